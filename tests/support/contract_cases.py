"""The cases of the contract: what is asked, on which shapes, and how far from the truth an answer may be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard
from regard import biases, scores
from regard.backends import Backend

Maker = Callable[["Shape"], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads: int = 6
    kv_heads: int = 2
    n: int = 37
    m: int = 45
    d: int = 16
    dv: int = 12


SQUARE = Shape(n=41, m=41, dv=16)


@dataclass(frozen=True)
class Case:
    name: str
    make: Maker
    shape: Shape = field(default_factory=Shape)

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
        """Query, key, value and the keyword arguments, rounded to dtype, floating leaves requiring gradients."""
        torch.manual_seed(seed)
        s = self.shape
        shapes = ((s.batch, s.heads, s.n, s.d), (s.batch, s.kv_heads, s.m, s.d), (s.batch, s.kv_heads, s.m, s.dv))
        tensors = [torch.randn(x, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes]
        return tensors, {k: _cast(v, dtype) for k, v in self.make(s).items()}


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.dtype.is_floating_point:
        return x.to(dtype).detach().requires_grad_()
    if isinstance(x, biases.Alibi):
        return biases.alibi(_cast(x.slopes, dtype), x.offset)
    if isinstance(x, biases.Relative):
        return biases.relative(_cast(x.table, dtype), x.offset)
    return x.to(dtype) if isinstance(x, torch.nn.Module) else x


def leaves(tensors: list[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    """Everything that a gradient is asked for."""
    found = list(tensors)
    for value in kwargs.values():
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(value)
        elif isinstance(value, biases.Bias):
            found += value.tensors
        elif isinstance(value, torch.nn.Module):
            found += value.parameters()
    return found


def _keep(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4


def _with_holes(*shape: int) -> Tensor:
    bias = torch.randn(*shape, dtype=torch.float64)
    return bias.masked_fill(~_keep(*shape), -torch.inf)


def _blocks(s: Shape, size: int, rows: int) -> Tensor:
    shape = s.batch, 1, -(-s.n // rows), 3
    return torch.randint(-1, -(-s.m // size), shape, generator=torch.Generator().manual_seed(3))


MASKS: list[Case] = [
    Case("causal", lambda s: {"mask": regard.causal()}),
    Case("causal square", lambda s: {"mask": regard.causal()}, SQUARE),
    Case("causal offset", lambda s: {"mask": regard.causal(offset=3)}),
    Case("causal offset per item", lambda s: {"mask": regard.causal(offset=torch.tensor([-5, 4]))}),
    Case("window", lambda s: {"mask": regard.window(5, 2)}),
    Case("one-sided window", lambda s: {"mask": regard.window(None, 1)}, SQUARE),
    Case("padding", lambda s: {"mask": regard.padding([17, 0])}),
    Case("padding by keep", lambda s: {"mask": regard.padding(_keep(s.batch, s.m))}),
    Case("documents", lambda s: {"mask": regard.documents(torch.arange(s.n) // 9)}, SQUARE),
    Case("documents mixed", lambda s: {"mask": regard.documents(torch.arange(s.n) % 5, torch.arange(s.m) % 7)}),
    Case("packed", lambda s: {"mask": regard.packed([10, 20, 11])}, SQUARE),
    Case("cumulative lengths", lambda s: {"mask": regard.packed(cu_seqlens=torch.tensor([0, 10, 30, 41]))}, SQUARE),
    Case("blocks", lambda s: {"mask": regard.blocks(8)}),
    Case("prefix", lambda s: {"mask": regard.prefix(6)}),
    Case("prefix per item", lambda s: {"mask": regard.prefix(torch.tensor([0, 9]))}),
    Case("strided", lambda s: {"mask": regard.strided(4)}),
    Case("global tokens", lambda s: {"mask": regard.window(2, 2) | regard.global_tokens([0, 20])}),
    Case("dense", lambda s: {"mask": regard.dense(_keep(s.n, s.m))}),
    Case("dense per head", lambda s: {"mask": _keep(s.heads, s.n, s.m)}),
    Case("dense per item", lambda s: {"mask": _keep(s.batch, 1, s.n, s.m)}),
    Case("key mask", lambda s: {"mask": _keep(s.batch, 1, 1, s.m)}),
    Case("predicate", lambda s: {"mask": regard.predicate(lambda b, h, i, j: (i + 2 * j + 3 * h + 5 * b) % 4 != 0)}),
    Case("everything", lambda s: {"mask": regard.everything()}),
    Case("composed", lambda s: {"mask": (regard.causal() & regard.padding([30, 45])) | ~regard.window(20, 20)}),
    Case("nothing", lambda s: {"mask": ~regard.everything()}),
    Case("chosen", lambda s: {"mask": regard.chosen(_blocks(s, size=4, rows=16), size=4, rows=16)}),
]

SCORES: list[Case] = [
    Case("Scaled", lambda s: {"score": scores.Scaled(0.3)}),
    Case("Balanced", lambda s: {"score": scores.Balanced()}),
    Case("Temperature", lambda s: {"score": scores.Temperature(init=3.0, heads=s.heads), "mask": regard.causal()}),
    Case("Cosine", lambda s: {"score": scores.Cosine(0.2, learnable=True)}),
    Case("Bilinear", lambda s: {"score": scores.Bilinear(s.d, s.d), "mask": regard.window(9)}),
    Case("Additive", lambda s: {"score": scores.Additive(s.d, s.d, 6), "mask": regard.causal()}),
    Case("Gaussian", lambda s: {"score": scores.Gaussian(2.0, learnable=True)}),
]

ARGUMENTS: list[Case] = [
    Case("plain", lambda s: {}),
    Case("plain square", lambda s: {}, SQUARE),
    Case("multi-head", lambda s: {}, Shape(kv_heads=6, dv=16)),
    Case("one head", lambda s: {}, Shape(heads=1, kv_heads=1)),
    Case("one query", lambda s: {"mask": regard.causal()}, Shape(n=1)),
    Case("one key", lambda s: {"mask": regard.padding([0, 1])}, Shape(m=1)),
    Case("several strips", lambda s: {"mask": regard.causal()}, Shape(batch=1, heads=2, n=700, m=900, d=8, dv=4)),
    Case("scale", lambda s: {"scale": 0.4}),
    Case("scale tensor", lambda s: {"scale": torch.tensor(0.4)}, SQUARE),
    Case("scale per head", lambda s: {"scale": torch.linspace(0.1, 0.5, s.heads)}),
    Case("softcap", lambda s: {"softcap": 1.5}),
    Case("sink", lambda s: {"sink": torch.linspace(-2, 2, s.heads), "mask": regard.padding([17, 0])}),
    Case("sink square", lambda s: {"sink": torch.linspace(-2, 2, s.heads), "mask": regard.causal()}, SQUARE),
    Case("bias", lambda s: {"bias": torch.randn(s.batch, s.heads, s.n, s.m)}),
    Case("bias square", lambda s: {"bias": torch.randn(s.n, s.m)}, SQUARE),
    Case("bias broadcast", lambda s: {"bias": torch.randn(s.heads, 1, s.m)}),
    Case("bias by rows", lambda s: {"bias": torch.randn(s.batch, 1, s.n, 1)}),
    Case("bias with −inf", lambda s: {"bias": _with_holes(s.n, s.m)}),
    Case("alibi", lambda s: {"bias": biases.alibi(torch.linspace(0.1, 0.5, s.heads)), "mask": regard.causal()}),
    Case("relative", lambda s: {"bias": biases.relative(torch.randn(s.heads, 17))}),
    Case(
        "all together",
        lambda s: {
            "mask": regard.causal() & regard.padding([30, 45]),
            "bias": torch.randn(s.heads, s.n, s.m),
            "scale": torch.linspace(0.1, 0.5, s.heads),
            "softcap": 2.0,
            "sink": torch.linspace(-1, 1, s.heads),
        },
    ),
    Case(
        "additive together",
        lambda s: {
            "mask": regard.window(8, 3),
            "bias": biases.relative(torch.randn(s.heads, 9)),
            "score": scores.Additive(s.d, s.d, 5),
            "softcap": 1.0,
            "sink": torch.zeros(s.heads),
        },
    ),
]

CASES = [*ARGUMENTS, *MASKS, *SCORES]
BY_NAME = {case.name: case for case in CASES}


def plain(query: Tensor, key: Tensor, value: Tensor, **kw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The textbook's lines in the dtype of the inputs: output, lse, entropy, weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    n, m = query.shape[2], key.shape[2]
    S = _plain_scores(query, key, kw.get("score"), kw.get("scale")).to(query.dtype)
    if (cap := kw.get("softcap")) is not None:
        S = cap * torch.tanh(S / cap)
    bias = kw.get("bias")
    if bias is not None:
        S = S + (bias.dense(n, m).to(S.dtype) if isinstance(bias, biases.Bias) else bias)
    mask = kw.get("mask")
    if mask is not None:
        allowed = mask if isinstance(mask, Tensor) else mask.bind(*query.shape[:2]).dense(n, m)
        S = torch.where(allowed, S, -torch.inf)
    seen = -torch.inf < S
    rows = seen.any(-1, keepdim=True)
    S = torch.where(rows, S, 0.0)
    sink = kw.get("sink")
    if sink is None:
        lse = S.logsumexp(-1, keepdim=True)
    else:
        wide = torch.cat((torch.where(rows, S, -torch.inf), sink[:, None, None].expand(*S.shape[:-1], 1)), -1)
        lse = wide.logsumexp(-1, keepdim=True)
    logP = torch.where(seen, S, 0.0) - lse
    P = torch.where(seen, logP.exp(), 0.0)
    entropy = -(P * torch.where(seen, logP, 0.0)).sum(-1)
    lse = torch.where(rows, lse, -torch.inf if sink is None else lse).squeeze(-1)
    return P @ value, lse, entropy, P


def _plain_scores(query: Tensor, key: Tensor, score: Any, scale: Any) -> Tensor:
    if score is not None:
        return score(query, key)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return query @ key.mT * (scale.reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale)


def results(backend: str | Backend, tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Output, lse, entropy and largest logit of a backend, and the gradients of every leaf through the first three."""
    seen = regard.observe(*tensors, **kwargs, backend=backend)
    grads = torch.autograd.grad(loss(*seen_rows(seen)[:3]), leaves(tensors, kwargs), allow_unused=True)
    return seen_rows(seen), [zero_if_none(g) for g in grads]


