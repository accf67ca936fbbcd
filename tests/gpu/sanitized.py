"""Small cases of the Hopper kernels under compute-sanitizer: `make sanitize-gpu`.

`python -m gpu.sanitized memcheck backward` takes the cases that begin with this word alone.

Every report of memcheck is an error. racecheck knows neither mbarriers nor TMA, so it reports pairs of places
that these synchronise. KNOWN lists them, and any other pair is an error.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import regard
from gpu.test_hopper_lazy_row_max_on_gpu import holed, needle, with_profile
from gpu.test_kernels_on_gpu import of_bits, random
from regard import biases
from regard.kernels.hopper import forward_launch

CHIP = Path(forward_launch.__file__).parent
N, M, HEADS = 300, 1200, 2  # of two items
PROGRAMS = 3  # so that each takes one row block after the other
HAZARDS = 2**26  # racecheck stops at fewer in the wide backward, where one pair of places can have 400,000
DIMS = {"forward": (64, 96, 128, 192, 256), "backward": (64, 96, 128, 192, 256), "passes": (64, 128), "jvp": (64, 128)}
MADE: dict[str, Any] = {
    "full": dict,
    "causal": lambda: {"mask": regard.causal(M - N)},
    "window": lambda: {"mask": regard.window(600, 9)},
    "padding": lambda: {"mask": regard.padding([M - 30, 0])},
    "bits": lambda: {"mask": of_bits(N, M)},
    "bits with full blocks": lambda: {"mask": holed(N, M)},
    "sink": lambda: {"sink": random(HEADS, seed=5)},
    "relative": lambda: {"bias": biases.relative(random(HEADS, 129, dtype=torch.float32, seed=5))},
    "dropout": lambda: {"dropout": 0.3},
    "gqa": lambda: {"mask": regard.causal()},
}
CASES = [f"{what}, {d}, {name}" for what, dims in DIMS.items() for d, name in product(dims, MADE)]
KNOWN = {
    # Triton's own switch between the warps of `warp_specialize`, in every kernel.
    *(frozenset({kernel}) for kernel in ("forward.forward", "backward.backward", "backward_wide.backward", "jvp.jvp")),
    frozenset({"backward_192.backward"}),
    *(frozenset({kernel}) for kernel in ("statistics.received", "statistics.pooled")),
    # The tile info of the forward: written by the producer before `q_ready`, and by consumers before `q_free`.
    frozenset({"tile_scheduler.write_info", "tile_scheduler.read_info"}),
    # That of the backward: the producer writes it after `k_free`. Debug information puts some of the reads in the
    # line that uses the number.
    *(
        frozenset({"tile_scheduler.write_info", f"backward.{at}"})
        for at in ("backward", "consume_tile", "mma_one_row_block")
    ),
    # P of the wide backward, which one group writes and the other reads after `p_ready`.
    frozenset({"backward_wide.p_consumer", "backward_wide.ds_consumer"}),
    # Hidden values: every group writes the same zeros to the same place.
    frozenset({"nonfinite.zero_unseen"}),
}


def run(case: str) -> None:
    """One case: half of the rows of some heads have an outlier, and each program takes many row blocks."""
    what, d, name = case.split(", ")
    forward_launch.multiprocessors = lambda device: PROGRAMS
    tensors = with_profile(needle(30, 0.7)(M), N, int(d), torch.bfloat16, slice(None, None, 2), HEADS)
    if name == "gqa":
        tensors[1:] = [x.detach()[:, :1].requires_grad_() for x in tensors[1:]]
    if d == "192":  # the kernel for such keys has values of 128 dims
        tensors[2] = tensors[2].detach()[..., :128].contiguous().requires_grad_()
    if what != "backward":
        tensors = [x.detach() for x in tensors]
    kwargs = MADE[name]() | {"scale": 1.0, "backend": "triton"}
    if what == "jvp":
        tangents = [x.flip(2) for x in tensors]
        torch.func.jvp(lambda *x: regard.attention(*x, **kwargs), tuple(tensors), tuple(tangents))
    seen = regard.observe(*tensors, **kwargs)
    plain = regard.attention(*tensors, **kwargs)
    if what == "backward":
        (seen.output.float().sum() + seen.lse.sum() + seen.entropy.sum() + plain.float().square().sum()).backward()
    elif what == "passes":
        print(float(seen.received.sum()), float(seen.map(40, 40).sum()))
    torch.cuda.synchronize()
    assert name == "dropout" or torch.equal(seen.output, plain), case


def main(tool: str, cases: list[str]) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("sanitized.py: the Hopper kernels need a GPU of compute capability 9.0.")
    wrong = 0
    pairs: Counter[frozenset[str]] = Counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {pool.submit(watched, tool, case): case for case in cases}
        for number, finished in enumerate(as_completed(runs), 1):
            case, log = runs[finished], finished.result()
            found = races(log) if tool == "racecheck" else []
            pairs.update(found)
            new = {" and ".join(sorted(pair)) for pair in found if pair not in KNOWN}
            done = f"done {case}" in log
            right = done and not new and reported(log) == log.count("Race reported between")
            wrong += not right
            what = "right" if right else "wrong" if done else "not done"
            print(f"{number} of {len(cases)}, {case}: {what}", *sorted(new), sep="\n    NEW: ", flush=True)
            if not right:
                print(log, flush=True)
    for pair, count in pairs.most_common():
        print(f"{count:7}  {'' if pair in KNOWN else 'NEW: '}{' and '.join(sorted(pair))}")
    print(f"{tool}: {len(cases) - wrong} of {len(cases)} cases are right")
    sys.exit(wrong > 0)


def watched(tool: str, case: str) -> str:
    """The sanitizer's log of a case, run in its own process, where each tensor has its own memory."""
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--print-limit", "1000"]
    alone = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": str(HAZARDS),
    }
    said = subprocess.run(
        [*sanitizer, sys.executable, "-m", "gpu.sanitized", case],
        env=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout + said.stderr


def reported(log: str) -> int:
    """How many errors and warnings the sanitizer counted, printed or not; −1 if it did not finish."""
    counts = re.findall(r"SUMMARY: (\d+) errors|SUMMARY: (\d+) hazards? displayed", log)
    return int("".join(counts[-1])) if counts else -1


def races(log: str) -> list[frozenset[str]]:
    """The pairs of functions between which races are reported: the first place of a report with each of the others."""
    found = []
    for report in re.findall(r"Race reported between (.*?)\n=+ *\n", log, re.DOTALL):
        places = re.findall(r"access at (\S+)(?: in (\S+):(\d+))?", report)
        first, *others = (function_at(file, int(line)) if file else address for address, file, line in places)
        found += [frozenset((first, other)) for other in others]
    return found


@cache
def function_at(file: str, line: int) -> str:
    """The function of a Hopper kernel in which a line is."""
    path = CHIP / Path(file).name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ():
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or line):
            return f"{path.stem}.{node.name}"
    return f"{file}:{line}"


if __name__ == "__main__":
    asked = " ".join(sys.argv[1:])
    if asked in CASES:
        run(asked)
        print("done", asked)
        sys.exit()
    tool, _, beginning = asked.partition(" ")
    chosen = [case for case in CASES if case.startswith(beginning)]
    if tool not in ("memcheck", "racecheck") or not chosen:
        sys.exit(
            f"sanitized.py takes memcheck or racecheck, and how a case begins, as in 'memcheck backward, 128'; or one "
            f"case, as {CASES[0]!r}. Cases are of {', '.join(DIMS)}; then a dim; then {', '.join(MADE)}. Got {asked!r}."
        )
    main(tool, chosen)
