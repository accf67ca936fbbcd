"""The kernel for spans, without a GPU: it compiles for sm_90, once by rows and once by keys, whatever the mask."""

from __future__ import annotations

import pytest
import torch

import hopper_compiled
import regard
from hopper_compiled import compiles, usage
from regard.kernels.block_mask import BlockMask
from regard.kernels.portable import spans_launch
from regard.kernels.portable.spans import spans
from regard.kernels.span_terms import span_terms

hopper = hopper_compiled.hopper
MASKS = [
    (regard.causal(), 16, 16),
    (regard.packed([100, 1]) & regard.window(16), 101, 101),
    (regard.packed(cu_seqlens=torch.tensor([0, 16], dtype=torch.int32)) & regard.padding([16, 1, 7]), 16, 16),
]


@compiles
def test_it_compiles_once_by_rows_and_once_by_keys(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def compile_alone(programs: int, device: torch.device, values: tuple[int, ...]) -> None:
        named = dict(zip(spans.arg_names, values, strict=True))
        kernel = spans.warmup(**named, **spans_launch._OPTIONS, grid=(programs,))
        found[kernel.result().hash if hasattr(kernel, "result") else kernel.hash] = kernel

    monkeypatch.setattr(spans_launch, "_launch", compile_alone)
    for mask, n, m in MASKS:
        terms = span_terms(mask, n, m)
        assert terms is not None
        made = BlockMask(n, m, lead=(terms.items, 1), terms=terms, device=torch.device("cpu"))
        made.by_rows(16, 128, 1)
        made.by_keys(1, 16)
    assert len(found) == 2
    for kernel in found.values():
        used = usage(kernel)
        assert used["STACK"] <= 16
        assert used["LOCAL"] == 0
        assert used["REG"] <= 128
