"""Why torch's kernels cannot compute a problem, as a list of reasons."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.torch import (
    forward_mode_is_active,
    is_exporting,
    is_traced,
    lacks_values,
    may_need_grad,
    transforms_are_active,
)
from ...core.nonfinite import all_finite
from ...core.problem import Problem
from ...masks.causal import Causal
from ...masks.dense import Dense
from ...masks.everything import Everything
from ...masks.padding import Keep, Padding
from .call import LARGEST_SCALE, SMALL, computes_in_float32, is_torch_causal

__all__ = ["refusals"]

FAR = 1024.0  # beyond it, float32 leaves a weight less than four digits


def refusals(p: Problem) -> list[str]:
    """Every reason that can be seen from the problem, before torch chooses a kernel."""
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
    if not isinstance(p.scale, Tensor) and abs(p.scale) > LARGEST_SCALE:
        reasons.append(f"torch's kernels lose the digits of logits with a scale beyond {LARGEST_SCALE:g}")
    if torch.compiler.is_compiling() and not is_traced() and p.query.shape[-1] != p.value.shape[-1]:
        reasons.append("under torch.compile torch may take its matrix path where the dims of key and value differ")
    if p.bias is not None:
        reasons += _about_bias(p)
    if p.mask is not None:
        reasons += _about_mask(p)
    if not p.query.is_cpu:
        reasons += _about_device(p)
    if not is_exporting() and not (p.query.numel() and p.key.numel() and p.value.numel()):  # a size may be unknown
        reasons.append("nothing is there to compute, and some of torch's kernels divide by that")
    return reasons


def _about_mask(p: Problem) -> list[str]:
    mask, reasons = p.mask, []
    if mask is None or isinstance(mask, Everything):
        return []
    if p.bias is not None:
        return ["torch takes one of mask and bias"]
    if isinstance(mask, Causal) and is_torch_causal(mask, p.rows, p.keys):
        return []
    batch, heads = mask.lead
    if batch not in (1, p.query.shape[0]):
        reasons.append("the mask is shared by several leading dimensions")
    written = isinstance(mask, Padding | Keep) or (isinstance(mask, Dense) and not _reads_when_run())
    if torch.compiler.is_compiling() or is_traced() or lacks_values(p.query):
        if not written:  # whatever their number: sizes may be symbols, and a question about one would be a guard
            reasons.append("where values cannot be read, as under torch.compile, a NaN behind the mask might leak")
        return reasons
    if not written and (pairs := batch * heads * p.rows * p.keys) > SMALL:
        reasons.append(f"torch would need the mask as {pairs:,} numbers")
    if not reasons and not all_finite(p.query, p.key, p.value):
        reasons.append("a NaN or inf behind the mask would leak through torch's kernels")
    return reasons


def _reads_when_run() -> bool:
    """Whether an operator of a compiled graph will read the values that decide about torch's kernel."""
    return torch.compiler.is_compiling() and not is_traced()


def _about_device(p: Problem) -> list[str]:
    reasons = []
    if torch.are_deterministic_algorithms_enabled() and p.query.is_cuda:
        reasons.append("torch's CUDA kernels do not promise the same bits, and deterministic algorithms are asked for")
    if forward_mode_is_active() or transforms_are_active():
        reasons.append("torch's kernels have no rules for forward mode and torch.func on this device")
    if not isinstance(p.scale, Tensor) and p.scale <= 0:
        reasons.append("torch's kernels on this device take the largest logit before a scale that is not positive")
    return reasons


def _about_bias(p: Problem) -> list[str]:
    if not isinstance(p.bias, Tensor):
        return ["torch would need the bias as a matrix"]
    reasons = []
    if p.bias.requires_grad or forward_mode_is_active() or transforms_are_active():
        reasons.append("torch's kernels give the bias no gradient")
    computed = torch.float32 if computes_in_float32(p) else p.dtype
    if computed.itemsize < 4 and p.bias.dtype != computed:
        reasons.append(f"torch would round the bias to {computed}")
    if torch.compiler.is_compiling() or is_traced() or not all_finite(p.query, p.key, p.value):
        reasons.append("a NaN or inf behind −inf in the bias would leak through torch's kernels")
    elif not p.query.is_cpu and bool(((p.bias < -1e30) & (p.bias > -torch.inf)).any()):
        reasons.append("torch's kernels on this device lose rows of very low logits")
    elif not reasons and may_need_grad(p.query, p.key, p.value) and _has_far_rows(p.bias):
        reasons.append("torch's backward keeps one number per row, in which a bias this large leaves no digits")
    return reasons


def _has_far_rows(bias: Tensor) -> bool:
    """Whether the largest bias of a row is finite and far from 0, as in a row of finfo.min."""
    if bias.is_meta or not bias.numel():
        return False
    level = bias.amax(-1)
    return bool(((level.abs() > FAR) & (level > -torch.inf)).any())
