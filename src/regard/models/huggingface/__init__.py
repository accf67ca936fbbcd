"""Hugging Face models with `attn_implementation="regard"`: exact attention, in which masks stay masks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, MissingPackageError
from ...functional import attention, observe
from ...masks import Mask, causal, dense, padding
from .lazy_mask import LazyMask
from .mask_functions import MaskBuilder

__all__ = ["register"]

NAME = "regard"


def register() -> None:
    """Let every Hugging Face model that can choose its attention choose ours: `attn_implementation="regard"`.

    It holds for models made or loaded afterwards, and for those there are by `model.set_attn_implementation("regard")`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> small = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    >>> model = LlamaForCausalLM._from_config(small, attn_implementation="regard")
    >>> model.config._attn_implementation
    'regard'
    """
    try:
        transformers: Any = import_module("transformers")
        attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as missing:
        raise MissingPackageError(
            f"register: Hugging Face's models need the package transformers, version 5 or later. Importing it gave: "
            f"{missing}. Install it with pip install 'regard[hf]'."
        ) from missing
    attentions.register(NAME, attend)
    masks.register(NAME, MaskBuilder.for_transformers())


def attend(
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
    """Attend as transformers asks its attention functions to: output (batch, rows, heads, dim) and, if asked, weights.

    Arguments that only tell another kernel what the mask says already are left unread. The weights are those before
    dropout.
    """
    _refuse(others)
    mask, bias = read(attention_mask, query, key)
    if mask is None and bias is None and is_causal and query.shape[2] > 1:
        mask = causal(offset=0)
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        picked = dense(chosen.scatter(-1, indices.long(), True).unsqueeze(1))
        mask = picked if mask is None else mask & picked
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    given: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux}
    if not output_attentions:
        return attention(query, key, value, dropout=dropout, **given).transpose(1, 2).contiguous(), None
    seen = observe(query, key, value, dropout=dropout, **given)
    return seen.output.transpose(1, 2).contiguous(), seen.weights()


def read(given: LazyMask | Mask | Tensor | None, query: Tensor, key: Tensor) -> tuple[Mask | None, Tensor | None]:
    """Read what came as attention_mask: a mask of ours, a tensor that selects, or one that adds; as (mask, bias)."""
    if given is None or isinstance(given, Mask):
        return given, None
    rows, keys = query.shape[2], key.shape[2]
    if isinstance(given, LazyMask):
        if given.shape[2:] == (rows, keys):
            return given.mask, None
        given = given.tensor
    if given.dim() == 2:  # one row of keys for each batch item, as tokenizers give it
        return padding(keep=given[:, :keys] != 0), None
    given = given[..., :keys]
    if given.is_floating_point():
        return None, given
    return dense(given), None


def _refuse(others: dict[str, Any]) -> None:
    """Refuse what would change the result and is not computed here."""
    if others.get("cache") is not None:
        raise ArgumentError(
            "attend: attn_implementation='regard' has no paged cache: continuous batching gives it no mask. "
            "Use model.set_attn_implementation('sdpa') for it, or model.generate(...) in batches."
        )
    if others.get("block_indices") is not None:
        raise ArgumentError(
            "attend: attn_implementation='regard' takes no block_indices: this model builds their mask for 'eager' and "
            "'sdpa' alone. Use model.set_attn_implementation('sdpa')."
        )
