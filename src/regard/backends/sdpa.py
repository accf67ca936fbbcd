"""`sdpa`: torch's own fused kernels, where they do exactly what is asked."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..chunked.foreign import AttentionFormula, ForeignKernel
from ..compat.torch import cached_signature, call_function, may_need_grad
from ..core.nonfinite import all_finite
from ..core.problem import Problem
from ..core.rows import Rows
from ..masks import Mask
from ..masks.causal import Causal
from ..masks.dense import Dense
from ..masks.everything import Everything
from ..masks.padding import Keep, Padding
from .base import Backend

__all__ = ["Sdpa", "at_once"]

_SMALL = 2**16  # pairs for which a mask may be laid out in full: a constant, so memory stays linear
_FLASH = 1
_KERNELS = {_FLASH: "flash", 2: "memory-efficient", 3: "cuDNN", 4: "overrideable"}


class Call(NamedTuple):
    """The arguments of torch's function that mean the same."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool


class Sdpa(Backend):
    """`torch.nn.functional.scaled_dot_product_attention`, by its fused kernels only."""

    name: ClassVar[str] = "sdpa"
    about: ClassVar[str] = "torch's fused kernels"

    def refuses(self, p: Problem) -> list[str]:
        reasons = []
        if p.observed:
            reasons.append("torch's kernels give no statistics of the weights")
        if p.dropout:
            reasons.append("torch draws dropout by itself; ours is the same on every backend")
        if p.softcap is not None:
            reasons.append("torch's kernels have no softcap")
        if p.sink is not None:
            reasons.append("torch's kernels have no sink")
        if p.score is not None and p.score.pairwise:
            reasons.append(f"the score {type(p.score).__name__} is no dot product")
        if p.bias is not None:
            reasons += _about_bias(p)
        if p.mask is not None:
            reasons += _about_mask(p)
        if not p.query.is_cpu:
            reasons += _about_device(p)
        if not (p.query.numel() and p.key.numel() and p.value.numel()):
            reasons.append("nothing is there to compute, and some of torch's kernels divide by that")
        if reasons:
            return reasons
        if not torch.compiler.is_compiling() and _kernel(_asked(p)) not in _KERNELS:
            reasons.append(
                "torch would take its matrix path: none of its fused kernels does this, or they are switched off"
            )
        return reasons

    def detail(self, p: Problem) -> str:
        return f"torch's {_KERNELS.get(_kernel(_asked(p)), 'matrix')} kernel"

    def run(self, p: Problem) -> Rows:
        call = p.notes.pop("sdpa", None)
        if not isinstance(call, Call):
            call = _call(p)
        if torch.compiler.is_compiling():
            return _result(p, _traced(p, call))
        if may_need_grad(*call[:3]):
            return _result(p, _with_derivatives(p, call))
        return _result(p, _attend(call))


def at_once(query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor | None:
    """Answer the plainest calls before they are posed: what `Sdpa` would do, where one glance shows that it may.

    Square float32 on the CPU, no derivative asked for, no mask or a simple one. None leaves it to the straight line.
    """
    if not type(query) is type(key) is type(value) is Tensor or query.is_nested or key.is_nested or value.is_nested:
        return None
    shape = query.shape
    if (
        len(shape) != 4
        or 0 in shape
        or not shape == key.shape == value.shape
        or not query.dtype == key.dtype == value.dtype == torch.float32
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch.compiler.is_compiling()
        or may_need_grad(query, key, value)
    ):
        return None
    allowed, causal = None, False
    if mask is not None:
        if type(mask) is Causal and mask.offset is None:
            causal = True
        elif (allowed := _glance(query, mask)) is None:
            return None
    call = Call(query, key, value, allowed, causal, shape[3] ** -0.5, False)
    if _kernel(call) != _FLASH:
        return None
    output = _attend(call)
    if allowed is not None and not math.isfinite(output.sum().item()):
        return None  # what leaks from behind a mask makes a NaN of the output
    return output


def _glance(query: Tensor, mask: object) -> Tensor | None:
    """A simple mask as a tensor, if it fits."""
    batch, _, n, _ = query.shape
    if type(mask) is Padding:
        fits = mask.lengths.is_cpu and mask.lengths.shape == (batch,)
        return mask.keys(n, query.device) if fits else None
    if isinstance(mask, Mask) and n * n <= _SMALL and mask.constant and mask.lead == (1, 1):
        return _laid(mask, n, n, query.device) if mask.misfit(n, n) is None else None
    return None


def _result(p: Problem, output: Tensor) -> Rows:
    if output.dtype != p.dtype:
        output = output.to(p.dtype)
    return Rows(p.shaped(output))


def _attend(call: Call) -> Tensor:
    query, key, value, mask, causal, scale, grouped = call
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _with_derivatives(p: Problem, call: Call) -> Tensor:
    meaning = AttentionFormula(p.mask, call.mask if isinstance(p.bias, Tensor) else None, call.scale)
    if not p.query.is_cpu:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _attend(call._replace(query=q, key=k, value=v))

        output: Tensor = call_function(ForeignKernel, meaning, attend, *call[:3])
        return output
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=call.query.dtype).masked_fill_(~mask, -torch.inf)
    output, _ = call_function(FusedOnCpu, meaning, mask, call.causal, *call[:3])
    return output


