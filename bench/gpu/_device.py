"""How measurements are taken on a CUDA device: by events, peers in turns within one run, memory above the inputs.

`python bench/gpu/_device.py` redraws the plots of the results, for GPU machines without matplotlib.
"""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[1]))
import _harness
from _harness import Row, nvidia
from _turns import balanced

T = TypeVar("T")
DEVICE = "cuda"
_BEGAN = time.perf_counter()
_failed: dict[str, str] = {}


@dataclass(frozen=True)
class Peer:
    """A call to measure; `kernel` is the torch kernel that it must use."""

    call: Callable[[], object]
    kernel: SDPBackend | None = None

    def __call__(self) -> object:
        with self.bound():
            return self.call()

    def bound(self) -> AbstractContextManager[object]:
        """A context in which torch's own function uses this kernel and no other."""
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)


Peers = Mapping[str, Peer | None]


class Measured(NamedTuple):
    """The result of measuring some peers."""

    ms: dict[str, float | None]  # the median of each; None where it failed
    apart: float | None  # the largest difference between their first results


def start(main: Callable[[], None], ahead: Mapping[str, Callable[[], object]] | None = None) -> None:
    """Run a benchmark on the device; before it, separate processes run each case of `ahead` once.

    They fill the disk cache of compiled kernels in parallel. Set REGARD_COMPILED to skip them if it is filled already.
    """
    if not torch.cuda.is_available():
        sys.exit("bench/gpu: these measurements need a CUDA device, and torch sees none here.")
    torch.manual_seed(0)
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            attempt(name, (ahead or {})[name])
        return
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # there are enough processes already
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    names = [] if os.environ.get("REGARD_COMPILED") else ahead or {}
    begun = [subprocess.Popen([sys.executable, sys.argv[0], name], env=alone, **quiet) for name in names]
    for process in begun:
        process.wait()
    if begun:
        print(f"compiled in {time.perf_counter() - _BEGAN:.0f} s", flush=True)
    main()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """A normally distributed tensor on the device."""
    return torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def attempt(what: str, call: Callable[[], T]) -> T | None:
    """What `call` returns, or None with the reason recorded: a failing peer does not stop the others."""
    try:
        return call()
    except Exception as failure:  # noqa: BLE001  (third-party peers may fail in any way)
        reason = (str(failure).strip() or "no reason given").splitlines()[0]
        _failed[what] = f"{type(failure).__name__}: {reason[:200]}"
        print(f"{what} failed:", traceback.format_exc(limit=-3)[-1500:], sep="\n", file=sys.stderr, flush=True)
    gc.collect()
    with suppress(RuntimeError):  # a broken device has nothing to free
        torch.cuda.empty_cache()
    return None


def absent(what: str, reason: str) -> None:
    """Let the report say why a peer has no figures at all."""
    _failed.setdefault(what, reason)


def each(cases: Mapping[str, Callable[[], Row]]) -> list[Row]:
    """The rows of all cases; a failing case is left out, and the report says why."""
    found = (attempt(name, case) for name, case in cases.items())
    return [row for row in found if row is not None]


