"""What a row may not see: no trace of it in the row, and none at all of what nobody sees, not even if it is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import leaves
from regard import biases, scores

N, M, SEEN = 20, 50, 36  # rows and keys fill no block; in the last block of keys some are seen
NAN, INF = float("nan"), float("inf")


def inputs(n: int = N, m: int = M, batch: int = 1) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = (batch, 2, n, 16), (batch, 1, m, 16), (batch, 1, m, 12)
    return [torch.randn(s, generator=made) for s in shapes]


def with_holes(rows: int) -> Tensor:
    bias = torch.randn(rows, M, generator=torch.Generator().manual_seed(1))
    bias[:, SEEN:] = -torch.inf
    return bias.requires_grad_()


def bits() -> Tensor:
    keep = torch.rand(N, M, generator=torch.Generator().manual_seed(2)) > 0.3
    keep[:, SEEN:] = False
    return keep


def results(tensors: list[Tensor], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Statistics, gradients and late passes, by name."""
    tensors = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(5)  # for dropout
    seen = regard.observe(*tensors, **kwargs, backend="triton")
    found = {name: getattr(seen, name).detach() for name in ("output", "lse", "entropy", "max_logit")}
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    loss = seen.output.sin().sum() + lse.sin().sum() + seen.entropy.square().sum()
    pulled = torch.autograd.grad(loss, leaves(tensors, kwargs), allow_unused=True)
    names = ("query", "key", "value", *(f"leaf {at}" for at in range(len(pulled) - 3)))
    found |= {f"gradient of {name}": g for name, g in zip(names, pulled, strict=True) if g is not None}
    return found | {"received": seen.received, "strongest": seen.top(2)[1]}


