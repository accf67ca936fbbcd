"""The divergence of weights that are averaged over heads first: workspaces, splits and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import launch_cache
from ..arguments import KernelArgs
from .configs import Config
from .divergence import JS, KL
from .divergence_launch import DivergenceRows, Gradients, Pair, both_lse, side_constants
from .divergence_mean import divergence_mean, mean_dk, mean_dq, mean_slopes
from .launch import by_tma, options_of

__all__ = ["mean_backward", "mean_forward"]

_SPLIT = 1024  # keys of one program
_PAIRS = 2**24  # of a batch item in a workspace, about


class MeanStats(NamedTuple):
    """What the passes head by head read."""

    slopes: Tensor | None  # float32 (L, rows of the strip, keys)
    lse: Tensor  # float32 (L, H, N)
    delta: Tensor  # float32 (L, H, N): Σ p·A, which the pass by rows finds
    g: Tensor  # float32 (L, 1, N)


def _sizes(w: Pair) -> dict[str, int]:
    p, r = w.p, w.r
    return {"n": p.n, "m": p.m, "heads_p": p.heads, "heads_r": r.heads, "groups_p": p.groups, "groups_r": r.groups}


def _constants(w: Pair, c: Config, **more: Any) -> dict[str, Any]:
    found = w.constants(c, **more)
    for name, side in (("P", w.p), ("R", w.r)):
        found[name] = side_constants(side, c, LISTED=False, ONE_HEAD=side.heads == 1)
    return found


def mean_forward(w: Pair) -> DivergenceRows:
    """The divergence of the mean weights of each row, (L, 1, N), and lse of every head, (L, H, N)."""
    L, _, N = w.p.rows
    rows = DivergenceRows(w.p.query.new_empty(0, dtype=torch.float32), *both_lse(w))
    splits = triton.cdiv(w.p.m, _SPLIT)
    parts = rows.lse_p.new_empty(splits, L, 1, N)
    key = ("mean divergence", w.signature)
    launch = launch_cache.find(key)
    c = w.config("divergence") if launch is None else launch.about
    tensors = {"out": parts, "rows": rows, "mix": w.mix, **w.arguments(c)}
    if launch is not None:
        launch.again(**tensors)
    else:
        row_blocks = triton.cdiv(N, c.BM)
        numbers = {**_sizes(w), "batches": L, "row_blocks": row_blocks, "split": _SPLIT // c.BN}
        arguments = {**tensors, **w.described(c), **numbers, **_constants(w, c)}
        launch_cache.start(key, divergence_mean, row_blocks * splits * L, arguments, options_of(c), tensors, c)
    return rows._replace(value=parts[0] if splits == 1 else parts.sum(0))


def mean_backward(
    w: Pair, rows: DivergenceRows, g: Tensor, queries: tuple[bool, bool], keys: tuple[bool, bool]
) -> tuple[Gradients, Gradients]:
    """The wanted gradients of queries and of keys, of either side, a strip of rows at a time."""
    if w.kind == KL:
        g = torch.where(rows.value == torch.inf, 0.0, g)
    L, _, N = w.p.rows
    block = max(max(side.config(f"divergence{of}")[:2]) for side in (w.p, w.r) for of in ("", " dq", " dk"))  # all tiles divide it
    width = triton.cdiv(w.p.m, block) * block
    strip = min(max(_PAIRS // width // block, 1), triton.cdiv(N, block)) * block
    needs = queries[0] or keys[0], queries[1] or keys[1]
    slopes = Gradients(*(g.new_empty(L, strip, width) if need else None for need in needs))
    dq = [side.query.new_empty(side.query.shape) for side in (w.p, w.r)]
    dk = [side.key.new_zeros(side.key.shape, dtype=torch.float32) if need else None for side, need in zip((w.p, w.r), keys, strict=True)]
    stats = [
        MeanStats(slope, lse, g.new_empty(side.rows), g)
        for slope, lse, side in zip(slopes, (rows.lse_p, rows.lse_r), (w.p, w.r), strict=True)
    ]
    numbers = {"strip": strip, "width": width}
    # The first row of a strip is in a tensor, so that all strips start the same launches; each has 16 bytes of its own.
    starts = torch.arange(0, N, strip, dtype=torch.int32, device=g.device)[:, None].repeat(1, 4)
    for start in starts:
        _slopes(w, rows, slopes, start, needs, numbers)
        for at, side in enumerate((w.p, w.r)):
            logs = at == 1 and w.kind != JS
            if needs[at]:
                _by_head(side, mean_dq, "divergence dq", dq[at], start, stats[at], numbers, logs)
            if keys[at]:
                _by_head(side, mean_dk, "divergence dk", dk[at], start, stats[at], numbers, logs)
    found = (None if x is None else x.to(side.key.dtype) for x, side in zip(dk, (w.p, w.r), strict=True))
    return Gradients(*(x if need else None for x, need in zip(dq, queries, strict=True))), Gradients(*found)


def _slopes(
    w: Pair, rows: DivergenceRows, out: Gradients, start: Tensor, needs: tuple[bool, bool], numbers: dict[str, int]
) -> None:
    key = ("slopes", needs, tuple(numbers.values()), w.signature)
    launch = launch_cache.find(key)
    c = w.config("divergence") if launch is None else launch.about
    tensors = {"out": out, "start": start, "rows": rows, "mix": w.mix, **w.arguments(c)}
    if launch is not None:
        launch.again(**tensors)
        return
    programs = numbers["width"] // c.BN * (numbers["strip"] // c.BM) * w.p.rows[0]
    kinds = _constants(w, c, NEEDS_P=needs[0], NEEDS_R=needs[1])
    arguments = {**tensors, **w.described(c), **_sizes(w), **numbers, **kinds}
    launch_cache.start(key, mean_slopes, programs, arguments, options_of(c), tensors, c)


def _by_head(
    w: KernelArgs, kernel: Any, direction: str, out: Tensor | None, start: Tensor, stats: MeanStats, numbers: dict[str, int], logs: bool
) -> None:
    """Start a pass over the heads of one side, by rows or by keys."""
    key = (kernel, logs, tuple(numbers.values()), w.signature)
    launch = launch_cache.find(key)
    c = w.config(direction) if launch is None else launch.about
    by_keys = kernel is mean_dk
    tensors = {
        "q": w.query, "k": w.key, "out": out, "start": start, "stats": stats,
        "args": w.pass_args(w.block_lists(c, by_keys), w.strides()),
    }  # fmt: skip
    if launch is not None:
        launch.again(**tensors)
        return
    L, H, _ = w.rows
    programs = triton.cdiv(w.m, c.BN) * L * w.key.shape[1] if by_keys else numbers["strip"] // c.BM * L * H
    q, k = by_tma(w.by_tma, (w.query, w.key), (c.BM, c.BN))
    C = side_constants(w, c, LOGS=logs, GROUPED=w.groups > 1)
    arguments = {**tensors, "q": q, "k": k, **w.sizes, **numbers, "C": C}
    launch_cache.start(key, kernel, programs, arguments, options_of(c), tensors, c)
