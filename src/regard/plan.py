"""Which backend runs, and why: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .arithmetic import exact
from .backends import KNOWN, Backend
from .canonical import Result
from .errors import BackendError
from .problem import Problem, autocasts

__all__ = ["Plan", "choose", "plan", "run"]

AUTO: tuple[Backend, ...] = tuple(KNOWN[name] for name in ("sdpa", "triton", "chunked"))  # fastest first


@dataclass(frozen=True)
class Plan:
    """The backend that a call takes, and every other's reasons; `str` draws it as a table."""

    backend: str | None
    detail: str
    refusals: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        width = max(map(len, self.refusals))
        lines = []
        for name in self.refusals:
            reasons = self.refusals.get(name, ())
            if name == self.backend:
                lines.append(f"→ {name:<{width}}  {self.detail}")
            elif reasons:
                lines += [f"  {name if not at else '':<{width}}  no: {reason}" for at, reason in enumerate(reasons)]
            else:
                lines.append(f"  {name:<{width}}  could, but is not the first choice: {KNOWN[name].about}")
        return "\n".join(lines)


def choose(p: Problem, backend: str | Backend = "auto") -> Backend:
    """The first backend without a reason to refuse, or the named one, which runs or raises."""
    if backend == "auto":
        for candidate in AUTO:
            if not candidate.refuses(p):
                return candidate
    named = _named(backend, p.who)
    if reasons := named.refuses(p):
        raise BackendError(
            f"{p.who}: the backend {named.name!r} refuses: {'; '.join(reasons)}. "
            f"backend='auto' takes one that accepts, and regard.why(...) lists them all."
        )
    return named


def run(p: Problem, backend: Backend) -> Result:
    """Run a problem on a backend in the dtypes that the problem has, whatever autocast would make of them."""
    if torch._C._is_any_autocast_enabled() and autocasts(p.query.device):
        with exact(p.query.device):
            return backend.run(p)
    return backend.run(p)


def plan(p: Problem, backend: str | Backend = "auto") -> Plan:
    """What `choose` would do, as data."""
    refusals = {name: tuple(known.refuses(p)) for name, known in KNOWN.items()}
    if backend == "auto":
        chosen: Backend | None = choose(p)
    else:
        named = _named(backend, p.who)
        refusals[named.name] = tuple(named.refuses(p))
        chosen = None if refusals[named.name] else named
    return Plan(chosen.name if chosen else None, chosen.detail(p) if chosen else "", refusals)


def _named(backend: str | Backend, who: str) -> Backend:
    if isinstance(backend, Backend):
        return backend
    found = KNOWN.get(backend) if isinstance(backend, str) else None
    if found is None:
        raise BackendError(
            f"{who}: backend must be 'auto', {', '.join(map(repr, KNOWN))}, or a backend object. Got {backend!r}."
        )
    return found
