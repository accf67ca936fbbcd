"""The guarantees of the contract, each by bits where it is promised by bits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.scores import Additive, Balanced, Bilinear, Cosine, Gaussian, Scaled, Temperature

INF, NAN = math.inf, math.nan
OURS = ("reference", "chunked")
ours = pytest.mark.parametrize("backend", OURS)
everyone = pytest.mark.parametrize("backend", [*OURS, "auto"])
SRC = Path(__file__).resolve().parent.parent / "src"


def inputs(
    batch: int = 2,
    heads: int = 4,
    n: int = 37,
    m: int | None = None,
    d: int = 16,
    dv: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    m, dv, kv_heads = n if m is None else m, d if dv is None else dv, heads if kv_heads is None else kv_heads
    shapes = (batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, dv)
    query, key, value = (torch.randn(s, generator=made, dtype=dtype).requires_grad_(grad) for s in shapes)
    return query, key, value


def same_bits(a: Tensor, b: Tensor) -> None:
    """Equal number for number: NaN is never equal, and rounding is not forgiven."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ, by {(a - b).abs().max():.3g} at most"


def statistics(seen: regard.Observation) -> dict[str, Tensor]:
    names = ("output", "lse", "entropy", "max_logit", "received", "gradient_health", "distance", "visible")
    values, indices = seen.top(3)
    return {name: getattr(seen, name) for name in names} | {"top values": values, "top indices": indices}


# 3. Deterministic.


def rich_arguments(heads: int, n: int, m: int) -> dict[str, object]:
    made = torch.Generator().manual_seed(5)
    return {
        "bias": torch.randn(heads, n, m, generator=made).requires_grad_(),
        "scale": torch.rand(heads, generator=made).requires_grad_(),
        "sink": torch.randn(heads, generator=made).requires_grad_(),
        "softcap": 5.0,
    }


@ours
@pytest.mark.parametrize("n", [37, 700])
def test_the_same_inputs_give_the_same_bits_forward_and_backward(backend: str, n: int) -> None:
    def run() -> list[Tensor]:
        query, key, value = inputs(1, 4, n, kv_heads=2, grad=True)
        rich = rich_arguments(4, n, n)
        seen = regard.observe(query, key, value, mask=regard.causal(), backend=backend, **rich)
        (seen.output.square().sum() + seen.lse.sum() + seen.entropy.square().sum()).backward()
        leaves = [query, key, value, rich["bias"], rich["scale"], rich["sink"]]
        return [*statistics(seen).values(), *(x.grad for x in leaves)]

    for a, b in zip(run(), run(), strict=True):
        same_bits(a, b)


@ours
def test_dropout_gives_the_same_bits_for_the_same_seed_and_others_for_another(backend: str) -> None:
    def run(seed: int) -> list[Tensor]:
        query, key, value = inputs(grad=True)
        torch.manual_seed(seed)
        regard.attention(query, key, value, dropout=0.3, backend=backend).square().sum().backward()
        return [query.grad, key.grad, value.grad]

    for a, b, c in zip(run(1), run(1), run(2), strict=True):
        same_bits(a, b)
        assert not torch.equal(a, c)


BATCHES = {
    "plain": {},
    "one row": {"n": 1, "m": 300},
    "two rows": {"n": 2, "m": 65},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "n": 130},
    "long": {"n": 530, "m": 300, "heads": 1, "d": 8},
    "one head": {"heads": 1, "n": 64},
    "one key": {"n": 5, "m": 1},
    "narrow": {"d": 3, "dv": 5},
}


def alone_and_together(
    backend: str, shape: dict[str, int], batch: int = 5, mask: regard.Mask | None = None, **arguments: object
) -> None:
    """Hold every item of a batch, with its gradients, against itself in a batch of one."""
    together = inputs(batch, grad=True, **shape)
    seen = regard.observe(*together, mask=mask, backend=backend, **arguments)
    (seen.output.square().sum() + seen.entropy.sum()).backward()
    found = statistics(seen)
    for b in range(batch):
        alone = [x.detach()[b : b + 1].clone().requires_grad_() for x in together]
        own = None if mask is None else mask.restrict(slice(b, b + 1), slice(None))
        one = regard.observe(*alone, mask=own, backend=backend, **arguments)
        (one.output.square().sum() + one.entropy.sum()).backward()
        for name, value in statistics(one).items():
            assert torch.equal(value[0], found[name][b]), f"{name} of item {b} depends on its batch"
        for name, x, y in zip("qkv", alone, together, strict=True):
            assert torch.equal(x.grad[0], y.grad[b]), f"the gradient of {name} of item {b} depends on its batch"


