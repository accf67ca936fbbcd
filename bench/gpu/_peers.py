"""Our calls and those they are compared with, on the plain shapes: torch's kernels, FlashAttention-4, FlexAttention.

A peer that is not installed has no figures, and the report says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _device import Peer, absent, random
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

TOKENS, HIDDEN = 16384, 2048
SHAPES = {
    f"d{d}, n{n}, {'causal' if causal else 'full'}": (d, n, causal)
    for d in (128, 64, 256)
    for n in (16384, 4096)
    for causal in (False, True)
    if os.environ.get("REGARD_SHAPES", "") in f"d{d}, n{n}, "  # a part of a name selects the shapes that contain it
}


NARROW = 128  # dims up to which there is a requirement


class Plain(NamedTuple):
    """Plain attention at one of the shapes."""

    name: str
    query: Tensor  # (B, H, N, D)
    key: Tensor
    value: Tensor
    causal: bool

    @property
    def flops(self) -> float:
        """Two products over the visible pairs."""
        b, h, n, d = self.query.shape
        return 4.0 * b * h * n * n * d * (0.5 if self.causal else 1.0)

    def tflops(self, ms: float | None, times: float = 1.0) -> float | None:
        """TFLOP/s of a pass that does `times` the forward's work."""
        return None if ms is None else self.flops * times / ms / 1e9


def plain(name: str, grad: bool = False) -> Plain:
    """One of the shapes: all tokens in sequences of n, all hidden units in heads of d."""
    d, n, causal = SHAPES[name]
    q, k, v = (random(TOKENS // n, HIDDEN // d, n, d, grad=grad) for _ in range(3))
    return Plain(name, q, k, v, causal)


def peers(x: Plain) -> dict[str, Peer | None]:
    """Torch's kernels, FlashAttention-4, FlexAttention (unless REGARD_NO_FLEX skips it), and ours."""
    _, q, k, v, causal = x
    mask = regard.causal() if causal else None
    rule, skipped = before if causal else None, bool(os.environ.get("REGARD_NO_FLEX"))
    return {
        "cuDNN": torchs(q, k, v, SDPBackend.CUDNN_ATTENTION, is_causal=causal),
        "flash": torchs(q, k, v, SDPBackend.FLASH_ATTENTION, is_causal=causal),
        "FA4": flash4(q, k, v, causal),
        "FlexAttention": None if skipped else flex(q, k, v, rule),
        "Flex, FLASH": None if skipped else flex_flash(q, k, v, rule),
        "regard": Peer(lambda: regard.attention(q, k, v, mask=mask, backend="triton")),
    }


@cache
def flash4_functions() -> Any:
    """FlashAttention-4's module, or None if it is not installed; the report says so."""
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        absent("FlashAttention-4", f"not installed (pip install flash-attn-4): {error}")
        return None
    return interface


def flash4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Peer | None:
    """FlashAttention-4, which takes and gives (batch, length, heads, dim): views of the same tensors."""
    found = flash4_functions()
    if found is None:
        return None
    return Peer(
        lambda: found.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)[0].transpose(1, 2)
    )


def flex_flash(q: Tensor, k: Tensor, v: Tensor, rule: Callable[..., Tensor] | None = None) -> Peer | None:
    """FlexAttention by FlashAttention-4's kernels, its FLASH backend."""
    if flash4_functions() is None:
        absent("FlexAttention's FLASH backend", "it needs FlashAttention-4")
        return None
    return flex(q, k, v, rule, size=(128, 128), BACKEND="FLASH")


def torchs(q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend, **kwargs: Any) -> Peer:
    """Torch's function with one of its kernels."""
    return Peer(lambda: F.scaled_dot_product_attention(q, k, v, **kwargs), kernel)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Callable[..., Tensor] | None = None,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    score: Callable[..., Tensor] | None = None,
    **options: str | int,
) -> Peer:
    """FlexAttention, with its block mask built at the first call and kept; `score` is its score_mod."""
    given: dict[str, Any] = {"kernel_options": options} if options else {}
    given |= {"score_mod": score} if score else {}

    @cache
    def blocks() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        sizes = {} if size is None else {"BLOCK_SIZE": size}
        return rule and create_block_mask(rule, batch, None, q.shape[2], k.shape[2], device=q.device, **sizes)

    return Peer(lambda: compiled_flex()(q, k, v, block_mask=blocks(), **given))


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention compiled per shape; its backward can be run repeatedly."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import flex_attention

    dynamo.recompile_limit = 64  # beyond the limit it would fall back to the full matrix
    functorch.donated_buffer = False  # retain_graph is refused otherwise
    return torch.compile(flex_attention, dynamic=False)


def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """FlexAttention's rule for causal."""
    return j <= i
