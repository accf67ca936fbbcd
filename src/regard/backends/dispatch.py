"""Which backend runs, and why: pure functions of the problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..chunked.divergence import row_divergence
from ..compat.torch import (
    any_autocast_enabled,
    autocast_enabled,
    forward_mode_is_active,
    is_capturing,
    is_traced,
    may_need_grad,
    no_autocast,
    not_traced,
)
from ..core.options import BothLse, Heads, Kind
from ..core.problem import Problem
from ..core.rows import Rows
from ..display import block, table
from ..errors import BackendError
from ..masks.causal import Causal
from ..masks.everything import Everything
from . import KNOWN, Backend
from .measured import CHIP, SHORTEST, speeds
from .remembered import Given, Key, remember

__all__ = ["Plan", "choose", "compare", "plan", "run", "run_and_remember"]

ENOUGH_WORK = 2**37  # pairs × dims that fill some 0.4 ms: a shorter kernel ends before the next launch


class Order(NamedTuple):
    """Which backends are asked, the fastest first, and the measurement that puts one first."""

    names: tuple[str, ...]
    because: dict[str, str]


ON_CPU = Order(("sdpa", "chunked"), {})  # Triton's interpreter is for tests
FORWARD_MODE_ON_CPU = Order(
    ("chunked", "sdpa"), {"chunked": "in forward mode its tangent comes with the output, in one pass"}
)
PLAIN = Order(
    ("sdpa", "triton", "chunked"),
    {"sdpa": "starts short calls sooner (H200, bench/results/gpu_small_calls.md)"},
)
LONG_PLAIN = Order(  # where nothing was measured
    ("flash4", *PLAIN.names),
    {
        "flash4": f"first for plain calls of {SHORTEST:,} rows and more",
        "sdpa": "before ours where nothing was measured",
    },
)
EXPORTED = Order(("sdpa", "reference"), {})  # plain operators of torch, which read no value and know every mask
EXPORTED_MASKS = Order(("reference",), {})  # a kernel elsewhere may give NaN for a row that sees nothing
OTHERS = Order(
    ("triton", "sdpa", "chunked"),
    {"triton": "for masks and statistics torch's kernels refuse or are slower (H200, bench/results/gpu_masks.md)"},
)


def order(p: Problem) -> Order:
    """The order in which backends are asked, from measurements; in a traced program, those that any can run."""
    causal = isinstance(p.mask, Causal) and p.mask.offset is None and p.rows == p.keys
    unmasked = p.mask is None or isinstance(p.mask, Everything)
    if is_traced() and not forward_mode_is_active():
        return EXPORTED if unmasked or isinstance(p.mask, Causal) else EXPORTED_MASKS
    if not p.query.is_cuda:
        return ON_CPU if not forward_mode_is_active() else FORWARD_MODE_ON_CPU
    if not (unmasked or causal) or p.observed or (p.bias is not None and _captured()):
        return OTHERS  # (torch's kernels may take a bias only after a look at its values, which a capture forbids)
    if p.rows < SHORTEST:
        return PLAIN
    return _by_speed(p, causal) or LONG_PLAIN


def _by_speed(p: Problem, causal: bool) -> Order | None:
    """The order by measured speeds; None where nothing was measured. torch.compile keeps torch's kernels."""
    if torch.compiler.is_compiling() or p.query.dtype not in (torch.float16, torch.bfloat16):
        return None
    items, heads, rows, dim = p.query.shape
    if (
        items * heads * rows * p.keys * dim < ENOUGH_WORK
        or p.bias is not None
        or p.dropout
        or any(0 in x.stride() for x in (p.query, p.key, p.value))
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(p.query.device) != CHIP
    ):
        return None
    found = speeds(dim, p.value.shape[3], rows, causal, may_need_grad(*p.tensors))
    if found is None:
        return None
    others = tuple(name for name in LONG_PLAIN.names if name not in found.names)
    return Order((*found.names, *others), dict.fromkeys(found.names, found.because))


