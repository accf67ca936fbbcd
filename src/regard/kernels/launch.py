"""From tensors to tensors: each function runs a pass on the problem's device, by the chip's own kernel or the portable one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..compat.torch import is_current_device
from ..compat.triton import INTERPRETED
from ..core.rows import Rows
from . import launch_cache
from .arguments import BackwardRows, Gradients, KernelArgs, Tangents
from .portable import launch as portable
from .portable import pointwise_launch as portable_pointwise
from .portable import statistics_launch as portable_statistics
from .portable.configs import hopper

if TYPE_CHECKING:
    from .portable.divergence_launch import DivergenceRows, Pair
    from .portable.divergence_launch import Gradients as PairGradients

__all__ = [
    "backward",
    "backward_preprocess",
    "bias_gradient",
    "divergence",
    "divergence_backward",
    "double_backward",
    "forward",
    "jvp",
    "moments",
    "on_hopper",
    "pooled",
    "received",
    "table_gradient",
    "top",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(function: Callable[Concatenate[KernelArgs, P], R]) -> Callable[Concatenate[KernelArgs, P], R]:
    """Make the device of the tensors the current one: Triton starts kernels there, whatever their tensors are on."""

    @wraps(function)
    def wrapped(w: KernelArgs, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not w.query.is_cuda or is_current_device(w.query.device):
            return function(w, *args, **kwargs)
        with torch.cuda.device_of(w.query):
            return function(w, *args, **kwargs)

    return wrapped


def on_hopper(query: Tensor) -> bool:
    """Whether the kernels for Hopper run on the device of a tensor."""
    return not INTERPRETED and hopper(query.device)


@on_its_device
def forward(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass: by decoding, by the chip's own kernel, or by the portable one."""
    route = launch_cache.find(key := ("route of the forward", w.signature))
    if route is None:
        route = portable.forward
        if not portable.decodes(w) and on_hopper(w.query):
            from .hopper import forward_launch as chip

            if not w.wide:
                route = route if chip.refuses(w) else chip.launch_forward
            elif not chip.refuses_wide(w):
                route = chip.launch_wide
        launch_cache.store(key, route)
    found: Rows = route(w, entropy)
    return found


@on_its_device
def jvp(w: KernelArgs, tangents: Tangents, entropy: bool) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The forward pass, and the tangents of output, lse and entropy, by the chip's own kernel or the portable one. No sink."""
    if not on_hopper(w.query):
        return portable.jvp(w, tangents, entropy)
    from .hopper import jvp_launch as chip

    route = launch_cache.find(key := ("route of the jvp", chip.tangent_signature(tangents), w.signature))
    if route is None:
        launch_cache.store(key, route := portable.jvp if chip.refuses(w, tangents) else chip.launch_jvp)
    found: tuple[Rows, tuple[Tensor, Tensor, Tensor]] = route(w, tangents, entropy)
    return found


@on_its_device
def backward(w: KernelArgs, rows: BackwardRows, queries: bool = True, keys: bool = True) -> Gradients:
    """The wanted gradients, of queries or of keys and values: by the chip's own kernel if all are wanted, or by the portable two."""
    if not (queries and keys and on_hopper(w.query)):
        return portable.backward(w, rows, queries, keys)
    from .hopper import backward_launch as chip

    dO = rows.dO
    by_chip = launch_cache.find(key := ("route of the backward", w.signature, dO.dtype, dO.stride(), dO.data_ptr() & 15))
    if by_chip is None:
        launch_cache.store(key, by_chip := not chip.refuses(w, rows))
    return Gradients(*chip.launch_backward(w, rows)) if by_chip else portable.backward(w, rows, queries, keys)


@on_its_device
def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    if on_hopper(w.query):
        from .hopper import statistics_launch as chip

        if not chip.refuses(w):
            return chip.received(w, row_max, log_row_sum)
    return portable_statistics.received(w, row_max, log_row_sum)


@on_its_device
def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    if on_hopper(w.query):
        from .hopper import statistics_launch as chip

        if not chip.refuses_grid(w, height, width):
            return chip.pooled(w, row_max, log_row_sum, height, width)
    return portable_statistics.pooled(w, row_max, log_row_sum, height, width)


@on_its_device
def divergence(w: KernelArgs, pair: Pair) -> DivergenceRows:
    """The divergence between two attentions, of which w is the first."""
    from .portable import divergence_launch, divergence_mean_launch  # here, since most processes never need them

    return divergence_mean_launch.mean_forward(pair) if pair.mean else divergence_launch.forward(pair)


@on_its_device
def divergence_backward(
    w: KernelArgs, pair: Pair, rows: DivergenceRows, g: Tensor, queries: tuple[bool, bool], keys: tuple[bool, bool]
) -> tuple[PairGradients, PairGradients]:
    """The wanted gradients of queries and of keys, of either side."""
    from .portable import divergence_launch, divergence_mean_launch

    route = divergence_mean_launch.mean_backward if pair.mean else divergence_launch.backward
    return route(pair, rows, g, queries, keys)


# No chip has kernels of its own for these.
backward_preprocess = on_its_device(portable.backward_preprocess)
double_backward = on_its_device(portable.double_backward)
bias_gradient = on_its_device(portable.bias_gradient)
table_gradient = on_its_device(portable_pointwise.table_gradient)
moments = on_its_device(portable_statistics.moments)
top = on_its_device(portable_statistics.top)