def plain_results(tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The same of the textbook's lines, in the dtype of the inputs."""
    found = plain(*tensors, **kwargs)[:3]
    grads = torch.autograd.grad(loss(*found), leaves(tensors, kwargs), allow_unused=True)
    return list(found), [zero_if_none(g) for g in grads]


def truth(tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The same of `reference` in float64."""
    return results("reference", *as_double(tensors, kwargs))


def seen_rows(seen: regard.Observation) -> list[Tensor]:
    return [seen.output, seen.lse, seen.entropy, seen.max_logit]


def loss(output: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
    """A number that all differentiable results have a part in."""
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
    weight = weight.bfloat16().double()  # a cotangent that every dtype can hold
    lse = torch.where(lse > -torch.inf, lse, 0.0)
    return (output.double() * weight).sum() + lse.double().sin().sum() + entropy.double().square().sum()


def as_double(tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    def up(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype.is_floating_point:
            return x.detach().double().requires_grad_()
        if isinstance(x, biases.Alibi):
            return biases.alibi(up(x.slopes), x.offset)
        if isinstance(x, biases.Relative):
            return biases.relative(up(x.table), x.offset)
        if isinstance(x, torch.nn.Module):
            return copy.deepcopy(x).double()
        return x

    return [up(t) for t in tensors], {k: up(v) for k, v in kwargs.items()}


def zero_if_none(g: Tensor | None) -> Tensor:
    return torch.zeros(()) if g is None else g


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinities must be the same."""
    a, b = a.detach().double(), b.detach().double()
    same = a == b
    return float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0


def agree(found: list[Tensor], true: list[Tensor], ordinary: list[Tensor], factor: float, what: str) -> None:
    """Hold each result to `factor` times the error of the plain computation, or of rounding, and 1e-5 of its size."""
    assert len(found) == len(true)
    for at, (x, t) in enumerate(zip(found, true, strict=True)):
        assert x.shape == t.shape or 1 in (x.numel(), t.numel())
        bound = 1e-5 * max(1.0, float(t.detach().nan_to_num(0, 0, 0).abs().max()) if t.numel() else 1.0)
        if at < len(ordinary):
            plain = error(ordinary[at], t)
            if math.isnan(plain):  # plain arithmetic overflows here, as float16 may
                plain = 2**-9 * float(t.detach().abs().max())
            bound += factor * max(plain, error(t.to(x.dtype), t))  # the first may be 0 by luck
        assert error(x, t) <= bound, f"{what} {at}: {error(x, t):.2e} > {bound:.2e}"
