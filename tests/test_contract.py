"""One meaning: every backend, in every case, agrees with `reference` in float64 (DESIGN.md §3, guarantee 1)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from contract_cases import ARGUMENTS, BY_NAME, CASES, MASKS, SCORES, Case, leaves, plain
from regard import biases
from regard.backends import KNOWN, Backend, Chunked

BACKENDS: dict[str, str | Backend] = {name: name for name in KNOWN} | {"chunked by 7": Chunked(chunk_size=7)}
REFUSES_ALL = {"triton"}

# What torch's fused kernels do exactly, on a CPU. A case that leaves this list is a regression.
SDPA_TAKES = {
    "plain square",
    "multi-head",
    "scale tensor",
    "causal square",
    "one-sided window",
    "documents",
    "packed",
}


def loss(seen: Any, weight: Tensor) -> Tensor:
    """A number that all differentiable results have a part in."""
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    return (seen.output.double() * weight).sum() + lse.double().sin().sum() + seen.entropy.double().square().sum()


def truth(case: Case, tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    return results("reference", *as_double(tensors, kwargs))


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


def results(backend: str | Backend, tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    seen = regard.observe(*tensors, **kwargs, backend=backend)
    weight = torch.linspace(-1, 1, seen.output.numel(), dtype=torch.float64).view(seen.output.shape)
    grads = torch.autograd.grad(loss(seen, weight), leaves(tensors, kwargs), allow_unused=True)
    return [seen.output, seen.lse, seen.entropy, seen.max_logit], [zero_if_none(g) for g in grads]


def zero_if_none(g: Tensor | None) -> Tensor:
    return torch.zeros(()) if g is None else g


def plain_results(tensors: list[Tensor], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    class Seen:
        output, lse, entropy, _ = plain(*tensors, **kwargs)

    weight = torch.linspace(-1, 1, Seen.output.numel(), dtype=torch.float64).view(Seen.output.shape)
    grads = torch.autograd.grad(loss(Seen, weight), leaves(tensors, kwargs), allow_unused=True)
    return [Seen.output, Seen.lse, Seen.entropy], [zero_if_none(g) for g in grads]


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinities must be the same."""
    a, b = a.detach().double(), b.detach().double()
    same = a == b
    return float(torch.where(same, 0.0, (a - b).abs()).max()) if a.numel() else 0.0


def agree(found: list[Tensor], true: list[Tensor], ordinary: list[Tensor], factor: float, what: str) -> None:
    assert len(found) == len(true)
    for at, (x, t) in enumerate(zip(found, true, strict=True)):
        assert x.shape == t.shape or x.numel() == 1
        bound = 1e-5 * max(1.0, float(t.detach().nan_to_num(0, 0, 0).abs().max()) if t.numel() else 1.0)
        if at < len(ordinary):
            bound += factor * error(ordinary[at], t)
        assert error(x, t) <= bound, f"{what} {at}: {error(x, t):.2e} > {bound:.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_in_float64_is_the_textbook(case: Case) -> None:
    tensors, kwargs = case.inputs()
    found, grads = results("reference", tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    for x, y in zip([*found[:3], *grads], [*ordinary, *ordinary_grads], strict=True):
        assert error(x, y) < 1e-9


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("sdpa", "triton")])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_statistics_and_every_gradient_agree_in_float32(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    true, true_grads = truth(case, tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    assert [x.dtype for x in found] == [torch.float32] * 4
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("backend", ["chunked", "chunked by 7"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_chunked_in_float64_is_reference_to_rounding(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs()
    true, true_grads = results("reference", tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in {"all together", "causal", "Bilinear", "Cosine", "relative", "bias"}],
    ids=lambda c: c.name,
)
def test_half_precision_agrees_too(case: Case, backend: str, dtype: torch.dtype) -> None:
    tensors, kwargs = case.inputs(dtype)
    true, true_grads = truth(case, tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results(BACKENDS[backend], tensors, kwargs)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32, torch.float32]
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_sdpa_takes_is_pinned_and_exact(case: Case) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    if regard.why(*tensors, **kwargs).backend != "sdpa":
        assert case.name not in SDPA_TAKES
        with pytest.raises(regard.errors.BackendError, match="sdpa"):
            regard.attention(*tensors, **kwargs, backend="sdpa")
        return
    assert case.name in SDPA_TAKES
    output = regard.attention(*tensors, **kwargs, backend="sdpa")
    doubled, double_kwargs = as_double(tensors, kwargs)
    true = regard.attention(*doubled, **double_kwargs, backend="reference")
    ordinary = plain(*tensors, **kwargs)[0]
    agree([output], [true], [ordinary], 2, "output")
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
    grads, true_grads, ordinary_grads = (
        torch.autograd.grad((o * weight).sum(), leaves(t, k), allow_unused=True)
        for o, t, k in ((output, tensors, kwargs), (true, doubled, double_kwargs), (ordinary, tensors, kwargs))
    )
    filled = [list(map(zero_if_none, g)) for g in (grads, true_grads, ordinary_grads)]
    agree(*filled, 3, "gradient")


@pytest.mark.parametrize("name", sorted(REFUSES_ALL))
def test_a_seat_without_kernels_refuses_with_its_reasons(name: str) -> None:
    tensors, _ = BY_NAME["plain"].inputs(torch.float32)
    with pytest.raises(regard.errors.BackendError, match="no kernels of its own"):
        regard.attention(*tensors, backend=name)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("case", [*ARGUMENTS, *MASKS[:3], SCORES[4]], ids=lambda c: c.name)
def test_attention_is_what_observe_puts_out(case: Case, backend: str) -> None:
    tensors, kwargs = case.inputs(torch.float32)
    output = regard.attention(*tensors, **kwargs, backend=backend)
    assert torch.equal(output, regard.observe(*tensors, **kwargs, backend=backend).output)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 70), st.integers(0, 200),
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 80), st.sampled_from(MASKS), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_shapes_that_nobody_thought_of(
    batch: int, kv: int, groups: int, n: int, m: int, d: int, dv: int, chunk: int, mask: Case, cap: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(batch, kv * groups, n, d, dtype=torch.float64, requires_grad=True)
    k = torch.randn(batch, kv, m, d, dtype=torch.float64, requires_grad=True)
    v = torch.randn(batch, kv, m, dv, dtype=torch.float64, requires_grad=True)
    made = mask.make(mask.shape)["mask"]
    fitting = made if isinstance(made, regard.Mask) and made.lead == (1, 1) and made.misfit(n, m) is None else None
    kwargs = {"mask": fitting, "softcap": 3.0 if cap else None}
    true, true_grads = results("reference", [q, k, v], kwargs)
    found, grads = results(Chunked(chunk_size=chunk), [q, k, v], kwargs)
    for x, y in zip([*found, *grads], [*true, *true_grads], strict=True):
        assert error(x, y) < 1e-10
