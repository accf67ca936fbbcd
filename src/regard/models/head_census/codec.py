"""From texts to the inputs of a model: token ids, special tokens around a window, padding, and the texts of ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..loading import LoadedModel
from .pieces import Pieces

__all__ = ["Codec", "codec_of"]

_LONGEST = 2048


@dataclass(frozen=True)
class Codec:
    """How a model reads text."""

    encode: Callable[[str], list[int]]  # without special tokens
    inputs: Callable[[Tensor, Tensor], dict[str, Tensor]]  # named arguments from ids and a mask, (items, N) each
    pieces: Pieces
    prefix: tuple[int, ...] = ()  # special tokens before each window
    suffix: tuple[int, ...] = ()
    padding: int = 0
    most: int | None = None  # tokens for which the model has positions

    @property
    def length(self) -> int:
        """How many tokens a window has unless somebody says otherwise."""
        return _LONGEST if self.most is None else min(_LONGEST, self.most)


def codec_of(loaded: LoadedModel) -> Codec:
    """The codec of a model with its tokenizer."""
    device = next(loaded.model.parameters()).device
    if hasattr(loaded.tokenizer, "pieces"):  # the built-in one
        words = loaded.tokenizer
        return Codec(
            words.encode, lambda ids, mask: {"ids": ids.to(device)}, Pieces(words.pieces), most=loaded.trained_length
        )
    return _from_transformers(loaded, loaded.tokenizer, device)


def _from_transformers(loaded: LoadedModel, tokenizer: Any, device: torch.device) -> Codec:
    config = getattr(loaded.model, "config", None)
    encoded = tokenizer("a", return_special_tokens_mask=True)
    special = encoded["special_tokens_mask"]
    words = [at for at, flag in enumerate(special) if not flag] or [len(special)]
    prefix, suffix = encoded["input_ids"][: words[0]], encoded["input_ids"][words[-1] + 1 :]
    positions = getattr(config, "max_position_embeddings", None)
    most = positions if isinstance(positions, int) and positions > 0 else None
    if most is not None and "roberta" in str(getattr(config, "model_type", "")):
        most -= 2  # its positions begin at 2
    takes = inspect.signature(loaded.model.forward).parameters
    few = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}  # nobody reads them

    def inputs(ids: Tensor, mask: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"input_ids": ids.to(device), **few}
        if not bool(mask.all()) or "attention_mask" not in takes:
            found["attention_mask"] = mask.long().to(device)
        if getattr(config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = found["input_ids"]
        return found

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    padding = tokenizer.pad_token_id
    pieces = Pieces(_texts(tokenizer), frozenset(tokenizer.all_special_ids))
    return Codec(encode, inputs, pieces, tuple(prefix), tuple(suffix), 0 if padding is None else padding, most)


def _texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """The text of each id, with a space before a token that begins a word."""

    def texts(ids: Sequence[int]) -> list[str]:
        names = tokenizer.convert_ids_to_tokens(list(ids))
        wordpiece = any("##" in str(name) for name in list(tokenizer.get_vocab())[:50_000])
        found = []
        for token, name in zip(ids, names, strict=True):
            name = f"id {token}" if name is None else str(name)
            if name in tokenizer.all_special_tokens:
                found.append(name)
            elif wordpiece:
                found.append(name[2:] if name.startswith("##") else f" {name}")
            else:
                text = tokenizer.decode([token])
                begins = name.startswith(("Ġ", "▁", " ")) and not text.startswith((" ", "\n", "\t"))
                found.append(f" {text}" if begins else text)
        return found

    return texts