def measured(case: str, peers: Peers, rounds: int = 3, rep: int = 40, once: bool = False) -> Measured:
    """Median milliseconds by CUDA events, with the peers taking turns so that a hot chip is hot for all of them.

    There are enough rounds for each peer to run after each other one at least once: a peer that heats the chip less
    leaves a faster clock to its successor. With `once`, a turn is one call by wall-clock time, for calls so long that
    the host does not matter.
    """
    first = {name: attempt(f"{case}, {name}", peer) for name, peer in peers.items() if peer is not None}
    left = {name: peers[name] for name, result in first.items() if result is not None}
    difference = _difference([_tensor(x) for x in first.values() if x is not None])
    del first
    taken: dict[str, list[float]] = {name: [] for name in left}
    orders = balanced(list(left))

    def turn(peer: Peer) -> float:
        return wall(peer)[1] if once else _median(peer, rep)

    for at in range(-(-rounds // len(orders)) * len(orders) if orders else 0):
        for name in orders[at % len(orders)]:
            peer = left.get(name)
            ms = None if peer is None else attempt(f"{case}, {name}", lambda peer=peer: turn(peer))
            if ms is None:
                left.pop(name, None)
            else:
                taken[name].append(ms)
    ms = {name: statistics.median(taken[name]) if name in left else None for name in peers}
    print(f"{case}: " + ", ".join(f"{k} {_shown(v)} ms" for k, v in ms.items()), flush=True)
    return Measured(ms, difference)


def _shown(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.4g}"


def _median(peer: Peer, rep: int) -> float:
    from triton.testing import do_bench

    with peer.bound():
        return float(do_bench(peer.call, warmup=10, rep=rep, return_mode="median"))


def with_same_bits(case: str, peers: Peers, times: int = 100) -> dict[str, int | None]:
    """How many of so many further calls of each peer give the same bits as its first; each gives a tuple of tensors."""

    def same(peer: Peer) -> int:
        first = peer()
        return sum(all(map(torch.equal, first, peer())) for _ in range(times))

    found = {
        name: attempt(f"{case}, {name} again and again", lambda peer=peer: same(peer))
        for name, peer in peers.items()
        if peer is not None
    }
    return {name: found.get(name) for name in peers}


def in_a_graph(case: str, peers: Peers) -> dict[str, float | None]:
    """Median milliseconds of each peer captured in a CUDA graph: the time of the kernels, without the host's."""
    from triton.testing import do_bench_cudagraph

    def captured(peer: Peer) -> float:
        with peer.bound():
            return float(do_bench_cudagraph(peer.call, rep=20, return_mode="median"))

    found = {
        name: attempt(f"{case}, {name} in a graph", lambda peer=peer: captured(peer))
        for name, peer in peers.items()
        if peer is not None
    }
    return {name: found.get(name) for name in peers}


def wall(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and the wall-clock milliseconds until the device is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, (time.perf_counter() - begin) * 1e3


def peak(case: str, peers: Peers) -> dict[str, float | None]:
    """The peak memory of each peer above what was allocated before, in MiB, with kernels and workspaces warm."""

    def above(peer: Peer) -> float:
        peer()
        gc.collect()
        before = forget_peak()
        kept = peer()
        found = peak_above(before)
        del kept
        return found

    found = {
        name: attempt(f"{case}, memory of {name}", lambda peer=peer: above(peer))
        for name, peer in peers.items()
        if peer is not None
    }
    return {name: found.get(name) for name in peers}


def forget_peak() -> int:
    """Reset the peak; return the bytes allocated now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_above(before: int) -> float:
    """The peak memory since then above `before`, in MiB."""
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """A folder for Python's bytecode, which an installation by pip has, but not each machine of a bench."""
    return tempfile.TemporaryDirectory()


def in_a_new_process(call: str, most: float = 90.0) -> str:
    """The last line that a call, `module.function(…)`, prints in a new process with empty caches of kernels.

    The bytecode of all modules is there from the second such process on that imports them.
    """
    with tempfile.TemporaryDirectory() as folder:
        empty = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | empty | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": _bytecode().name}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", f"import {call.partition('.')[0]}; {call}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=most, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    print(f"{call}: {(line := done.stdout.splitlines()[-1])}", flush=True)
    return line


def _tensor(result: Any) -> Tensor:
    """The output among what a peer returns."""
    result = getattr(result, "output", result)
    return result[0] if isinstance(result, tuple) else result


def _difference(tensors: list[Tensor]) -> float | None:
    first, *others = tensors or [None]
    alike = [x for x in others if first is not None and x.shape == first.shape]
    return max((float((x.detach().float() - first.detach().float()).abs().max()) for x in alike), default=None)


def clock() -> float:
    """The maximum clock of the multiprocessors, in Hz."""
    said = nvidia("clocks.max.sm")
    if said is not None and said.replace(".", "").isdigit():
        return float(said) * 1e6
    return float(torch.cuda.get_device_properties(0).clock_rate) * 1e3


def over(a: float | None, b: float | None) -> float | None:
    """a / b if both are known."""
    return None if a is None or not b else a / b


def at_least(x: float | None, bound: float) -> bool | None:
    return None if x is None else x >= bound


def at_most(x: float | None, bound: float) -> bool | None:
    return None if x is None else x <= bound


def verdict(checks: Mapping[str, bool | None]) -> str | None:
    """Yes, or no with what does not hold; None if not measured."""
    wrong = [name for name, holds in checks.items() if holds is False]
    if wrong:
        return "no" if len(checks) == 1 else f"no: {', '.join(wrong)}"
    return None if None in checks.values() else "yes"


@dataclass(frozen=True)
class Bars:
    """A plot of some columns: one group of bars per row."""

    columns: Sequence[str]
    unit: str
    log: bool = False


def report(name: str, question: str, rows: Sequence[Row], note: str = "", bars: Bars | None = None) -> None:
    """Print the table; write it as gpu_<name>.md and .json, and .svg if there is something to plot."""
    lost = [f"- {what}: {reason}" for what, reason in _failed.items()]
    if lost:
        note = "\n".join([note, "", "Not measured (–):", "", *lost]).strip()
    if not rows:
        sys.exit(note)
    print(f"measured in {time.perf_counter() - _BEGAN:.0f} s", flush=True)
    plot = None if bars is None else {"columns": list(bars.columns), "unit": bars.unit, "log": bars.log}
    draw(_harness.report(f"gpu_{name}", question, rows, note, plot=plot))


OURS = ("#0d9488", "#5fc4b8", "#134e4a")
PEERS = {"cuDNN": "#6b7280", "flash": "#c4c8cf", "FA4": "#ea580c", "FlexAttention": "#7c3aed", "Flex, FLASH": "#c4b5fd"}
OTHERS = ("#2563eb", "#db2777", "#ca8a04", "#0891b2", "#4d7c0f")


def _colours(columns: Sequence[str]) -> list[str]:
    """A peer has the same colour in every plot, and ours are green."""
    ours, others = cycle(OURS), cycle(OTHERS)
    names = [column.removesuffix(", ms") for column in columns]
    return [next(ours) if name.startswith("regard") else PEERS.get(name) or next(others) for name in names]


def _wrapped(label: str) -> str:
    """A label in short lines: a new line at each comma that no bracket is around, and before it gets too wide."""
    lines = [textwrap.wrap(part.replace("/", "/ "), 16) for part in re.split(r", (?![^(]*\))", label)]
    return "\n".join(line.replace("/ ", "/") for part in lines for line in part)


def draw(written: Path) -> None:
    """Draw the plot that a results JSON asks for, as an SVG next to it."""
    facts = json.loads(written.read_text(encoding="utf-8"))
    plot, rows = facts.get("plot"), facts["rows"]
    if plot is None:
        return
    try:
        import matplotlib
    except ImportError:
        print(f"No plot: matplotlib is not installed here; bench/gpu/_device.py draws it later from {written.name}.")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "regard"
    from matplotlib import pyplot

    label = next(iter(rows[0]))
    columns = [c for c in plot["columns"] if any(row[c] is not None for row in rows)]
    width = 0.8 / len(columns)
    wide = 1.0 + len(rows) * max(0.25 * len(columns), 1.1)  # so that labels do not meet
    figure, axes = pyplot.subplots(figsize=(max(6.0, wide), 4.5), layout="constrained")
    for at, (column, colour) in enumerate(zip(columns, _colours(columns), strict=True)):
        there = [(x, row[column]) for x, row in enumerate(rows) if row[column] is not None]
        places = [x + (at - (len(columns) - 1) / 2) * width for x, _ in there]
        axes.bar(places, [y for _, y in there], width, label=column, color=colour)
    axes.set_xticks(range(len(rows)), [_wrapped(str(row[label])) for row in rows], fontsize=8)
    axes.set_ylabel(plot["unit"])
    if plot["log"]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set_title(facts["question"], fontsize=9, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(columns) > 1:
        figure.legend(loc="outside lower center", ncols=min(len(columns), 6), fontsize=8, frameon=False)
    figure.savefig(written.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    for written in sorted(_harness.RESULTS.glob("gpu_*.json")):
        draw(written)
        if written.with_suffix(".svg").exists():
            print(written.with_suffix(".svg"))


if __name__ == "__main__":
    main()
