"""One contract for every mask: `allows` is the definition, and everything else agrees with it."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard.masks
from mask_cases import CASES, Case, for_each_mask, written_out
from regard.errors import MaskError
from regard.masks import *  # noqa: F403  (reprs are read back by their names)
from regard.masks import Mask
from regard.masks.base import FULL, HIDDEN, And, Not, Or
from regard.masks.predicate import Predicate

every_case = for_each_mask(CASES)
every_mask = pytest.mark.parametrize("mask", {id(case.mask): case.mask for case in CASES}.values(), ids=repr)


def parts(mask: Mask) -> list[Mask]:
    inside = [mask.left, mask.right] if isinstance(mask, And | Or) else [mask.part] if isinstance(mask, Not) else []
    return [mask, *(leaf for part in inside for leaf in parts(part))]


def test_no_mask_is_missing_from_the_cases() -> None:
    for module in pkgutil.iter_modules(regard.masks.__path__):
        importlib.import_module(f"regard.masks.{module.name}")
    found, fresh = set(), [Mask]
    while fresh:
        fresh = [child for mask in fresh for child in mask.__subclasses__() if child.__module__.startswith("regard.")]
        found |= {child for child in fresh if not child.__name__.startswith("_")}
    assert len(found) >= 16
    assert found <= {type(part) for case in CASES for part in parts(case.mask)}


@every_case
def test_dense_is_allows_pair_by_pair(case: Case) -> None:
    mask, n, m = case
    dense = mask.dense(n, m)
    assert dense.dtype == torch.bool
    assert dense.shape in ((n, m), (*mask.lead, n, m))
    assert dense.is_contiguous()
    assert torch.equal(dense.expand(*mask.lead, n, m), written_out(case))


@every_case
def test_allows_takes_indices_of_any_shape(case: Case) -> None:
    mask, n, m = case
    dense = mask.dense(n, m)
    i, j = torch.arange(n), torch.arange(m)
    assert torch.equal(mask.allows(i[:, None], j, n, m), dense)
    assert torch.equal(mask.allows(i.flip(0)[:, None], j.flip(0), n, m), dense.flip(-1, -2))
    assert torch.equal(mask.allows(i[1::2, None], j[::3], n, m), dense[..., 1::2, ::3])
    assert torch.equal(mask.allows(i.int()[:, None, None], j[:, None], n, m), dense.unsqueeze(-1))
    for row in range(n):
        assert torch.equal(mask.allows(row, j, n, m), dense[..., row, :])
    for key in range(m):
        assert torch.equal(mask.allows(i, key, n, m), dense[..., key])


@every_case
def test_a_row_sees_nothing_outside_its_span_and_all_of_an_exact_one(case: Case) -> None:
    mask, n, m = case
    dense, j = mask.dense(n, m), torch.arange(m)
    for rows in (torch.arange(n), torch.arange(n).flip(0)[::2], torch.arange(min(n, 1))):
        lo, hi, exact = mask.span(rows, n, m)
        assert lo.dtype == hi.dtype == torch.int64
        assert lo.shape == hi.shape == dense[..., rows, :].shape[:-1]
        assert (lo >= 0).all()
        assert (hi <= m).all()
        inside = (j >= lo[..., None]) & (j < hi[..., None])
        assert not (dense[..., rows, :] & ~inside).any()
        assert not exact or torch.equal(dense[..., rows, :], inside)


def grids(length: int) -> list[Tensor]:
    edges = [[0, length], list(range(length + 1)), [*range(0, length, 2), length], [length // 3, length - length // 4]]
    return [torch.tensor(e) for e in [*edges, [0, 0, length // 2, length // 2, length]]]


@every_case
def test_hidden_tiles_hide_all_and_full_tiles_show_all(case: Case) -> None:
    mask, n, m = case
    dense = mask.dense(n, m).expand(*mask.lead, n, m)
    visible = F.pad(dense.flatten(0, 1).sum(0).cumsum(0).cumsum(1), (1, 0, 1, 0))  # pairs above and to the left
    for rows in grids(n):
        for cols in grids(m):
            cover = mask.cover(rows, cols, n, m)
            assert cover.dtype == torch.int8
            assert cover.shape == (len(rows) - 1, len(cols) - 1)
            found = visible[rows][:, cols].diff(dim=0).diff(dim=1)
            pairs = rows.diff()[:, None] * cols.diff() * math.prod(mask.lead)
            assert not found[cover == HIDDEN].any()
            assert torch.equal(found[cover == FULL], pairs[cover == FULL])


@every_case
def test_lists_hold_the_keys_that_rows_see_and_the_rest_says_which(case: Case) -> None:
    mask, n, m = case
    lists = mask.listed(n, m)
    if lists is None:
        return
    blocks = (lists.entries[..., None] == torch.arange(-(-m // lists.size))).any(-2)  # (B, H, lists, blocks)
    found = blocks.repeat_interleave(lists.rows, 2)[:, :, :n].repeat_interleave(lists.size, 3)[..., :m]
    found = found.repeat_interleave(mask.lead[1] // found.shape[1], 1) if found.shape[1] > 1 else found
    if lists.rest is not None:
        found = found & lists.rest.dense(n, m)
    assert torch.equal(found.expand(*mask.lead, n, m), mask.dense(n, m).expand(*mask.lead, n, m))


@every_case
def test_density_and_visible_count_the_pairs(case: Case) -> None:
    mask, n, m = case
    dense = mask.dense(n, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.masks.base.PAIRS_AT_ONCE", 8)
        assert mask.density(n, m) == pytest.approx(dense.double().mean().item() if dense.numel() else 0.0)
        assert torch.equal(mask.visible(torch.arange(n).flip(0), n, m), dense.flip(-2).sum(-1))


@every_case
def test_the_picture_shows_the_pairs(case: Case) -> None:
    mask, n, m = case
    batch, head = (size - 1 for size in mask.lead)
    dense = mask.dense(n, m).expand(*mask.lead, n, m)[batch, head]
    drawn = mask.picture(n, m, batch=batch, head=head)
    assert drawn == ("\n".join("".join("·█"[seen] for seen in row) for row in dense.tolist()) if m else "")


@every_case
def test_a_small_picture_shades_by_the_share_of_pairs(case: Case) -> None:
    mask, n, m = case
    dense = mask.dense(n, m).expand(*mask.lead, n, m)[0, 0]
    lines = mask.picture(n, m, width=3).split("\n")
    if max(n, m) <= 3 or 0 in (n, m):
        return
    rows, cols = torch.arange(n) * len(lines) // n, torch.arange(m) * len(lines[0]) // m
    for r, line in enumerate(lines):
        for c, shade in enumerate(line):
            share = dense[rows == r][:, cols == c].double().mean().item()
            assert shade == (" " if share == 0 else "█" if share == 1 else "░▒▓"[min(2, math.floor(share * 3))])


@every_mask
def test_its_repr_makes_it_again(mask: Mask) -> None:
    written = repr(mask)
    if any(isinstance(part, Predicate) for part in parts(mask)):
        assert "predicate(slanted)" in written
    elif "<" not in written and "..." not in written:
        assert eval(written) == mask


@every_mask
def test_equality_hash_and_pickle_go_by_value(mask: Mask) -> None:
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.to("cpu")):
        assert twin == mask
        assert hash(twin) == hash(mask)
    assert mask != "a mask"
    assert (mask == ~mask) is False


def test_masks_with_different_values_differ() -> None:
    different = {repr(case.mask): case.mask for case in CASES if "<" not in repr(case.mask)}
    masks = list(different.values())
    for k, mask in enumerate(masks):
        bound = isinstance(mask, Predicate)
        assert [k] == [at for at, other in enumerate(masks) if other == mask] or bound


@every_case
def test_sharing_changes_no_pair(case: Case) -> None:
    mask, n, m = case
    fewer = mask.shared(torch.device("cpu"))
    assert torch.equal(fewer.dense(n, m).expand(*mask.lead, n, m), mask.dense(n, m).expand(*mask.lead, n, m))


@every_case
def test_restrict_gives_the_mask_of_some_items_and_heads(case: Case) -> None:
    mask, n, m = case
    whole = mask.dense(n, m).expand(*mask.lead, n, m)
    for batch, heads in ((slice(0, 1), slice(0, 1)), (slice(1, 3), slice(0, None)), (slice(0, 2), slice(1, 2))):
        fewer = mask.restrict(batch, heads)
        some = [slice(None) if size == 1 else cut for size, cut in zip(mask.lead, (batch, heads), strict=True)]
        assert torch.equal(fewer.dense(n, m).expand(*fewer.lead, n, m), whole[some[0], some[1]])
        assert mask.lead != (1, 1) or fewer is mask
        assert 0 in fewer.lead or torch.equal(
            fewer.restrict(slice(0, 1), slice(0, 1)).dense(n, m).reshape(n, m),
            fewer.dense(n, m).expand(*fewer.lead, n, m)[0, 0],
        )


@every_mask
def test_a_mask_is_neither_true_nor_false(mask: Mask) -> None:
    with pytest.raises(MaskError, match=r"compose masks with & \| ~"):
        bool(mask)


@every_mask
def test_a_mask_on_another_device_keeps_its_shapes(mask: Mask) -> None:
    moved = mask.to("meta")
    assert [t.shape for t in moved.tensors] == [t.shape for t in mask.tensors]
    assert all(t.device.type == "meta" for t in moved.tensors)
    assert moved is mask or moved.tensors
    assert moved.lead == mask.lead


@every_mask
def test_a_mask_cannot_be_changed(mask: Mask) -> None:
    with pytest.raises(AttributeError):
        mask.left = causal()  # noqa: F405
