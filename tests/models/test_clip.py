"""qk_clip_: the largest logit of every head becomes at most the threshold, on the modules people use."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, DtypeError, RegardError, ShapeError
from regard.models.qk_clip import qk_clip_
from regard.scores import Cosine, Temperature

E, H, N, B = 24, 4, 7, 2
THRESHOLD = 100.0
Run = Callable[[], object]


class Llama(nn.Module):
    """Attention as Hugging Face writes it: separate Linears, rotary positions, grouped heads, a config."""

    def __init__(self, kv_heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=H, num_key_value_heads=kv_heads)
        self.head_dim = E // H
        self.q_proj = nn.Linear(E, E, bias=bias)
        self.k_proj = nn.Linear(E, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(E, kv_heads * self.head_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = regard.positions.rotary(q), regard.positions.rotary(k)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The scaled logits (batch, heads, rows, keys) of every call to torch's or our attention from now on."""
    seen: list[Tensor] = []

    def looking(through: Callable[..., Any]) -> Callable[..., Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            score = kwargs.get("score")
            each = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            temperature = q.shape[-1] ** 0.5 if score is None else score.temperature.item()
            seen.append((q @ each.mT / temperature).detach())
            return through(q, k, v, *args, **kwargs)

        return attend

    for holder, name in ((F, "scaled_dot_product_attention"), (regard.nn.attend, "attention")):
        monkeypatch.setattr(holder, name, looking(getattr(holder, name)))
    return seen


def spread(module: nn.Module, at: dict[str, slice]) -> nn.Module:
    """Give the logits of every head their own size: some below the threshold and some far above it."""
    sizes = torch.tensor([2.0, 60.0, 900.0, 0.3]).repeat_interleave(E // H)
    with torch.no_grad():
        for name, part in at.items():
            rows = dict(module.named_parameters())[name][part]
            rows.mul_(sizes.view(-1, *[1] * (rows.dim() - 1)))
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape))
    return module


def packed(kind: type[nn.Module], **arguments: Any) -> tuple[nn.Module, Run]:
    module = spread(kind(E, H, batch_first=True, **arguments), {"in_proj_weight": slice(E)})
    x = torch.randn(B, N, E)
    return module, lambda: module(x, x, x, need_weights=False)


def separate(kind: type[nn.Module], **arguments: Any) -> tuple[nn.Module, Run]:
    module = spread(kind(E, H, kdim=10, vdim=6, batch_first=True, **arguments), {"q_proj_weight": slice(E)})
    x, y, z = torch.randn(B, N, E), torch.randn(B, 5, 10), torch.randn(B, 5, 6)
    return module, lambda: module(x, y, z, need_weights=False)


def llama(**arguments: Any) -> tuple[nn.Module, Run]:
    module, x = spread(Llama(**arguments), {"q_proj.weight": slice(E)}), torch.randn(B, N, E)
    return module, lambda: module(x)


def transformers_llama() -> tuple[nn.Module, Run]:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=E, num_attention_heads=H, num_key_value_heads=2, attn_implementation="sdpa")
    module = spread(LlamaAttention(config, 0), {"q_proj.weight": slice(E)})
    x = torch.randn(B, N, E)
    turns = LlamaRotaryEmbedding(config)(x, torch.arange(N)[None])
    return module, lambda: module(x, position_embeddings=turns, attention_mask=None)


