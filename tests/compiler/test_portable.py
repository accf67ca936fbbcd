"""The portable kernels without a GPU: each compiles for each chip, fits its memory, and spills within a bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hopper_compiled import compiles
from portable_compiled import PASSES, made_for
from regard.kernels.portable.configs import CHIPS

DIMS = ((64, 64), (128, 128), (256, 256), (512, 512), (576, 512))
DTYPES = {2: torch.bfloat16, 4: torch.float32}
TENSOR_MEMORY = 512  # columns of a Blackwell multiprocessor
# What each run compiles, a few seconds each: kernels that had no room on such chips with Hopper's tiles.
EVERY_DAY = [
    ("12.0", "received", 2, (128, 128)),
    ("8.9", "decode", 2, (128, 128)),
    ("gfx942", "received", 2, (512, 512)),
]
# Bytes of a thread that find no register, at most: by the bytes of a number, up to dim 128 and above it. float32 is
# multiplied by three products of parts, which take registers of their own.
SPILLED = {2: (1024, 3072), 4: (6400, 12288)}
NARROW = 128


def every() -> Iterator[Any]:
    for chip in CHIPS:
        for name in PASSES:
            for size in DTYPES:
                for dims in DIMS:
                    if max(dims) > 256 and name in ("jvp", "double backward"):
                        continue  # these are computed by the formula
                    if dims[0] > 512 and name in ("backward", "bias gradient", "preprocess"):
                        continue
                    marks = [] if (chip, name, size, dims) in EVERY_DAY else [pytest.mark.slow]
                    yield pytest.param(chip, name, size, dims, marks=marks)


@compiles
@pytest.mark.parametrize(("chip", "name", "size", "dims"), [*every()])
def test_a_pass_compiles_for_a_chip_and_has_room_there(
    chip: str, name: str, size: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "bias" if name == "bias gradient" else "spans"
    made = made_for(chip, name, dims, DTYPES[size], kind, monkeypatch)
    assert made
    for kernel in made:
        assert kernel.shared <= CHIPS[chip].shared, f"{kernel.name} takes {kernel.shared} bytes"
        assert kernel.tensor_memory <= TENSOR_MEMORY
        bound = SPILLED[size][max(dims) > NARROW]
        assert kernel.spilled <= bound, f"{kernel.name} spills {kernel.spilled} bytes, {bound} are known"
