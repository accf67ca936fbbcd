"""Where the tokens of a text repeat: the weight of each row on earlier copies of its token, and on what followed them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..chunked.token_repeats import TokenLabels, TokenRepeats
from . import launch_cache
from .arguments import KernelArgs
from .launch import on_its_device
from .portable.aggregates import constants
from .portable.statistics_launch import WeightStats
from .portable.token_repeats import token_repeats as kernel

__all__ = ["token_repeats"]

_ROWS, _KEYS = 64, 32  # of a tile, at most: most tokens have few copies, and few registers let more programs run at once


@on_its_device
def token_repeats(w: KernelArgs, row_max: Tensor, log_row_sum: Tensor, tokens: TokenLabels) -> TokenRepeats:
    """Sum the weights on repeats of the tokens of (L, N): (L, H, N) each; nothing is read back to the host."""
    L, H, N = w.rows
    launch = launch_cache.find(key := ("token repeats", w.signature))
    c = w.config("dq") if launch is None else launch.about  # the lists of its tiles are those of `row_survey`
    out = TokenRepeats(*torch.empty(2, *row_max.shape, dtype=row_max.dtype, device=row_max.device).unbind())
    tensors = {
        "q": w.query, "k": w.key, "out": out, "runs": tokens.runs,
        "stats": WeightStats(row_max, log_row_sum), "args": w.pass_args(w.block_lists(c), w.strides()),
    }  # fmt: skip
    if launch is not None:
        launch.again(**tensors)
        return out
    BM, BN = min(c.BM, _ROWS), min(c.BN, _KEYS)
    C = constants(BM=BM, BN=BN, DROP=False, D=w.dims["D"], DP=w.dims["DP"], DR=w.dims["DR"], **w.kinds, FAST=w.fast, TMA=False)
    options = {"num_warps": c.warps if BM == c.BM else 4, "num_stages": min(c.stages, 2), "enable_fp_fusion": True}
    programs = triton.cdiv(N, BM) * L * H
    launch_cache.start(key, kernel, programs, {**tensors, **w.sizes, "key_blocks": triton.cdiv(w.m, 128), "C": C}, options, tensors, c)
    return out
