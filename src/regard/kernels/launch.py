"""From tensors to tensors: each function runs a pass on the problem's device, by the chip's own kernel or the portable one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..compat.torch import is_current_device
from ..compat.triton import INTERPRETED
from ..core.rows import Rows
from . import launch_cache
from .arguments import BackwardRows, DoubleBackwardRows, Gradients, KernelArgs, Tangents
from .portable import launch as portable
from .portable.configs import hopper

__all__ = [
    "backward",
    "backward_preprocess",
    "bias_gradient",
    "double_backward",
    "forward",
    "jvp",
    "moments",
    "pooled",
    "received",
    "top",
]

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


def _on_hopper(w: KernelArgs) -> bool:
    return not INTERPRETED and hopper(w.query.device)


@on_its_device
def forward(w: KernelArgs, entropy: bool) -> Rows:
    """The forward pass: by decoding, by the chip's own kernel, or by the portable one."""
    route = launch_cache.find(key := ("route of the forward", w.signature))
    if route is None:
        route = portable.forward
        if not portable.decodes(w) and _on_hopper(w):
            from .hopper import forward_launch as chip

            route = route if chip.refuses(w) else chip.launch_forward
        launch_cache.store(key, route)
    found: Rows = route(w, entropy)
    return found


@on_its_device
def jvp(w: KernelArgs, tangents: Tangents, entropy: bool) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """The forward pass, and the tangents of output, lse and entropy. A sink is not included."""
    return portable.jvp(w, tangents, entropy)


@on_its_device
def backward_preprocess(w: KernelArgs, found: Rows, dO: Tensor, g_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """δ = Σ dO ∘ O − g_lse of each row, and lse in the units of the kernels' exponents."""
    return portable.backward_preprocess(w, found, dO, g_lse)


@on_its_device
def backward(w: KernelArgs, rows: BackwardRows, queries: bool = True, keys: bool = True) -> Gradients:
    """The wanted gradients, of queries or of keys and values: by the chip's own kernel if all are wanted, or by the portable two."""
    if not (queries and keys and _on_hopper(w)):
        return portable.backward(w, rows, queries, keys)
    from .hopper import backward_launch as chip

    dO = rows.dO
    by_chip = launch_cache.find(key := ("route of the backward", w.signature, dO.dtype, dO.stride(), dO.data_ptr() & 15))
    if by_chip is None:
        launch_cache.store(key, by_chip := not chip.refuses(w, rows))
    return Gradients(*chip.launch_backward(w, rows)) if by_chip else portable.backward(w, rows, queries, keys)


@on_its_device
def double_backward(
    w: KernelArgs, tangents: Tangents, dO: Tensor, dO_dot: Tensor | None, rows: DoubleBackwardRows, needs: tuple[bool, ...]
) -> Gradients:
    """The tangents of dQ, dK and dV, the last two together. Scales are numbers, biases have no tangent, no sink."""
    return portable.double_backward(w, tangents, dO, dO_dot, rows, needs)


@on_its_device
def bias_gradient(w: KernelArgs, rows: BackwardRows, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a bias tensor of `shape` (L|1, H|1, N|1, M|1), of slopes (H,), or of a table (H|1, 2R + 1)."""
    return portable.bias_gradient(w, rows, shape)


@on_its_device
def received(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> Tensor:
    """Σ over rows of the weight each key receives: (L, H, M)."""
    if _on_hopper(w):
        from .hopper import statistics_launch as chip

        if not chip.refuses(w):
            return chip.received(w, row_max, log_row_sum)
    return portable.received(w, row_max, log_row_sum)


@on_its_device
def moments(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p (1 − p) and Σ p |i + M − N − j| of each row: (L, H, N) each."""
    return portable.moments(w, row_max, log_row_sum)


@on_its_device
def pooled(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, height: int, width: int) -> Tensor:
    """The mean weight in each cell of a grid: (L, H, height, width)."""
    if _on_hopper(w):
        from .hopper import statistics_launch as chip

        if not chip.refuses_grid(w, height, width):
            return chip.pooled(w, row_max, log_row_sum, height, width)
    return portable.pooled(w, row_max, log_row_sum, height, width)


@on_its_device
def top(w: KernelArgs, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their keys, (L, H, N, k) each; −inf and −1 where fewer are visible."""
    return portable.top(w, k)
