"""A tensor as a mask: integers select by `!= 0` at every entry point, eager and compiled; floats must be 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard.errors import DtypeError, MaskError

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
TABLE = torch.tensor([[1, 0, 0, 3], [2, 1, 0, 0], [0, 0, 0, 0], [2, 0, 2, 1]])  # the third row sees nothing
MODULE = regard.nn.ScaledDotProductAttention()


def inputs(*lead: int) -> list[Tensor]:
    return list(torch.randn(3, *(lead or (2, 2)), 4, 8, generator=torch.Generator().manual_seed(0)).unbind())


def multihead(mask: Any) -> Tensor:
    torch.manual_seed(0)
    attend = regard.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    return attend(x, x, x, mask=mask)[0]


def over_group(mask: Any) -> Tensor:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return regard.distributed.attention(*inputs(), mask=mask)
    finally:
        dist.destroy_process_group()


ENTRIES: dict[str, Callable[[Any], Tensor]] = {
    "attention": lambda mask: regard.attention(*inputs(), mask=mask),
    "chunked": lambda mask: regard.attention(*inputs(), mask=mask, backend="chunked"),
    "observe": lambda mask: regard.observe(*inputs(), mask=mask).output,
    "steps": lambda mask: regard.steps(*inputs(), mask=mask).output,
    "attention_with_weights": lambda mask: regard.attention_with_weights(*inputs(), mask)[1],
    "ScaledDotProductAttention": lambda mask: MODULE(*inputs(), mask)[0],
    "MultiheadAttention": multihead,
    "KVCache": lambda mask: regard.nn.KVCache().attend(*inputs(), mask=mask),
    "dense": lambda mask: regard.attention(*inputs(), mask=mask if mask.dtype == torch.bool else regard.dense(mask)),
    "&": lambda mask: regard.attention(*inputs(), mask=regard.everything() & mask),
    "distributed": over_group,
}

HEADS = regard.nn.MultiheadAttention(8, 2, batch_first=True).eval()
COMPILED: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, k, v, mask: regard.attention(q, k, v, mask=mask),
    "dense": lambda q, k, v, mask: regard.attention(q, k, v, mask=regard.dense(mask) & regard.causal()),
    "module": lambda q, k, v, mask: MODULE(q, k, v, mask, return_weights=False)[0],
    "heads": lambda q, k, v, mask: HEADS(q[0], k[0], v[0], mask=mask, need_weights=False)[0],
}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("entry", ENTRIES)
def test_integers_of_every_dtype_select_where_they_are_not_0(entry: str) -> None:
    call = ENTRIES[entry]
    expected = call(TABLE != 0)
    for dtype in INTEGERS:
        torch.testing.assert_close(call(TABLE.to(getattr(torch, dtype))), expected, rtol=0, atol=0)
    for dtype in ("int8", "int64"):  # a negative number is not 0 either
        torch.testing.assert_close(call(-TABLE.to(getattr(torch, dtype))), expected, rtol=0, atol=0)


@pytest.mark.parametrize("entry", COMPILED)
def test_integers_select_alike_under_the_compiler(entry: str, fresh_compiler: None) -> None:
    call = torch.compile(COMPILED[entry], backend="eager")
    given = inputs()
    with torch.no_grad():
        expected = COMPILED[entry](*given, TABLE != 0)
        for dtype in ("uint8", "int64") if entry == "attention" else ("int32",):
            found = call(*given, TABLE.to(getattr(torch, dtype)))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_why_takes_the_same_masks_as_attention() -> None:
    for dtype in INTEGERS:
        plan = regard.why(*inputs(), mask=TABLE.to(getattr(torch, dtype)))
        assert str(plan) == str(regard.why(*inputs(), mask=TABLE != 0))


TEXTBOOK = ("attention_with_weights", "ScaledDotProductAttention", "MultiheadAttention", "KVCache")


@pytest.mark.parametrize("entry", TEXTBOOK)
def test_in_textbook_forms_a_float_mask_of_zeros_hides_everything(entry: str) -> None:
    call = ENTRIES[entry]
    torch.testing.assert_close(call(torch.zeros(4, 4)), call(torch.zeros(4, 4).bool()), rtol=0, atol=0)
    torch.testing.assert_close(call(torch.eye(4)), call(torch.eye(4).bool()), rtol=0, atol=0)
    if entry != "MultiheadAttention":  # its output projection has a bias
        assert not call(torch.zeros(4, 4)).any()


@pytest.mark.parametrize("entry", [*TEXTBOOK, "attention", "observe", "steps"])
def test_a_float_mask_of_other_numbers_is_refused_with_both_remedies(entry: str) -> None:
    for wrong in (TABLE.float(), torch.full((4, 4), -torch.inf), torch.full((4, 4), torch.nan)):
        with pytest.raises(MaskError, match="additive mask as bias=, and a selecting one as mask != 0") as caught:
            ENTRIES[entry](wrong)
        assert "== 0" not in str(caught.value)


def test_attention_refuses_a_float_mask_of_zeros_that_may_be_additive() -> None:
    with pytest.raises(MaskError, match="zeros alone hides everything or adds nothing"):
        regard.attention(*inputs(), mask=torch.zeros(4, 4))


class Coded(Tensor):
    """A tensor whose values stand for something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "make",
    [
        regard.dense,
        regard.padding,
        regard.documents,
        regard.packed,
        regard.causal,
        regard.prefix,
        regard.global_tokens,
        lambda x: regard.window(1, offset=x),
        lambda x: regard.padding(lengths=x),
        lambda x: regard.everything() & x,
        lambda x: multihead(x),
        lambda x: regard.nn.MultiheadAttention(8, 2)(*[torch.zeros(4, 2, 8)] * 3, attn_mask=x.bool()),
        lambda x: regard.nn.MultiheadAttention(8, 2)(*[torch.zeros(4, 2, 8)] * 3, key_padding_mask=x.bool()),
        lambda x: regard.attention_with_weights(*inputs(), x.float()),
        lambda x: regard.scaled_dot_product_attention(*inputs(), x.float()),
        lambda x: regard.scaled_dot_product_attention(*inputs(), x.bool()),
    ],
)
def test_a_subclass_with_a_meaning_of_its_own_is_refused_by_its_name(make: Callable[[Tensor], object]) -> None:
    with pytest.raises(DtypeError, match="Coded"):
        make(torch.tensor([1, 1]).as_subclass(Coded))


def test_a_parameter_and_a_subclass_that_changes_nothing_are_read() -> None:
    class Named(Tensor):
        pass

    expected = regard.attention(*inputs(), mask=TABLE != 0)
    for mask in (TABLE.as_subclass(Named), torch.nn.Parameter(TABLE, requires_grad=False)):
        torch.testing.assert_close(regard.attention(*inputs(), mask=mask), expected, rtol=0, atol=0)
