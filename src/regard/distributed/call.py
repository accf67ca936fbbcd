"""One call of attention over a group, validated and compared across all ranks before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..backends import KNOWN, Backend, Triton
from ..biases import Bias
from ..compat.torch import forward_mode_is_active, transforms_are_active
from ..core.dropout import draw_seed
from ..core.folded import group_bias
from ..core.nonfinite import all_finite
from ..core.problem import Problem
from ..core.spec import Spec
from ..core.tiling import TileSizes
from ..core.validation import pose
from ..errors import ArgumentError, BackendError, ShapeError
from ..masks import Mask
from ..masks.causal import causal_of_torch
from ..scores import Pointwise, Score
from .consistency import CallSizes, call_info, pairs_checksum, unread_captures
from .layout import Sharding, check_layout, sharding_of
from .ranks import Group, RankInfo, Ranks
from .ring_plan import RingPlan, plan_ring

__all__ = ["STRATEGIES", "GroupCall", "ParallelConfig", "kernel_refusals", "prepare_call", "read_causal_bias"]

STRATEGIES = ("auto", "ring", "heads")


@dataclass(frozen=True)
class ParallelConfig:
    """Over which ranks a call runs, and how."""

    group: Group | None = None
    layout: str = "contiguous"
    strategy: str = "auto"
    seed: int | None = None  # for dropout, if ranks of other groups must use the same
    origin: tuple[int, int] = (0, 0)  # this rank's first batch item and head, if batch or heads are sharded too

    def check(self, who: str) -> None:
        """Raise if layout or strategy is unknown."""
        check_layout(who, self.layout)
        if self.strategy not in STRATEGIES:
            raise ArgumentError(
                f"{who}: strategy must be one of {', '.join(map(repr, STRATEGIES))}. Got {self.strategy!r}."
            )


@dataclass(frozen=True, eq=False)
class GroupCall:
    """One call that is the same on all ranks."""

    ranks: Ranks
    local: Problem  # this rank's rows and keys, without mask and bias
    mask: Mask | None  # of all rows and keys; or of this rank's rows and all keys
    bias: Tensor | Bias | None  # a tensor is (L|1, H|1, rows of this rank|1, M|1)
    local_mask_rows: int | None  # the number of rows of a mask that has the rows of this rank only; otherwise None
    plan: RingPlan
    total_rows: int  # of all ranks
    total_keys: int
    seed: int
    finite: bool  # whether no NaN or inf could leak from hidden pairs, on any rank
    centre: Tensor | None  # of the score, if the logits do not depend on the origin
    strategy: str
    origin: tuple[int, int]
    backend: str | Backend

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.local.query.shape[1] // max(self.local.key.shape[1], 1)

    @property
    def grouped_bias(self) -> Tensor | None:
        """The bias tensor (L|1, K|1, G|1, N|1, M|1), if there is one."""
        return group_bias(self.bias if isinstance(self.bias, Tensor) else None, self.local.key.shape[1])

    @property
    def tile_sizes(self) -> TileSizes:
        return self.backend.tile_sizes if isinstance(self.backend, Backend) else TileSizes()

    @property
    def spec(self) -> Spec:
        """The spec of all rows and keys, without the score."""
        spec = Spec.of(self.local._replace(mask=self.mask, bias=self.bias), self.seed)
        return replace(spec, n=self.total_rows, m=self.total_keys, origin=self.origin)


def _refuse_transforms(who: str) -> None:
    if forward_mode_is_active() or transforms_are_active():
        raise ArgumentError(
            f"{who}: a call over a group supports reverse mode only, without torch.func. Gather the sequence on one "
            f"rank, with regard.distributed.gather, and call regard.attention."
        )


def prepare_call(
    who: str,
    config: ParallelConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    backend: str | Backend = "auto",
    observed: bool = False,
    **given: Any,
) -> GroupCall:
    """Validate a call on this rank, compare it with the other ranks, and plan which rank needs which keys."""
    _refuse_transforms(who)
    ranks = Ranks.of(who, config.group)
    mask, bias = read_causal_bias(mask, bias)

    def prepare() -> tuple[RankInfo, tuple[Problem, Problem | None]]:
        config.check(who)
        _check_backend(who, backend)
        local = _checked_score(pose(query, key, value, observed=observed, who=who, **given))
        with_tensors = _pose_with_tensors(local, query, key, value, mask, bias)
        how = {"layout": config.layout, "strategy": config.strategy, "backend": backend}
        finite = _nothing_leaks(local, mask, bias, backend)
        return call_info(local, mask, bias, _seed(who, local, config), finite, how), (local, with_tensors)

    info, (local, with_tensors) = ranks.agree(prepare)
    sizes = [CallSizes(*numbers) for numbers in info.sizes]
    _check_keys(who, sizes)
    n, m = sum(of_rank.rows for of_rank in sizes), sum(of_rank.keys for of_rank in sizes)
    rows = sharding_of(who, "rows", [of_rank.rows for of_rank in sizes], config.layout)
    keys = sharding_of(who, "keys", [of_rank.keys for of_rank in sizes], config.layout)
    whole = pose(
        *(_placeholder(x, length, local.dtype) for x, length in ((query, n), (key, m), (value, m))),
        mask=mask if isinstance(mask, Mask) else None,
        bias=bias if isinstance(bias, Bias) else None,
        score=local.score,
        who=who,
    )
    if whole.mask is not None and unread_captures(mask):
        checked = whole.mask.shared(query.device)
        ranks.agree(lambda: (RankInfo((), {"mask": pairs_checksum(checked, n, m, query.device)}), None))
    mask_is_local = isinstance(mask, Tensor)
    return GroupCall(
        ranks=ranks,
        local=local,
        mask=with_tensors.mask if mask_is_local and with_tensors is not None else whole.mask,
        bias=with_tensors.bias if isinstance(bias, Tensor) and with_tensors is not None else whole.bias,
        local_mask_rows=local.rows if mask_is_local else None,
        plan=_cached_plan(rows, keys, whole.mask, n, m, known=not mask_is_local),
        total_rows=n,
        total_keys=m,
        seed=sizes[0].seed,
        finite=all(of_rank.finite for of_rank in sizes),
        centre=_common_centre(ranks, local),
        strategy=config.strategy,
        origin=config.origin,
        backend=backend,
    )


def _checked_score(p: Problem) -> Problem:
    if isinstance(p.score, Pointwise):
        raise ArgumentError(
            f"{p.who}: a sequence over several devices takes no Pointwise score. Use softcap=, "
            "bias=regard.biases.alibi(…) or relative(…), or attend on one device."
        )
    return p


def _common_centre(ranks: Ranks, p: Problem) -> Tensor | None:
    """One centre for the queries and keys of all ranks: the median of what each would choose."""
    if p.score is None:
        return None
    own = p.score.centre(p.query.to(p.exact_dtype), p.key.to(p.exact_dtype))
    if own is not None:
        return ranks.all_gather(own).median(0).values
    for part in p.score.modules():
        if isinstance(part, Score) and type(part).centre is not Score.centre:
            raise ArgumentError(
                f"{p.who}: {type(p.score).__name__} wraps {type(part).__name__}, which has a centre that all ranks "
                f"must share. Define `centre` and `prepare_around` in it, and call those of {type(part).__name__}."
            )
    return None


def read_causal_bias(
    mask: Mask | Tensor | None, bias: Tensor | Bias | None
) -> tuple[Mask | Tensor | None, Tensor | Bias | None]:
    """Replace torch's CausalBias by the mask of the whole sequence that it stands for."""
    if isinstance(mask, Tensor) and (causal := causal_of_torch(mask)) is not None:
        mask = causal
    if isinstance(bias, Tensor) and (causal := causal_of_torch(bias)) is not None and isinstance(mask, Mask | None):
        return (causal if mask is None else mask & causal), None
    return mask, bias


