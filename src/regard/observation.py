"""What the weights of one call say, without the weights: statistics of rows now, passes over tiles when asked."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import Backend
from .backends.dispatch import choose, run, run_and_remember
from .backends.remembered import Remembered, key_of, recall
from .chunked.stacked_survey import StackedSurvey
from .chunked.statistics import Survey, logits_at
from .chunked.token_repeats import TokenLabels, TokenRepeats
from .compat.torch import forward_mode_is_active, is_wrapped, shared_with_backward
from .core.problem import Problem
from .core.rows import Rows, StackedRows, unstacked
from .core.versions import Versions
from .display import block, gallery, note, table
from .errors import ArgumentError, ChangedError, DtypeError, RegardError, ShapeError
from .masks import Mask

__all__ = [
    "WATCHERS",
    "Change",
    "Index",
    "Observation",
    "Top",
    "Watcher",
    "answered",
    "as_index",
    "changed",
    "notify",
    "observed",
    "watchers",
    "watching",
]

Index = int | slice | range | Tensor | list[int] | None
_DRAWN_HEADS, _MAP_SIDE, _DRAWN_PAIRS = 8, 32, 1 << 28  # what a notebook shows, and the pairs that this may read
_READ_LATER = ("query", "key", "mask", "bias", "score", "scale", "sink")  # what late passes read


class Top(NamedTuple):
    """The strongest keys of each row, (…, Hq, N, k) each; `indices` can be handed to `regard.chosen` as they are."""

    weights: Tensor
    indices: Tensor


class Observation:
    """One call of attention that you can see through.

    `output`, `lse` and `entropy` are differentiable and come with the forward pass, `max_logit` too; the rest is
    computed when asked for and never holds N × M numbers, unless `weights()` or `scores()` are asked for whole.

    >>> import torch, regard
    >>> seen = regard.observe(*torch.randn(3, 1, 2, 16, 8).unbind())
    >>> seen
    Observation(heads (1, 2), 16 queries, 16 keys, by chunked)
    >>> seen.received.sum(-1)
    tensor([[16.0000, 16.0000]])
    """

    output: Tensor

    _computed_moments: tuple[Tensor, Tensor] | None = None
    _surveyed: StackedSurvey | None = None
    _call: Remembered | None = None

    def __init__(
        self, problem: Problem, backend: Backend, rows: Rows | StackedRows, call: Remembered | None = None
    ) -> None:
        if call is not None and call.by_lengths and problem.sink is None:  # late passes read no other tensor
            versions = Versions((problem.query, problem.key), eager=True)
        else:
            versions = Versions(_read(problem))
        if versions.uncounted or problem.value.is_inference():
            problem = problem._replace(**{name: _copy(getattr(problem, name)) for name in _READ_LATER})
            versions = Versions(_read(problem))
        elif call is not None:
            self._call = call
        self._store(problem, backend, rows, versions)

    def _store(self, problem: Problem, backend: Backend, rows: Rows | StackedRows, versions: Versions) -> None:
        if type(rows) is not StackedRows and any(x is None for x in rows):
            raise RuntimeError(f"the backend {backend.name} gave no statistics")
        self.output, self._found = rows[0], rows
        self._problem, self._backend, self._versions = problem, backend, versions

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which go the whole way to a survey."""
        return {name: value for name, value in self.__dict__.items() if name != "_call"}

    def __repr__(self) -> str:
        p = self._problem
        return f"Observation(heads {tuple(p.lead)}, {p.rows} queries, {p.keys} keys, by {self._backend.name})"

    def _repr_html_(self) -> str:
        """The first heads: their map, pooled, and what their rows attend to."""
        p, seen = self._problem, self.lse.numel() > 0
        if not seen or not p.keys or is_wrapped(self.lse) or p.rows * p.keys * self.lse[..., 0].numel() > _DRAWN_PAIRS:
            return block(repr(self))
        try:
            maps = self.map(min(_MAP_SIDE, p.rows), min(_MAP_SIDE, p.keys)).detach()
        except RegardError as error:
            return block(repr(self), note(str(error)))
        maps = maps.reshape(-1, *maps.shape[-2:])[:_DRAWN_HEADS].float().nan_to_num().cpu()
        entropy, most = (x.detach().reshape(-1, p.rows)[:_DRAWN_HEADS].cpu() for x in (self.entropy, self.max_logit))
        shades = (maps / maps.amax((-2, -1), keepdim=True).clamp(min=1e-12)).sqrt().tolist()
        rows = [
            (f"H{head}", f"{x.mean():.2f}", f"{x.exp().mean():.1f}", f"{y.max():.3g}")
            for head, (x, y) in enumerate(zip(entropy, most, strict=True))
        ]
        heads = self.lse[..., 0].numel()
        more = f"the first {len(rows)} of {heads:,} heads; " if heads > len(rows) else ""
        says = "mean weight in each cell, as its square root; queries go down and keys to the right"
        return block(
            repr(self),
            gallery((f"H{head}", cells) for head, cells in enumerate(shades)),
            table(["head", "entropy", "effective keys", "max logit"], rows, numbers=(1, 2, 3)),
            note(more + says),
        )

    @property
    def _rows(self) -> Rows:
        if isinstance(self._found, StackedRows):
            self._found = unstacked(*self._found)
        return self._found

    @property
    def lse(self) -> Tensor:
        """log Σ exp of the logits of each row, (…, Hq, N); differentiable."""
        return self._rows.lse

    @property
    def entropy(self) -> Tensor:
        """The entropy of the weights of each row in nats, (…, Hq, N); differentiable."""
        return self._rows.entropy

    @property
    def max_logit(self) -> Tensor:
        """The largest logit of each row, (…, Hq, N)."""
        return self._rows.max_logit

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, (…, Hq, N, M)."""
        p = self._problem
        return (*p.lead, p.rows, p.keys)

    @property
    def perplexity(self) -> Tensor:
        """exp(entropy): how many keys each row effectively attends to, (…, Hq, N)."""
        return self.entropy.exp()

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each row may attend to, (…, Hq, N)."""
        if self._surveyed is not None and (found := self._surveyed.survey.visible) is not None:
            return found
        plain = self.visible_by_lengths and not any(map(is_wrapped, self._problem.tensors))
        return self._backend.visible(self._problem if plain else self._plain_problem("visible"))

    @cached_property
    def received(self) -> Tensor:
        """Σ over queries of the weight each key receives, (…, Hq, M)."""
        if self._surveyed is not None:
            return self._surveyed.survey.received
        return self._backend.received(self._plain_problem("received"), self._rows)

    @property
    def gradient_health(self) -> Tensor:
        """Σ p(1 − p), the trace of the softmax Jacobian: 0 where the softmax is saturated, (…, Hq, N)."""
        return self._moments("gradient_health")[0]

    @property
    def distance(self) -> Tensor:
        """Σ p·|i + M − N − j|: how far from its own position each row attends, with the ends aligned, (…, Hq, N)."""
        return self._moments("distance")[1]

    def scores(self, rows: Index = None, cols: Index = None) -> Tensor:
        """The logits that entered the softmax, −inf where hidden: (…, Hq, rows, cols); differentiable."""
        p = self.problem_for("scores")
        return logits_at(p, *self._indices("scores", rows, cols))

    def weights(self, rows: Index = None, cols: Index = None) -> Tensor:
        """The exact weights before dropout, or some rows and columns: (…, Hq, rows, cols); differentiable."""
        p = self.problem_for("weights")
        i, j = self._indices("weights", rows, cols)
        S = logits_at(p, i, j)
        shown = torch.gt(S, -torch.inf)
        lse, row_max, log_row_sum = (
            x.index_select(-1, i)[..., None] for x in (self.lse, self.max_logit, self._rows.log_row_sum)
        )
        some = torch.gt(row_max, -torch.inf)
        lse, row_max = torch.where(some, lse, 0.0), torch.where(some, row_max, 0.0)
        log_row_sum = log_row_sum + (lse - lse.detach())  # the value to all digits, with the derivative of lse
        X = torch.where(shown, S - row_max.detach() - log_row_sum, 0.0)
        return torch.where(shown, X.exp(), 0.0).to(p.dtype)

    def top(self, k: int) -> Top:
        """The k largest weights of each row and their keys, each (…, Hq, N, k); ties to the lowest index.

        Where fewer keys are visible, the weight is 0 and the index −1.
        """
        p = self._plain_problem("top")
        if not isinstance(k, int) or isinstance(k, bool) or not k >= 1:
            raise ArgumentError(f"top: k must be a whole number, at least 1. Got {k!r}.")
        return Top(*self._backend.top(p, self._rows, k))

    def map(self, height: int, width: int) -> Tensor:
        """The mean weight in each cell of a grid over N × M; row i is in cell ⌊i·height/N⌋: (…, Hq, height, width)."""
        p = self._plain_problem("map")
        self._check_grid("map", height, width)
        return self._backend.pooled(p, self._rows, height, width)

    def _check_grid(self, member: str, height: int, width: int) -> None:
        for name, size, limit in (("height", height, self._problem.rows), ("width", width, self._problem.keys)):
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= limit:
                raise ArgumentError(
                    f"{member}: {name} must be a whole number from 1 to {limit}, so that no cell is empty. "
                    f"Got {size!r}."
                )

    def survey(self, height: int, width: int) -> Survey:
        """`map(height, width)`, `received`, `gradient_health`, `distance` and more, in as few passes as possible."""
        p = self._plain_problem("survey")
        self._check_grid("survey", height, width)
        found = self._backend.survey(p, self._rows, height, width)
        self.__dict__["received"], self._computed_moments = found.received, (found.health, found.distance)
        if found.visible is not None:
            self.__dict__["visible"] = found.visible
        return found

    def stacked_survey(self, height: int, width: int) -> Survey | StackedSurvey:
        """`survey`, in one tensor where the call is like an earlier one: its parts are made when they are read."""
        if self._call is not None and self._call.survey is not None and type(self._found) is StackedRows:
            self._check_grid("survey", height, width)
            found = self._call.survey(self.problem_for("survey"), self._found, height, width)
            if found is not None:
                self._surveyed = found
                return found
        return self.survey(height, width)

    def survey_with_repeats(self, tokens: Tensor | TokenLabels) -> tuple[Survey, TokenRepeats]:
        """`survey(1, 1)`, and the weight of each row on earlier copies of its token and on the tokens after them.

        `tokens` are the ids (items, N) of rows and keys alike, one row of them per batch item. Several calls that
        read the same ids take them as `TokenLabels`, which are sorted once.
        """
        p = self._plain_problem("survey_with_repeats")
        if tokens.shape != (p.query.shape[0], p.rows) or p.rows != p.keys:
            raise ShapeError(
                f"survey_with_repeats: tokens must be {(p.query.shape[0], p.rows)}, one id per row, for as many keys "
                f"as rows. Got {tuple(tokens.shape)} for {p.rows} rows and {p.keys} keys."
            )
        labels = tokens if isinstance(tokens, TokenLabels) else TokenLabels(tokens)
        return self._backend.survey_with_repeats(p, self._rows, labels)

    def among(self, rows: Tensor) -> Observation:
        """The same call as if only these rows (items, N) had any weight, for late passes that sum over rows."""
        p = self.problem_for("among")
        shown = rows.reshape(-1, *(1,) * (len(p.lead) - 1), p.rows)
        twin = object.__new__(Observation)
        hidden = self._rows.log_row_sum.masked_fill(~shown, torch.inf)  # exp(S − row max − inf) is 0
        twin._store(p, self._backend, self._rows._replace(log_row_sum=hidden), self._versions)
        return twin

    @property
    def visible_by_lengths(self) -> bool:
        """Whether `visible` depends on the lengths alone, and on no tensor that could be changed in place."""
        p = self._problem
        if self._call is not None:
            return self._call.by_lengths
        return p.bias is None and (p.mask is None or p.mask.constant)

    def kept(self) -> Observation:
        """Without its graph, with one batch dimension and one for the heads, to read later; itself if it is that."""
        p = self.problem_for("kept")
        recorded = forward_mode_is_active() or p.query.requires_grad or p.key.requires_grad or p.value.requires_grad
        if not recorded and (type(self._found) is not StackedRows or p.sink is not None):  # stacked rows have no graph
            parts = (p.bias, p.scale, p.sink, *self._found)
            recorded = any(isinstance(x, Tensor) and x.requires_grad for x in parts)
        if len(p.lead) == 2 and not recorded:
            return self
        lead = tuple(p.query.shape[:2])
        detached: dict[str, Any] = {name: x.detach() for name, x in p._asdict().items() if isinstance(x, Tensor)}
        rows = Rows(*(x.detach().reshape(lead + x.shape[len(p.lead) :]) for x in self._rows))
        twin = object.__new__(Observation)
        p = p._replace(**detached, lead=lead)
        twin._store(p, self._backend, rows, Versions(_read(p)))
        return twin

    def _moments(self, member: str) -> tuple[Tensor, Tensor]:
        """gradient_health and distance, from one pass."""
        if self._computed_moments is None and self._surveyed is not None:
            self._computed_moments = self._surveyed.survey.health, self._surveyed.survey.distance
        if self._computed_moments is None:
            self._computed_moments = self._backend.moments(self._plain_problem(member), self._rows)
        return self._computed_moments

    def _indices(self, member: str, rows: Index, cols: Index) -> tuple[Tensor, Tensor]:
        p = self._problem
        i = as_index(rows, p.rows, member, "rows", p.device)
        return i, as_index(cols, p.keys, member, "cols", p.device)

    def _plain_problem(self, member: str) -> Problem:
        """The problem for a pass over tiles, which works on plain tensors."""
        if any(map(is_wrapped, self._problem.tensors)):
            raise ArgumentError(
                f"{member}: it has no rule inside torch.func transforms. Return output, lse, entropy or weights() from "
                f"the transformed function, or observe outside of it."
            )
        return self.problem_for(member)

    def problem_for(self, member: str) -> Problem:
        """The arguments of the call, for what computes its weights again; an error if they changed since."""
        p = self._problem
        alone = self._call is not None and self._call.by_lengths  # no module and no mask can replace a tensor
        if self._versions.changed() if alone else self._versions.differ_from(_read(p)):
            raise ChangedError(
                f"{member}: an input of observe was changed in place, or replaced, since; its weights can no longer "
                f"be computed. Ask for {member} before the change, or observe again."
            )
        return p