@dataclass(frozen=True, repr=False)
class Plan:
    """The backend that a call takes, and every other's reasons; `str` draws it as a table."""

    backend: str | None
    detail: str
    refusals: dict[str, tuple[str, ...]]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        width = max(map(len, self.refusals))
        return "\n".join(f"{mark} {name:<{width}}  {text}" for mark, name, text in self._lines())

    def _repr_html_(self) -> str:
        return block("", table(["", "backend", "what it says"], self._lines()))

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        """A mark at the one that runs, the name, and what it does or why it refuses."""
        for name, reasons in self.refusals.items():
            if name == self.backend:
                yield "→", name, self.detail
            elif reasons:
                yield from ((" ", "" if at else name, f"no: {reason}") for at, reason in enumerate(reasons))
            else:
                could = "could" if self.backend is None else "could, but is not the first choice"
                yield " ", name, f"{could}: {KNOWN[name].about}"


def _captured() -> bool:
    return torch.compiler.is_compiling() or is_capturing()


def choose(p: Problem, backend: str | Backend = "auto") -> Backend:
    """The first backend without a reason to refuse, or the named one, which runs or raises."""
    if backend == "auto":
        for candidate in map(KNOWN.__getitem__, order(p).names):
            if not candidate.refuses(p):
                return candidate
    named = _named(backend, p.who)
    if reasons := named.refuses(p):
        raise BackendError(
            f"{p.who}: the backend {named.name!r} refuses: {'; '.join(reasons)}. "
            f"backend='auto' takes one that accepts, and regard.why(...) lists them all."
        )
    return named


def run(p: Problem, backend: Backend) -> Rows:
    """Run a problem on a backend in the dtypes that the problem has, whatever autocast would make of them."""
    if any_autocast_enabled() and autocast_enabled(p.query.device):
        with no_autocast(p.query.device):
            return backend.run(p)
    return backend.run(p)


@not_traced
def compare(
    first: Problem, second: Problem, kind: Kind, heads: Heads, epsilon: float | None, lse: BothLse = (None, None)
) -> Tensor:
    """The divergence of each row between two attentions: by kernels if there are any, else in plain torch."""
    found = KNOWN["triton"].divergence(first, second, kind, heads, epsilon, lse)
    return row_divergence(first, second, kind, heads, epsilon, lambda p: run(p, choose(p))) if found is None else found


def plan(p: Problem, backend: str | Backend = "auto") -> Plan:
    """What `choose` would do, as data."""
    refusals = {name: tuple(known.refuses(p)) for name, known in KNOWN.items()}
    if backend == "auto":
        chosen: Backend | None = choose(p)
    else:
        named = _named(backend, p.who)
        refusals[named.name] = tuple(named.refuses(p))
        chosen = None if refusals[named.name] else named
    return Plan(chosen.name if chosen else None, _detail(p, chosen, backend) if chosen else "", refusals)


def _detail(p: Problem, chosen: Backend, asked: str | Backend) -> str:
    """What runs, and by which measurement it was the first choice."""
    because = order(p).because.get(chosen.name) if asked == "auto" else None
    return f"{chosen.detail(p)}; {because}" if because else chosen.detail(p)


def _named(backend: str | Backend, who: str) -> Backend:
    if isinstance(backend, Backend):
        return backend
    found = KNOWN.get(backend) if isinstance(backend, str) else None
    if found is None:
        raise BackendError(
            f"{who}: backend must be 'auto', {', '.join(map(repr, KNOWN))}, or a backend object. Got {backend!r}."
        )
    return found


def run_and_remember(key: Key, given: Given, p: Problem, backend: str | Backend) -> tuple[Backend, Any]:
    """Run the first call with a key, and remember it: the backend, and the output or, of an observed call, `Rows`."""
    chosen = choose(p, backend)
    call = remember(key, given, p, chosen)
    if call is not None:
        return chosen, call.attend(*given, p.sink, key.bias)
    rows = run(p, chosen)
    return chosen, rows if p.observed else rows.output