def _nothing_leaks(p: Problem, mask: Mask | Tensor | None, bias: Tensor | Bias | None, backend: str | Backend) -> bool:
    """Whether this rank's tensors are finite, or nothing is hidden: then no NaN or inf leaks from hidden pairs.

    Our kernels never read hidden keys; but a score is applied to them before the kernels run.
    """
    hides = mask is not None or bias is not None
    if not hides or (p.score is None and not kernel_refusals(p, bias, backend)):
        return True
    return all_finite(p.query, p.key, p.value)


def kernel_refusals(p: Problem, bias: Tensor | Bias | None, backend: str | Backend) -> list[str]:
    """Why our kernels do not compute the blocks of a ring; the same on all ranks, whatever their lengths."""
    requested = backend == "triton" or isinstance(backend, Triton)
    if not requested and not (backend == "auto" and p.query.is_cuda):
        return ["they are for GPUs, and for backend='auto' or 'triton'"]
    query, key, value = (x.new_empty(*x.shape[:-2], 1, x.shape[-1]) for x in (p.query, p.key, p.value))
    return KNOWN["triton"].refuses(p._replace(query=query, key=key, value=value, bias=bias))


def _seed(who: str, p: Problem, config: ParallelConfig) -> int:
    if config.seed is not None or not p.dropout:
        return config.seed or 0
    return draw_seed(who)


