"""From two problems to their divergence and its gradients: each function allocates results and starts its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import launch_cache
from ..arguments import KernelArgs
from .aggregates import Constants, constants
from .configs import Config
from .divergence import KL, divergence_kl, divergence_terms, row_lse
from .divergence_backward import divergence_dk, divergence_dq, pack_rows
from .launch import by_tma, options_of
from .tile_ops import PACK

__all__ = ["DivergenceRows", "Gradients", "Mix", "Pair", "backward", "both_lse", "forward"]


class DivergenceRows(NamedTuple):
    """What a forward pass finds of each row, float32 (L, H, N) each; lse are in log2 units."""

    value: Tensor
    lse_p: Tensor
    lse_r: Tensor
    delta_p: Tensor | None = None  # Σ p·A, where it is not the value
    delta_r: Tensor | None = None  # Σ r·B, where it is not −1


class Mix(NamedTuple):
    """What an epsilon makes of the second attention, in log2 units."""

    kept: float = 0.0  # log2(1 − ε)
    floor: Tensor | None = None  # float32 (L, H, N): log2(ε / number of keys)


class Stats(NamedTuple):
    """What a backward kernel reads."""

    packed: Tensor  # float32 (L · H, N padded, 4 or 8), as `pack_rows` has it
    mix: Mix


class Gradients(NamedTuple):
    """A gradient of each side; None where it is not wanted."""

    p: Tensor | None = None
    r: Tensor | None = None


@dataclass(eq=False)
class Pair:
    """Two problems over the same rows and keys; their values are never read."""

    p: KernelArgs
    r: KernelArgs
    kind: int
    listed: bool  # whether their masks are the same
    mean: bool = False  # whether the weights are averaged over heads first
    mix: Mix = field(default_factory=Mix)
    known_lse: tuple[Tensor | None, Tensor | None] = (None, None)  # of p and of r, as `lse` finds them

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        return self.kind, self.listed, self.mean, self.mix.kept, self.p.signature, self.r.signature

    @property
    def sizes(self) -> dict[str, int]:
        p, r = self.p, self.r
        return {"n": p.n, "m": p.m, "heads": p.heads, "groups_p": p.groups, "groups_r": r.groups}

    def config(self, direction: str) -> Config:
        """Tiles that fit both sides."""
        found = [w.config(direction) for w in (self.p, self.r)]
        return min(found, key=lambda c: (c.BM * c.BN, c.stages))

    def arguments(self, c: Config, by_keys: bool = False) -> dict[str, Any]:
        """The arguments that hold tensors of both sides."""
        p, r = self.p, self.r
        lists = p.block_lists(c, by_keys)
        others = lists if self.listed else r.block_lists(c, by_keys)
        return {
            "q_p": p.query, "k_p": p.key, "q_r": r.query, "k_r": r.key,
            "args_p": p.pass_args(lists, p.strides()), "args_r": r.pass_args(others, r.strides()),
        }  # fmt: skip

    def described(self, c: Config) -> dict[str, Any]:
        """Queries and keys as TMA takes them, where it can."""
        q_p, k_p = by_tma(self.p.by_tma, (self.p.query, self.p.key), (c.BM, c.BN))
        q_r, k_r = by_tma(self.r.by_tma, (self.r.query, self.r.key), (c.BM, c.BN))
        return {"q_p": q_p, "k_p": k_p, "q_r": q_r, "k_r": k_r}

    def constants(self, c: Config, **more: Any) -> dict[str, Constants]:
        P, R = (side_constants(w, c, LISTED=self.listed) for w in (self.p, self.r))
        return {"P": P, "R": R, "C": constants(KIND=self.kind, QUICK=self.quick, PTX=self.p.ptx, **more)}

    @property
    def quick(self) -> bool:
        """Whether logarithms may be as rough as products of 16 bits."""
        return not (self.p.exact or self.r.exact)

    @property
    def row_width(self) -> int:
        """The numbers of a packed row."""
        return 4 if self.kind == KL else 8

    @property
    def sinks(self) -> dict[str, Tensor | None]:
        return {"sinks_p": self.p.sink, "sinks_r": self.r.sink}

    def new_rows(self, deltas: bool) -> DivergenceRows:
        made = (self.p.query.new_empty(self.p.rows, dtype=torch.float32) for _ in range(5 if deltas else 3))
        return DivergenceRows(*made)


def side_constants(w: KernelArgs, c: Config, **more: Any) -> Constants:
    """What a kernel is compiled for on one side."""
    kinds = {**w.kinds, "D": w.dims["D"], "DP": w.dims["DP"], "BY_SPAN": w.by_span and more.get("LISTED", False)}
    return constants(BM=c.BM, BN=c.BN, DROP=False, FAST=w.fast, TMA=w.by_tma, **kinds, **more)


def forward(w: Pair) -> DivergenceRows:
    """The divergence of each row: KL in one pass, others after both lse are known."""
    if w.kind == KL:
        out = w.new_rows(deltas=False)
        _start(w, "divergence kl", divergence_kl, {"out": out, **w.sinks})
        return out
    lse_p, lse_r = both_lse(w)
    out = w.new_rows(deltas=True)._replace(lse_p=lse_p, lse_r=lse_r)
    _start(w, "divergence terms", divergence_terms, {"out": out, **w.sinks, "mix": w.mix})
    return out


def _start(w: Pair, name: str, kernel: Any, tensors: dict[str, Any], needs: tuple[bool, bool] | None = None) -> None:
    """Start a kernel that holds rows."""
    key = (name, needs, w.signature)
    launch = launch_cache.find(key)
    c = w.config("divergence dq" if needs else "divergence") if launch is None else launch.about
    tensors = {**tensors, **w.arguments(c)}
    if launch is not None:
        launch.again(**tensors)
        return
    L, H, N = w.p.rows
    row_blocks = triton.cdiv(N, c.BM)
    more: dict[str, Any] = {"SINK_P": w.p.sink is not None, "SINK_R": w.r.sink is not None}
    if needs is not None:
        more = {"NEEDS_P": needs[0], "NEEDS_R": needs[1], "WIDTH": w.row_width}
    arguments = {**tensors, **w.described(c), **w.sizes, "row_blocks": row_blocks, **w.constants(c, **more)}
    launch_cache.start(key, kernel, row_blocks * L * H, arguments, options_of(c), tensors, c)


def both_lse(w: Pair) -> tuple[Tensor, Tensor]:
    """lse of p and of r; one that is known is not computed again."""
    p, r = w.known_lse
    return lse(w.p) if p is None else p, lse(w.r) if r is None else r


def lse(w: KernelArgs) -> Tensor:
    """lse of each row in log2 units, with the sink: (L, H, N)."""
    L, H, N = w.rows
    out = w.query.new_empty(w.rows, dtype=torch.float32)
    launch = launch_cache.find(key := ("divergence lse", w.signature))
    c = w.config("divergence") if launch is None else launch.about
    tensors = {"q": w.query, "k": w.key, "out": out, "args": w.pass_args(w.block_lists(c), w.strides()), "sinks": w.sink}
    if launch is not None:
        launch.again(**tensors)
        return out
    row_blocks = triton.cdiv(N, c.BM)
    q, k = by_tma(w.by_tma, (w.query, w.key), (c.BM, c.BN))
    C = side_constants(w, c, LISTED=True, SINK=w.sink is not None)
    arguments = {**tensors, "q": q, "k": k, **w.sizes, "row_blocks": row_blocks, "C": C}
    launch_cache.start(key, row_lse, row_blocks * L * H, arguments, options_of(c), tensors, c)
    return out


def backward(w: Pair, rows: DivergenceRows, g: Tensor, queries: tuple[bool, bool], keys: tuple[bool, bool]) -> tuple[Gradients, Gradients]:
    """The wanted gradients of queries and of keys, of either side."""
    stats = Stats(_packed(w, rows, g), w.mix)
    dq, dk = Gradients(), Gradients()
    if any(queries):
        dq = _new_gradients(w.p.query, w.r.query, queries)
        _start(w, "divergence dq", divergence_dq, {"out": dq, "stats": stats}, queries)
    if any(keys):
        dk = _new_gradients(w.p.key, w.r.key, keys)
        if all(keys) and w.p.groups != w.r.groups:
            _start_dk(w, dk._replace(r=None), stats, (True, False), w.p.groups)
            _start_dk(w, dk._replace(p=None), stats, (False, True), w.r.groups)
        else:
            _start_dk(w, dk, stats, keys, w.p.groups if keys[0] else w.r.groups)
    return dq, dk


def _packed(w: Pair, rows: DivergenceRows, g: Tensor) -> Tensor:
    """What the backward kernels know of each row."""
    L, H, N = w.p.rows
    blocks = triton.cdiv(N, PACK.value)
    out = g.new_empty(L * H, blocks * PACK.value, w.row_width, dtype=torch.float32)
    tensors = {"rows": rows, "g": g, "floors": w.mix.floor, "out": out}
    launch = launch_cache.find(key := ("divergence rows", g.data_ptr() & 15, w.signature))
    if launch is not None:
        launch.again(**tensors)
    else:
        arguments = {**tensors, "n": N, "C": constants(KIND=w.kind, QUICK=w.quick, WIDTH=w.row_width)}
        launch_cache.start(key, pack_rows, blocks * L * H, arguments, {"enable_fp_fusion": True}, tensors)
    return out


def _new_gradients(p: Tensor, r: Tensor, needs: tuple[bool, bool]) -> Gradients:
    return Gradients(*(x.new_empty(x.shape) if need else None for x, need in zip((p, r), needs, strict=True)))


def _start_dk(w: Pair, out: Gradients, stats: Stats, needs: tuple[bool, bool], groups: int) -> None:
    key = ("divergence dk", needs, groups, w.signature)
    launch = launch_cache.find(key)
    c = w.config("divergence dk") if launch is None else launch.about
    tensors = {"out": out, "stats": stats, **w.arguments(c, by_keys=True)}
    if launch is not None:
        launch.again(**tensors)
        return
    L, H, _ = w.p.rows
    kinds = w.constants(c, NEEDS_P=needs[0], NEEDS_R=needs[1], GROUPED=groups > 1, WIDTH=w.row_width)
    arguments = {**tensors, **w.described(c), **w.sizes, "groups": groups, **kinds}
    launch_cache.start(key, divergence_dk, triton.cdiv(w.p.m, c.BN) * L * (H // groups), arguments, options_of(c), tensors, c)