def answered(problem: Problem, backend: str | Backend = "auto") -> Tensor:
    """Run a problem as the watchers of this thread change it."""
    change = changed(problem)
    return change.finished(run(change.problem, choose(change.problem, backend)).output)


def observed(problem: Problem, backend: str | Backend = "auto") -> Observation:
    """Run a problem as the watchers of this thread change it, and observe it."""
    if not WATCHERS:
        return _observed(problem, backend)
    change = changed(problem)
    seen = _observed(change.problem, backend)
    if change.finish:
        seen.output = change.finished(seen.output)
        seen._found = seen._rows._replace(output=seen.output)
    return seen


def _observed(problem: Problem, backend: str | Backend) -> Observation:
    problem = problem if problem.observed else problem._replace(observed=True)
    p, known = problem, None
    if _may_be_remembered(p):
        known = key_of(p.query, p.key, p.value, p.mask, p.scale, p.softcap, p.sink, backend, True)
    if known is None:
        chosen = choose(p, backend)
        return Observation(p, chosen, run(p, chosen))
    given, call = (p.query, p.key, p.value, p.mask), recall(known)
    if call is None:
        return Observation(p, *run_and_remember(known, given, p, backend))
    return Observation(p, call.backend, call.attend(*given, p.sink, None), call)


def _may_be_remembered(p: Problem) -> bool:
    return p.query.is_cuda and p.bias is None and p.score is None and not p.dropout and len(p.lead) == 2


