"""Differences: what is subtracted from what, what was paired, and what the table says if nothing changed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import regard
from regard.models.difference import Difference
from regard.models.head_statistics import STATISTICS, Head

SHAPES = ([2, 2], [3])


def head(layer: str = "a", number: int = 0, **numbers: float) -> Head:
    return Head(layer, number, **{**dict.fromkeys(STATISTICS, 0.0), **numbers})


def test_the_words_say_which_is_subtracted_from_which_and_how_many_changed() -> None:
    changed = [head(number=n, first_share=0.1 * n) for n in range(4)]
    lines = Difference(changed, [], []).table(names=("old", "new")).lines
    assert lines == ["new minus old: 3 heads changed"]
    assert Difference(changed[:2], [], []).table().lines == ["the second minus the first: 1 head changed"]


def test_more_heads_than_the_table_shows_are_counted_and_the_strongest_come_first() -> None:
    table = Difference([head(number=n, first_share=0.01 * n) for n in range(1, 31)], [], []).table(most=5)
    assert table.lines == ["the second minus the first: the 5 strongest of 30 heads that changed"]
    assert [number for _, number, _ in table.rows] == ["30", "29", "28", "27", "26"]


def test_a_nan_does_not_change_the_order_of_heads() -> None:
    changed = [head(number=n, first_share=0.1 * n, relative_entropy=math.nan if n % 2 else 0.0) for n in (2, 1, 4, 3)]
    assert [head.head for head in Difference(changed, [], []).strongest()] == [4, 3, 2, 1]


def test_a_change_of_any_statistic_counts() -> None:
    assert Difference([head(max_logit=-2.0)], [], []).table().lines == ["the second minus the first: 1 head changed"]


def test_no_difference_prints_no_empty_table() -> None:
    table = Difference([head(), head(number=1, max_logit=math.nan)], [], []).table(names=("x", "y"))
    assert str(table) == "y minus x: no difference (2 heads compared)"


def test_heads_with_only_nan_are_not_compared() -> None:
    lost = head(**dict.fromkeys(STATISTICS, math.nan))
    some = Difference([lost, head(number=1)], [], []).table().lines
    assert some[0].endswith("no difference (1 head compared)")
    assert some[1] == "1 head could not be compared: all numbers are NaN"
    assert Difference([lost], [], []).table().lines[0].endswith("there are no heads to compare")
    assert Difference([], [], []).table().lines == ["the second minus the first: there are no heads to compare"]


@pytest.mark.parametrize("by_order", [False, True])
def test_different_shapes_are_reported_with_the_pairing_and_what_was_left_out(by_order: bool) -> None:
    only = [head("b", 0), head("b", 1)]
    told = Difference([head()], only, [head("c")], SHAPES, by_order).table(names=("x", "y")).lines[0]
    assert told.startswith("x has 2 layers of 2 heads and y has 1 layer of 3 heads: layers are paired by ")
    assert ("by order (named as in x) and" in told) == by_order
    assert ("by name and heads by number" in told) != by_order
    assert told.endswith("left out: 2 heads of x and 1 head of y")


def test_layers_of_different_sizes_are_counted_in_total() -> None:
    told = Difference([head()], [], [], ([1, 2], [3]), by_order=True).table(names=("x", "y")).lines[0]
    assert told.startswith("x has 2 layers with 3 heads and y has 1 layer of 3 heads")
    assert told.endswith("left out: none")


def test_the_same_shapes_and_names_need_no_words() -> None:
    assert len(Difference([head()], [], [], SHAPES).table().lines) == 1


def test_names_from_outside_never_move_the_cursor() -> None:
    table = Difference([replace(head(first_share=0.5), layer="\x1b[2J")], [], []).table(names=("\x1b[31m", "y"))
    assert "\x1b" not in str(table)
    with (console := Console(color_system=None)).capture() as printed:
        console.print(table)
    assert "\x1b" not in printed.get()


def watched(lengths: tuple[int, ...] = (9,), heads: int = 2, seed: int = 0, prefix: str = "") -> regard.models.Seen:
    """An encoder layer with padded rows, watched."""
    torch.manual_seed(seed)
    block = torch.nn.TransformerEncoderLayer(16, heads, dropout=0.0, batch_first=True)
    model = torch.nn.ModuleDict({prefix: block}) if prefix else block
    x = torch.randn(len(lengths), max(lengths), 16, generator=torch.Generator().manual_seed(7))
    hidden = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    with regard.watch(model) as seen:
        block(x, src_key_padding_mask=hidden)
    return seen


def test_distances_compare_every_head_of_one_with_every_head_of_the_other() -> None:
    a, b = watched((9, 4)), watched((9, 4), heads=4, seed=1)
    found = a.diff(b).distances("self_attn")
    P, R = a[0].weights().double()[:, :, None], b[0].weights().double()[:, None]
    M = (P + R) / 2
    true = (torch.special.xlogy(P, P / M).nansum(-1) + torch.special.xlogy(R, R / M).nansum(-1)) / 2
    assert found.shape == (2, 4)
    assert torch.allclose(found.double(), true.mean((0, -1)), atol=1e-6)
    same = a.diff(a).distances(0)
    assert same.diagonal().abs().max() < 1e-6
    assert same[0, 1] > 1e-3


def test_rows_that_see_nothing_do_not_count_as_equal() -> None:
    q, k = torch.randn(2, 1, 2, 6, 4).unbind()
    some = [regard.observe(x, y, y, mask=regard.causal(offset=-3)) for x, y in ((q, k), (k, q))]
    found = Difference([], [], [], calls={"a": (some[0], some[1])}).distances("a")
    rows = regard.divergence(*some, "js", heads="pairs")[0]
    assert rows[..., :3].eq(0).all()
    assert torch.allclose(found, rows[..., 3:].mean(-1))


def test_layers_without_a_partner_and_texts_of_other_lengths_have_no_distances() -> None:
    a = watched()
    with pytest.raises(regard.errors.ArgumentError, match=r"^distances: layer must be one .*'self_attn'. Got 'b'"):
        a.diff(a).distances("b")
    with pytest.raises(regard.errors.ShapeError, match=r"^divergence: a and b must have the same rows and keys"):
        a.diff(watched((5,))).distances(0)
    renamed = a.diff(watched(prefix="x"))
    assert renamed.by_order
    assert renamed.distances("self_attn").shape == (2, 2)