Torch, Ours = nn.MultiheadAttention, regard.nn.MultiheadAttention
CASES: dict[str, Callable[[], tuple[nn.Module, Run]]] = {
    "torch, packed": lambda: packed(Torch),
    "torch, without bias": lambda: packed(Torch, bias=False),
    "torch, learnt key": lambda: packed(Torch, add_bias_kv=True),
    "torch, separate": lambda: separate(Torch),
    "regard, packed": lambda: packed(Ours),
    "regard, grouped": lambda: packed(Ours, num_kv_heads=2),
    "regard, one key head, rotary": lambda: packed(Ours, num_kv_heads=1, rotary=True),
    "regard, separate, grouped": lambda: separate(Ours, num_kv_heads=2),
    "regard, learnt key, zero key": lambda: packed(Ours, num_kv_heads=2, add_bias_kv=True, add_zero_attn=True),
    "regard, temperature": lambda: packed(Ours, num_kv_heads=2, score=Temperature(3.0)),
    "q_proj, grouped": lambda: llama(),
    "q_proj, one each": lambda: llama(kv_heads=H),
    "q_proj, one key head": lambda: llama(kv_heads=1, bias=False),
    "transformers' Llama": transformers_llama,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_logit_of_a_head_shrinks_so_that_the_largest_is_at_most_the_threshold(
    case: Callable[[], tuple[nn.Module, Run]], logits: list[Tensor]
) -> None:
    torch.manual_seed(1)
    module, run = case()
    run()
    largest = logits[0].amax((0, 2, 3))
    assert (largest > THRESHOLD).any()
    assert (largest < THRESHOLD).any()
    factor = qk_clip_(module, largest, THRESHOLD)
    assert all(parameter.is_leaf for parameter in module.parameters())
    torch.testing.assert_close(factor, THRESHOLD / largest.clamp(min=THRESHOLD))
    run()
    now = logits[1]
    torch.testing.assert_close(now.amax((0, 2, 3)), largest.clamp(max=THRESHOLD), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(now, logits[0] * factor[:, None, None], rtol=1e-4, atol=1e-3)


def test_queries_and_keys_share_the_scaling_equally() -> None:
    module = Llama(kv_heads=H)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    qk_clip_(module, [400.0, 100.0, 25.0, -torch.inf])
    for name, parameter in module.named_parameters():
        scale = 0.5 if name[0] in "qk" else 1.0
        assert torch.equal(parameter[:6], before[name][:6] * scale)
        assert torch.equal(parameter[6:], before[name][6:])


def test_a_head_below_the_threshold_in_a_clipped_group_keeps_its_logits_by_larger_queries() -> None:
    module = Llama(kv_heads=2, bias=False)
    q, k = module.q_proj.weight.detach().clone(), module.k_proj.weight.detach().clone()
    qk_clip_(module, [1600.0, 30.0, 80.0, 99.0])
    assert torch.equal(module.k_proj.weight, torch.cat([k[:6] * 0.25, k[6:]]))
    assert torch.equal(module.q_proj.weight, torch.cat([q[:6] * 0.25, q[6:12] * 4.0, q[12:]]))


def test_nothing_changes_at_the_threshold_and_a_gradient_stays_where_it_was() -> None:
    module = Torch(E, H)
    module.in_proj_weight.grad = torch.ones_like(module.in_proj_weight)
    before = module.in_proj_weight.detach().clone()
    assert qk_clip_(module, torch.full((H,), THRESHOLD)).tolist() == [1.0] * H
    assert torch.equal(module.in_proj_weight, before)
    qk_clip_(module, torch.full((H,), 2 * THRESHOLD, requires_grad=True))
    assert module.in_proj_weight.requires_grad
    assert module.in_proj_weight.grad.eq(1).all()
    module(*[torch.randn(N, B, E)] * 3)[0].sum().backward()


def test_weights_in_bfloat16_are_rounded_once() -> None:
    module = Llama(bias=False).to(torch.bfloat16)
    before = module.q_proj.weight.detach().float()
    qk_clip_(module, [300.0] * H)
    assert torch.equal(module.q_proj.weight, (before * 3**-0.5).bfloat16())


def test_the_number_of_heads_can_be_given() -> None:
    module = nn.Module()
    module.query, module.key = nn.Linear(E, E), nn.Linear(E, 12)
    before = module.key.bias.detach().clone()
    with pytest.raises(ArgumentError, match=r"qk_clip_: Module does not say how many heads.*Give heads="):
        qk_clip_(module, [400.0] * H)
    qk_clip_(module, [400.0] * H, heads=H, kv_heads=2)
    assert torch.equal(module.key.bias, before / 2)
    qk_clip_(module, [400.0] * H, heads=H)
    assert torch.equal(module.key.bias, before / 4)


def parametrized() -> nn.Module:
    module = Llama()
    nn.utils.parametrizations.weight_norm(module.k_proj)
    return module


def with_norm(name: str, norm: object) -> nn.Module:
    module = Llama()
    setattr(module, name, norm)
    return module


def tied() -> nn.Module:
    module = Llama(kv_heads=H)
    module.k_proj.weight = module.q_proj.weight
    return module


REFUSED: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], type[RegardError], str]] = {
    "no module": (lambda: "attn", [1.0] * H, {}, DtypeError, r"must be a module that attends\. Got str"),
    "another module": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        [1.0] * H,
        {},
        ArgumentError,
        r"Got Sequential with 0\.",
    ),
    "a norm": (lambda: with_norm("q_norm", nn.LayerNorm(6)), [1.0] * H, {}, ArgumentError, r"\(q_norm\), so scal"),
    "a flag": (lambda: with_norm("use_qk_norm", True), [1.0] * H, {}, ArgumentError, r"changes no logit"),
    "cosine": (lambda: Ours(E, H, score=Cosine()), [1.0] * H, {}, ArgumentError, r"whose score is Cosine"),
    "weight norm": (parametrized, [1.0] * H, {}, ArgumentError, r"computed by a parametrization"),
    "tied": (tied, [1.0] * H, {}, ArgumentError, r"separate weights"),
    "other heads": (lambda: Torch(E, H), [1.0] * H, {"heads": 2}, ArgumentError, r"has heads=4\. Got heads=2"),
    "too few": (lambda: Torch(E, H), [1.0] * 3, {}, ShapeError, r"one number per head, \(4,\)\. Got \(3,\)"),
    "rows": (lambda: Torch(E, H), torch.ones(B, H, N), {}, ShapeError, r"Got \(2, 4, 7\); reduce it"),
    "nan": (lambda: Torch(E, H), [1.0, torch.nan, 1.0, 1.0], {}, ArgumentError, r"must be numbers below infinity"),
    "infinite": (lambda: Torch(E, H), [1.0, torch.inf, 1.0, 1.0], {}, ArgumentError, r"must be numbers below infin"),
    "threshold": (lambda: Torch(E, H), [1.0] * H, {"threshold": 0.0}, ArgumentError, r"threshold must be a finite"),
    "five heads": (Llama, [1.0] * 5, {"heads": 5}, ShapeError, r"rows for 5 heads.*Got 24 and 12 rows"),
    "three of four": (Llama, [1.0] * H, {"kv_heads": 3}, ShapeError, r"for 3, a divisor of it"),
    "no heads": (Llama, [1.0] * H, {"heads": 0}, ArgumentError, r"heads must be at least 1; got 0"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_clipped_is_refused_with_the_reason_and_left_as_it_was(case: Any) -> None:
    make, largest, arguments, kind, said = case
    module = make()
    before = [p.detach().clone() for p in module.parameters()] if isinstance(module, nn.Module) else []
    with pytest.raises(kind, match=rf"^qk_clip_: .*{said}"):
        qk_clip_(module, largest, **arguments)
    if before:
        assert all(map(torch.equal, before, module.parameters()))


def test_an_identity_in_place_of_a_norm_is_accepted() -> None:
    qk_clip_(with_norm("q_norm", nn.Identity()), [1.0] * H)
