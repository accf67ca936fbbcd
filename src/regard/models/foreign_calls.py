"""Hear the attention functions of other libraries while a model is watched or edited, and put everything back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from .flash_calls import hear_flash_attention
from .huggingface.implementation import answered_by_regard, observed_beside
from .listener import respond_or_miss
from .torch_calls import TorchCalls

__all__ = ["hear_foreign_calls"]


@contextmanager
def hear_foreign_calls(model: nn.Module, unchanged: bool) -> Iterator[None]:
    """Hear torch's functions, those of FlashAttention, and the implementations of Hugging Face models.

    With `unchanged`, a Hugging Face model keeps its own functions, and each call is observed by a pass of its own.
    """
    with ExitStack() as stack:
        stack.enter_context(TorchCalls())
        stack.enter_context(hear_flash_attention())
        if unchanged:
            stack.enter_context(observed_beside(model, partial(respond_or_miss, beside=True)))
        else:
            stack.enter_context(answered_by_regard(model))
        yield
