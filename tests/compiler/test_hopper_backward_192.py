"""The Hopper backward of keys of 192 dims with values of 128, without a GPU: it compiles for sm_90 and fits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hopper_compiled
from hopper_compiled import RECENT, N, compiles, fits, machine_code, work
from regard.kernels.arguments import BackwardRows
from regard.kernels.hopper import backward_launch as chip
from sass import lost_operands

hopper = hopper_compiled.hopper
EMPTY = torch.zeros(1, dtype=torch.int32)
# Bytes of a thread that find no register, at most, by Triton 3.6 and by 3.9.
SPILLED = {"none": (24, 56), "spans": (112, 184), "bits": (104, 160)}


def made_for(kind: str, tile: chip.BackwardTile, **more: Any) -> Any:
    w = work(192, kind, **more)
    w.value = torch.zeros(2, 2, N, 128, dtype=torch.bfloat16)
    rows = BackwardRows(w.value.new_zeros(*w.rows, 128), *(torch.zeros(w.rows) for _ in range(3)), None, None, EMPTY)
    arguments, options = chip.backward_arguments(w, rows, chip.workspace_for(w, tile), tile, None)
    return chip.kernel_for(tile).warmup(**arguments, grid=(1,), **options)


@compiles
@pytest.mark.parametrize("kind", ["spans", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "bits"))])
def test_it_fits_the_chip_and_products_run_beside_what_comes_after_them(kind: str, hopper: None) -> None:
    kernel = made_for(kind, chip.D192)
    fits(kernel, SPILLED[kind][RECENT])
    code = machine_code(kernel)
    assert code.count("WARPGROUP.DEPBAR") <= kernel.asm["ptx"].count("wgmma.wait_group") + 2
    assert not lost_operands(code)


@compiles
def test_the_producer_counts_the_visits_of_all_heads(hopper: None) -> None:
    """Triton 3.6 does not if only bounds of loops need their number: grouped heads with masks of their own hung."""
    # The loop over v in `load_tile`; no other has that name.
    begins = re.findall(r"scf\.for %v(?:_\d+)? = %(\w+) to", made_for("spans", chip.D192).asm["ttgir"])
    assert [begin.rpartition("_")[0] or begin for begin in begins] == ["visit"]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"softcap": 9.0}])
def test_no_product_finds_its_operand_overwritten(more: dict[str, Any], hopper: None) -> None:
    assert not lost_operands(machine_code(made_for("spans", chip.D192, **more)))
