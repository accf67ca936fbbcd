"""Masks: which row may attend to which key, as data that composes with `&`, `|` and `~`."""

from regard.masks.base import Mask
from regard.masks.blocks import blocks
from regard.masks.causal import causal
from regard.masks.chosen import chosen
from regard.masks.dense import dense
from regard.masks.documents import documents, packed
from regard.masks.everything import everything
from regard.masks.global_tokens import global_tokens
from regard.masks.padding import padding
from regard.masks.predicate import predicate
from regard.masks.prefix import prefix
from regard.masks.strided import strided
from regard.masks.window import window

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chosen",
    "dense",
    "documents",
    "everything",
    "global_tokens",
    "packed",
    "padding",
    "predicate",
    "prefix",
    "strided",
    "window",
]