padded = regard.padding([SEEN])
UNSEEN: dict[str, Any] = {
    "padding": lambda: {"mask": padded},
    "dense": lambda: {"mask": bits()},
    "keep": lambda: {"mask": regard.padding((torch.arange(M) < SEEN) & (torch.arange(M) % 3 > 0))},
    "bias": lambda: {"bias": with_holes(N)},
    "bias by keys": lambda: {"bias": with_holes(1)},
    "bias and mask": lambda: {"bias": with_holes(N), "mask": regard.causal()},
    "softcap": lambda: {"mask": padded, "softcap": 2.0},
    "dropout": lambda: {"mask": padded, "dropout": 0.3},
    "learnt bias": lambda: {"mask": padded, "bias": torch.zeros(N, M, requires_grad=True)},
    "alibi": lambda: {"mask": padded, "bias": biases.alibi(torch.ones(2, requires_grad=True))},
    "relative": lambda: {"mask": padded, "bias": biases.relative(torch.ones(2, 9, requires_grad=True))},
    "sink": lambda: {"mask": padded, "sink": torch.zeros(2, requires_grad=True)},
    "scales": lambda: {"mask": padded, "scale": torch.full((2,), 0.3, requires_grad=True)},
    "Bilinear": lambda: {"mask": padded, "score": scores.Bilinear(16, 16)},
    "Cosine": lambda: {"mask": padded, "score": scores.Cosine(0.3, learnable=True)},
    "Gaussian": lambda: {"mask": padded, "score": scores.Gaussian(2.0, learnable=True)},
    "Additive": lambda: {"mask": padded, "score": scores.Additive(16, 16, 3)},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_nobody_sees_leaves_no_trace(name: str) -> None:
    query, key, value = inputs()
    torch.manual_seed(0)
    kwargs = UNSEEN[name]()
    clean = results([query, key, value], kwargs)
    for at, (bad_key, bad_value) in enumerate(((NAN, INF), (INF, NAN), (-INF, -INF), (1.0, NAN), (NAN, 1.0))):
        key[:, :, SEEN:][:, :, at::5] = bad_key
        value[:, :, SEEN:][:, :, at::5] = bad_value
    found = results([query, key, value], kwargs)
    assert [what for what, x in found.items() if not torch.equal(x, clean[what])] == []


def test_what_nobody_sees_leaves_no_trace_where_keys_are_split() -> None:
    query, key, value = inputs(1, 1100, batch=2)
    for kwargs in (
        {"mask": regard.padding([1030, 7])},
        {"bias": torch.where(torch.arange(1100) < 1030, 0.0, -torch.inf)},
        {"mask": regard.padding([1030, 7]), "softcap": 2.0},
    ):
        clean = regard.observe(query, key, value, **kwargs, backend="triton")
        spoiled = [x.clone() for x in (key, value)]
        for x in spoiled:
            x[:, :, 1030:] = NAN
        found = regard.observe(query, *spoiled, **kwargs, backend="triton")
        for name in ("output", "lse", "entropy", "max_logit"):
            assert torch.equal(getattr(found, name), getattr(clean, name))


@pytest.mark.parametrize("bad", [0.0, NAN], ids=str)
@pytest.mark.parametrize("sunk", [False, True])
def test_a_row_that_sees_nothing_gives_zeros(sunk: bool, bad: float) -> None:
    """With every kind of layout: spans that are empty, and lists and bits without this row."""
    keep = torch.ones(N, M, dtype=torch.bool)
    keep[:7] = False
    sink = torch.tensor([0.5, -1.0], requires_grad=True) if sunk else None
    for mask in (regard.causal(offset=-7), regard.dense(keep) & (regard.strided(2) | regard.prefix(9))):
        query, key, value = (t.requires_grad_() for t in inputs())
        with torch.no_grad():
            query[:, :, :7] = bad
        scale = torch.tensor(0.3, requires_grad=True)
        seen = regard.observe(query, key, value, mask=mask, sink=sink, scale=scale, backend="triton")
        empty = {
            "output": 0.0,
            "max_logit": -INF,
            "entropy": 0.0,
            "perplexity": 1.0,
            "visible": 0,
            "gradient_health": 0.0,
            "distance": 0.0,
        }
        for name, expected in empty.items():
            assert (getattr(seen, name)[:, :, :7] == expected).all(), name
        below = torch.full((2,), -INF) if sink is None else sink
        assert torch.equal(seen.lse[:, :, :7], below[:, None].expand(1, 2, 7))
        assert not seen.weights(rows=slice(7)).any()
        assert (seen.top(2)[1][:, :, :7] == -1).all()
        lse = torch.where(seen.max_logit > -INF, seen.lse, 0.0)
        loss = seen.output.square().sum() + lse.sin().sum() + seen.entropy.square().sum()
        grads = torch.autograd.grad(loss, [query, key, value, scale, *([] if sink is None else [sink])])
        assert [g.isfinite().all().item() for g in grads] == [True] * len(grads)
        assert not grads[0][:, :, :7].any()
        assert seen.received.isfinite().all()


def test_one_query_that_sees_nothing_of_many_keys_gives_zeros() -> None:
    query, key, value = (t.requires_grad_() for t in inputs(1, 1100, batch=2))
    for sink in (None, torch.tensor([0.5, -1.0])):
        seen = regard.observe(query, key, value, mask=regard.padding([0, 3]), sink=sink, backend="triton")
        assert not seen.output[0].any()
        assert not seen.entropy[0].any()
        assert (seen.max_logit[0] == -INF).all()
        assert torch.equal(seen.lse[0, :, 0], torch.full((2,), -INF) if sink is None else sink)
        assert seen.output[1].isfinite().all()
        grads = torch.autograd.grad(seen.output.sum(), (query, key, value))
        assert all(g.isfinite().all() for g in grads)
        assert not any(g[0].any() for g in grads)


PAST: dict[str, Any] = {
    "causal": lambda: {"mask": regard.causal()},
    "a window": lambda: {"mask": regard.window(9, 0)},
    "a part of causal": lambda: {"mask": regard.causal() & regard.strided(2)},
    "with a cap": lambda: {"mask": regard.causal(), "softcap": 2.0},
    "with a bias": lambda: {"mask": regard.causal(), "bias": torch.linspace(-1, 1, 90)},
    "additive": lambda: {"mask": regard.causal(), "score": scores.Additive(16, 16, 3)},
}


@pytest.mark.parametrize("name", PAST)
def test_causal_means_causal_by_bits(name: str) -> None:
    torch.manual_seed(0)
    kwargs = PAST[name]()
    n, cut = 90, 45  # in the middle of a block
    query, key, value = inputs(n, n)
    upstream = torch.randn(1, 2, cut, 12, generator=torch.Generator().manual_seed(3))

    def rows() -> list[Tensor]:
        q = query.clone().requires_grad_()
        seen = regard.observe(q, key, value, **kwargs, backend="triton")
        head = [x[:, :, :cut] for x in (seen.output, seen.lse, seen.entropy, seen.max_logit)]
        loss = (head[0] * upstream).sum() + head[1].sin().sum() + head[2].square().sum()
        return [*head, torch.autograd.grad(loss, q)[0][:, :, :cut]]

    before = rows()
    key[:, :, cut:] = 1e4 * torch.randn(1, 1, n - cut, 16)
    value[:, :, cut:] = -1e4
    assert all(torch.equal(a, b) for a, b in zip(before, rows(), strict=True))


def test_causal_means_causal_by_bits_where_keys_are_split() -> None:
    query, key, value = inputs(3, 2100)
    mask = regard.causal(offset=1050)  # the three rows see 1051, 1052 and 1053 keys
    seen = regard.observe(query, key, value, mask=mask, backend="triton")
    key[:, :, 1051:] = 1e3
    value[:, :, 1051:] = -1e3
    after = regard.observe(query, key, value, mask=mask, backend="triton")
    for name in ("output", "lse", "entropy", "max_logit"):
        assert torch.equal(getattr(seen, name)[:, :, 0], getattr(after, name)[:, :, 0])
        assert not torch.equal(getattr(seen, name)[:, :, 1], getattr(after, name)[:, :, 1])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mask": regard.causal()},
        {"bias": torch.zeros(2, 20, 20)},
        {"mask": regard.chosen(torch.arange(20).expand(20, 20)) & regard.causal()},
    ],
    ids=["plain", "causal", "bias", "chosen"],
)
def test_what_a_row_sees_and_is_no_number_is_in_its_results(bad: float, given: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    k[0, :, 7, 0] = bad
    found, wanted = (regard.observe(q, k, v, **given, backend=backend) for backend in ("triton", "reference"))
    assert wanted.output.isnan().any()
    for name in (
        ("output", "lse", "entropy") if bad != INF else ("output", "lse")
    ):  # 0 · −inf is no number to `reference`
        assert torch.equal(getattr(found, name).isnan(), getattr(wanted, name).isnan()), name
