"""regard.nn.MultiheadAttention beyond torch's: grouped heads, scores, masks, rotary positions, dropout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.errors import RegardError
from regard.nn import KVCache, MultiheadAttention
from regard.positions import Rotary, rotary
from regard.scores import Additive, Cosine, Temperature

E, H, KV, D = 32, 4, 2, 8


def module(**arguments: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(E, H, **{"batch_first": True, "dtype": torch.float64, **arguments})


def tokens(length: int = 6) -> Tensor:
    return torch.randn(2, length, E, dtype=torch.float64)


@pytest.mark.parametrize("dims", [{}, {"kdim": 10, "vdim": 6}], ids=["packed", "separate"])
def test_grouped_heads_are_repeated_heads(dims: dict[str, int]) -> None:
    grouped, whole = module(num_kv_heads=KV, add_bias_kv=True, **dims), module(add_bias_kv=True, **dims)
    state = {}
    for name, value in grouped.state_dict().items():
        if name in ("in_proj_weight", "in_proj_bias"):
            q, k, v = value.split([E, KV * D, KV * D])
            state[name] = torch.cat([q, repeated(k, 0), repeated(v, 0)])
        elif name in ("k_proj_weight", "v_proj_weight"):
            state[name] = repeated(value, 0)
        else:
            state[name] = repeated(value, 2) if name in ("bias_k", "bias_v") else value
    whole.load_state_dict(state)
    query, key, value = tokens(5), *(torch.randn(2, 7, n, dtype=torch.float64) for n in (grouped.kdim, grouped.vdim))
    for a, b in zip(grouped(query, key, value), whole(query, key, value), strict=True):
        torch.testing.assert_close(a, b)


def repeated(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(dim, (KV, D)).repeat_interleave(H // KV, dim).flatten(dim, dim + 1)


def test_the_packed_projection_of_grouped_heads_has_the_documented_size() -> None:
    grouped = module(num_kv_heads=KV)
    assert grouped.in_proj_weight is not None
    assert grouped.in_proj_bias is not None
    assert grouped.in_proj_weight.shape == (E + 2 * KV * D, E)
    assert grouped.in_proj_bias.shape == (E + 2 * KV * D,)


@pytest.mark.parametrize("given", [True, 500.0, Rotary(D, 500.0)], ids=str)
def test_rotary_rotates_queries_and_keys_of_every_head(given: Any) -> None:
    rotated, x = module(rotary=given), tokens()
    base = 10000.0 if given is True else 500.0
    q, k, v = (x @ rotated.in_proj_weight.mT).chunk(3, -1)  # type: ignore[union-attr]
    q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k, v))
    heads = regard.attention(rotary(q, base=base), rotary(k, base=base), v)
    torch.testing.assert_close(rotated(x, x, x)[0], rotated.out_proj(heads.transpose(1, 2).flatten(-2)))
    assert rotated.state_dict().keys() == module().state_dict().keys()


def test_mask_objects_and_tensors_say_who_may_attend() -> None:
    attend, x = module(), tokens()
    wanted, weights = attend(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
    for mask in (regard.causal(), regard.causal().dense(6, 6), regard.causal().dense(6, 6).int()):
        for need_weights in (True, False):
            torch.testing.assert_close(attend(x, x, x, mask=mask, need_weights=need_weights)[0], wanted)
    torch.testing.assert_close(attend(x, x, x, mask=regard.causal())[1], weights)


def test_all_given_masks_apply_together() -> None:
    attend, x = module(add_zero_attn=True), tokens()
    attn = torch.rand(6, 6) < 0.3
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    together = ~attn & ~padding[:, None, None, :] & regard.window(2).dense(6, 6)
    for need_weights in (True, False):
        a = attend(x, x, x, padding, need_weights, attn, mask=regard.window(2))
        b = attend(x, x, x, need_weights=need_weights, mask=together)
        torch.testing.assert_close(a, b)


def test_extra_keys_work_with_masks_that_differ_by_item_and_head() -> None:
    attend, x = module(add_bias_kv=True, add_zero_attn=True), tokens()
    mask = regard.predicate(lambda b, h, i, j: (i + 2 * b + h) % 3 != j % 3)
    table = mask.bind(2, H).dense(6, 6)
    assert table.shape == (2, H, 6, 6)
    for need_weights in (True, False):
        a = attend(x, x, x, need_weights=need_weights, mask=mask)
        torch.testing.assert_close(a, attend(x, x, x, need_weights=need_weights, mask=table))
        torch.testing.assert_close(a, attend(x, x, x, None, need_weights, ~table.flatten(0, 1)))


def test_is_causal_alone_aligns_the_starts_as_torch_does() -> None:
    attend, x = module(), tokens()
    wanted = attend(x[:, :3], x, x, mask=regard.causal(offset=0))
    torch.testing.assert_close(attend(x[:, :3], x, x, is_causal=True), wanted)


@pytest.mark.parametrize(
    "score", [Cosine(0.5, learnable=True), Temperature(2.0, heads=H), Additive(D, D, 4)], ids=lambda s: type(s).__name__
)
def test_a_score_takes_the_place_of_the_product(score: regard.scores.Score) -> None:
    score = copy.deepcopy(score).double()
    attend, x = module(score=score), tokens()
    output, weights = attend(x, x, x, average_attn_weights=False)
    q, k, _ = (x @ attend.in_proj_weight.mT).chunk(3, -1)  # type: ignore[union-attr]
    q, k = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k))
    torch.testing.assert_close(weights, score(q, k).softmax(-1))
    torch.testing.assert_close(attend(x, x, x, need_weights=False)[0], output)
    for gradient in torch.autograd.grad(output.square().sum(), list(score.parameters())):
        assert gradient.abs().sum() > 0


def test_dropout_applies_in_training_only_and_the_weights_are_before_it() -> None:
    attend, x = module(dropout=0.5), tokens()
    wanted, weights = attend.eval()(x, x, x)
    torch.testing.assert_close(attend(x, x, x, need_weights=False)[0], wanted)
    attend.train()
    dropped, before = attend(x, x, x)
    torch.testing.assert_close(before, weights)
    assert not torch.allclose(dropped, wanted)
    torch.manual_seed(5)
    a = attend(x, x, x)[0]
    torch.manual_seed(5)
    torch.testing.assert_close(attend(x, x, x, need_weights=False)[0], a)


def test_dropout_keeps_the_mean() -> None:
    attend, x = module(dropout=0.3), tokens()
    wanted = attend.eval()(x, x, x)[0]
    attend.train()
    many = torch.stack([attend(x, x, x, need_weights=False)[0] for _ in range(400)])
    assert ((many.mean(0) - wanted).abs() <= 5 * many.std(0) / 20 + 1e-6).all()


def test_it_is_copied_and_pickled_whole() -> None:
    attend, x = module(num_kv_heads=KV, rotary=True, score=Cosine()), tokens()
    for other in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        torch.testing.assert_close(other(x, x, x), attend(x, x, x))
    assert "num_kv_heads=2" in repr(attend)


def test_autocast_and_inference_mode() -> None:
    attend = MultiheadAttention(E, H, batch_first=True, add_bias_kv=True)
    x = tokens().float()
    wanted = attend(x, x, x)[0]
    with torch.inference_mode():
        torch.testing.assert_close(attend(x, x, x)[0], wanted.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = attend(x, x, x)
    assert output.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), wanted, rtol=0.1, atol=0.05)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation creates."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else [made]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return made


def test_without_weights_memory_is_linear() -> None:
    attend = MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True, dropout=0.1)
    length = 4096
    x, padded = torch.randn(1, length, 8), torch.arange(length)[None] >= 3000
    with Largest() as seen:
        output, _ = attend(x, x, x, padded, need_weights=False, mask=regard.window(64))
        output.sum().backward()
    assert seen.numbers < length * length // 4


@pytest.mark.parametrize("length", [0, 1])
def test_few_keys_and_no_keys(length: int) -> None:
    attend, x = module(add_bias_kv=True, add_zero_attn=True), tokens()
    output, weights = attend(x, x[:, :length], x[:, :length], mask=regard.causal())
    assert output.shape == x.shape
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    assert weights.shape[-1] == length + 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"embed_dim": 0}, "embed_dim must be at least 1"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"dropout": 1.0}, "0 ≤ p < 1"),
        ({"score": nn.Identity()}, "score must be"),
        ({"rotary": "yes"}, "rotary must be"),
        ({"rotary": Rotary(4)}, "heads of dim 8"),
        ({"embed_dim": 12, "rotary": True}, "must be even"),
        ({"kdim": 2.5}, "kdim must be an integer"),
    ],
    ids=str,
)
def test_a_wrong_constructor_argument_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RegardError, match=words):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **arguments})


X = torch.zeros(2, 6, E, dtype=torch.float64)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "not tensors": (([1.0], X, X), {}, "must be tensors"),
    "rank": ((X, X[0], X), {}, "all be 3-D, or all 2-D"),
    "dim": ((X, X[..., :4], X), {}, "last dims"),
    "batch": ((X, X[:1], X[:1]), {}, "one batch"),
    "lengths": ((X, X, X[:, :3]), {}, "one length"),
    "dtype": ((X.float(),) * 3, {}, "parameters are torch.float64"),
    "device": ((X.to("meta"),) * 3, {}, "parameters are on cpu"),
    "attn_mask shape": ((X, X, X), {"attn_mask": torch.zeros(2, 6, 6)}, r"\(L, S\) or \(N·heads, L, S\)"),
    "attn_mask dtype": ((X, X, X), {"attn_mask": torch.zeros(6, 6).int()}, "attn_mask must be a tensor, bool"),
    "a mask as attn_mask": ((X, X, X), {"attn_mask": regard.causal()}, "pass a mask of regard as mask="),
    "attn_mask device": ((X, X, X), {"attn_mask": torch.zeros(6, 6, device="meta")}, "query's device"),
    "padding shape": ((X, X, X), {"key_padding_mask": torch.zeros(6).bool()}, r"must be \(N, S\)"),
    "padding of one": ((X[0],) * 3, {"key_padding_mask": torch.zeros(1, 6).bool()}, r"must be \(S,\)"),
    "mask kind": ((X, X, X), {"mask": "causal"}, "mask must be a regard Mask"),
    "additive mask": ((X, X, X), {"mask": torch.full((6, 6), -1e9)}, "bias= adds"),
    "mask shape": ((X, X, X), {"mask": torch.ones(6, 4).bool()}, "does not fit"),
    "cache and memory": ((X[:, :1], X, X), {"cache": KVCache()}, "same new tokens"),
}


@pytest.mark.parametrize(("inputs", "arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_input_gets_one_clear_error(inputs: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RegardError, match=words):
        module()(*inputs, **arguments)


@pytest.mark.parametrize("need_weights", [True, False])
def test_errors_of_attention_name_the_module(need_weights: bool) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "the mask does not fit": lambda: module()(X, X, X, need_weights=need_weights, mask=torch.ones(6, 4).bool()),
        "the score does not fit": lambda: module(score=Temperature(heads=3))(X, X, X, need_weights=need_weights),
    }
    for words, call in calls.items():
        with pytest.raises(RegardError, match=rf"^MultiheadAttention: {words}"):
            call()
