"""Editing heads: exact against the full matrices, on every call that is heard, under watch, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.models import Edit
from regard.observation import WATCHERS

HEADS, DIM, LENGTH = 4, 16, 11
EDITED = [1, 3]


class Layer(nn.Module):
    """Attention in one of the ways in which models call it; `change` is what full matrices do in its place."""

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.dropout = way, dropout
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.change: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = self.heads(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        if self.change is not None:
            S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~causal, -torch.inf)
            return self.change(S, v)
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        if self.way == "float mask":
            bias = torch.zeros(1, 1, *causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
            return F.scaled_dot_product_attention(q, k, v, bias)
        if self.way == "observe":
            return regard.observe(q, k, v, mask=regard.causal()).output
        return regard.attention(q, k, v, mask=regard.causal())


class Model(nn.Module):
    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(way, dropout) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def chosen(size: int, at: list[int]) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool)
    found[at] = True
    return found


HEAD = chosen(HEADS, EDITED)[:, None, None]


def weights(S: Tensor) -> Tensor:
    return S.softmax(-1).nan_to_num(0.0)  # a row that sees nothing gives zeros


def ablated(S: Tensor, v: Tensor) -> Tensor:
    return torch.where(HEAD, 0.0, weights(S) @ v)


def mean_ablated(S: Tensor, v: Tensor) -> Tensor:
    y = weights(S) @ v
    return torch.where(HEAD, y.mean((0, 2), keepdim=True), y)


def cut(S: Tensor, v: Tensor) -> Tensor:
    pairs = chosen(LENGTH, [0, 5, 6])[:, None] & chosen(LENGTH, [0, 1, 2, 3])
    return weights(S.masked_fill(HEAD & pairs, -torch.inf)) @ v


def scaled(S: Tensor, v: Tensor) -> Tensor:
    P = weights(S) * torch.where(HEAD & chosen(LENGTH, [0, 4]), 2.5, 1.0)
    return P / P.sum(-1, keepdim=True) @ v


def scaled_for_some(S: Tensor, v: Tensor) -> Tensor:
    P = weights(S) * torch.where(HEAD & chosen(LENGTH, [7, 8])[:, None] & chosen(LENGTH, [0, 4]), 2.5, 1.0)
    return P / P.sum(-1, keepdim=True) @ v


def windowed(S: Tensor, v: Tensor) -> Tensor:
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-2)
    return weights(S.masked_fill(HEAD & ~near, -torch.inf)) @ v


EDITS: dict[str, tuple[Callable[[Edit], object], Callable[[Tensor, Tensor], Tensor]]] = {
    "ablate": (lambda edit: edit.ablate("layers.1", EDITED), ablated),
    "mean": (lambda edit: edit.ablate(1, EDITED, mean=True), mean_ablated),
    "cut": (lambda edit: edit.cut(1, EDITED, queries=[0, 5, 6], keys=slice(4)), cut),
    "scale": (lambda edit: edit.scale(1, [1, -1], keys=[0, 4], factor=2.5), scaled),
    "some rows": (lambda edit: edit.scale(1, EDITED, keys=[0, 4], queries=range(7, 9), factor=2.5), scaled_for_some),
    "factor 0": (lambda edit: edit.scale(1, EDITED, keys=range(4), queries=[0, 5, 6], factor=0), cut),
    "pattern": (lambda edit: edit.pattern(1, EDITED, mask=regard.window(2, None)), windowed),
}


@pytest.mark.parametrize("way", ["sdpa", "float mask", "regard", "observe"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_what_full_matrices_give_and_watch_sees_it_in_either_order(name: str, way: str) -> None:
    apply, truth = EDITS[name]
    model, x = Model(way), torch.randn(2, LENGTH, DIM, requires_grad=True)
    plain = model(x)
    with regard.edit(model) as edit:
        apply(edit)
        alone = model(x)
    with regard.edit(model) as edit, regard.watch(model) as seen:
        apply(edit)
        within = model(x)
    with regard.watch(model) as seen_around, regard.edit(model) as edit:
        apply(edit)
        around = model(x)
    model.layers[1].change = truth
    expected = model(x)
    model.layers[1].change = None
    assert not torch.allclose(expected, plain, atol=1e-3)
    for found in (alone, within, around):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        (grad,), (true,) = (torch.autograd.grad(y.sin().sum(), x, retain_graph=True) for y in (found, expected))
        torch.testing.assert_close(grad, true, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(x), plain)
    assert not WATCHERS
    for one in (seen, seen_around):
        assert one.layers == ["layers.0", "layers.1"]
        assert not one.missed
    q, k, v = model.layers[1].qkv(x + model.layers[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    if "ablate" not in name and name != "mean":  # those change the output, and leave the weights
        torch.testing.assert_close(seen[1].weights() @ v, truth(S, v), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen[1].output, truth(S, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_torch_multihead_attention_is_edited_with_and_without_its_weights(needs_weights: bool, watched: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(DIM, HEADS, batch_first=True), torch.randn(2, LENGTH, DIM)
    q, k, v = F.linear(x, model.in_proj_weight, model.in_proj_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(HEAD & chosen(LENGTH, [2]), -torch.inf)
    expected = model.out_proj((S.softmax(-1) @ v).transpose(1, 2).flatten(2))
    with regard.edit(model) as edit:
        edit.cut("", EDITED, keys=2)
        if watched:
            with regard.watch(model):
                output, found = model(x, x, x, need_weights=needs_weights)
        else:
            output, found = model(x, x, x, need_weights=needs_weights)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    if needs_weights:
        torch.testing.assert_close(found, S.softmax(-1).mean(1), atol=1e-5, rtol=1e-5)
    else:
        assert found is None


def test_heads_without_an_edit_keep_their_bits_and_dropout_its_random_numbers() -> None:
    model, x = Model("sdpa", dropout=0.5), torch.randn(1, LENGTH, DIM)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with regard.edit(model) as edit:
        edit.ablate(0, 2, factor=1.0)
        assert torch.equal(model(x), plain)
    taken: list[Tensor] = []
    model.layers[1].out.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    for edited in (False, True):
        torch.manual_seed(1)
        with regard.edit(model) as edit:
            if edited:
                edit.ablate(1, 2)
            model(x)
    before, after = (y.unflatten(-1, (HEADS, -1)) for y in taken)
    assert torch.equal(after[:, :, [0, 1, 3]], before[:, :, [0, 1, 3]])
    assert not after[:, :, 2].any()
    assert before[:, :, 2].any()


def test_factors_are_differentiable_above_zero() -> None:
    model, x = Model("regard").double(), torch.randn(2, LENGTH, DIM, dtype=torch.float64)

    def loss(weight: Tensor, gate: Tensor) -> Tensor:
        with regard.edit(model) as edit:
            edit.scale(0, EDITED, keys=[0, 4], factor=weight)
            edit.scale(1, EDITED, keys=[1], queries=[3, 4], factor=weight[:, :1])
            edit.ablate(1, EDITED, factor=gate, mean=True)
            return model(x).square().sum()

    weight = torch.tensor([[0.5, 1.0], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    gate = torch.tensor([0.3, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (weight, gate), fast_mode=True)
    cut = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    with torch.no_grad():
        assert loss(cut, gate).isfinite()
    with pytest.raises(ArgumentError, match="a factor of 0 has no derivative"):
        loss(cut.requires_grad_(), gate)


def test_edits_take_memory_linear_in_the_length() -> None:
    length = 1 << 12
    q = torch.randn(1, 2, length, 4)
    model = Plain()
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple | list) else [found]:
                largest = max(largest, one.untyped_storage().nbytes() if isinstance(one, Tensor) else 0)
            return found

    with torch.no_grad(), regard.edit(model) as edit, Sizes():
        edit.cut("", 0, queries=range(100, 200), keys=range(50))
        edit.scale("", 1, keys=[0], queries=range(7), factor=0.5)
        edit.scale("", 1, keys=[3], factor=2.0)
        edit.pattern("", 0, mask=regard.window(64))
        model(q)
    assert largest < length * length  # bytes: an eighth of a bool matrix per head and batch item


class Plain(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_edits_and_watches_reach_calls_that_a_checkpoint_repeats() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.inner = nn.Linear(4, 4), Plain()

        def forward(self, q: Tensor) -> Tensor:
            return checkpoint(lambda x: self.inner(self.linear(x)), q, use_reentrant=False)

    model, q = Checkpointed(), torch.randn(1, 2, 8, 4)
    with regard.edit(model) as edit, regard.watch(model):
        edit.ablate("inner", 1)
        model(q).square().sum().backward()
    found = model.linear.weight.grad.clone()
    model.zero_grad()
    model.inner(model.linear(q))[:, 0].square().sum().backward()
    torch.testing.assert_close(found, model.linear.weight.grad, atol=1e-5, rtol=1e-5)


def test_alibi_and_factors_add_up() -> None:
    slopes = torch.tensor([0.5, 0.25])

    class WithAlibi(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return regard.attention(q, q, q, bias=regard.biases.alibi(slopes))

    q, model = torch.randn(1, 2, 6, 4), WithAlibi()
    with regard.edit(model) as edit:
        edit.scale("", 1, keys=[2], factor=3.0)
        found = model(q)
    S = q @ q.mT / 2 + regard.biases.alibi(slopes).dense(6, 6)
    S[:, 1, :, 2] += math.log(3.0)
    torch.testing.assert_close(found, S.softmax(-1) @ q, atol=1e-5, rtol=1e-5)


def run_with_an_edit_of_layer_5(model: nn.Module, x: Tensor) -> None:
    with regard.edit(model) as edit:
        edit.ablate(5)
        model(x)


def test_wrong_edits_are_refused_with_one_sentence() -> None:
    model, x = Model("sdpa"), torch.randn(1, LENGTH, DIM)
    with pytest.raises(DtypeError, match=r"model must be a torch\.nn\.Module"):
        regard.edit(3)  # type: ignore[arg-type]
    with regard.edit(model) as edit:
        for call, says in (
            (lambda: edit.ablate("layers.7"), "no module 'layers.7'; did you mean"),
            (lambda: edit.ablate(-1), "from 0. Got -1"),
            (lambda: edit.ablate(0, []), "heads must be a whole number"),
            (lambda: edit.scale(0, factor=-1.0), "at least 0"),
            (lambda: edit.scale(0, factor=torch.tensor([1.0, -2.0])), "at least 0"),
            (lambda: edit.remove(edit.interventions), "no such intervention"),
        ):
            with pytest.raises(ArgumentError, match=says):
                call()
        with pytest.raises(DtypeError, match="factor must be a number"):
            edit.scale(0, factor="2")  # type: ignore[arg-type]
        with pytest.raises(DtypeError, match="mask must be"):
            edit.pattern(0, mask=[1])  # type: ignore[arg-type]
        for apply, error, says in (
            (lambda: edit.ablate(0, 4), ArgumentError, "has 4 heads, 0 to 3. Got 4"),
            (lambda: edit.cut(0, keys=[LENGTH]), ArgumentError, "keys must be from"),
            (lambda: edit.ablate(0, [0, 1], mean=torch.zeros(3, 4)), ShapeError, "one vector per ablated head"),
            (lambda: edit.scale(0, 0, keys=[1, 2], factor=torch.ones(3)), ShapeError, "broadcast to"),
            (lambda: edit.pattern(0, mask=torch.ones(3, 3).bool()), regard.errors.MaskError, "must broadcast"),
        ):
            apply()
            with pytest.raises(error, match=says):
                model(x)
            edit.clear()
    with pytest.raises(ArgumentError, match="no attention call was heard in the layer 5"):
        run_with_an_edit_of_layer_5(model, x)
    assert not WATCHERS
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_edit_reaches_what_a_monitor_sees_and_the_heads_of_grouped_queries() -> None:
    model, x, logged = Model("sdpa"), torch.randn(1, LENGTH, DIM), {}
    with (
        regard.edit(model) as edit,
        regard.Monitor(model, every=1, log=lambda name, value, step: logged.update({name: value})),
    ):
        edit.pattern(1, 2, mask=regard.window(0))
        found = model(x)
    assert logged["attention/layers.1/head2/entropy"] == pytest.approx(0.0, abs=1e-5)
    assert logged["attention/layers.1/head1/entropy"] > 0.1
    model.layers[1].change = lambda S, v: torch.where(torch.arange(HEADS)[:, None, None] == 2, v, weights(S) @ v)
    torch.testing.assert_close(found, model(x), atol=1e-5, rtol=1e-5)

    class Grouped(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)

    q = torch.randn(1, 4, 5, 4)
    grouped = Grouped()
    plain = grouped(q)
    with regard.edit(grouped) as edit:
        edit.cut("", 3, keys=[0])
        output = grouped(q)
    torch.testing.assert_close(output[:, :3], plain[:, :3], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output[:, 3], F.scaled_dot_product_attention(q[:, 3], q[:, 1, 1:], q[:, 1, 1:]))
