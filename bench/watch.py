"""What does it cost to observe a whole model, compared with eager attention that returns the weights?"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch
from _harness import Row, report
from transformers import LlamaConfig, LlamaForCausalLM

import regard

LENGTHS = (1024, 4096, 16384)
HEADS, LAYERS = 2, 2


def model(attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64 * HEADS,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=max(LENGTHS),
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


@torch.no_grad()
def run(way: str, ids: torch.Tensor) -> float:
    """Run the model, and return the seconds that its findings took."""
    if way == "eager":
        model("eager")(ids, output_attentions=True)
        return 0.0
    regard.models.register()
    watched = model("regard")
    if way == "plain":
        watched(ids)
        return 0.0
    with regard.watch(watched) as seen:
        watched(ids)
    start = time.perf_counter()
    seen.findings()
    return time.perf_counter() - start


def measure(way: str, n: int) -> dict[str, float]:
    """Seconds, how many of them for findings, and peak memory above a short run's in MiB."""
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (1, n))
    run(way, ids[:, :64])
    before = _peak()
    start = time.perf_counter()
    findings = run(way, ids)
    return {"seconds": time.perf_counter() - start, "findings": findings, "MiB": _peak() - before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    rows: list[Row] = []
    for n in LENGTHS:
        found = {}
        for way in ("plain", "watch", "eager"):
            command = [sys.executable, __file__, way, str(n)]
            found[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        watch, eager, plain = found["watch"], found["eager"], found["plain"]
        rows.append(
            {
                "tokens": n,
                "watch / plain, time": (watch["seconds"] - watch["findings"]) / plain["seconds"],
                "with findings": watch["seconds"] / plain["seconds"],
                "watch / eager, time": watch["seconds"] / eager["seconds"],
                "watch, MiB": watch["MiB"],
                "eager, MiB": eager["MiB"],
                "eager / watch, MiB": eager["MiB"] / max(watch["MiB"], 1.0),
            }
        )
    note = (
        f"A causal model of {LAYERS} layers with {HEADS} heads of 64, float32, each run in its own process. "
        f"`plain` is the model with our attention; `watch` surveys every call, and with findings it computes all "
        f"statistics and applies all rules, which the other columns include; `eager` returns the weights with "
        f"`output_attentions=True` and computes nothing from them."
    )
    report("watch", "Observing a whole model", rows, note)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
