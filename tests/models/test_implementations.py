"""Every implementation of attention is heard: the same table from each, and everything is put back afterwards."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from architectures import DECODERS, ENCODERS, build, drawn

HEADS, DIM, LENGTH = 4, 32, 9
IMPLEMENTATIONS = ["eager", "flash_attention_2", "flash_attention_3", "flex_attention", "some-hub/kernel"]


def numbers(seen: regard.models.Seen) -> Tensor:
    assert seen.heads
    assert not seen.missed
    return torch.tensor([list(head.numbers().values()) for head in seen.heads])


@pytest.mark.parametrize("architecture", [DECODERS[0], ENCODERS[0]], ids=lambda one: str(one))
def test_a_hugging_face_model_gives_the_same_table_under_every_implementation(architecture: Any) -> None:
    model, ids = build(architecture), drawn(2, LENGTH)
    keep = torch.ones_like(ids)
    keep[0, :3] = 0
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), regard.watch(model) as seen:
        plain = model(ids, attention_mask=keep)[0]
    expected = numbers(seen)
    for name in IMPLEMENTATIONS:
        set_implementation(model, name)
        with torch.no_grad(), regard.watch(model) as seen:
            found = model(ids, attention_mask=keep)[0]
        torch.testing.assert_close(found[keep.bool()], plain[keep.bool()], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(numbers(seen), expected, atol=1e-5, rtol=1e-4, equal_nan=True)
        assert model.config._attn_implementation == name
        with pytest.raises(ZeroDivisionError):
            fail_while_watched(model)
        assert model.config._attn_implementation == name
    set_implementation(model, "eager")
    with torch.no_grad(), regard.edit(model) as edit:
        edit.ablate(seen.layers[0], 1)
        edited = model(ids, attention_mask=keep)[0]
    assert not torch.allclose(edited[keep.bool()], plain[keep.bool()], atol=1e-3)


def fail_while_watched(model: Any) -> None:
    with regard.watch(model), regard.edit(model):
        assert model.config._attn_implementation == "regard"
        raise ZeroDivisionError


def set_implementation(model: Any, name: str) -> None:
    """Set the name without its package."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = name


def test_a_monitor_leaves_an_eager_model_its_own_function() -> None:
    model, ids, logged = build(DECODERS[0]).train(), drawn(2, LENGTH), {}
    set_implementation(model, "eager")
    plain = model(ids)[0]
    with regard.Monitor(model, every=1, log=lambda name, value, step: logged.update({name: value})):
        found = model(ids)[0]
    assert torch.equal(found, plain)
    model.set_attn_implementation("sdpa")
    with regard.watch(model) as seen:
        model(ids)
    for head in seen.heads:
        assert logged[f"attention/{head.layer}/head{head.head}/entropy"] == pytest.approx(head.entropy, abs=1e-5)
    assert len(logged) == 2 * len(seen.heads)


