"""Hugging Face models with `attn_implementation="regard"`: exact attention, without any mask tensor."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import MissingPackageError
from .attention import attention_forward
from .mask_functions import MaskBuilder

__all__ = ["register"]

NAME = "regard"


def register() -> None:
    """Register regard with transformers, for every model with selectable attention: `attn_implementation="regard"`.

    Pass that when you load a model, or call `model.set_attn_implementation("regard")` on one that exists.

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
            f"register: Hugging Face models need the package transformers, version 5 or later. Importing it gave: "
            f"{missing}. Install it with pip install 'regard[hf]'."
        ) from missing
    attentions.register(NAME, attention_forward)
    masks.register(NAME, MaskBuilder.for_transformers())
