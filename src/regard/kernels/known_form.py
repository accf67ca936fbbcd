"""Functions of the scores that are a cap or a bias, for which there are faster kernels than for a function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..biases import Alibi, Relative
from ..compat.torch import forward_mode_is_active, is_capturing, transforms_are_active, versions_of
from ..core.problem import Problem
from ..masks.transfer import Arrival
from ..scores.elementwise import Pairs, apply
from ..scores.expression import SCORE, Expression
from ..scores.pointwise import Pointwise
from ..scores.tracing import Traced
from .attend_by_lists import has_lists

__all__ = ["KeptForm", "KnownForm", "Size", "form_of", "kept_form", "known_form"]

_WIDEST = 256  # dims that Hopper's kernels take in one pass


class KnownForm(NamedTuple):
    """What a function does to its score: cap it, or add a bias."""

    softcap: float | None = None
    bias: Alibi | Relative | None = None

    def __str__(self) -> str:
        if self.softcap is not None:
            return f"a softcap of {self.softcap:g}"
        return "ALiBi" if isinstance(self.bias, Alibi) else "a bias by relative position"


class Size(NamedTuple):
    """The size of a problem, and where it is."""

    heads: int
    rows: int
    keys: int
    device: torch.device


class _Known(NamedTuple):
    """The form that was found last, and for what."""

    traced: Traced
    size: Size
    tables: list[Tensor]
    versions: list[int]
    form: KnownForm | None
    arrival: Arrival  # other streams wait for the tensor of a bias
    token: object  # one for as long as the function and the size are the same

    def holds(self, traced: Traced, size: Size, tables: list[Tensor]) -> bool:
        """Whether nothing has changed since; tensors of inference mode do not tell."""
        same = self.traced is traced and self.size == size and len(self.tables) == len(tables)
        same = same and all(a is b for a, b in zip(self.tables, tables, strict=True))
        return same and self.versions == versions_of(tables) and -1 not in self.versions


class KeptForm(NamedTuple):
    """A form that was found for an earlier call, and an object that stands for its function and its size."""

    form: KnownForm
    token: object


def kept_form(score: Pointwise, size: Size) -> KeptForm | None:
    """The form that an earlier call found, if nothing has changed since; None where it would have to be found again."""
    known = score.known_form
    if not isinstance(known, _Known) or known.form is None:
        return None
    traced = score.traced(torch.float32)
    tables = _tables(score, traced)
    learns = any(x.requires_grad for x in tables)
    if learns or traced.steps or not known.holds(traced, size, tables):  # steps may make a table of another size
        return None
    known.arrival.wait(_tensors(known.form))
    return KeptForm(known.form, known.token)


def form_of(p: Problem) -> KnownForm | None:
    """The cap or the bias that a function of the scores is, if Hopper's kernels take it; they call no function."""
    score = p.score
    if not isinstance(score, Pointwise) or p.softcap is not None or torch.compiler.is_compiling():
        return None
    from .launch import on_hopper  # here, since the engine prepares Triton before the kernels are imported

    if forward_mode_is_active() or transforms_are_active() or not on_hopper(p.query) or has_lists(p):
        return None
    halves = p.query.dtype == p.key.dtype == p.value.dtype and p.query.element_size() == 2
    factor = score.base.factor(p.query.new_empty(0, p.query.shape[-1], dtype=torch.float32))
    if not halves or factor is None or max(p.query.shape[-1], p.value.shape[-1]) > _WIDEST:
        return None
    form = known_form(score, Size(p.query.shape[1], p.rows, p.keys, p.device))
    return None if form is None or (form.bias is not None and p.bias is not None) else form