@ours
@pytest.mark.parametrize("case", BATCHES)
def test_the_bits_of_a_sequence_do_not_depend_on_its_batch(backend: str, case: str) -> None:
    alone_and_together(backend, BATCHES[case])


@ours
@pytest.mark.parametrize("case", ["plain", "one row", "grouped"])
def test_the_bits_of_a_sequence_do_not_depend_on_its_batch_in_float64(backend: str, case: str) -> None:
    alone_and_together(backend, BATCHES[case] | {"dtype": torch.float64})


PADDED = {
    "short": ({"n": 33, "m": 33}, [33, 7, 1, 20, 0]),
    "blocks apart": ({"n": 40, "m": 700, "heads": 2}, [700, 100, 129, 1, 513]),
    "decode": ({"n": 1, "m": 1200, "heads": 2, "kv_heads": 1}, [1200, 600, 1, 128, 900]),
}


@ours
@pytest.mark.parametrize("case", PADDED)
def test_the_bits_of_a_sequence_do_not_depend_on_how_long_its_neighbours_are(backend: str, case: str) -> None:
    shape, lengths = PADDED[case]
    alone_and_together(backend, shape, mask=regard.padding(lengths))


@ours
def test_the_bits_of_a_sequence_do_not_depend_on_the_documents_of_its_neighbours(backend: str) -> None:
    ids = torch.stack([torch.arange(300) // size for size in (300, 7, 130, 1, 150)])
    alone_and_together(backend, {"n": 300, "heads": 1, "d": 8}, mask=regard.documents(ids) & regard.causal())


@ours
def test_the_bits_of_a_sequence_do_not_depend_on_the_offsets_of_its_neighbours(backend: str) -> None:
    mask = regard.window(9, offset=torch.tensor([0, 100, 250, -20, 500]))
    alone_and_together(backend, {"n": 30, "m": 512, "heads": 2}, mask=mask)


@ours
@pytest.mark.parametrize("case", ["plain", "one row"])
def test_the_bits_of_a_sequence_do_not_depend_on_its_batch_with_all_arguments(backend: str, case: str) -> None:
    shape = {"n": 37, **BATCHES[case]}
    n, m = shape["n"], shape.get("m", shape["n"])
    rich = {k: v.detach() if isinstance(v, Tensor) else v for k, v in rich_arguments(4, n, m).items()}
    alone_and_together(backend, shape, **rich)


def test_the_order_of_a_batch_does_not_matter() -> None:
    query, key, value = inputs(7, n=90)
    order = torch.randperm(7)
    shuffled = regard.attention(query[order], key[order], value[order], backend="chunked")
    same_bits(shuffled, regard.attention(query, key, value, backend="chunked")[order])


# 4. Causal means causal.

CAUSAL = {
    "causal": (lambda: regard.causal(), 40, 40),
    "causal, more keys": (lambda: regard.causal(), 30, 300),
    "causal from the top": (lambda: regard.causal(offset=0), 40, 60),
    "window": (lambda: regard.window(5), 300, 300),
    "prefix or causal": (lambda: regard.prefix(7) | regard.causal(), 40, 40),
    "blocks": (lambda: regard.blocks(130), 400, 400),
}


@everyone
@pytest.mark.parametrize("case", CAUSAL)
@pytest.mark.parametrize("watched", [False, True])
def test_changes_behind_the_mask_leave_the_bits_of_a_row_unchanged(backend: str, case: str, watched: bool) -> None:
    make, n, m = CAUSAL[case]
    query, key, value = inputs(2, 2, n, m, grad=watched)
    mask = make()
    before = regard.attention(query, key, value, mask=mask, backend=backend)
    allowed = mask.dense(n, m)
    for row in (0, n // 2, n - 1):
        hidden = ~allowed[row]
        noise = torch.randn(m, 1) * 1e4
        moved = [torch.where(hidden[:, None], x.detach() + noise, x.detach()) for x in (key, value)]
        assert bool(hidden.any()) == (not torch.equal(moved[0], key))
        after = regard.attention(query, *(x.requires_grad_(watched) for x in moved), mask=mask, backend=backend)
        same_bits(after[:, :, row], before[:, :, row])


@ours
def test_changes_behind_the_mask_leave_the_statistics_of_a_row_unchanged(backend: str) -> None:
    query, key, value = inputs(1, 2, 50)
    mask, row = regard.causal(), 20
    late = torch.arange(50)[:, None] > row
    before = regard.observe(query, key, value, mask=mask, backend=backend)
    after = regard.observe(
        query, torch.where(late, -3e3, key), torch.where(late, 1e6, value), mask=mask, backend=backend
    )
    for name in ("output", "lse", "entropy", "max_logit", "gradient_health", "distance", "visible"):
        rows = [getattr(seen, name)[:, :, : row + 1] for seen in (before, after)]
        same_bits(*rows)
    same_bits(before.weights(rows=slice(row + 1)), after.weights(rows=slice(row + 1)))


# Keys and values that nobody may attend.

SCORES = {
    "none": lambda: None,
    "scaled": lambda: Scaled(torch.nn.Parameter(torch.tensor(0.3))),
    "balanced": Balanced,
    "temperature": lambda: Temperature(2.0, heads=4),
    "cosine": lambda: Cosine(0.1, learnable=True),
    "bilinear": lambda: Bilinear(16, 16, heads=4),
    "additive": lambda: Additive(16, 16, 8),
    "gaussian": lambda: Gaussian(2.0, learnable=True),
}

UNSEEN = {  # masks for 2 items, 37 rows and 41 keys that hide some keys from all rows, and where
    "padding": lambda: regard.padding([30, 12]),
    "keep": lambda: regard.padding(torch.arange(41).expand(2, 41) % 3 != 0),
    "prefix": lambda: regard.prefix(20),
    "window": lambda: regard.window(2, 2, offset=0) & ~regard.prefix(3),
    "tensor": lambda: torch.rand(2, 1, 37, 41, generator=torch.Generator().manual_seed(1)) > 0.93,
    "causal from the top": lambda: regard.causal(offset=0),
    "heads": lambda: (torch.arange(41) < 20 + 5 * torch.arange(4)[:, None])[None, :, None, :].expand(2, 4, 37, 41),
}


def unseen_by_all(mask: regard.Mask | Tensor) -> Tensor:
    dense = mask if isinstance(mask, Tensor) else mask.dense(37, 41)
    return ~dense.expand(2, 4, 37, 41).any(-2)  # (2, 4, 41)


def poison(x: Tensor, where: Tensor) -> Tensor:
    """NaN, inf and −inf in turn."""
    bad = torch.tensor([NAN, INF, -INF]).repeat(x.shape[-2] // 3 + 1)[: x.shape[-2], None]
    return torch.where(where[..., None], bad.to(x.dtype), x.detach()).requires_grad_()


def everything_found(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: regard.Mask | Tensor | None,
    score: regard.scores.Score | None,
    backend: str,
    **more: object,
) -> dict[str, Tensor]:
    """Output, statistics and all gradients, and the late members."""
    for p in [] if score is None else score.parameters():
        p.grad = None
    seen = regard.observe(q, k, v, mask=mask, score=score, backend=backend, **more)
    found = statistics(seen) | {"weights": seen.weights(), "scores": seen.scores(), "map": seen.map(5, 7)}
    (seen.output.sin().sum() + seen.lse.clamp(min=-9).sin().sum() + seen.entropy.sin().sum()).backward()
    found |= {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    if score is not None:
        found |= {f"d{name}": p.grad.clone() for name, p in score.named_parameters()}
    return found


@ours
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", UNSEEN)
def test_nan_and_inf_that_nobody_may_attend_leave_no_trace(backend: str, score: str, mask: str) -> None:
    torch.manual_seed(0)
    chosen, allowed = SCORES[score](), UNSEEN[mask]()
    hidden = unseen_by_all(allowed)
    assert hidden.any()
    query, key, value = inputs(2, 4, 37, 41, grad=True)
    clean = everything_found(query, key, value, allowed, chosen, backend)
    query = query.detach().requires_grad_()
    dirty = everything_found(query, poison(key, hidden), poison(value, hidden), allowed, chosen, backend)
    assert clean.keys() == dirty.keys()
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not dirty["dk"].transpose(-1, -2)[hidden[..., None, :].expand(2, 4, 16, 41)].any()
    assert not dirty["dv"].transpose(-1, -2)[hidden[..., None, :].expand(2, 4, 16, 41)].any()


@everyone
@pytest.mark.parametrize("watched", [False, True])
def test_nan_behind_minus_infinity_in_the_bias_leaves_no_trace(backend: str, watched: bool) -> None:
    query, key, value = inputs(2, 4, 37, 41, grad=watched)
    hidden = torch.rand(2, 4, 41, generator=torch.Generator().manual_seed(3)) < 0.3
    bias = torch.randn(2, 4, 37, 41).masked_fill(hidden[:, :, None], -INF)
    clean = regard.attention(query, key, value, bias=bias, backend=backend)
    bad = [poison(x, hidden).detach().requires_grad_(watched) for x in (key, value)]
    dirty = regard.attention(query, *bad, bias=bias, backend=backend)
    torch.testing.assert_close(dirty, clean)
    if watched:
        dirty.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (query, *bad))


@ours
def test_nan_behind_minus_infinity_in_a_bias_that_learns_leaves_no_trace(backend: str) -> None:
    query, key, value = inputs(2, 4, 37, 41, grad=True)
    hidden = torch.zeros(2, 4, 41, dtype=torch.bool)
    hidden[..., 25:] = True
    bias = torch.randn(1, 1, 37, 41).masked_fill(hidden[:1, :1, None], -INF).requires_grad_()
    clean = everything_found(query, key, value, None, None, backend, bias=bias) | {"bias": bias.grad.clone()}
    bias.grad = None
    query = query.detach().requires_grad_()
    dirty = everything_found(query, poison(key, hidden), poison(value, hidden), None, None, backend, bias=bias)
    dirty["bias"] = bias.grad
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not bias.grad[..., 25:].any()


@everyone
def test_a_key_hidden_by_mask_or_bias_together_leaves_no_trace(backend: str) -> None:
    """Half of the rows lose the last key by the mask, the others by the bias: nobody may attend it."""
    query, key, value = inputs(1, 2, 6, grad=True)
    mask = torch.ones(6, 6, dtype=torch.bool)
    bias = torch.zeros(6, 6)
    mask[:3, 5], bias[3:, 5] = False, -INF
    hidden = (torch.arange(6) == 5).expand(1, 2, 6)
    bad = poison(key, hidden), poison(value, hidden)
    found = regard.attention(query, *bad, mask=mask, bias=bias, backend=backend)
    found.sum().backward()
    torch.testing.assert_close(found, regard.attention(query, key[:, :, :5], value[:, :, :5], backend="reference"))
    assert all(x.grad.isfinite().all() for x in (query, *bad))


@everyone
def test_nan_in_padding_shared_by_grouped_heads_leaves_no_trace(backend: str) -> None:
    query, key, value = inputs(2, 6, 9, 20, kv_heads=2, grad=True)
    hidden = (torch.arange(20) >= torch.tensor([[11], [3]]))[:, None].expand(2, 2, 20)
    bad = poison(key, hidden), poison(value, hidden)
    found = regard.attention(query, *bad, mask=regard.padding([11, 3]), backend=backend)
    found.square().sum().backward()
    torch.testing.assert_close(
        found, regard.attention(query, key, value, mask=regard.padding([11, 3]), backend="reference")
    )
    assert all(x.grad.isfinite().all() for x in (query, *bad))


@ours
def test_the_probability_of_nothing_is_not_a_number_to_multiply_by(backend: str) -> None:
    """A visible value that is inf is the caller's own; it reaches the rows that see it, and those only."""
    query, key, value = inputs(1, 1, 6)
    value[:, :, 4] = INF
    found = regard.attention(query, key, value, mask=regard.causal(), backend=backend)
    assert not found[0, 0, 4:].isfinite().any()


# Rows that may attend nothing.

EMPTY_ROWS = {
    "mask": lambda: {"mask": torch.arange(6)[:, None].expand(6, 9) % 2 == 1},
    "bias": lambda: {"bias": torch.zeros(6, 9).masked_fill(torch.arange(6)[:, None] % 2 == 0, -INF)},
    "mask and bias": lambda: {
        "mask": (torch.arange(9) < 4)[None].expand(6, 9),
        "bias": torch.zeros(6, 9).masked_fill((torch.arange(9) < 4) & (torch.arange(6)[:, None] % 2 == 0), -INF),
    },
    "predicate": lambda: {"mask": regard.predicate(lambda b, h, i, j: (i % 2 == 1) & (j >= 0))},
    "padding": lambda: {"mask": regard.padding([0, 0])},
}
ROWS = {name: torch.arange(6) % 2 == 0 if name != "padding" else torch.ones(6, dtype=torch.bool) for name in EMPTY_ROWS}
MORE = {
    "alone": {},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout": 0.2},
    "additive": {"score": Additive(16, 16, 4)},
    "cosine": {"score": Cosine()},
}


@ours
@pytest.mark.parametrize("case", EMPTY_ROWS)
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("sunk", [False, True])
def test_a_row_that_sees_nothing_gives_zeros_and_no_gradient(backend: str, case: str, more: str, sunk: bool) -> None:
    query, key, value = inputs(2, 2, 6, 9, grad=True)
    sink = torch.tensor([0.5, -2.0], requires_grad=True) if sunk else None
    empty = ROWS[case]
    seen = regard.observe(query, key, value, sink=sink, backend=backend, **EMPTY_ROWS[case](), **MORE[more])
    assert not seen.output[:, :, empty].any()
    assert not seen.weights()[:, :, empty].any()
    same_bits(
        seen.lse[:, :, empty],
        (torch.full((2,), -INF) if sink is None else sink)[None, :, None].expand_as(seen.lse[:, :, empty]),
    )
    assert (seen.max_logit[:, :, empty] == -INF).all()
    assert (seen.scores()[:, :, empty] == -INF).all()
    assert (seen.entropy[:, :, empty] == 0).all()
    assert (seen.perplexity[:, :, empty] == 1).all()
    assert (seen.gradient_health[:, :, empty] == 0).all()
    assert (seen.visible[:, :, empty] == 0).all()
    values, where = seen.top(2)
    assert not values[:, :, empty].any()
    assert (where[:, :, empty] == -1).all()
    assert torch.isfinite(seen.received).all()
    torch.autograd.backward(
        [seen.output, seen.entropy], [torch.randn_like(seen.output), torch.randn_like(seen.entropy)]
    )
    assert not query.grad[:, :, empty].any()
    for x in (query, key, value, *([] if sink is None else [sink])):
        assert x.grad.isfinite().all()
    if case == "padding":
        assert not key.grad.any()
        assert not value.grad.any()


@ours
@pytest.mark.parametrize("case", EMPTY_ROWS)
def test_the_lse_of_a_row_that_sees_nothing_sends_no_gradient_to_the_inputs(backend: str, case: str) -> None:
    query, key, value = inputs(2, 2, 6, 9, grad=True)
    sink = torch.zeros(2, requires_grad=True)
    seen = regard.observe(query, key, value, sink=sink, backend=backend, **EMPTY_ROWS[case]())
    seen.lse[:, :, ROWS[case]].sum().backward()
    assert not query.grad.any()
    assert not key.grad.any()
    same_bits(sink.grad, torch.full((2,), 2.0 * int(ROWS[case].sum())))


@everyone
@pytest.mark.parametrize("case", EMPTY_ROWS)
@pytest.mark.parametrize("watched", [False, True])
def test_attention_gives_zeros_in_rows_that_see_nothing(backend: str, case: str, watched: bool) -> None:
    query, key, value = inputs(2, 2, 6, 9, grad=watched)
    found = regard.attention(query, key, value, backend=backend, **EMPTY_ROWS[case]())
    assert not found[:, :, ROWS[case]].any()
    assert found.isfinite().all()
    if watched:
        found.sin().sum().backward()
        assert not query.grad[:, :, ROWS[case]].any()
        assert all(x.grad.isfinite().all() for x in (query, key, value))


@everyone
def test_nan_in_a_query_that_sees_nothing_reaches_no_gradient(backend: str) -> None:
    query, key, value = inputs(1, 2, 6, 9)
    query[:, :, ::2] = NAN
    for x in (query, key, value):
        x.requires_grad_()
    found = regard.attention(query, key, value, mask=EMPTY_ROWS["mask"]()["mask"], backend=backend)
    assert not found[:, :, ::2].any()
    found.square().sum().backward()
    assert key.grad.isfinite().all()
    assert value.grad.isfinite().all()
    assert not query.grad[:, :, ::2].any()


@ours
def test_logits_that_are_all_very_negative_are_still_a_softmax(backend: str) -> None:
    """Only −inf hides: a finite number, however low, is one number for all and changes no weight."""
    query, key, value = inputs(1, 1, 4)
    found = regard.observe(query, key, value, bias=torch.full((4, 4), torch.finfo(torch.float32).min), backend=backend)
    torch.testing.assert_close(found.weights().sum(-1), torch.ones(1, 1, 4))
    torch.testing.assert_close(found.output, value.mean(-2, keepdim=True).expand_as(value))


# 7. Empty dimensions, strides, lengths.


@everyone
@pytest.mark.parametrize(
    "shape",
    [
        {"n": 0, "m": 5},
        {"n": 5, "m": 0},
        {"n": 0, "m": 0},
        {"batch": 0},
        {"heads": 0},
        {"dv": 0},
        {"d": 0},
        {"n": 3, "m": 0, "heads": 4, "kv_heads": 2},
        {"batch": 0, "n": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_dimensions_work_forward_and_backward(backend: str, shape: dict[str, int], causal: bool) -> None:
    query, key, value = inputs(grad=True, **shape)
    mask = regard.causal() if causal else None
    found = regard.attention(query, key, value, mask=mask, backend=backend)
    assert found.shape == (*query.shape[:-1], value.shape[-1])
    if shape.get("m") == 0:
        assert not found.any()
    if "d" in shape and not causal:
        torch.testing.assert_close(found, value.mean(-2, keepdim=True).expand_as(found))
    found.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape and x.grad.isfinite().all() for x in (query, key, value))


@ours
@pytest.mark.parametrize("shape", [{"n": 0, "m": 5}, {"n": 5, "m": 0}, {"batch": 0}, {"heads": 0}], ids=str)
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.prefix(2)], ids=str)
def test_everything_can_be_observed_of_nothing(backend: str, shape: dict[str, int], mask: regard.Mask | None) -> None:
    query, key, value = inputs(**shape)
    seen = regard.observe(query, key, value, mask=mask, backend=backend)
    lead, n, m = query.shape[:2], query.shape[2], key.shape[2]
    for name in ("lse", "entropy", "max_logit", "perplexity", "visible", "gradient_health"):
        assert getattr(seen, name).shape == (*lead, n)
    assert seen.received.shape == (*lead, m)
    assert seen.weights().shape == seen.scores().shape == (*lead, n, m)
    values, where = seen.top(2)
    assert values.shape == where.shape == (*lead, n, 2)
    if m == 0:
        assert (seen.lse == -INF).all()
        assert (where == -1).all()


def strange(x: Tensor, how: str) -> Tensor:
    """The same numbers, laid out otherwise."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "dim first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if how == "sliced":
        return torch.stack((x, torch.full_like(x, NAN)), -1)[..., 0]
    if how == "every other row":
        return torch.stack((x, torch.full_like(x, NAN)), -2).flatten(-3, -2)[..., ::2, :]
    return torch.cat((x.new_full((7,), NAN), x.flatten()))[7:].view(x.shape)


@everyone
@pytest.mark.parametrize("how", ["transposed", "dim first", "sliced", "every other row", "offset"])
@pytest.mark.parametrize("shape", [{}, {"n": 1}, {"heads": 1}, {"kv_heads": 2}], ids=str)
def test_odd_strides_change_nothing(backend: str, how: str, shape: dict[str, int]) -> None:
    plain = inputs(grad=True, **shape)
    odd = [x.detach().clone().requires_grad_() for x in plain]
    mask = regard.causal()
    found = regard.attention(*(strange(x, how) for x in odd), mask=mask, backend=backend)
    expected = regard.attention(*plain, mask=mask, backend=backend)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    found.backward(strange(upstream, how))
    expected.backward(upstream)
    for x, y in zip(odd, plain, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@everyone
def test_expanded_inputs_get_the_sum_of_their_gradients(backend: str) -> None:
    query, key, value = (x.detach().requires_grad_() for x in inputs(1, 1))
    wide = [x.expand(3, 4, -1, -1) for x in (query, key, value)]
    found = regard.attention(*wide, backend=backend)
    copies = [x.detach().clone().requires_grad_() for x in wide]
    expected = regard.attention(*copies, backend="reference")
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    for x, y in zip((query, key, value), copies, strict=True):
        torch.testing.assert_close(x.grad, y.grad.sum((0, 1), keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 131), (131, 1), (63, 65), (129, 257), (127, 128), (200, 1100)])
def test_lengths_that_fit_no_block_give_what_the_formula_gives(chunk_size: int, n: int, m: int) -> None:
    if chunk_size == 1 and n > 100:
        n = 67
    query, key, value = inputs(1, 2, n, m, d=8, grad=True)
    twin = [x.detach().double().requires_grad_() for x in (query, key, value)]
    backend = regard.backends.Chunked(chunk_size=chunk_size)
    mask = regard.window(70, 3)
    seen = regard.observe(query, key, value, mask=mask, backend=backend)
    truth = regard.observe(*twin, mask=mask, backend="reference")
    for name in ("output", "entropy", "received", "visible"):
        torch.testing.assert_close(getattr(seen, name).double(), getattr(truth, name).double(), rtol=1e-4, atol=1e-5)
    (seen.output.square().sum() + seen.entropy.sum()).backward()
    (truth.output.square().sum() + truth.entropy.sum()).backward()
    for x, y in zip((query, key, value), twin, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-3, atol=1e-4)


def test_a_mask_of_more_pairs_than_32_bits_can_count_is_never_laid_out() -> None:
    """65,537 rows by 65,537 keys are more than 2³² pairs; a window leaves four of each row."""
    n = 2**16 + 1
    one = torch.randn(1, 1, n, 1)
    seen = regard.observe(one, one, one, mask=regard.window(3))
    i = n - 5
    logits = (one[0, 0, i] * one[0, 0, i - 3 : i + 1]).squeeze(-1)
    torch.testing.assert_close(seen.lse[0, 0, i], logits.logsumexp(0))
    assert int(seen.weights(rows=[i]).count_nonzero()) == 4


# 2. Linear memory.

PEAK = textwrap.dedent(
    """
    import resource, torch, regard
    torch.set_num_threads(1)
    def work(n):
        q, k, v = (torch.randn(1, 1, n, 64).requires_grad_() for _ in range(3))
        seen = regard.observe(q, k, v, backend="chunked", mask=regard.window(1000, None))
        (seen.output.sum() + seen.entropy.sum() + seen.lse.sum()).backward()
        seen.received, seen.top(4), seen.map(16, 16), seen.gradient_health, seen.visible
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = work(600)
    print(work(2048) - start, work(8192) - start)
    """
)


def test_memory_is_linear_in_the_sequence_forward_and_backward_whatever_is_observed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", PEAK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    small, large = map(float, done.stdout.split())  # MiB above what 600 tokens took
    matrix = 8192**2 * 4 / 2**20
    assert large < matrix / 3, f"{large:.0f} MiB; one matrix would be {matrix:.0f}"
    assert large < 4 * max(small, 20), f"{small:.0f} MiB for 2,048 tokens and {large:.0f} for 8,192"
