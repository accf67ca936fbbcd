"""The attention function that transformers calls for `attn_implementation="regard"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ...functional import attention, observe
from ...masks import Mask, causal, dense, padding
from .lazy_mask import LazyMask

__all__ = ["attention_forward"]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the interface of transformers: output (batch, rows, heads, dim), and weights if requested.

    Arguments that only repeat for another kernel what the mask says are ignored. The weights are those before dropout.
    """
    _refuse(others)
    mask, bias = _mask_and_bias(attention_mask, query, key)
    if mask is None and bias is None and is_causal and query.shape[2] > 1:
        mask = causal(offset=0)
    if indices is not None:
        selected = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        only = dense(selected.scatter(-1, indices.long(), True).unsqueeze(1))
        mask = only if mask is None else mask & only
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    given: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux}
    if not output_attentions:
        return attention(query, key, value, dropout=dropout, **given).transpose(1, 2).contiguous(), None
    seen = observe(query, key, value, dropout=dropout, **given)
    return seen.output.transpose(1, 2).contiguous(), seen.weights()


def _mask_and_bias(
    given: LazyMask | Mask | Tensor | None, query: Tensor, key: Tensor
) -> tuple[Mask | None, Tensor | None]:
    """Interpret attention_mask: a regard mask, a bool tensor that selects, or a float tensor that is added."""
    if given is None or isinstance(given, Mask):
        return given, None
    rows, keys = query.shape[2], key.shape[2]
    if isinstance(given, LazyMask):
        if given.shape[2:] == (rows, keys):
            return given.mask, None
        given = given.tensor
    if given.dim() == 2:  # (batch, keys), as tokenizers give it
        return padding(keep=given[:, :keys] != 0), None
    given = given[..., :keys]
    if given.is_floating_point():
        return None, given
    return dense(given), None


def _refuse(others: dict[str, Any]) -> None:
    """Refuse arguments that would change the result and are not supported."""
    if others.get("cache") is not None:
        raise ArgumentError(
            "attn_implementation='regard': a paged cache is not supported, since continuous batching passes no mask. "
            "Use model.set_attn_implementation('sdpa') for it, or model.generate(...) in batches."
        )
    if others.get("block_indices") is not None:
        raise ArgumentError(
            "attn_implementation='regard': block_indices are not supported, since this model builds their mask for "
            "'eager' and 'sdpa' only. Use model.set_attn_implementation('sdpa')."
        )
