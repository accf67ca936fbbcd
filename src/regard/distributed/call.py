"""One call of attention over a group, checked and agreed on by all ranks before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import KNOWN, Backend, Triton
from ..biases import Bias
from ..core.dropout import draw_seed
from ..core.nonfinite import all_finite
from ..core.problem import Problem
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..core.validation import pose
from ..errors import ArgumentError, BackendError, ShapeError
from ..masks import Mask
from .consistency import COLS, FINITE, KEYS, ROWS, SEED, told
from .layout import Held, check, pieces
from .local_inputs import grouped
from .ranks import Agreed, Group, Ranks, Told
from .ring_plan import Routes, routes

__all__ = ["STRATEGIES", "Asked", "Place", "against_kernels", "ask"]

STRATEGIES = ("auto", "ring", "heads")


@dataclass(frozen=True)
class Place:
    """Over which ranks, and how, a call spreads."""

    group: Group | None = None
    layout: str = "contiguous"
    strategy: str = "auto"
    seed: int | None = None  # of dropout, where the ranks of other groups must have the same
    origin: tuple[int, int] = (0, 0)  # the batch item and the head at which this rank's begin, where these are spread

    def check(self, who: str) -> None:
        check(who, self.layout)
        if self.strategy not in STRATEGIES:
            raise ArgumentError(
                f"{who}: strategy must be one of {', '.join(map(repr, STRATEGIES))}. Got {self.strategy!r}."
            )


@dataclass(frozen=True, eq=False)
class Asked:
    """One call, on which all ranks agree."""

    ranks: Ranks
    mine: Problem  # of this rank's rows and keys, without mask and bias
    mask: Mask | None  # of all rows and keys; or of this rank's rows and all keys
    bias: Tensor | Bias | None  # a tensor is (L|1, H|1, rows of this rank|1, M|1)
    mask_rows: int | None  # how many rows the mask has, if it has those of this rank alone
    routes: Routes
    rows: int  # of all ranks
    keys: int
    seed: int
    finite: bool
    strategy: str
    origin: tuple[int, int]
    backend: str | Backend

    @property
    def groups(self) -> int:
        return self.mine.query.shape[1] // max(self.mine.key.shape[1], 1)

    @property
    def table(self) -> Tensor | None:
        """The bias tensor (L|1, K|1, G|1, N|1, M|1), if there is one."""
        return grouped(self.bias if isinstance(self.bias, Tensor) else None, self.mine.key.shape[1], self.groups)

    @property
    def tile_sizes(self) -> TileSizes:
        return self.backend.tile_sizes if isinstance(self.backend, Backend) else TileSizes()

    @property
    def spec(self) -> Spec:
        """The rule of all rows and keys, but for the score."""
        p, batch = self.mine, self.mine.query.shape[0]
        return Spec(
            n=self.rows,
            m=self.keys,
            mask=self.mask,
            softcap=p.softcap,
            dropout=p.dropout,
            seed=self.seed,
            bias=self.bias if isinstance(self.bias, Bias) else None,
            inner=batch // self.mask.lead[0] if self.mask is not None and self.mask.lead[0] > 1 else 1,
            period=batch,
            origin=self.origin,
        )


def _reverse_alone(who: str) -> None:
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        raise ArgumentError(
            f"{who}: over a group there is reverse mode alone, without torch.func. Gather the sequence on one rank, "
            f"with regard.distributed.gather, and call regard.attention."
        )


def ask(
    who: str,
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    backend: str | Backend = "auto",
    observed: bool = False,
    **given: Any,
) -> Asked:
    """Check a call on this rank, agree on it with the others, and find out who needs what."""
    _reverse_alone(who)
    ranks = Ranks.of(who, place.group)

    def checked() -> tuple[Told, tuple[Problem, Problem | None]]:
        place.check(who)
        _backend(who, backend)
        mine = pose(query, key, value, observed=observed, who=who, **given)
        own = _with_tensors(mine, query, key, value, mask, bias)
        how = {"layout": place.layout, "strategy": place.strategy, "backend": backend}
        finite = _finite(mine, mask, bias, backend)
        return told(mine, mask, bias, _seed(who, mine, place), finite, how), (mine, own)

    agreed, (mine, own) = ranks.agree(checked)
    _fitting(who, agreed)
    n, m = (sum(said[at] for said in agreed.sizes) for at in (ROWS, KEYS))
    rows = pieces(who, "rows", [said[ROWS] for said in agreed.sizes], place.layout)
    keys = pieces(who, "keys", [said[KEYS] for said in agreed.sizes], place.layout)
    whole = pose(
        *(_long(x, length, mine.dtype) for x, length in ((query, n), (key, m), (value, m))),
        mask=mask if isinstance(mask, Mask) else None,
        bias=bias if isinstance(bias, Bias) else None,
        score=mine.score,
        who=who,
    )
    local = isinstance(mask, Tensor)
    return Asked(
        ranks,
        mine,
        own.mask if local and own is not None else whole.mask,
        own.bias if isinstance(bias, Tensor) and own is not None else whole.bias,
        mine.rows if local else None,
        _routes(rows, keys, whole.mask, n, m, known=not local),
        n,
        m,
        agreed.sizes[0][SEED],
        all(said[FINITE] for said in agreed.sizes),
        place.strategy,
        place.origin,
        backend,
    )


def _finite(p: Problem, mask: Mask | Tensor | None, bias: Tensor | Bias | None, backend: str | Backend) -> bool:
    """Whether nothing in this rank's tensors could reach what may not see it: they are finite, or nothing is hidden.

    Our kernels never touch what nobody may see; but before them it would pass through a score.
    """
    hides = mask is not None or bias is not None
    if not hides or (p.score is None and not against_kernels(p, bias, backend)):
        return True
    return all_finite(p.query, p.key, p.value)


def against_kernels(p: Problem, bias: Tensor | Bias | None, backend: str | Backend) -> list[str]:
    """Why the blocks of a ring are not computed by our kernels; the same on all ranks, whatever their lengths."""
    named = backend == "triton" or isinstance(backend, Triton)
    if not named and not (backend == "auto" and p.query.is_cuda):
        return ["they are for GPUs, and for backend='auto' or 'triton'"]
    query, key, value = (x.new_empty(*x.shape[:-2], 1, x.shape[-1]) for x in (p.query, p.key, p.value))
    return KNOWN["triton"].refuses(p._replace(query=query, key=key, value=value, bias=bias, notes={}))


def _seed(who: str, p: Problem, place: Place) -> int:
    if place.seed is not None or not p.dropout:
        return place.seed or 0
    return draw_seed(who)


def _with_tensors(
    p: Problem, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | Bias | None
) -> Problem | None:
    """Check the tensors that hold this rank's rows and all keys, against as many keys as they have."""
    if mask is not None and not isinstance(mask, Mask | Tensor):
        pose(query, key, value, mask=mask, who=p.who)  # which refuses it
    if bias is not None and not isinstance(bias, Bias | Tensor):
        pose(query, key, value, bias=bias, who=p.who)
    tensors = [t for t in (mask, bias) if isinstance(t, Tensor)]
    if not tensors:
        return None
    cols = max((t.shape[-1] for t in tensors if t.dim()), default=1)
    return pose(
        *(_long(x, length, p.dtype) for x, length in ((query, query.shape[-2]), (key, cols), (value, cols))),
        mask=mask if isinstance(mask, Tensor) else None,
        bias=bias if isinstance(bias, Tensor) else None,
        score=p.score,
        who=p.who,
    )


