"""The formula on one tile: logits, hidden pairs, dropped weights, and the textbook's rows."""

from __future__ import annotations

import pytest
import torch

from contract_cases import CASES, Case, plain
from folded_cases import BATCH, KEY_HEADS, KEYS, ROWS, folded
from regard.core.dropout import keep
from regard.core.folded import fold, unfold
from regard.core.formula import attend, hidden, kept, logits
from regard.core.tiling import Tile
from regard.core.validation import pose

WHOLE = Tile(slice(0, BATCH), slice(0, KEY_HEADS), slice(0, ROWS), slice(0, KEYS))
PART = Tile(slice(1, 2), slice(0, KEY_HEADS), slice(2, 7), slice(100, 260))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_formula_on_the_whole_matrix_is_the_textbook(case: Case) -> None:
    tensors, kwargs = case.inputs()
    p = pose(*tensors, **kwargs, observed=True)
    x = fold(p)
    batch, heads = x.key.shape[:2]
    whole = Tile(slice(0, batch), slice(0, heads), slice(0, x.spec.n), slice(0, x.spec.m))
    rows = unfold(p, attend(x.spec, whole, x.query, x.key, x.value, x.bias, *x.shared))
    for a, b in zip(rows[:3], plain(*tensors, **kwargs)[:3], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["plain", "softcap", "alibi", "relative", "additive"])
def test_the_logits_of_a_tile_are_that_part_of_all_logits(name: str) -> None:
    x = folded(name)
    rows, cols = PART.rows, PART.cols
    all_of_them = logits(x.spec, WHOLE, x.query, x.key, None, x.shared)
    part = logits(x.spec, PART, x.query[1:2, ..., rows, :], x.key[1:2, ..., cols, :], None, x.shared)
    torch.testing.assert_close(part, all_of_them[1:2, ..., rows, cols])


def test_hidden_pairs_are_those_that_the_mask_does_not_allow() -> None:
    spec = folded("a gap between runs").spec
    hide = hidden(spec, PART, 2, torch.device("cpu"))
    assert hide is not None
    assert spec.mask is not None
    assert torch.equal(hide.reshape(5, 160), ~spec.mask.dense(ROWS, KEYS)[PART.rows, PART.cols])
    assert hidden(folded("plain").spec, PART, 2, torch.device("cpu")) is None


def test_kept_weights_are_those_of_keep_at_the_same_places() -> None:
    x = folded("dropout")
    i = torch.arange
    expected = keep(x.spec.dropout, x.spec.seed, i(1, 2), i(4), i(2, 7), i(100, 260))
    assert torch.equal(kept(x.spec, PART, 2, torch.device("cpu")).flatten(1, 2), expected)
