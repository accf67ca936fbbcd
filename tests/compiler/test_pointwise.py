"""Kernels with a function of the scores, without a GPU: they compile for sm_90 and fit the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hopper_compiled
from hopper_compiled import SHARED, compiles, masked, usage
from regard.kernels import arguments, launch_cache
from regard.kernels.arguments import BackwardRows, KernelArgs
from regard.kernels.pointwise import PointwiseKernel, flat_tables
from regard.kernels.pointwise_source import Tables
from regard.kernels.portable import configs, launch, pointwise_launch
from regard.scores.tracing import trace

hopper = hopper_compiled.hopper
TABLE = torch.randn(4, 257)
SPILLS = 80  # bytes, of tiles that read a table at every pair


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dim", [64, 128])
def test_a_table_read_at_every_pair_is_not_staged_in_shared_memory(
    dim: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def start(key: Any, kernel: Any, programs: int, given: Any, options: Any, *_: Any) -> None:
        compiled = kernel.warmup(**given, grid=(1,), **options)
        found[kernel.__name__] = compiled.result() if hasattr(compiled, "result") else compiled

    monkeypatch.setattr(launch_cache, "start", start)
    monkeypatch.setattr(arguments, "chip_of", lambda device: configs.CHIPS["9.0"])
    traced = trace(lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-128, 128) + 128], {}, torch.float32)
    bound, tables = traced.read({}, torch.float32)
    function = PointwiseKernel(bound, flat_tables(tables), 1, TABLE.device)
    function.__dict__["tables"] = Tables.of(bound, nvidia=True)
    q, k, v = (torch.zeros(2, heads, hopper_compiled.N, dim, dtype=torch.bfloat16) for heads in (4, 2, 2))
    w = KernelArgs(q, k, v, masked("spans"), scale=0.1, pointwise=function)
    launch.forward(w, True)
    stats = torch.zeros(w.rows)
    rows = BackwardRows(torch.zeros_like(q), stats, stats, stats, None, None, torch.zeros(1, dtype=torch.int32))
    launch.backward(w, rows, True, True)
    pointwise_launch.table_gradient(w, rows, function.loads[0])
    assert found.pop("pack_row_stats")
    assert "ld.global.nc.v4.f32" in found["backward_dkdv"].asm["ptx"]
    assert set(found) == {"forward", "backward_dq", "backward_dkdv", "table_gradient_by_rows"}
    for name, kernel in found.items():
        assert kernel.metadata.shared <= SHARED, name
        assert "ld.global.nc.f32" in kernel.asm["ptx"], name
        if name != "table_gradient_by_rows":  # which gathers along diagonals
            assert usage(kernel)["STACK"] <= SPILLS, name
