"""Cases for four processes: each compares a module on a rank's part with one process on the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.distributed import gather, over, shard
from regard.errors import ArgumentError, ShapeError
from regard.nn import KVCache, MultiheadAttention, ScaledDotProductAttention
from world import Case

RANKS = 4
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def compared(layout: str, strategy: str, masked: Callable[[], dict[str, Any]], **given: Any) -> Case:
    """A case that compares this rank's rows and all gradients of a module with those of one process."""

    def compare(rank: int, folder: Path) -> None:
        whole = torch.randn(2, 21, 32, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, 21, 32, dtype=torch.float64)
        torch.manual_seed(1)
        module = MultiheadAttention(32, 8, batch_first=True, dtype=torch.float64, num_kv_heads=4, **given)
        arguments = masked()
        torch.manual_seed(2)  # for the dropout
        wanted, _ = module(whole, whole, whole, need_weights=False, **arguments)
        parameters = [whole, *module.parameters()]
        truth = torch.autograd.grad((wanted * weight).sum(), parameters)
        torch.manual_seed(2)
        with over(layout=layout, strategy=strategy):
            x = shard(whole, layout=layout)
            found, none = module(x, x, x, need_weights=False, **arguments)
        assert none is None
        torch.testing.assert_close(found, shard(wanted, layout=layout))
        torch.testing.assert_close(gather(found, layout=layout), wanted)
        grads = torch.autograd.grad((found * shard(weight, layout=layout)).sum(), parameters)
        for got, want, name in zip(grads, truth, ["input", *dict(module.named_parameters())], strict=True):
            total = got if name.startswith("score.") else _summed(got)
            torch.testing.assert_close(total, want, msg=lambda text, name=name: f"{name}: {text}")

    return compare


def _summed(x: Tensor) -> Tensor:
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "is_causal": lambda: {"is_causal": True},
    "a mask": lambda: {"mask": regard.window(6) & regard.padding(torch.tensor([21, 13]))},
    "both": lambda: {"is_causal": True, "mask": regard.padding(torch.tensor([21, 13]))},
}
for _layout in ("contiguous", "zigzag"):
    for _strategy in ("ring", "heads"):
        for _name, _masked in MASKS.items():
            CASES[f"rotary, {_layout}, {_strategy}, {_name}"] = compared(_layout, _strategy, _masked, rotary=True)
CASES["a learnt score"] = compared("zigzag", "ring", dict, score=regard.scores.Temperature(3.0, heads=8).double())
CASES["dropout"] = compared("zigzag", "ring", MASKS["is_causal"], dropout=0.3)


@case
def a_tensor_mask_has_the_ranks_rows_and_all_keys(rank: int, folder: Path) -> None:
    module, whole = MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 10, 8)
    allowed = torch.rand(10, 10) > 0.3
    wanted, _ = module(whole, whole, whole, mask=allowed, need_weights=False)
    x = shard(whole)
    with over():
        found, _ = module(x, x, x, mask=shard(allowed, dim=0), need_weights=False)
    torch.testing.assert_close(found, shard(wanted))


@case
def layouts_of_torch(rank: int, folder: Path) -> None:
    module, whole = MultiheadAttention(8, 2, rotary=True), torch.randn(10, 3, 8)
    wanted, _ = module(whole, whole, whole, need_weights=False, is_causal=True)
    x = shard(whole, dim=0)
    with over():
        found, _ = module(x, x, x, need_weights=False, is_causal=True)
        alone, _ = module(x[:, 0], x[:, 0], x[:, 0], need_weights=False, is_causal=True)
    torch.testing.assert_close(found, shard(wanted, dim=0))
    torch.testing.assert_close(alone, found[:, 0])


@case
def cross_attention_with_other_lengths(rank: int, folder: Path) -> None:
    module, whole, other = (
        MultiheadAttention(8, 2, batch_first=True, rotary=True),
        torch.randn(1, 9, 8),
        torch.randn(1, 14, 8),
    )
    wanted, _ = module(whole, other, other, need_weights=False)
    x, y = shard(whole), shard(other)
    with over():
        found, _ = module(x, y, y, need_weights=False)
    torch.testing.assert_close(found, shard(wanted))


@case
def the_textbook_module(rank: int, folder: Path) -> None:
    module, whole = ScaledDotProductAttention(), torch.randn(2, 9, 8)
    x = shard(whole)
    with over():
        found, _ = module(x, x, x, mask=regard.causal(), return_weights=False)
    torch.testing.assert_close(found, shard(module(whole, whole, whole, mask=regard.causal())[0]))
    with over():
        with pytest.raises(ShapeError, match=r"^ScaledDotProductAttention: query and key must have the same dim"):
            module(x, x[..., :7], x, return_weights=False)
        with pytest.raises(ArgumentError, match=r"^ScaledDotProductAttention: over a group no rank holds weights"):
            module(x, x, x)


@case
def options_that_need_the_whole_sequence_are_refused(rank: int, folder: Path) -> None:
    module, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    hidden = torch.zeros(3, 3, dtype=torch.bool)
    calls: dict[str, Callable[[], object]] = {
        "need_weights=True": lambda: module(x, x, x),
        "attn_mask": lambda: module(x, x, x, attn_mask=hidden, need_weights=False),
        "key_padding_mask": lambda: module(x, x, x, key_padding_mask=hidden[:1], need_weights=False),
        "cache": lambda: module(x, x, x, cache=KVCache(), need_weights=False),
        "add_bias_kv": lambda: MultiheadAttention(8, 2, add_bias_kv=True)(x, x, x, need_weights=False),
        "add_zero_attn": lambda: MultiheadAttention(8, 2, add_zero_attn=True)(x, x, x, need_weights=False),
        "is_causal": lambda: module(x, x, x, mask=hidden, is_causal=True, need_weights=False),
        "KVCache.attend": lambda: KVCache().attend(x[None], x[None], x[None]),
    }
    with over():
        for name, call in calls.items():
            with pytest.raises(ArgumentError, match=name):
                call()


@case
def a_memory_reads_the_same_inside_over(rank: int, folder: Path) -> None:
    memory = regard.Memory(4, 2)
    memory.write(torch.randn(5 + rank, 4), torch.randn(5 + rank, 2))
    q = torch.randn(3, 4)
    ways: list[dict[str, Any]] = [{}, {"top": 2}, {"group": torch.distributed.group.WORLD}]
    outside = [memory.read(q, **way) for way in ways]
    with over():
        inside = [memory.read(q, **way) for way in ways]
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@case
def a_module_in_a_transformer_layer(rank: int, folder: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = MultiheadAttention(16, 4, batch_first=True, rotary=True, num_kv_heads=2)
            self.think = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attend(x, x, x, is_causal=True, need_weights=False)[0]
            return x + self.think(x)

    model, whole = nn.Sequential(Layer(), Layer()), torch.randn(1, 19, 16)
    with over(layout="zigzag"):
        found = model(shard(whole, layout="zigzag"))
    torch.testing.assert_close(gather(found, layout="zigzag"), model(whole), atol=1e-5, rtol=1e-5)
