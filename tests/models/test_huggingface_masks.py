"""Mask functions of transformers become regard masks: the same pairs, and no rows × keys tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import Mask, causal, documents, everything, padding, window
from regard.models.huggingface.lazy_mask import LazyMask
from regard.models.huggingface.mask_functions import MASK_FUNCTIONS, MaskBuilder, MaskRegion

hf: Any = import_module("transformers.masking_utils")
BUILD = MaskBuilder.for_transformers()

PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 2, 2, 2, 2, 2]])
GROUPS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1], [2, 2, -1, -1, -1, 3, 3, -1, -1, 5]])
KEEP = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 1, 0]], dtype=torch.bool)


def odd_ones(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + batch) % 3 != 1


def row_by_row(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A function of single indices: with whole tensors it would select other rows."""
    return GROUPS[batch][i] == GROUPS[batch][j]


class Case(NamedTuple):
    function: Callable[..., Tensor]
    use_vmap: bool = False


CASES = {
    "causal": Case(hf.causal_mask_function),
    "both ways": Case(hf.bidirectional_mask_function),
    "window": Case(hf.sliding_window_causal_mask_function(3)),
    "window alone": Case(hf.sliding_window_overlay(3)),
    "window both ways": Case(hf.sliding_window_bidirectional_mask_function(2)),
    "chunks": Case(hf.chunked_causal_mask_function(3, torch.tensor([0, 2]))),
    "packed": Case(hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(PACKED))),
    "blocks": Case(hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(GROUPS))),
    "blocks in a window": Case(
        hf.and_masks(hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(GROUPS)), hf.sliding_window_overlay(4))
    ),
    "padding as a function": Case(hf.padding_mask_function(KEEP)),
    "moved": Case(hf.add_offsets_to_mask_function(hf.sliding_window_causal_mask_function(2), 1, 2)),
    "a function": Case(hf.and_masks(hf.causal_mask_function, odd_ones)),
    "a function of single indices": Case(hf.or_masks(hf.causal_mask_function, row_by_row), use_vmap=True),
}
REGIONS = [
    MaskRegion(7, 7),
    MaskRegion(3, 8, 5, 0),
    MaskRegion(1, 6, 5, 0),
    MaskRegion(1, 4, 7, 4),
    MaskRegion(2, 5, 6, 3),
    MaskRegion(4, 7, 0, 0),
]


@pytest.mark.parametrize("keep", [None, KEEP], ids=["", "padded"])
@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mask_allows_the_pairs_that_transformers_allows(case: Case, region: MaskRegion, keep: Tensor | None) -> None:
    given = {
        "q_length": region.rows,
        "kv_length": region.keys,
        "q_offset": region.row_start,
        "kv_offset": region.key_start,
    }
    given |= {"batch_size": 2, "mask_function": case.function, "use_vmap": case.use_vmap, "attention_mask": keep}
    expected = hf.sdpa_mask(**given, allow_is_causal_skip=False).expand(2, 1, *region[:2])
    made = BUILD(**given)
    found = torch.ones(2, 1, *region[:2], dtype=torch.bool) if made is None else made.tensor
    assert torch.equal(found, expected)
    kept = BUILD(**given, allow_is_causal_skip=False)  # what is never None
    assert torch.equal(kept if isinstance(kept, Tensor) else kept.tensor, expected)


def test_every_known_function_of_the_installed_transformers_is_converted() -> None:
    assert len(BUILD.converters) == len(MASK_FUNCTIONS)


def test_a_function_that_does_not_do_what_its_name_says_is_not_converted() -> None:
    def causal_mask_function(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < i

    converter = MASK_FUNCTIONS["causal_mask_function"].converter
    assert not MaskBuilder({causal_mask_function.__code__: converter}).agrees(causal_mask_function)


@pytest.mark.parametrize(
    ("function", "region", "mask"),
    [
        (hf.causal_mask_function, MaskRegion(5, 5), causal()),
        (hf.causal_mask_function, MaskRegion(5, 8), causal(offset=0)),
        (hf.causal_mask_function, MaskRegion(2, 9, 7, 0), causal()),
        (hf.sliding_window_causal_mask_function(3), MaskRegion(9, 9), window(2)),
        (hf.sliding_window_causal_mask_function(9), MaskRegion(9, 9), causal()),
        (hf.sliding_window_bidirectional_mask_function(2), MaskRegion(9, 9), window(2, right=2)),
        (
            hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(PACKED)),
            MaskRegion(10, 10),
            causal() & documents(PACKED),
        ),
    ],
)
def test_a_mask_is_the_simplest_equivalent(function: Any, region: MaskRegion, mask: Mask) -> None:
    sizes = {"batch_size": 2, "q_length": region.rows, "kv_length": region.keys, "q_offset": region.row_start}
    made = BUILD(**sizes, mask_function=function)
    assert isinstance(made, LazyMask)
    assert made.mask == mask


