"""watch: look at the attention of a whole model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import DtypeError
from regard.observation import Observation

from .calls import Calls
from .seen import Seen

__all__ = ["watch"]


@contextmanager
def watch(model: nn.Module, tell: Callable[[str], None] | None = None) -> Iterator[Seen]:
    """Observe every attention call that `model` makes inside the `with` block, in linear memory.

    It sees torch's `scaled_dot_product_attention`, every call of regard, and `torch.nn.MultiheadAttention`; what a
    model computes by hand, as with `attn_implementation="eager"`, it cannot see. The model's output stays what it was.
    `tell`, if given, is called with the name of each layer when it has been seen.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
    >>> with regard.watch(model) as seen:
    ...     _ = model(torch.zeros(1, 8, 16))
    >>> [round(head.effective_keys, 3) for head in seen.heads]
    [8.0, 8.0, 8.0, 8.0]
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"watch: model must be a torch.nn.Module. Got {type(model).__name__}.")
    seen = Seen()

    def see(name: str, what: Observation) -> None:
        seen.add(name, what)
        if tell is not None:
            tell(name)

    def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.tokens = _ids(args, named)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with Calls(model, see, seen.missed.__setitem__):
            yield seen
    finally:
        handle.remove()


def _ids(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The token ids among a model's arguments: `input_ids`, else the first whole numbers in one or two dimensions."""
    others = (x for name, x in named.items() if not any(word in name for word in ("mask", "position", "type")))
    for x in (named.get("input_ids"), *args, *others):
        if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() in (1, 2):
            return x.detach()[None] if x.dim() == 1 else x.detach()
    return None
