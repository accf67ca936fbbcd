"""Does memory grow linearly with the sequence, not with its square?"""

from __future__ import annotations

import resource
import subprocess
import sys

import torch
from _harness import Row, report

import regard

LENGTHS = (4096, 8192, 16384, 32768)


def measure(n: int, observed: bool) -> float:
    """Peak memory above the inputs in MiB: observe forward and backward, through output and entropy; one head, d 64."""
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    small = [x.detach()[:, :, :600].clone().requires_grad_() for x in (q, k, v)]
    _step(*small)  # libraries and buffers that do not depend on n
    before = _peak()
    if observed:
        _step(q, k, v)
    return _peak() - before


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    seen = regard.observe(q, k, v)
    (seen.output.square().mean() + seen.entropy.mean()).backward()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    rows: list[Row] = []
    for n in LENGTHS:
        command = [sys.executable, __file__, str(n)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        full = n * n * 4 / 2**20
        rows.append({"tokens": n, "peak above inputs, MiB": peak, "one n × n matrix, MiB": full})
    note = (
        "Forward + backward of observe through output and entropy; one head, d 64, float32. Bound at 32,768: 300 MiB."
    )
    report("memory", "Peak memory against the length of the sequence", rows, note)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(int(sys.argv[1]), True))
    else:
        main()
