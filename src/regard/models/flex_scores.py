"""Read the score modification of a flex_attention call: a bias that it adds, a factor, or a softcap."""

from __future__ import annotations

import dis
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Self

import torch
from torch import Tensor

from ..biases import Bias
from ..masks.predicate import Predicate
from .posing import vmapped

__all__ = ["ScoreModification", "read_score_modification"]

ScoreMod = Callable[..., Tensor]  # (score, batch, head, row, key)
_SCORES = (0.0, 1.0, -1.0, 0.5, 3.0, -7.0, 40.0, -90.0)
_POINTS = 64  # pairs at which a modification is tried
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ScoreModification:
    """mod(s, …) = cap(slope · s) + bias(head, row, key), as far as it could be tried."""

    slope: float = 1.0
    softcap: float | None = None
    bias: Bias | None = None
    sources: tuple[Tensor, ...] = ()  # tensors that the function reads


@dataclass(frozen=True, eq=False)
class ScoreModBias(Bias):
    """What a score modification adds to a score of 0, evaluated tile by tile."""

    mod: ScoreMod
    count: int  # of heads
    device: torch.device
    _anchor: Tensor = field(init=False)  # a bias must have a tensor; this one is not read

    def __post_init__(self) -> None:
        object.__setattr__(self, "_anchor", torch.zeros(1, device=self.device))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._anchor,)

    @property
    def heads(self) -> int:
        return self.count

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        head = torch.arange(self.count, device=i.device)[:, None, None]
        return modified(self.mod, tensors[0].new_zeros(()), i.new_zeros(()), head, i[:, None], j)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.mod, self.count, torch.device(device))


def modified(mod: ScoreMod, score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The modified scores, broadcast over all indices."""
    return vmapped(mod, score, batch, head, i, j)


def read_score_modification(
    mod: ScoreMod, shape: tuple[int, int, int, int], device: torch.device
) -> ScoreModification | str:
    """Read a function of (score, batch, head, row, key) for (B, H, N, M); a clause says why it cannot be read.

    It is tried with some scores at some pairs: what it makes of a score must be the same at all of them, up to what it
    adds.
    """
    if getattr(mod, "__name__", "") == "_identity" or not math.prod(shape):
        return ScoreModification()
    if shape[0] > 1 and _reads_batch(mod):
        return "its score_mod depends on the batch index"
    at = _points(shape, device)
    scores = torch.tensor(_SCORES, dtype=torch.float64, device=device)[:, None]
    try:
        found = modified(mod, scores, *at).double()  # (scores, points)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"its score_mod cannot be evaluated ({type(error).__name__})"
    hidden = torch.isneginf(found)
    if not bool((hidden == hidden[:1]).all()):
        return "its score_mod hides pairs by their score"
    shown = ~hidden[0]
    sources = Predicate(mod).sources
    bias = ScoreModBias(mod, shape[1], device)
    if not bool(shown.any()):
        return ScoreModification(bias=bias, sources=sources)
    rise = (found - found[:1])[:, shown]  # what it makes of each score
    if not bool((rise - rise[:, :1]).abs().amax(1).le(_TOLERANCE * (1 + found[:, shown].abs().amax(1))).all()):
        return "what its score_mod makes of a score depends on the pair"
    curve = rise.mean(1)
    close = _TOLERANCE * (1 + found[:, shown].abs().amax())
    slope = float(curve[1])
    if bool((curve - slope * scores[:, 0]).abs().le(close).all()):
        return ScoreModification(1.0 if abs(slope - 1) < _TOLERANCE else slope, None, bias, sources)
    cap = _cap(float(curve[6]), _SCORES[6])
    if cap is not None and bool((curve - cap * torch.tanh(scores[:, 0] / cap)).abs().le(close).all()):
        return ScoreModification(1.0, cap, bias, sources)
    return "its score_mod is neither an added bias, a factor nor a softcap"


def _points(shape: tuple[int, int, int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Pairs of the first and the last indices, and some in between, always the same."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    found = []
    for size in shape:
        some = torch.randint(0, size, (_POINTS,), generator=generator, device="cpu")
        some[0], some[1] = 0, size - 1
        found.append(some.to(device))
    return tuple(found)


def _cap(value: float, score: float) -> float | None:
    """The c with c · tanh(score / c) = value."""
    if not 0 < value < score:
        return None
    low, high = value, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(score / middle) < value else (low, middle)
    return (low + high) / 2


def _reads_batch(mod: ScoreMod) -> bool:
    """Whether a function may read its second argument; one without plain code may."""
    code = getattr(mod, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount < 2:
        return True
    name = code.co_varnames[1]
    return name in code.co_cellvars or any(
        name in (step.argval if isinstance(step.argval, tuple) else (step.argval,))
        for step in dis.get_instructions(code)
        if step.opname.startswith("LOAD_FAST")
    )
