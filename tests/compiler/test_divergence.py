"""The kernels of a divergence, without a GPU: they compile for sm_90, for its units, and spill little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hopper_compiled
from hopper_compiled import compiles, masked, usage
from regard.kernels import arguments, launch_cache
from regard.kernels.arguments import KernelArgs
from regard.kernels.portable import configs, divergence_launch, divergence_mean_launch
from regard.kernels.portable.divergence import JS, KL
from regard.kernels.portable.divergence_launch import Pair

hopper = hopper_compiled.hopper
N = hopper_compiled.N
EVERY_DAY = [("forward", KL, "spans", 64)]
# Bytes of a thread that find no register, at most, by Triton 3.6 and 3.9; all others have room.
SPILLED = {
    ("queries", 64): 112, ("queries", 128): 552, ("queries", 256): 704, ("keys", 128): 88, ("keys", 256): 192,
    ("mean", 64): 688, ("mean", 128): 8, ("mean backward", 64): 1000, ("mean backward", 128): 1088,
}  # fmt: skip
NARROW_TILES = [("keys", 256), ("mean backward", 256)]  # of 32 rows, for which the units of older chips multiply


def every() -> Iterator[Any]:
    yield from EVERY_DAY
    for what in ("forward", "queries", "keys", "mean", "mean backward"):
        for kind in (KL, JS):
            for mask, dim in (("spans", 64), ("spans", 128), ("none", 128), ("bits", 64), ("spans", 256)):
                if (what, kind, mask, dim) not in EVERY_DAY:
                    yield pytest.param(what, kind, mask, dim, marks=pytest.mark.slow)


@pytest.fixture
def compiled(hopper: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches would start on a Hopper GPU."""
    found: list[Any] = []

    def start(key: Any, kernel: Any, programs: int, given: Any, options: Any, changing: Any, about: Any = None) -> None:
        made = kernel.warmup(**given, grid=(1,), **options)
        if kernel.__name__ != "pack_rows":  # which has no products
            found.append(made.result() if hasattr(made, "result") else made)

    def config(self: Any, direction: str) -> configs.Config:
        return configs._PAIRS[direction, 2, max(64, self.query.shape[3])]

    monkeypatch.setattr(launch_cache, "start", start)
    monkeypatch.setattr(arguments, "chip_of", lambda device: configs.CHIPS["9.0"])
    monkeypatch.setattr(KernelArgs, "config", config)
    return found


def pair(kind: int, mask: str, dim: int) -> Pair:
    sides = []
    for heads in (4, 2):
        q, k = (torch.zeros(2, count, N, dim, dtype=torch.bfloat16) for count in (4, heads))
        sides.append(KernelArgs(q, k, k, masked(mask), scale=0.1))
    return Pair(sides[0], sides[1], kind, True)


@compiles
@pytest.mark.parametrize(("what", "kind", "mask", "dim"), list(every()))
def test_a_pass_compiles_for_hopper(what: str, kind: int, mask: str, dim: int, compiled: list[Any]) -> None:
    w = pair(kind, mask, dim)
    rows, both, none = w.new_rows(deltas=kind != KL), (True, True), (False, False)
    if what == "forward":
        divergence_launch.forward(w)
    elif what == "mean":
        divergence_mean_launch.mean_forward(w)
    elif what == "mean backward":
        divergence_mean_launch.mean_backward(w, rows._replace(value=rows.value[:, :1]), rows.value[:, :1], both, both)
    else:
        divergence_launch.backward(w, rows, rows.value, *((both, none) if what == "queries" else (none, both)))
    assert compiled
    for kernel in compiled:
        used = usage(kernel)
        assert used["STACK"] <= SPILLED.get((what, dim), 0)
        assert used["LOCAL"] == 0
        assert kernel.metadata.shared <= hopper_compiled.SHARED
        assert "wgmma.mma_async" in kernel.asm["ptx"] or (what, dim) in NARROW_TILES
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
        assert ("ld.global.nc.v4.f32" in kernel.asm["ptx"]) == (what in ("queries", "keys"))  # rows are read packed