def test_a_token_that_sees_everything_needs_no_mask() -> None:
    step = {"batch_size": 2, "q_length": 1, "kv_length": 8, "q_offset": 7, "mask_function": hf.causal_mask_function}
    assert BUILD(**step) is None
    assert BUILD(**step, attention_mask=torch.ones(2, 8, dtype=torch.bool)) is None
    assert BUILD(**step, attention_mask=KEEP[:, :8]).mask == padding(keep=KEEP[:, :8])


def test_a_step_of_a_static_cache_gets_its_one_row_as_a_tensor_without_reading_the_position() -> None:
    position = torch.tensor(4)
    step = {"batch_size": 2, "q_length": 1, "kv_length": 9, "q_offset": position, "allow_is_causal_skip": False}
    made = BUILD(**step, mask_function=hf.causal_mask_function, attention_mask=KEEP[:, :5])
    assert isinstance(made, Tensor)
    assert torch.equal(made[:, 0, 0], torch.nn.functional.pad(KEEP[:, :5], (0, 4)))


def test_a_static_cache_passes_its_position_as_a_tensor() -> None:
    made = BUILD(batch_size=1, q_length=3, kv_length=9, q_offset=torch.tensor(0), mask_function=hf.causal_mask_function)
    assert made.mask == causal(offset=0)


def test_the_arguments_of_earlier_versions_are_accepted() -> None:
    made = BUILD(
        batch_size=1, kv_length=9, cache_position=torch.tensor([4, 5, 6]), mask_function=hf.causal_mask_function
    )
    assert torch.equal(made.tensor[0, 0], causal(offset=4).dense(3, 9))


def test_a_mask_built_before_is_passed_on() -> None:
    lazy = LazyMask(causal(), 2, 5, 5, "cpu")
    assert BUILD(batch_size=2, q_length=5, kv_length=5, attention_mask=lazy) is lazy


LAZY = LazyMask(causal() & padding(keep=KEEP[:, :4]), batch=2, rows=3, keys=4, device="cpu")
TABLE = (causal() & padding(keep=KEEP[:, :4])).dense(3, 4)


def test_a_lazy_mask_looks_like_the_tensor() -> None:
    assert LAZY.shape == TABLE.shape
    assert (LAZY.ndim, LAZY.dim(), LAZY.dtype) == (4, 4, torch.bool)
    assert LAZY.contiguous() is LAZY
    assert "tensor" not in vars(LazyMask(causal(), 2, 3, 4, "cpu").contiguous())


def test_a_lazy_mask_is_sliced_and_combined_like_the_tensor() -> None:
    assert torch.equal(LAZY[:, 0, :, :2], TABLE[:, 0, :, :2])
    assert torch.equal(torch.cat([LAZY, TABLE], -1), torch.cat([TABLE, TABLE], -1))
    assert torch.equal(LAZY & ~TABLE, torch.zeros_like(TABLE))
    assert torch.equal(~LAZY | TABLE, torch.ones_like(TABLE))
    assert torch.equal(LAZY.masked_fill(TABLE, False), torch.zeros_like(TABLE))
    assert torch.equal(LAZY.to(torch.float32), TABLE.float())


def test_a_lazy_mask_added_to_logits_hides() -> None:
    logits = torch.randn(2, 4, 3, 4)
    expected = logits.masked_fill(~TABLE, torch.finfo(torch.float32).min).softmax(-1)
    hidden = ~TABLE.any(-1, keepdim=True)
    for added in (logits + LAZY, LAZY + logits, torch.add(logits, LAZY)):
        torch.testing.assert_close(added.softmax(-1).masked_fill(hidden, 0), expected.masked_fill(hidden, 0))


def test_a_lazy_mask_moved_to_a_device_stays_a_mask() -> None:
    moved = LAZY.to("meta")
    assert isinstance(moved, LazyMask)
    assert moved.mask.tensors[0].is_meta


def test_a_lazy_mask_has_only_the_attributes_of_a_tensor() -> None:
    with pytest.raises(AttributeError, match="neither has a tensor"):
        LAZY.colour


def test_attention_accepts_a_mask_from_a_function() -> None:
    made = BUILD(batch_size=2, q_length=6, kv_length=6, mask_function=odd_ones)
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    expected = regard.attention(q, k, v, mask=made.tensor)
    torch.testing.assert_close(regard.attention(q, k, v, mask=made.mask), expected)
    assert made.mask != everything()
