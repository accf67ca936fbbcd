"""Portable kernels compiled for chips that are not here: every pass that launches one, and what became of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from regard.chunked.token_repeats import TokenLabels  # noqa: E402
from regard.core.rows import Rows  # noqa: E402
from regard.kernels import arguments, launch_cache  # noqa: E402
from regard.kernels.arguments import (  # noqa: E402
    BIAS_TENSOR,
    BackwardRows,
    BiasArgs,
    DoubleBackwardRows,
    KernelArgs,
    Tangents,
)
from regard.kernels.block_mask import BlockMask  # noqa: E402
from regard.kernels.portable import launch, statistics_launch  # noqa: E402
from regard.kernels.portable.configs import CHIPS, Chip  # noqa: E402
from regard.kernels.token_repeats import token_repeats  # noqa: E402

N = 300


class Made(NamedTuple):
    """A compiled kernel: its name, the shared memory of a program, and the bytes that a thread spills."""

    name: str
    shared: int
    spilled: int
    tensor_memory: int


class Driver:
    """What Triton asks of a driver to compile for a chip."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.chip.name.startswith("gfx"):
            return GPUTarget("hip", self.chip.name, 64)
        return GPUTarget("cuda", int(self.chip.name.replace(".", "")), 32)


@contextmanager
def compiling(chip: Chip, patch: pytest.MonkeyPatch) -> Iterator[list[Made]]:
    """Let launches compile for a chip, and start nothing."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    made: list[Made] = []
    run = JITFunction.run

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        memory = getattr(kernel.metadata, "tmem_size", None) or 0
        made.append(Made(self.fn.__name__, kernel.metadata.shared, spilled(kernel), memory))
        return kernel

    with patch.context() as inside:
        inside.setattr(JITFunction, "run", compile_alone)
        inside.setattr(launch_cache, "INTERPRETED", True)  # nothing is kept of a launch
        inside.setattr(launch_cache, "_LAUNCHES", {})
        inside.setattr(arguments, "chip_of", lambda device: chip)
        before = driver._active
        driver.set_active(Driver(chip))
        try:
            yield made
        finally:
            driver._active = before


def spilled(kernel: Any) -> int:
    """Bytes of a thread's registers that went to memory."""
    if "cubin" not in kernel.asm:
        found = re.search(r"\.private_segment_fixed_size:\s*(\d+)", kernel.asm["amdgcn"])
        return int(found[1]) if found else 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", said.stdout))


def work(chip: Chip, dims: tuple[int, int], dtype: torch.dtype, kind: str = "spans", rows: int = N) -> KernelArgs:
    """A problem with grouped heads, as a call on that chip would have it."""
    D, E = dims
    q, k, v = (torch.zeros(1, heads, n, d, dtype=dtype) for heads, n, d in ((4, rows, D), (2, N, D), (2, N, E)))
    more: dict[str, Any] = {}
    if kind == "bias":
        more = {"kind": BIAS_TENSOR, "bias": BiasArgs(torch.zeros(4, rows, N), 0, rows * N, N, 1)}
    if kind == "spans":
        ends = torch.arange(1, rows + 1, dtype=torch.int32).expand(1, 1, rows).contiguous()
        mask = BlockMask(rows, N, torch.zeros_like(ends), ends)
    else:
        mask = BlockMask(rows, N)
    w = KernelArgs(q, k, v, mask, scale=0.1, **more)
    w.__dict__["precision"] = "ieee" if chip.name.startswith("gfx") else "tf32x3"  # as on a GPU
    return w


def statistics(w: KernelArgs) -> list[torch.Tensor]:
    return [torch.zeros(w.rows) for _ in range(2)]


def backward_rows(w: KernelArgs) -> BackwardRows:
    dO = w.value.new_zeros(*w.rows, w.value.shape[3])
    return BackwardRows(dO, *(torch.zeros(w.rows) for _ in range(5)), torch.zeros(1, dtype=torch.int32))


def decode(w: KernelArgs) -> None:
    launch._decode(w, True)


def tangents(w: KernelArgs) -> Tangents:
    return Tangents(*(torch.zeros_like(x) for x in (w.query, w.key, w.value)))


def double_backward(w: KernelArgs) -> None:
    dO = w.value.new_zeros(*w.rows, w.value.shape[3])
    rows = DoubleBackwardRows(*(torch.zeros(w.rows) for _ in range(9)))
    launch.double_backward(w, tangents(w), dO, torch.zeros_like(dO), rows, (True, True, True))


PASSES: dict[str, Callable[[KernelArgs], Any]] = {
    "forward": lambda w: launch._forward(w, True),
    "decode": decode,
    "backward": lambda w: launch.backward(w, backward_rows(w), True, True),
    "preprocess": lambda w: launch.backward_preprocess(
        w, Rows(w.value.new_zeros(*w.rows, w.value.shape[3]), *(torch.zeros(w.rows) for _ in range(4))),
        w.value.new_zeros(*w.rows, w.value.shape[3]), None),
    "bias gradient": lambda w: launch.bias_gradient(w, backward_rows(w), (1, 4, N, N)),
    "jvp": lambda w: launch.jvp(w, tangents(w), True),
    "double backward": double_backward,
    "received": lambda w: statistics_launch.received(w, *statistics(w)),
    "moments": lambda w: statistics_launch.moments(w, *statistics(w)),
    "pooled": lambda w: statistics_launch.pooled(w, *statistics(w), 7, 5),
    "bands": lambda w: statistics_launch.received_by_bands(w, *statistics(w), 7),
    "row survey": lambda w: statistics_launch.row_survey(
        w, *statistics(w), torch.zeros(w.rows), torch.zeros(1, dtype=torch.int64)),
    "token repeats": lambda w: token_repeats(w, *statistics(w), TokenLabels(torch.zeros(1, N, dtype=torch.int64))),
    "top": lambda w: statistics_launch.top(w, 10),
}  # fmt: skip


def made_for(
    chip: str, name: str, dims: tuple[int, int], dtype: torch.dtype, kind: str, patch: pytest.MonkeyPatch
) -> list[Made]:
    """The kernels of a pass, compiled for a chip."""
    with compiling(CHIPS[chip], patch) as made:
        PASSES[name](work(CHIPS[chip], dims, dtype, kind, 32 if name == "decode" else N))
    return made
