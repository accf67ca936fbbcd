"""Hopper kernels compiled without a GPU: the works they are compiled for, and what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import regard  # noqa: E402
from regard.compat.triton import INTERPRETED  # noqa: E402
from regard.kernels.arguments import (  # noqa: E402
    BIAS_RELATIVE,
    BIAS_TENSOR,
    BiasArgs,
    KernelArgs,
)
from regard.kernels.block_lists import MaskBits  # noqa: E402
from regard.kernels.block_mask import BlockMask  # noqa: E402
from uncompiled import noted  # noqa: E402

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from regard.kernels.hopper import forward_launch  # noqa: E402

SHARED = 227 * 1024
N = 300
RECENT = tuple(int(x) for x in triton.__version__.split(".")[:2]) > (3, 6)

compiles = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter has no Gluon")
# What warmup is asked for, and masks that calls have then.
warmed = pytest.mark.parametrize(
    ("variant", "masks"),
    [
        ("plain", [None]),
        ("mask", [regard.causal(), regard.window(9, 2), regard.padding([5, 700])]),
        ("bits", [regard.strided(5), torch.rand(4, 1000, 700) > 0.4]),
    ],
)


class Hopper:
    """What Triton asks of a driver to compile, as if a Hopper GPU were there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper() -> Iterator[None]:
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(Hopper())
    yield
    driver._active = before


def masked(kind: str) -> BlockMask:
    if kind == "spans":
        ends = torch.arange(1, N + 1, dtype=torch.int32).expand(1, 1, N).contiguous()
        return BlockMask(N, N, torch.zeros_like(ends), ends)
    if kind == "bits":
        blocks = -(-N // 128)
        table = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32)
        return BlockMask(N, N, mask_bits=MaskBits(table, torch.full((1, 128, 4), -1, dtype=torch.int32)))
    return BlockMask(N, N)


def work(dim: int = 64, mask: str = "none", dtype: torch.dtype = torch.bfloat16, **more: Any) -> KernelArgs:
    q, k, v = (torch.zeros(2, heads, N, dim, dtype=dtype) for heads in (4, 2, 2))
    return KernelArgs(q, k, v, masked(mask), scale=0.1, **more)


def biased(kind: int) -> dict[str, Any]:
    if kind == BIAS_TENSOR:
        return {"kind": kind, "bias": BiasArgs(torch.zeros(4, N, N), 0, N * N, N, 1)}
    return {"kind": kind, "bias": BiasArgs(torch.zeros(4, 65), 0, 65 if kind == BIAS_RELATIVE else 1, 0, 0, 0, 32)}


def told(kernel: Any, tool: str, *options: str) -> str:
    """What one of Triton's tools says of the machine code of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin" / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(kernel: Any) -> dict[str, int]:
    """The registers, stack and local memory of a thread."""
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", told(kernel, "cuobjdump", "--dump-resource-usage"))
    return {name: int(number) for name, number in found}


def machine_code(kernel: Any) -> str:
    return told(kernel, "nvdisasm", "-c")


def fits(kernel: Any, stack: int = 0, shared: int = SHARED, registers: int = 168) -> None:
    """A kernel has room on the chip, spills no more than is known, and uses the engines that multiply and copy."""
    used = usage(kernel)
    assert kernel.metadata.shared <= shared
    assert used["REG"] <= registers
    assert used["STACK"] <= stack, f"STACK is {used['STACK']} bytes, {stack} are known"
    assert used["LOCAL"] == 0
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What calls would compile on a Hopper GPU, (kernel, key); nothing runs."""
    from regard.kernels import launch as seam

    found = noted(monkeypatch)
    refuses = forward_launch.refuses
    monkeypatch.setattr(forward_launch, "refuses", lambda *given: [r for r in refuses(*given) if "capability" not in r])
    monkeypatch.setattr(seam, "hopper", lambda device: True)
    return found
