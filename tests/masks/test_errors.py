"""A bad argument gets one error that names the function, the rule, what it got, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, DtypeError, MaskError, RegardError
from regard.masks import (
    Mask,
    blocks,
    causal,
    chosen,
    dense,
    documents,
    global_tokens,
    packed,
    padding,
    predicate,
    prefix,
    strided,
    window,
)

FLOATS = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: causal(offset=1.5), DtypeError, "causal: offset must be an integer; got 1.5"),
        (lambda: causal(offset=torch.ones(2)), MaskError, "causal: offset must hold integers; got torch.float32"),
        (lambda: causal(offset=torch.ones(2, 2).int()), MaskError, "causal: offset must be 0-D or 1-D"),
        (lambda: causal(True), DtypeError, "causal: offset must be an integer; got True"),
        (lambda: window(-1), ArgumentError, "window: left must be an integer of at least 0; got -1"),
        (lambda: window(1, right=-2), ArgumentError, "window: right must be"),
        (lambda: window("wide"), DtypeError, "window: left must be an integer of at least 0; got 'wide' (str)"),
        (lambda: window(torch.tensor(3)), DtypeError, "window: left must be an integer of at least 0; got a tensor"),
        (lambda: padding(FLOATS), MaskError, "padding: lengths are integers and keep is bool; got torch.float32"),
        (lambda: padding(), ArgumentError, "padding: give either lengths or keep; got neither"),
        (lambda: padding([1], lengths=[1]), ArgumentError, "padding: give either lengths or keep; got several"),
        (lambda: padding(3), MaskError, "padding: lengths must have one entry per batch item; got one number"),
        (lambda: padding([-1]), ArgumentError, "padding: lengths must be at least 0; got -1"),
        (lambda: padding(torch.ones(1, 2, 3).bool()), MaskError, "padding: keep must be (batch, keys) or (keys,)"),
        (lambda: padding("all"), DtypeError, "padding: lengths or keep must be a tensor"),
        (lambda: documents(FLOATS), MaskError, "documents: query_ids must hold integers"),
        (lambda: documents([[[1]]]), MaskError, "documents: query_ids must be 1-D or 2-D; got shape (1, 1, 1)"),
        (lambda: documents([[1], [2]], [[1], [2], [3]]), MaskError, "documents: query_ids and key_ids must have"),
        (lambda: packed([3, -1]), ArgumentError, "packed: lengths must be at least 0"),
        (lambda: packed([[3]]), MaskError, "packed: lengths must be 1-D"),
        (lambda: packed(), ArgumentError, "packed: give either lengths or cu_seqlens; got neither"),
        (
            lambda: packed(key_cu_seqlens=[0, 3]),
            ArgumentError,
            "cu_seqlens; got key_cu_seqlens alone",
        ),
        (lambda: packed([3], cu_seqlens=[0, 3]), ArgumentError, "packed: give either lengths or cu_seqlens; got both"),
        (lambda: packed([3], key_cu_seqlens=[0, 3]), ArgumentError, "packed: key_cu_seqlens goes with cu_seqlens"),
        (lambda: packed(cu_seqlens=[]), MaskError, "packed: cu_seqlens must start with 0; got no entry"),
        (lambda: packed(cu_seqlens=[2, 3]), MaskError, "packed: cu_seqlens must start with 0; got 2"),
        (lambda: packed(cu_seqlens=[0, 3, 2]), MaskError, "packed: cu_seqlens must never fall; got 3, then 2"),
        (lambda: packed(cu_seqlens=[0.0, 3.0]), MaskError, "packed: cu_seqlens must hold integers"),
        (lambda: packed(cu_seqlens=[0, 3], key_cu_seqlens=[0]), MaskError, "one entry per document and one more"),
        (lambda: blocks(0), ArgumentError, "blocks: size must be an integer of at least 1; got 0"),
        (lambda: prefix(-1), ArgumentError, "prefix: length must be an integer of at least 0; got -1"),
        (lambda: prefix(None), DtypeError, "prefix: length must be an integer"),
        (lambda: strided(0), ArgumentError, "strided: step must be an integer of at least 1; got 0"),
        (lambda: global_tokens([3, -1]), ArgumentError, "global_tokens: indices must be at least 0; got -1"),
        (lambda: global_tokens(3), MaskError, "global_tokens: indices must be 1-D"),
        (lambda: chosen(FLOATS), MaskError, "chosen: indices must hold integers; got torch.float32"),
        (lambda: chosen([0, 1]), MaskError, "chosen: indices must be 2-D or 3-D or 4-D; got shape (2,)"),
        (lambda: chosen([[0]], size=0), ArgumentError, "chosen: size must be an integer of at least 1; got 0"),
        (lambda: chosen([[0]], rows=True), DtypeError, "chosen: rows must be an integer of at least 1; got True"),
        (lambda: dense(FLOATS), MaskError, "dense: the tensor must be bool"),
        (lambda: dense(torch.ones(1, 1, 1, 2, 3).bool()), MaskError, "dense: the tensor must be (n, m), (heads, n, m)"),
        (lambda: dense([[1], [1, 2]]), DtypeError, "dense: tensor must be a tensor or a list that can be converted"),
        (lambda: predicate(FLOATS > 0), DtypeError, "predicate: f must be a function f(batch, head, i, j); got Tensor"),
        (lambda: padding([1, 2]) & padding([1, 2, 3]), MaskError, "&: two masks must have the same number"),
        (lambda: dense(torch.ones(2, 3, 3) > 0) | dense(torch.ones(5, 3, 3) > 0), MaskError, "|: two masks must have"),
        (lambda: causal().picture(3, 3, width=0), ArgumentError, "picture: width must be at least 1; got 0"),
        (lambda: padding([1, 2]).picture(3, 3, batch=2), ArgumentError, "picture: batch must be from 0 to 1; got 2"),
        (lambda: causal() & FLOATS, MaskError, "bias= adds, mask= selects"),
    ],
)
def test_a_bad_argument_gets_one_clear_error(make: Callable[[], Mask], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, RegardError)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "n", "m", "reason"),
    [
        (documents([0] * 7), 8, 8, "documents: there are 8 rows, but ids for 7"),
        (documents([0] * 7), 7, 8, "documents: there are 8 keys, but ids for 7"),
        (packed([3, 4]), 8, 8, "packed: the lengths sum to 7; there are 8 rows"),
        (packed([0, 3, 8]), 8, 8, "sum to 11; there are 8 rows. They look like cumulative lengths"),
        (packed(cu_seqlens=[0, 7]), 8, 8, "packed: cu_seqlens ends with 7; there are 8 rows"),
        (packed(cu_seqlens=[0, 7]), 7, 8, "Give key_cu_seqlens if the keys are others"),
        (
            packed(cu_seqlens=[0, 7], key_cu_seqlens=[0, 9]),
            7,
            8,
            "packed: key_cu_seqlens ends with 9; there are 8 keys",
        ),
        (packed([3, 4]), 7, 8, "packed: rows and keys are the same tokens; there are 7 rows and 8 keys"),
        (dense(torch.ones(5, 6) > 0), 5, 7, "dense: the tensor has shape (5, 6); there are 5 rows and 7 keys"),
        (chosen([[0], [8]]), 2, 8, "chosen: an index is 8; indices count keys, from 0 to 7, and −1 is none"),
        (chosen([[0], [-2]]), 2, 8, "chosen: an index is -2; indices count keys, from 0 to 7"),
        (chosen([[3]], size=4), 1, 12, "chosen: an index is 3; indices count blocks of 4 keys, from 0 to 2"),
        (chosen([[0]], rows=4), 5, 8, "indices have 1 lists; there are 5 rows, 4 for each list, so 2 lists are needed"),
        (padding([[1, 0]]), 2, 3, "padding: keep has entries for 2 keys; there are 3"),
        (causal() & ~padding([[1, 0]]), 2, 3, "padding: keep"),
        (causal() | packed([3]), 2, 3, "packed: rows"),
    ],
    ids=repr,
)
def test_a_mask_of_another_size_says_why_it_does_not_fit(mask: Mask, n: int, m: int, reason: str) -> None:
    assert reason in str(mask.misfit(n, m))
    for use in (mask.dense, mask.density, mask.picture):
        with pytest.raises(MaskError, match=r"^(chosen|documents|packed|dense|padding): "):
            use(n, m)


def test_masks_of_any_size_fit() -> None:
    assert (causal() & window(3) | padding([1, 2]) & ~blocks(3)).misfit(3, 9) is None


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda b, h, i, j: True, "got bool. Use torch operations"),
        (lambda b, h, i, j: i - j, "got torch.int64. End it with a comparison"),
        (lambda b, h, i, j: torch.ones(7) > 0, "got shape (7,). Combine the indices"),
    ],
)
def test_a_predicate_must_give_a_bool_for_each_pair(f: object, message: str) -> None:
    with pytest.raises(MaskError) as caught:
        predicate(f).dense(2, 3)
    assert message in str(caught.value)


def test_a_predicate_that_decides_by_if_says_what_to_write_instead() -> None:
    def before(batch: Any, head: Any, i: Any, j: Any) -> Any:
        return i >= j and j >= 0

    with pytest.raises(MaskError, match=r"^predicate: before uses `if`, .* Combine conditions by &, \| and ~"):
        predicate(before).dense(6, 6)


def test_an_error_of_a_predicate_itself_stays_as_it_is() -> None:
    table = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="must match the size"):
        predicate(lambda b, h, i, j: (i >= j) & table).dense(6, 6)


def test_masks_compose_with_masks_and_tensors_only() -> None:
    for other in (1, None, "causal"):
        with pytest.raises(TypeError):
            causal() & other
        with pytest.raises(TypeError):
            causal() | other
        with pytest.raises(TypeError):
            other & causal()
        with pytest.raises(TypeError):
            other | causal()


def test_a_predicate_that_takes_other_arguments_is_refused_where_it_is_made() -> None:
    with pytest.raises(MaskError, match=r"^predicate: f must take four arguments"):
        predicate(lambda i, j: i >= j)  # type: ignore[arg-type,misc]
    assert predicate(lambda *indices: indices[2] >= indices[3]).density(2, 2) == 0.75


@pytest.mark.parametrize("n", [-1, 2.5, "a"])
def test_a_number_of_rows_that_is_negative_or_not_whole_is_refused(n: Any) -> None:
    wanted = rf"^causal: n and m must be whole numbers of at least 0; got n={n!r}, m=3\.$"
    for look in (causal().picture, causal().dense, causal().density):
        with pytest.raises(MaskError, match=wanted):
            look(n, 3)