class Attention(nn.Module):
    """Attention that calls a function of its choice, with heads before or after the length."""

    def __init__(self, attend: Any, heads_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend, self.heads_first = nn.Linear(DIM, 3 * DIM), attend, heads_first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.heads_first:
            return self.attend(q, k, v)
        return self.attend(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def seen_of(attend: Any, x: Tensor, heads_first: bool = True) -> tuple[Tensor, regard.models.Seen]:
    model = Attention(attend, heads_first)
    with warnings.catch_warnings(), torch.no_grad(), regard.watch(model) as seen:
        warnings.simplefilter("ignore")  # that nothing was seen is tested by `seen.missed`
        output = model(x)
    return output, seen


def window_bias(left: int, right: int) -> Tensor:
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    return torch.zeros(LENGTH, LENGTH).masked_fill((distance < -left) | (distance > right), -torch.inf)


calls: list[str] = []


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """A stand-in with the signature and the meaning of FlashAttention's function."""
    calls.append("flash_attn_func")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    S = q @ k.mT * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    S = softcap * torch.tanh(S / softcap) if softcap else S
    left, right = (10**6 if side < 0 else side for side in window_size)
    S = S + window_bias(left, 0 if causal else right)
    if alibi_slopes is not None:
        S = S - alibi_slopes[:, None, None] * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    output = (S.softmax(-1) @ v).transpose(1, 2)
    return (output, S.logsumexp(-1), None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """A stand-in for packed sequences, each with its ends aligned."""
    parts = []
    for at in range(len(cu_seqlens_q) - 1):
        (a, b), (c, d) = (x[at : at + 2].tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        Q, K, V = q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)
        S = Q @ K.mT / math.sqrt(Q.shape[-1])
        if causal:
            S = S.masked_fill(~torch.ones(b - a, d - c).tril(d - c - b + a).bool(), -torch.inf)
        parts.append((S.softmax(-1).nan_to_num(0.0) @ V).transpose(0, 1))  # a row without keys gives zeros
    return torch.cat(parts)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, causal: bool = False) -> Tensor:
    return flash_attn_func(*qkv.unbind(-3), causal=causal)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stand-in for the package flash_attn; this module holds its functions, too."""
    module, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func):
        setattr(module, function.__name__, function)
    cute.flash_attn_func = lambda q, k, v, causal=False: (flash_attn_func(q, k, v, causal=causal), "lse")  # type: ignore[attr-defined]
    cute.flash_attn_func.__name__, cute.flash_attn_func.__module__ = "flash_attn_func", "flash_attn.cute.interface"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    before = flash_attn_func
    yield module
    assert globals()["flash_attn_func"] is module.flash_attn_func is before


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.3},
    {"window_size": (2, 1), "softcap": 1.5},
    {"causal": True, "window_size": (3, -1), "alibi_slopes": torch.linspace(0.1, 0.4, HEADS)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_flash_attention_is_heard_through_every_reference(flash: ModuleType, options: dict[str, Any]) -> None:
    x = torch.randn(2, LENGTH, DIM)
    calls.clear()
    output, seen = seen_of(lambda *qkv: flash_attn_func(*qkv, **options), x, heads_first=False)
    assert not calls  # we answered
    assert not seen.missed
    torch.testing.assert_close(seen[0].output, output, atol=1e-5, rtol=1e-5)
    model = Attention(lambda *qkv: flash_attn_func(*qkv, **options), heads_first=False)
    torch.testing.assert_close(output, model(x), atol=1e-5, rtol=1e-5)
    found, given = seen_of(
        lambda *qkv: flash.flash_attn_func(*qkv, **options, return_attn_probs=True)[0], x, heads_first=False
    )
    torch.testing.assert_close(found, output, atol=1e-5, rtol=1e-5)
    assert given.calls == 1
    with torch.no_grad(), regard.edit(model) as edit:
        edit.ablate(0, 2)
        edited = model(x)
    assert not edited[:, 2].any()
    torch.testing.assert_close(edited[:, :2], output[:, :2])


def test_packed_and_joined_forms_of_flash_attention_and_cute_are_heard(flash: ModuleType) -> None:
    x, starts = torch.randn(1, LENGTH, DIM), torch.tensor([0, 4, LENGTH], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 5, 5, causal=True)[None]

    def uneven(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begins = torch.tensor([0, 6, LENGTH], dtype=torch.int32)
        return flash_attn_varlen_func(q[0], k[0], v[0], starts, begins, 5, 6, causal=True)[None]

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True)

    def cute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, lse = sys.modules["flash_attn.cute"].flash_attn_func(q, k, v, causal=True)
        assert lse == "lse"
        return output

    for attend in (packed, uneven, joined, cute):
        output, seen = seen_of(attend, x, heads_first=False)
        assert not seen.missed
        assert seen.calls == 1
        torch.testing.assert_close(output, Attention(attend, False)(x), atol=1e-5, rtol=1e-5)
    _, seen = seen_of(lambda *qkv: flash_attn_func(*qkv, block_table=x), x, heads_first=False)  # it runs as it is
    assert "block_table has no counterpart" in seen.missed[""]


TABLE = torch.randn(HEADS, 2 * LENGTH)
MODS: dict[str, Any] = {
    "none": None,
    "bias": lambda score, b, h, i, j: score + TABLE[h, i - j + LENGTH],
    "softcap": lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0) - 0.1 * (i - j).abs(),
    "factor": lambda score, b, h, i, j: 0.5 * score,
    "hides": lambda score, b, h, i, j: torch.where(i - j < 4, score, -float("inf")),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mod", MODS)
def test_flex_attention_is_heard_with_its_block_mask_and_what_can_be_read_of_its_scores(mod: str) -> None:
    x = torch.randn(2, LENGTH, DIM)
    documents = torch.tensor([0] * 4 + [1] * 5)

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[i] == documents[j]) & (i >= j)

    mask = create_block_mask(same_document, None, None, LENGTH, LENGTH, device="cpu")
    output, seen = seen_of(lambda *qkv: flex_attention(*qkv, score_mod=MODS[mod], block_mask=mask), x)
    assert not seen.missed
    plain = Attention(lambda q, k, v: (by_formula(q, k, MODS[mod], same_document), v), True)
    S, v = plain(x)
    torch.testing.assert_close(output, S.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen[0].weights(), S.softmax(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(seen[0].visible, S.isfinite().sum(-1))


def by_formula(q: Tensor, k: Tensor, mod: Any, mask: Any) -> Tensor:
    b, h, i, j = (
        torch.arange(size).view([-1 if at == to else 1 for to in range(4)])
        for at, size in enumerate((2, HEADS, LENGTH, LENGTH))
    )
    S = q @ k.mT / math.sqrt(q.shape[-1])
    S = S if mod is None else mod(S, b, h, i, j)
    return S.masked_fill(~mask(b, h, i, j), -torch.inf)


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
def test_flex_attention_that_cannot_be_read_runs_as_it_is_and_says_why() -> None:
    x = torch.randn(2, LENGTH, DIM)
    for mod, why in (
        (lambda score, b, h, i, j: score * score, "neither an added bias, a factor nor a softcap"),
        (lambda score, b, h, i, j: score * (1 + h), "depends on the pair"),
        (lambda score, b, h, i, j: score + b, "depends on the batch index"),
        (lambda score, b, h, i, j: torch.where(score > 0.5, score, -float("inf")), "hides pairs by their score"),
    ):
        _, seen = seen_of(lambda *qkv, mod=mod: flex_attention(*qkv, score_mod=mod), x)
        assert not seen.heads
        assert why in seen.missed[""]
    model = Attention(lambda *qkv: flex_attention(*qkv, return_lse=True), True)
    with torch.no_grad(), regard.watch(model) as seen:
        output, lse = model(x)
    torch.testing.assert_close(lse, seen[0].lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, seen[0].output)


def test_attention_by_hand_is_told_the_line_that_makes_it_seen() -> None:
    class HandmadeAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    model = nn.Sequential(HandmadeAttention())
    with pytest.warns(UserWarning, match=r"regard\.attention\(q, k, v"), regard.watch(model) as seen:
        model(torch.randn(1, 2, 5, 4))
    assert "regard.attention(q, k, v" in seen.missed["0"]

    class OneLine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x, scale=1.0)

    x = torch.randn(1, 2, 5, 4)
    with regard.watch(OneLine()) as seen:
        found = OneLine()(x)
    torch.testing.assert_close(found, model(x))