def _read(p: Problem) -> list[Tensor]:
    """Every tensor that late passes read: all but the values."""
    found = [p.query, p.key]
    if p.mask is not None and not p.mask.constant:
        found += p.mask.sources
    if p.bias is not None or p.score is not None:
        found += p._replace(mask=None).tensors[3:]
        return found
    if isinstance(p.scale, Tensor):
        found.append(p.scale)
    if p.sink is not None:
        found.append(p.sink)
    return found


def _copy(x: Any) -> Any:
    """A copy of what late passes read, where no version would say that it was changed in place.

    In a graph that is compiled no version is known. The copy keeps its derivative there, and the compiler drops it if
    nobody reads it; structured biases and scores stay as they are.
    """
    if not torch.compiler.is_compiling():
        return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)
    if isinstance(x, Mask):
        return x.changed(torch.clone)
    return x.clone() if isinstance(x, Tensor) else x


def as_index(index: Index, length: int, member: str, name: str, device: torch.device) -> Tensor:
    """Rows or keys as a 1-D index."""
    if index is None:
        return torch.arange(length, device=device)
    if isinstance(index, slice):
        chosen = range(length)[index]
        return torch.arange(len(chosen), device=device) * chosen.step + chosen.start
    if type(index) is int:
        index = [index]
    if isinstance(index, range):
        index = list(index)
    if isinstance(index, list) and all(type(i) in (int, bool) for i in index):
        index = torch.tensor(index, device="cpu") if index else torch.empty(0, dtype=torch.int64, device="cpu")
    if not isinstance(index, Tensor) or index.dtype.is_floating_point or index.dtype.is_complex:
        raise DtypeError(
            f"{member}: {name} must be a whole number, a slice, or whole numbers in one dimension. Got {index!r}."
        )
    if index.dim() != 1:
        raise ShapeError(f"{member}: {name} must have one dimension. Got shape {tuple(index.shape)}.")
    if index.dtype == torch.bool:
        if len(index) != length:
            raise ShapeError(f"{member}: {name} as a mask needs {length} entries. Got {len(index)}.")
        index = index.nonzero().squeeze(-1)
    index = index.to(torch.int64)
    if index.numel() and not bool(((index >= -length) & (index < length)).all()):
        wrong = index[(index < -length) | (index >= length)][0]
        raise ArgumentError(f"{member}: {name} must be from {-length} to {length - 1}. Got {wrong}.")
    return torch.where(index < 0, index + length, index).to(device)