def known_form(score: Pointwise, size: Size) -> KnownForm | None:
    """The form of a function that is a cap, or a bias by head and row − key; None if it is neither, or a table learns.

    >>> capped = Pointwise(lambda score, b, h, i, j: 5.0 * torch.tanh(score / 5.0))
    >>> known_form(capped, Size(2, 3, 3, torch.device("cpu")))
    KnownForm(softcap=5.0, bias=None)
    """
    traced = score.traced(torch.float32)
    tables = _tables(score, traced)
    if any(x.requires_grad for x in tables):
        return None
    if is_capturing():  # found inside the graph, so that replays follow the tables
        return _found(score, size)
    known = score.known_form
    if not isinstance(known, _Known) or not known.holds(traced, size, tables):
        form = _found(score, size)
        same = isinstance(known, _Known) and known.traced is traced and known.size == size
        token = known.token if isinstance(known, _Known) and same else object()
        known = _Known(traced, size, tables, versions_of(tables), form, Arrival.of(_tensors(form)), token)
        score.known_form = known
    known.arrival.wait(_tensors(known.form))
    return known.form


def _tables(score: Pointwise, traced: Traced) -> list[Tensor]:
    return [*score.given.values(), *(x for x in traced.captured if isinstance(x, Tensor))]


def _tensors(form: KnownForm | None) -> tuple[Tensor, ...]:
    return () if form is None or form.bias is None else form.bias.tensors


@torch.inference_mode(False)  # what it makes is kept, and a later call may need gradients
@torch.no_grad()
def _found(score: Pointwise, size: Size) -> KnownForm | None:
    traced = score.traced(torch.float32)
    e, value = traced.expression, traced.value
    cap = _cap(e, value)
    if cap is not None:
        return KnownForm(softcap=cap)
    rest = _added(e, value)
    if rest is None or "batch" in e.leaves(rest) or not e.on_diagonal(rest):
        return None
    bound, floating = score.read(torch.float32)
    table = _slopes(e, rest)
    if table is not None and bound.shapes[table] == (size.heads,):
        slopes = bound.tables(floating)[table].to(size.device)
        slopes = slopes.clone() if slopes.is_inference() else slopes  # which autograd cannot save
        return KnownForm(bias=Alibi(slopes if e.nodes[value].op == "sub" else -slopes, 0))
    reach = max(size.rows, size.keys) - 1
    distance = torch.arange(reach, -reach - 1, -1, device=size.device).clamp(1 - size.keys, size.rows - 1)  # i − j
    zero = torch.zeros_like(distance[:1])
    pairs = Pairs(zero, torch.arange(size.heads, device=size.device)[:, None], distance, zero)
    nothing = torch.zeros(size.heads, len(distance), device=size.device)
    return KnownForm(bias=Relative(apply(bound, pairs, floating, nothing, None), 0))


def _cap(e: Expression, value: int) -> float | None:
    """c of c · tanh(score / c)."""
    for a, b in _factors(e, value):
        c, inner = e.number(b), e.nodes[a]
        if c is None or c <= 0 or inner.op != "tanh":
            continue
        divided = e.nodes[inner.args[0]]
        if divided.op == "div" and divided.args[0] == e.score and e.number(divided.args[1]) == c:
            return float(c)
        if any(x == e.score and (e.number(y) or 0.0) * c == 1.0 for x, y in _factors(e, inner.args[0])):
            return float(c)
    return None


def _added(e: Expression, value: int) -> int | None:
    """What is added to the score, or taken from it."""
    node = e.nodes[value]
    places = [] if node.op not in ("add", "sub") else [(0, 1)] if node.op == "sub" else [(0, 1), (1, 0)]
    found = (node.args[b] for a, b in places if node.args[a] == e.score)
    return next((rest for rest in found if SCORE not in e.leaves(rest)), None)


def _slopes(e: Expression, rest: int) -> int | None:
    """The table of table[head] · |i − j|."""
    for a, b in _factors(e, rest):
        load, distance = e.nodes[a], e.nodes[b]
        if load.op != "load" or [e.nodes[x].op for x in load.args] != ["head"]:
            continue
        distance = e.nodes[distance.args[0]] if distance.op == "float" else distance
        inner = e.nodes[distance.args[0]] if distance.op == "abs" else None
        if inner is not None and inner.op == "sub" and {e.nodes[x].op for x in inner.args} == {"row", "key"}:
            return int(load.value)
    return None


def _factors(e: Expression, place: int) -> list[tuple[int, int]]:
    """The factors of a product in either order."""
    node = e.nodes[place]
    return [node.args[:2], node.args[1::-1]] if node.op == "mul" else []  # type: ignore[list-item]