def _asked(p: Problem) -> Call:
    """The call for torch to judge: the real one, kept for the run, or one of its shapes where that takes computing."""
    if p.plain_scale:
        call = p.notes["sdpa"] = _call(p)
        return call
    width = p.query.shape[-1] if p.score is None else p.score.width(p.query.shape[-1], p.key.shape[-1])
    float_like = torch.float64 if p.dtype == torch.float64 else torch.float32
    query, key = (torch.empty(*x.shape[:-1], width, dtype=float_like, device=x.device) for x in (p.query, p.key))
    value = torch.empty(p.value.shape, dtype=float_like, device=p.device)
    return _call(p._replace(query=query, key=key, value=value, score=None, scale=1.0, notes={}))


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _call(p: Problem) -> Call:
    query, key, value, scale = p.query, p.key, p.value, p.scale
    if p.dtype not in (torch.float32, torch.float64) and (not p.plain_scale or _slow_half(p)):
        query, key, value = query.float(), key.float(), value.float()
    if p.score is not None:
        query, key, _ = p.score.prepare(query, key)
        scale = 1.0
    elif isinstance(scale, Tensor):
        query, scale = query * scale.to(query.dtype).reshape(-1, 1, 1), 1.0
    mask, causal = (None, False) if p.mask is None else _masked(p.mask, p)
    if causal and key.shape[2] > query.shape[2]:  # nobody sees the keys behind the last row
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if isinstance(p.bias, Tensor):
        mask = p.bias.to(query.dtype)
    elif mask is not None and not query.is_cpu:  # cuDNN averages a row that a bool mask leaves empty; −inf it respects
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = _unit(query), _unit(key), _unit(value)
    if query.shape[1] == key.shape[1]:
        return Call(query, key, value, mask, causal, scale, False)
    return Call(query, key, value, mask, causal, scale, True)


def _slow_half(p: Problem) -> bool:
    """Whether this processor multiplies float32 faster than what it is given."""
    if p.dtype == torch.float32 or not p.query.is_cpu or torch.compiler.is_compiling():
        return False
    units = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not (p.dtype == torch.bfloat16 and units)


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _masked(mask: Mask, p: Problem) -> tuple[Tensor | None, bool]:
    """The mask as torch takes it: (tensor, is_causal)."""
    if isinstance(mask, Everything):
        return None, False
    if isinstance(mask, Causal) and _from_the_top(mask, p.rows, p.keys):
        if p.rows == 1 and p.keys == 1:  # a statement and not a value: it may be traced with symbols
            return None, False
        return None, True
    if isinstance(mask, Dense):
        return mask.allowed, False
    if isinstance(mask, Padding | Keep):
        return mask.keys(p.keys, p.query.device), False
    return (_laid if mask.constant else Mask.dense)(mask, p.rows, p.keys, p.query.device), False


@lru_cache(maxsize=32)
def _laid(mask: Mask, n: int, m: int, device: torch.device) -> Tensor:
    """A small mask in full, kept for the next call."""
    return mask.dense(n, m, device)


def _from_the_top(mask: Causal, n: int, m: int) -> bool:
    """Whether row i sees the keys up to i: what torch calls causal."""
    offset = mask.offset
    return n == m if offset is None else isinstance(offset, int) and offset == 0


