"""The attention function that transformers calls for `attn_implementation="regard"`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...core.problem import Problem
from ...core.validation import pose
from ...errors import ArgumentError
from ...functional import attention, observe
from ...masks import Mask, causal, chosen, dense, padding
from ..posing import with_infinities
from .lazy_mask import LazyMask

__all__ = ["attention_forward", "call_as_problem"]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Mask | Tensor | None,
    dropout: float = 0.0,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the interface of transformers: output (batch, rows, heads, dim), and weights if requested.

    Arguments that only repeat for another kernel what the mask says are ignored. The weights are those before dropout.
    """
    given = _options(module, query, key, attention_mask, **others)
    if not output_attentions:
        return attention(query, key, value, dropout=dropout, **given).transpose(1, 2).contiguous(), None
    seen = observe(query, key, value, dropout=dropout, **given)
    return seen.output.transpose(1, 2).contiguous(), seen.weights()


def call_as_problem(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **others: Any,
) -> Problem:
    """Pose a call of any attention function of transformers, which takes the same arguments."""
    given = _options(module, query, key, attention_mask, **others)
    if isinstance(given["bias"], Tensor):
        given["bias"] = with_infinities(given["bias"])
    return pose(query, key, value, dropout=dropout, who="attention", **given)


def _options(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: LazyMask | Mask | Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The same call in our words; `others` change no result, or are refused."""
    if others.get("cache") is not None:
        raise ArgumentError(
            "attn_implementation='regard': a paged cache is not supported, since continuous batching passes no mask. "
            "Use model.set_attn_implementation('sdpa') for it, or model.generate(...) in batches."
        )
    mask, bias = _mask_and_bias(attention_mask, query, key)
    if mask is None and bias is None and is_causal and query.shape[2] > 1:
        mask = causal(offset=0)
    for keys in _chosen_keys(module, indices, block_indices):
        mask = keys if mask is None else mask & keys
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    return {"mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux}


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


def _chosen_keys(module: nn.Module, indices: Tensor | None, block_indices: Tensor | None) -> Iterator[Mask]:
    """The keys that an indexer chose: indices (batch, rows, K), or those of blocks (batch, heads, rows, K)."""
    if indices is not None:
        yield chosen(indices.unsqueeze(1) if indices.dim() == 3 else indices)
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if not isinstance(size, int):
            raise ArgumentError(
                "attn_implementation='regard': block_indices count blocks of module.indexer.block_size keys, and "
                f"{type(module).__name__} has no such number. Use model.set_attn_implementation('sdpa')."
            )
        yield chosen(block_indices, size=size)