def _pose_with_tensors(
    p: Problem, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, bias: Tensor | Bias | None
) -> Problem | None:
    """Validate a mask and bias that are tensors, which hold this rank's rows and all keys: as many as they have."""
    if mask is not None and not isinstance(mask, Mask | Tensor):
        pose(query, key, value, mask=mask, who=p.who)  # raises
    if bias is not None and not isinstance(bias, Bias | Tensor):
        pose(query, key, value, bias=bias, who=p.who)
    if isinstance(mask, Tensor) and isinstance(bias, Tensor) and causal_of_torch(bias) is not None:
        raise ArgumentError(
            f"{p.who}: a CausalBias refers to the whole sequence, and a mask that is a tensor to this rank's rows. "
            f"Hide the later keys in the tensor too, and leave bias out."
        )
    tensors = [t for t in (mask, bias) if isinstance(t, Tensor)]
    if not tensors:
        return None
    keys = max((t.shape[-1] for t in tensors if t.dim()), default=1)
    return pose(
        *(_placeholder(x, length, p.dtype) for x, length in ((query, query.shape[-2]), (key, keys), (value, keys))),
        mask=mask if isinstance(mask, Tensor) else None,
        bias=bias if isinstance(bias, Tensor) else None,
        score=p.score,
        who=p.who,
    )


def _check_keys(who: str, sizes: list[CallSizes]) -> None:
    """Raise, on every rank, if the mask or bias of a rank does not have all keys."""
    total = sum(of_rank.keys for of_rank in sizes)
    for rank, of_rank in enumerate(sizes):
        for name, keys in (("mask", of_rank.mask_keys), ("bias", of_rank.bias_keys)):
            if keys not in (0, 1, total):
                raise ShapeError(
                    f"{who}: a {name} that is a tensor holds the rows of its rank and the keys of all ranks. There are "
                    f"{total} keys; the {name} of rank {rank} has {keys}."
                )


def _cached_plan(rows: Sharding, keys: Sharding, mask: Mask | None, n: int, m: int, known: bool) -> RingPlan:
    if mask is None or mask.constant:
        return plan_ring(rows, keys, mask, n, m, known)
    return mask.remembered(("ring plan", rows, keys), lambda: plan_ring(rows, keys, mask, n, m))


def _placeholder(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """A tensor of x's shape except its length, which stores one number; in the dtype of the call."""
    return x.new_zeros((), dtype=dtype).expand(*x.shape[:-2], length, x.shape[-1])


def _check_backend(who: str, backend: str | Backend) -> None:
    if not isinstance(backend, Backend) and backend != "auto" and backend not in KNOWN:
        raise BackendError(
            f"{who}: backend must be 'auto', {', '.join(map(repr, KNOWN))}, or a backend object. Got {backend!r}."
        )