def _about_mask(p: Problem) -> list[str]:
    mask, reasons = p.mask, []
    if mask is None or isinstance(mask, Everything):
        return []
    if p.bias is not None:
        return ["torch takes one of mask and bias"]
    if isinstance(mask, Causal) and _from_the_top(mask, p.rows, p.keys):
        return []
    batch, heads = mask.lead
    if batch not in (1, p.query.shape[0]):
        reasons.append("the mask is shared by several leading dimensions")
    if not isinstance(mask, Dense | Padding | Keep) and (pairs := batch * heads * p.rows * p.keys) > _SMALL:
        reasons.append(f"torch would need the mask as {pairs:,} numbers")
    if torch.compiler.is_compiling():
        if not isinstance(mask, Dense | Padding | Keep):
            reasons.append("under torch.compile only padding and tensors are laid out")
    elif not reasons and not all_finite(p.query, p.key, p.value):
        reasons.append("a NaN or inf behind the mask would leak through torch's kernels")
    return reasons


def _about_device(p: Problem) -> list[str]:
    reasons = []
    if torch.are_deterministic_algorithms_enabled() and p.query.is_cuda:
        reasons.append("torch's CUDA kernels do not promise the same bits, and deterministic algorithms are asked for")
    if _forward_mode() or torch._C._are_functorch_transforms_active():
        reasons.append("torch's kernels have no rules for forward mode and torch.func on this device")
    if not isinstance(p.scale, Tensor) and p.scale <= 0:
        reasons.append("torch's kernels on this device take the largest logit before a scale that is not positive")
    return reasons


def _about_bias(p: Problem) -> list[str]:
    if not isinstance(p.bias, Tensor):
        return ["torch would need the bias as a matrix"]
    reasons = []
    if p.bias.requires_grad or _forward_mode() or torch._C._are_functorch_transforms_active():
        reasons.append("torch's kernels give the bias no gradient")
    computed = torch.float32 if _slow_half(p) else p.dtype
    if computed.itemsize < 4 and p.bias.dtype != computed:
        reasons.append(f"torch would round the bias to {computed}")
    if torch.compiler.is_compiling() or not all_finite(p.query, p.key, p.value):
        reasons.append("a NaN or inf behind −inf in the bias would leak through torch's kernels")
    elif not p.query.is_cpu and bool(((p.bias < -1e30) & (p.bias > -torch.inf)).any()):
        reasons.append("torch's kernels on this device lose rows of very low logits")
    return reasons


def _kernel(call: Call) -> int:
    """Which kernel torch would take, by its own choice and switches; 0 is the matrix path."""
    query, key, value, mask, causal, scale, grouped = call
    if torch._C._are_functorch_transforms_active():  # torch's choice reads through no wrapper: ask it about the shapes
        query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    try:
        return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped))
    except RuntimeError:  # every kernel is switched off
        return 0


def _traced(p: Problem, call: Call) -> Tensor:
    """Under torch.compile: torch's function, with nothing behind a mask left to leak."""
    if call.mask is None:
        return _attend(call)
    allowed = call.mask  # (B|1, H|1, N|1, M|1)
    rows, keys = allowed.any(-1, keepdim=True), allowed.any(1, keepdim=True).any(2, keepdim=True).mT
    query = torch.where(rows, call.query, 0.0)
    key, value = torch.where(keys, call.key, 0.0), torch.where(keys, call.value, 0.0)
    return _attend(call._replace(query=query, key=key, value=value))


@cached_signature
class FusedOnCpu(torch.autograd.Function):
    """Torch's CPU kernel and its backward; every other derivative by the formula, strip by strip."""

    @staticmethod
    def forward(
        meaning: AttentionFormula, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=meaning.scale)
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.meaning, mask, ctx.causal, q, k, v = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, mask, *output)
        ctx.save_for_forward(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, output, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *ctx.meaning.vjp(q, k, v, grad)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        scale = ctx.meaning.scale
        return None, None, None, *op(grad, q, k, v, output, lse, 0.0, ctx.causal, attn_mask=mask, scale=scale)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.meaning.jvp(*ctx.saved_tensors[:3], tangents[3:]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """Item by item: the kernel knows one batch dimension, and a mask may follow it."""
        items = [
            call_function(FusedOnCpu, *(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(column) for column in zip(*items, strict=True)), (0, 0)