def _fitting(who: str, agreed: Agreed) -> None:
    """Raise, on all ranks alike, if a rank's mask or bias does not have all keys."""
    keys = sum(said[KEYS] for said in agreed.sizes)
    for rank, said in enumerate(agreed.sizes):
        for name, cols in zip(("mask", "bias"), said[COLS:], strict=True):
            if cols not in (0, 1, keys):
                raise ShapeError(
                    f"{who}: a {name} that is a tensor holds the rows of its rank and the keys of all ranks. There are "
                    f"{keys} keys; got {cols} in that of rank {rank}."
                )


def _routes(rows: Held, keys: Held, mask: Mask | None, n: int, m: int, known: bool) -> Routes:
    if mask is None or mask.constant:
        return routes(rows, keys, mask, n, m, known)
    found: Routes = mask.remembered(("routes", rows, keys), lambda: routes(rows, keys, mask, n, m))
    return found


def _long(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """A tensor like x but for its length, that holds a single number; in the dtype of the call, so that it stays so."""
    return x.new_zeros((), dtype=dtype).expand(*x.shape[:-2], length, x.shape[-1])


def _backend(who: str, backend: str | Backend) -> None:
    if not isinstance(backend, Backend) and backend != "auto" and backend not in KNOWN:
        raise BackendError(
            f"{who}: backend must be 'auto', {', '.join(map(repr, KNOWN))}, or a backend object. Got {backend!r}."
        )
