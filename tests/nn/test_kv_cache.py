"""regard.nn.KVCache: decoding with a cache equals the full pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, RegardError
from regard.nn import KVCache, MultiheadAttention

T, E, H, KV = 23, 32, 4, 2


def qkv(tokens: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, H, tokens, 8, dtype=dtype)
    return q, torch.randn(2, KV, tokens, 8, dtype=dtype), torch.randn(2, KV, tokens, 5, dtype=dtype)


def pieces(sizes: list[int]) -> Iterator[slice]:
    start = 0
    while start < T:
        for size in sizes:
            yield slice(start, min(start + size, T))
            start += size


CHUNKS = ([1], [T], [5], [7, 1, 1], [1, 12, 1], [22, 1])
CACHES: dict[str, dict[str, int]] = {
    "growing": {},
    "fixed": {"capacity": T},
    "window 1": {"window": 1},
    "window 4": {"window": 4},
    "window 11": {"window": 11},
    "window 40": {"window": 40},
}


def mask_of(cache: KVCache) -> regard.Mask:
    return regard.causal() if cache.window is None else regard.window(cache.window - 1)


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@pytest.mark.parametrize("limits", CACHES.values(), ids=CACHES.keys())
def test_decoding_in_pieces_equals_the_full_pass(sizes: list[int], limits: dict[str, int]) -> None:
    q, k, v = qkv()
    cache = KVCache(**limits)
    parts = [cache.attend(*(x[:, :, piece] for x in (q, k, v))) for piece in pieces(sizes) if piece.start < T]
    torch.testing.assert_close(torch.cat(parts, 2), regard.attention(q, k, v, mask=mask_of(cache)))
    assert cache.length == T


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8))
def test_a_window_gives_the_last_keys_in_order_for_any_piece_sizes(counts: list[int], window: int) -> None:
    cache, seen = KVCache(window=window), 0
    for count in counts:
        new = torch.arange(seen, seen + count, dtype=torch.float32).reshape(1, 1, -1, 1)
        reach = cache.reach(count)
        keys, values = cache.append(new, -new)
        seen += count
        first = max(0, seen - count - (window - 1))
        assert keys.flatten().tolist() == list(range(first, seen))
        assert torch.equal(values, -keys)
        assert keys.shape[2] == reach
        assert cache.held == min(seen, window)
        assert cache.nbytes == 2 * 2 * window * 4


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@pytest.mark.parametrize("limits", CACHES.values(), ids=CACHES.keys())
def test_a_module_decodes_with_rotary_positions_as_in_the_full_pass(sizes: list[int], limits: dict[str, int]) -> None:
    torch.manual_seed(0)
    attend = MultiheadAttention(E, H, batch_first=True, num_kv_heads=KV, rotary=True, dtype=torch.float64).eval()
    x, cache = torch.randn(2, T, E, dtype=torch.float64), KVCache(**limits)
    with torch.inference_mode():
        parts = [attend(*[x[:, p]] * 3, cache=cache, need_weights=False)[0] for p in pieces(sizes) if p.start < T]
    torch.testing.assert_close(torch.cat(parts, 1), attend(x, x, x, mask=mask_of(cache))[0].detach())


@torch.no_grad()
@pytest.mark.parametrize("extra", [False, True])
def test_a_module_with_a_cache_returns_weights_and_takes_masks_over_the_held_tokens(extra: bool) -> None:
    attend = MultiheadAttention(E, H, add_bias_kv=extra, add_zero_attn=extra, dtype=torch.float64)
    x, cache = torch.randn(6, 2, E, dtype=torch.float64), KVCache()
    hidden = torch.tensor([[False] * 6, [True, True, False, False, False, False]])
    wanted, weights = attend(x, x, x, hidden, is_causal=True, mask=regard.causal())
    attend(*[x[:3]] * 3, hidden[:, :3], cache=cache)
    output, row = attend(*[x[3:]] * 3, hidden, cache=cache)
    torch.testing.assert_close(output, wanted[3:])
    torch.testing.assert_close(row, weights[:, 3:])


def test_a_growing_cache_doubles() -> None:
    cache, sizes = KVCache(), set()
    for token in torch.randn(600, 1, 1, 1, 4):
        cache.append(token, token)
        sizes.add(cache.nbytes // (2 * 4 * 4))
    assert len(sizes) <= 5
    assert max(sizes) <= 2 * 600


def test_a_fixed_cache_that_is_full_says_so_and_keeps_what_it_holds() -> None:
    _, k, v = qkv(6)
    cache = KVCache(capacity=5)
    cache.append(k[:, :, :4], v[:, :, :4])
    with pytest.raises(ValueError, match=r"KVCache: it is full: it holds 4 of 5 tokens, and 2 more came\. .*window="):
        cache.append(k[:, :, 4:], v[:, :, 4:])
    keys, _ = cache.append(k[:, :, 4:5], v[:, :, 4:5])
    assert torch.equal(keys, k[:, :, :5])


def test_reset_forgets_and_takes_another_batch() -> None:
    cache = KVCache(capacity=8)
    _, k, v = qkv(6)
    cache.append(k, v)
    memory = cache.nbytes
    cache.reset()
    assert (cache.length, cache.held, cache.nbytes) == (0, 0, memory)
    keys, _ = cache.append(k[:, :, :3] + 1, v[:, :, :3])
    assert torch.equal(keys, k[:, :, :3] + 1)
    cache.reset()
    keys, _ = cache.append(k[:1].float(), v[:1].float())
    assert keys.dtype == torch.float32
    assert keys.shape == (1, KV, 6, 8)


def test_positions_continue_after_the_past() -> None:
    cache = KVCache(window=2)
    _, k, v = qkv(5)
    cache.append(k, v)
    assert cache.positions(3).tolist() == [5, 6, 7]


def test_it_works_in_and_out_of_inference_mode() -> None:
    q, k, v = qkv()
    for limits in CACHES.values():
        cache = KVCache(**limits)
        parts = []
        for i in range(T):
            with torch.inference_mode(i % 3 != 1):
                parts.append(cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v))).clone())
        torch.testing.assert_close(torch.cat(parts, 2), regard.attention(q, k, v, mask=mask_of(cache)))


def test_held_tokens_carry_no_gradient_and_tensors_that_require_one_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(4))
    cache = KVCache()
    with pytest.raises(ArgumentError, match=r"^KVCache: it holds no graph"):
        cache.append(k, v)
    with torch.no_grad():
        keys, values = cache.append(k, v)
    assert not keys.requires_grad
    assert not values.requires_grad
    cache.reset()
    (gradient,) = torch.autograd.grad(cache.attend(q, k.detach(), v.detach()).sum(), [q])
    assert gradient.isfinite().all()


def test_tokens_that_attention_refuses_are_not_held() -> None:
    q, k, v = qkv(4)
    cache = KVCache()
    cache.attend(q, k, v)
    for wrong in ({"mask": torch.ones(3, 3, dtype=torch.bool)}, {"softcap": -1.0}, {"backend": "nonsense"}):
        with pytest.raises(RegardError):
            cache.attend(q, k, v, **wrong)
        assert cache.length == 4


def test_attend_passes_on_what_attention_takes() -> None:
    q, k, v = qkv(6)
    cache = KVCache()
    cache.attend(*(x[:, :, :4] for x in (q, k, v)))
    keep = torch.tensor([True, False, True, True, True, True])
    got = cache.attend(*(x[:, :, 4:] for x in (q, k, v)), mask=keep[None], softcap=5.0)
    wanted = regard.attention(q[:, :, 4:], k, v, mask=regard.causal() & keep[None], softcap=5.0)
    torch.testing.assert_close(got, wanted)


K = torch.zeros(1, 2, 3, 4)
WRONG: dict[str, tuple[tuple[Any, Any], str]] = {
    "no tensor": (([1.0], K), "key must be a floating tensor"),
    "integers": ((K, K.long()), "value must be a floating tensor"),
    "rank": ((K[0], K[0]), r"\(batch, heads, tokens, dim\)"),
    "lengths": ((K, K[:, :, :1]), "may differ only in dim"),
    "batch": ((K.expand(2, -1, -1, -1), K.expand(2, -1, -1, -1)), r"it holds keys \(1, 2, tokens, 4\)"),
    "dim": ((K, K[..., :2]), "it holds values"),
    "dtype": ((K.double(), K.double()), "it holds keys of torch.float32"),
    "device": ((K.to("meta"), K.to("meta")), "it holds keys on cpu"),
}


@pytest.mark.parametrize(("pair", "words"), WRONG.values(), ids=WRONG.keys())
def test_tokens_that_do_not_fit_are_refused(pair: tuple[Any, Any], words: str) -> None:
    cache = KVCache()
    cache.append(K, K)
    with pytest.raises(RegardError, match=words):
        cache.append(*pair)
    assert cache.length == 3


@pytest.mark.parametrize(
    "limits", [{"capacity": 0}, {"window": 0}, {"window": 2.5}, {"capacity": 4, "window": 2}], ids=str
)
def test_a_wrong_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(RegardError, match=r"^KVCache: "):
        KVCache(**limits)


def test_attend_needs_one_query_per_token() -> None:
    cache = KVCache()
    with pytest.raises(ValueError, match="one query for each new token"):
        cache.attend(K[:, :, :1], K, K)
    assert cache.length == 0


@torch.no_grad()
def test_a_module_holds_no_tokens_whose_mask_does_not_fit() -> None:
    attend, x, cache = MultiheadAttention(E, H), torch.randn(3, 2, E), KVCache()
    with pytest.raises(RegardError):
        attend(x, x, x, cache=cache, mask=regard.packed([1, 1]))
    assert cache.length == 0


@torch.no_grad()
def test_a_cache_with_a_window_of_w_is_the_window_of_w_minus_one_over_the_whole_sequence() -> None:
    module = regard.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 9, 8)
    whole, _ = module(x, x, x, mask=regard.window(4 - 1), need_weights=False)
    cache = KVCache(window=4)
    parts = [module(part, part, part, cache=cache, need_weights=False)[0] for part in x.split((1, 5, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
