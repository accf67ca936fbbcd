"""Each mask against the formula of its row in the table; and spans and covers that are tight, not only correct."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import (
    Mask,
    blocks,
    causal,
    chosen,
    dense,
    documents,
    everything,
    global_tokens,
    packed,
    padding,
    predicate,
    prefix,
    strided,
    window,
)
from regard.masks.base import FULL, HIDDEN, PARTIAL
from regard.masks.documents import Packed, Varlen

N, M = 6, 8
KEEP = [[True, False] * 4, [False] * 3 + [True] * 5]

MEANINGS = [
    (causal(), lambda b, i, j: j <= i + M - N),
    (causal(offset=0), lambda b, i, j: j <= i),
    (causal(offset=[1, -1]), lambda b, i, j: j <= i + (1, -1)[b]),
    (window(2), lambda b, i, j: i + M - N - 2 <= j <= i + M - N),
    (window(2, right=1, offset=0), lambda b, i, j: i - 2 <= j <= i + 1),
    (window(None, right=1, offset=[0, 2]), lambda b, i, j: j <= i + (0, 2)[b] + 1),
    (window(1, right=None), lambda b, i, j: i + M - N - 1 <= j),
    (padding([3, 5]), lambda b, i, j: j < (3, 5)[b]),
    (padding(KEEP), lambda b, i, j: KEEP[b][j]),
    (padding(torch.tensor(KEEP).int()), lambda b, i, j: KEEP[b][j]),
    (documents([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 5, 0, 0]), lambda b, i, j: i // 2 == (0, 1, 1, 1, 2, 5, 0, 0)[j]),
    (blocks(3), lambda b, i, j: (i + M - N) // 3 == j // 3),
    (blocks(3, offset=1), lambda b, i, j: (i + 1) // 3 == j // 3),
    (prefix(3), lambda b, i, j: j < 3),
    (prefix([0, 4]), lambda b, i, j: j < (0, 4)[b]),
    (strided(3), lambda b, i, j: (i + M - N - j) % 3 == 0),
    (strided(3, offset=0), lambda b, i, j: (i - j) % 3 == 0),
    (global_tokens([1, 7]), lambda b, i, j: i + M - N in (1, 7) or j in (1, 7)),
    (global_tokens([1, 7], offset=[0, 6]), lambda b, i, j: i + 6 * b in (1, 7) or j in (1, 7)),
    (dense(torch.tensor(KEEP)[:, None, None]), lambda b, i, j: KEEP[b][j]),
    (predicate(lambda b, h, i, j: i * j > 3 + b).bind(2, 1), lambda b, i, j: i * j > 3 + b),
    (everything(), lambda b, i, j: True),
    (~causal() | strided(3), lambda b, i, j: j > i + M - N or (i + M - N - j) % 3 == 0),
    (causal() & padding([3, 5]), lambda b, i, j: j <= i + M - N and j < (3, 5)[b]),
]


@pytest.mark.parametrize(("mask", "formula"), MEANINGS, ids=lambda x: repr(x) if isinstance(x, Mask) else "")
def test_a_mask_is_the_formula_of_its_row_in_the_table(mask: Mask, formula: object) -> None:
    expected = torch.tensor([[[bool(formula(b, i, j)) for j in range(M)] for i in range(N)] for b in range(2)])
    assert torch.equal(mask.dense(N, M).expand(2, 1, N, M)[:, 0], expected)


def test_packed_documents_are_documents() -> None:
    expected = documents([0, 0, 1, 1, 1]).dense(5, 5)
    assert torch.equal(packed([2, 3]).dense(5, 5), expected)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(packed(cu_seqlens=torch.tensor([0, 2, 5], dtype=dtype)).dense(5, 5), expected)
    varlen = packed(cu_seqlens=[0, 2, 2, 3], key_cu_seqlens=[0, 1, 4, 6])
    assert torch.equal(varlen.dense(3, 6), documents([0, 0, 2], [0, 1, 1, 1, 2, 2]).dense(3, 6))


def test_cumulative_lengths_of_32_bits_stay_the_tensor_that_was_given() -> None:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    mask = packed(cu_seqlens=ends)
    assert mask.tensors[0] is ends
    assert mask == packed(cu_seqlens=[0, 2, 5])
    assert hash(mask) == hash(packed(cu_seqlens=[0, 2, 5]))
    assert mask != packed(cu_seqlens=[0, 3, 5])
    ends[1] = 4
    assert mask.dense(5, 5)[0].tolist() == [True, True, True, True, False]
    assert repr(mask) == "packed(cu_seqlens=[0, 4, 5])"


def test_tokens_after_the_last_document_see_nothing_and_are_seen_by_none() -> None:
    for mask in (Packed(torch.tensor([2, 3])), Varlen(cu_seqlens=torch.tensor([0, 2, 5]))):  # unchecked, as on a GPU
        i = torch.arange(7)
        allowed = mask.allows(i[:, None], i[None, :], 7, 7)
        assert torch.equal(allowed[:5, :5], packed([2, 3]).dense(5, 5))
        assert not allowed[5:].any()
        assert not allowed[:, 5:].any()
        lo, hi, exact = mask.span(i, 7, 7)
        assert exact
        assert torch.equal((i >= lo[:, None]) & (i < hi[:, None]), allowed)


def edges(length: int, size: int) -> Tensor:
    return torch.tensor([*range(0, length, size), length])


def true_cover(mask: Mask, rows: Tensor, cols: Tensor, n: int, m: int) -> Tensor:
    table = mask.dense(n, m).reshape(-1, n, m)
    grid = [[table[:, a:b, c:d] for c, d in zip(cols, cols[1:])] for a, b in zip(rows, rows[1:])]  # noqa: B905, RUF007
    return torch.tensor([[HIDDEN if not t.any() else FULL if t.all() else PARTIAL for t in line] for line in grid])


TIGHT = [
    causal(),
    causal(offset=-70),
    window(40),
    window(20, right=30),
    window(40) | global_tokens([0, 1, 200]),
    window(40) & causal(),
    causal() | prefix(100),
    blocks(48),
    strided(64),
    prefix(64),
    padding([100, 60]),
    padding(torch.arange(256)[None] >= torch.tensor([[32], [70]])),
    packed([64, 32, 100, 60]),
    documents([7] * 64 + [3] * 32 + [9] * 100 + [1] * 60),
    documents([7] * 64 + [3] * 32 + [7] * 96 + [1] * 64),
    documents([7] * 64 + [3] * 192, [3] * 100 + [5] * 100 + [7] * 56),
    global_tokens([*range(32), 100]),
    dense(torch.ones(256, 256).tril().bool()),
    dense(torch.ones(2, 1, 256, 256).tril(-9).bool()),
    dense(torch.arange(256)[None, None, None] < 96),
    everything(),
    ~causal(),
]


@pytest.mark.parametrize("mask", TIGHT, ids=repr)
def test_cover_finds_every_hidden_and_every_full_tile(mask: Mask) -> None:
    rows, cols = edges(256, 32), edges(256, 16)
    assert mask.cover(rows, cols, 256, 256).tolist() == true_cover(mask, rows, cols, 256, 256).tolist()


def test_far_tiles_of_a_long_window_with_global_tokens_are_hidden() -> None:
    mask, n = window(256, right=256) | global_tokens([0, 5]), 1 << 20
    rows, cols = edges(n, n // 64), edges(n, n // 256)
    cover = mask.cover(rows, cols, n, n)
    assert (cover[1:, 1:] == HIDDEN).double().mean() > 0.95
    assert (cover[0] == PARTIAL).all()
    assert (cover[:, 0] == PARTIAL).all()


@pytest.mark.parametrize(
    ("mask", "exact"),
    [
        (causal() | prefix(3), True),
        (causal() & window(3) & padding([3, 9]), True),
        (~causal(), True),
        (~~window(1), True),
        (~window(1), False),
        (window(1) | prefix(2), False),
        (everything() & dense(torch.ones(9, 9).tril().bool()), True),
        (documents([1, 1, 0, 0, 0, 2, 2, 2, 2]), True),
        (documents([1, 0, 1, 0, 0, 2, 2, 2, 2]), False),
        (padding([[0, 1, 1, 1, 0, 0, 0, 0, 0]]), True),
        (padding([[0, 1, 0, 1, 0, 0, 0, 0, 0]]), False),
        (causal(offset=20) | strided(3), True),
        (global_tokens([3, 4]), True),
        (strided(2), False),
        (prefix(1) | ~prefix(2), False),
        (~prefix(2) | prefix(1), False),
        (~prefix(2) | prefix(2), True),
        (~everything(), True),
    ],
    ids=repr,
)
def test_spans_are_exact_where_the_visible_keys_are_an_interval(mask: Mask, exact: bool) -> None:
    assert mask.span(torch.arange(9), 9, 9).exact is exact


def test_cover_follows_from_span_for_a_new_mask() -> None:
    class Zigzag(Mask):
        def allows(self, i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
            return (j >= 8 * (i % 2)) & (j < 8 * (i % 2) + 4) & (i % 4 != 3)

        def span(self, i: Tensor, n: int, m: int) -> object:
            lo = 8 * (i % 2)
            return type(causal().span(i, n, m))(lo, torch.where(i % 4 != 3, lo + 4, 0), True)

    cover = Zigzag().cover(torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 4, 8, 12, 16]), 16, 16)
    assert cover.tolist() == [[FULL, 0, 0, 0], [0, 0, FULL, 0], [FULL, 0, 0, 0], [0, 0, 0, 0]]
    cover = Zigzag().cover(torch.tensor([0, 2, 3, 4]), torch.tensor([0, 4, 8, 12, 16]), 16, 16)
    assert cover.tolist() == [[1, 1, 1, 0], [FULL, 0, 0, 0], [0, 0, 0, 0]]


def test_trivial_compositions_simplify() -> None:
    x = causal()
    assert (everything() & x) is x
    assert (x & everything()) is x
    assert (everything() | x) == everything()
    assert (x | everything()) == everything()
    assert ~~x is x


def test_bind_reads_three_dimensions_as_heads_or_as_a_batch() -> None:
    mask = dense(torch.ones(2, 3, 4, dtype=torch.bool))
    assert mask.lead == (1, 2)
    assert mask.bind(5, 2) is mask
    assert mask.bind(2, 1, headless=True).lead == (2, 1)
    assert (causal() & mask).bind(2, 1, headless=True).lead == (2, 1)
    assert (~mask).bind(2, 1, headless=True).lead == (2, 1)


def test_bind_changes_nothing_else() -> None:
    mask = ~(causal() & padding([2, 3])) | blocks(2)
    assert mask.bind(2, 4) is mask
    assert mask.bind(2, 4, headless=True) is mask


def test_a_predicate_sees_the_true_batch_and_head_in_a_part_of_the_batch() -> None:
    def rule(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (batch == 2) & (head == 1) & (i >= j)

    whole = (predicate(rule) & causal()).bind(4, 3)
    part = whole.restrict(slice(2, 4), slice(1, 2))
    assert part.lead == (2, 1)
    assert part.dense(3, 3)[0].any()
    assert not part.dense(3, 3)[1].any()
    assert part.bind(9, 9) is part
    assert not predicate(rule).dense(3, 3).any()


def test_tensors_are_those_of_all_parts() -> None:
    lengths, table = torch.tensor([1, 2]), torch.ones(3, 3, dtype=torch.bool)
    assert [t.data_ptr() for t in (causal() & padding(lengths) | ~dense(table)).tensors] == [
        lengths.data_ptr(),
        table.data_ptr(),
    ]
    assert causal().tensors == ()


def test_a_written_out_mask_does_not_share_its_memory() -> None:
    table = torch.ones(3, 3, dtype=torch.bool)
    dense(table).dense(3, 3).zero_()
    assert table.all()


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (causal() & padding([3, 5]), "causal() & padding(lengths=[3, 5])"),
        (window(3), "window(3)"),
        (window(None, right=2, offset=1), "window(None, right=2, offset=1)"),
        (~(causal() | prefix(2)) & blocks(4), "~(causal() | prefix(2)) & blocks(4)"),
        (causal() & (blocks(1) & blocks(2)), "causal() & (blocks(1) & blocks(2))"),
        (documents([0, 1], [1]), "documents([0, 1], key_ids=[1])"),
        (documents(torch.arange(100)), "documents([0, 1, 2, ..., 99])"),
        (dense(torch.ones(8, 9)[None] > 0), "dense(<bool 1×8×9>)"),
    ],
)
def test_a_repr_reads_like_the_code_that_makes_it(mask: Mask, written: str) -> None:
    assert repr(mask) == written


@pytest.mark.parametrize("hidden", [None, causal(), padding([2, 3])], ids=repr)
def test_a_picture_of_a_predicate_is_that_of_the_batch_item_and_head(hidden: Mask | None) -> None:
    rule = predicate(lambda b, h, i, j: (i + j + b + 2 * h) % 3 == 0)
    mask = rule if hidden is None else rule & hidden
    whole = mask.bind(2, 4).dense(3, 3)
    for batch, head in ((0, 0), (0, 3), (1, 0), (1, 2)):
        pairs = whole[batch, head].tolist()
        assert mask.picture(3, 3, batch=batch, head=head) == "\n".join("".join("·█"[x] for x in row) for row in pairs)


def test_a_large_picture_is_drawn_in_shades() -> None:
    drawn = causal().picture(1000, 1000, width=10)
    assert drawn == "▓░        \n██▓░      \n████▓░    \n██████▓░  \n████████▓░"


@pytest.mark.parametrize(
    "mask", [causal(), causal(offset=torch.tensor([1, 2])), padding(torch.tensor([2, 3]))], ids=repr
)
def test_masks_are_traced_by_the_compiler(mask: Mask) -> None:
    def pairs(x: Tensor) -> Tensor:
        return mask.dense(x.shape[0], x.shape[1]) & causal().allows(
            torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]), *x.shape
        )

    x = torch.zeros(4, 5)
    assert torch.equal(torch.compile(pairs, backend="eager", fullgraph=True)(x), pairs(x))


def test_constructors_are_traced_by_the_compiler() -> None:
    def pairs(lengths: Tensor, table: Tensor) -> Tensor:
        mask = causal() & padding(lengths) & dense(table) | window(1, offset=lengths) & prefix(lengths)
        return mask.dense(4, 4)

    lengths, table = torch.tensor([2, 3]), torch.ones(4, 4, dtype=torch.bool)
    assert torch.equal(torch.compile(pairs, backend="eager", fullgraph=True)(lengths, table), pairs(lengths, table))


def test_constructors_read_no_values() -> None:
    ints, table = torch.ones(2, device="meta", dtype=torch.int64), torch.ones(2, 3, device="meta", dtype=torch.bool)
    made = [
        padding(ints),
        padding(table),
        documents(ints),
        packed(ints),
        global_tokens(ints),
        prefix(ints),
        dense(table),
    ]
    assert all((mask & causal(ints) | window(1, offset=ints)).lead for mask in made)


def test_a_predicate_is_shared_among_the_items_and_heads_that_it_ignores() -> None:
    cpu = torch.device("cpu")
    rules = {
        (1, 1): lambda b, h, i, j: i > j,
        (4, 1): lambda b, h, i, j: i > j + b,
        (1, 3): lambda b, h, i, j: i > j + h,
        (4, 3): lambda b, h, i, j: i > j + h - b,
    }
    for lead, rule in rules.items():
        assert predicate(rule).bind(4, 3).shared(cpu).lead == lead
        assert (~predicate(rule) & causal()).bind(4, 3).shared(cpu).lead == lead
    always = predicate(lambda b, h, i, j: torch.tensor(True))
    assert always.bind(4, 3).shared(cpu).lead == (1, 1)


@pytest.mark.parametrize(
    "mask",
    [causal(), window(3), blocks(4), strided(3), global_tokens([0, 5]), causal() & (blocks(4) | strided(3))],
    ids=repr,
)
@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_last_rows_alone_see_what_they_see_in_the_whole_sequence(mask: Mask, backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 11, 4).unbind()
    whole = regard.attention(q, k, v, mask=mask, backend=backend)
    for rows in (1, 3):
        last = regard.attention(q[:, :, -rows:], k, v, mask=mask, backend=backend)
        torch.testing.assert_close(last, whole[:, :, -rows:])


def test_a_list_of_chosen_keys_is_a_set() -> None:
    wanted = chosen([[0, 2, 5], [1, 3, 4]]).dense(2, 6)
    for lists in ([[5, 0, 2, 0], [3, 1, 1, 4]], [[2, -1, 5, 0], [4, 3, 1, -1]]):
        assert torch.equal(chosen(lists).dense(2, 6), wanted)
        assert chosen(lists).visible(torch.arange(2), 2, 6).tolist() == [3, 3]
    assert chosen([[1, 1]], size=4).visible(torch.arange(1), 1, 6).tolist() == [2]  # the last block has two keys


def test_lists_of_key_heads_are_those_of_the_query_heads_that_share_them() -> None:
    mask = chosen([[[[0]], [[1]]]]).bind(1, 4)
    assert mask.lead == (1, 4)
    assert mask.dense(1, 2)[0, :, 0, 0].tolist() == [True, True, False, False]
    assert mask.restrict(slice(0, 1), slice(1, 3)).dense(1, 2)[0, :, 0, 0].tolist() == [True, False]