class Change(NamedTuple):
    """A call as it is to be computed: a problem, and what happens to its output (…, H, N, Dv) afterwards."""

    problem: Problem
    finish: tuple[Callable[[Tensor], Tensor], ...] = ()

    def finished(self, output: Tensor) -> Tensor:
        """The output, changed."""
        for step in self.finish:
            output = step(output)
        return output


class Watcher(ABC):
    """Something that sees every call of its thread: it computes those that are not observed, and is shown others."""

    @abstractmethod
    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        """Return the output of a call that did not ask to be observed."""

    @abstractmethod
    def show(self, seen: Observation) -> None:
        """Receive a call that was observed."""

    def change(self, p: Problem) -> Change:
        """The call as it is to be computed; by default, as it is."""
        return Change(p)


_WATCHERS_HERE = "regard.watchers"  # the list of those in a thread
WATCHERS: list[Watcher] = []
"""All that are active in this process; while there is none, a call looks no further."""


def watchers() -> list[Watcher]:
    """Those that are active in this thread, or in the thread whose backward pass runs here; the last one computes."""
    return shared_with_backward(_WATCHERS_HERE, list) if WATCHERS else []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see the calls of this thread."""
    mine: list[Watcher] = shared_with_backward(_WATCHERS_HERE, list)
    WATCHERS.append(watcher)
    mine.append(watcher)
    try:
        yield
    finally:
        mine.remove(watcher)
        WATCHERS.remove(watcher)


def changed(p: Problem) -> Change:
    """A call as the watchers of this thread change it, one after the other."""
    finish: tuple[Callable[[Tensor], Tensor], ...] = ()
    for watcher in watchers():
        if type(watcher).change is not Watcher.change:  # most change nothing
            change = watcher.change(p)
            p, finish = change.problem, finish + change.finish
    return Change(p, finish)


def notify(seen: Observation) -> None:
    """Show a call to every watcher of this thread."""
    if WATCHERS:
        for watcher in watchers():
            watcher.show(seen)
