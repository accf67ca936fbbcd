"""What a model loses on texts: the batches and the loss with which `regard ablate` ranks heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError
from .builtin import Model
from .loading import LoadedModel, TokenizedText

__all__ = ["TextLoss", "text_loss"]

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class TextLoss:
    """Texts as batches for a model, and a loss on them: what `importance` takes."""

    batches: list[Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]
    says: str  # what the loss is, in words
    has_gradient: bool  # whether its gradient at the whole model says anything
    pieces: list[str]  # the tokens of the first batch
    tokens: int  # over all batches
    cut: bool  # whether there is more text than that


def text_loss(
    loaded: LoadedModel, texts: Iterable[str], *, length: int = 256, windows: int = 8, repeat: bool = False
) -> TextLoss:
    """Cut texts into windows of at most `length` tokens, at most `windows` of them, and choose a loss for the model.

    A model that predicts the next token has the mean of −log p(token). Any other has the relative change of its last
    hidden states, ‖h − h₀‖² / ‖h₀‖² with h₀ those of the whole model. With `repeat`, each window is read twice in a
    row, and only the second reading counts: it shows what heads do that copy.
    """
    found: list[TokenizedText] = []
    cut, rest = False, iter(texts)
    for text in rest:
        read = loaded.tokenize(text)
        most = windows - len(found)
        found += list(_windows(read, length, most))
        if len(found) == windows:
            cut = len(read.pieces) > most * length or next(rest, None) is not None
            break
    if not found:
        raise ArgumentError("ablate: there is no text with at least two tokens; give longer texts.")
    pieces = found[0].pieces * (2 if repeat else 1)
    batches = [{name: x.repeat(1, 2) if repeat else x for name, x in one.inputs.items()} for one in found]
    tokens = sum(next(iter(batch.values())).shape[1] for batch in batches)
    name = type(loaded.model).__name__
    if isinstance(loaded.model, Model) or "CausalLM" in name or "LMHead" in name:
        says = "−log p of the next token, mean" + (" over the second reading of each text" if repeat else "")
        return TextLoss(batches, _NextToken(repeat), says, True, pieces, tokens, cut)
    change = _OutputChange(loaded.model, batches)
    return TextLoss(batches, change, "relative change of the last hidden states", False, pieces, tokens, cut)


def _windows(text: TokenizedText, length: int, most: int) -> Iterator[TokenizedText]:
    for start in range(0, min(len(text.pieces), most * length), length):
        pieces = text.pieces[start : start + length]
        if len(pieces) > 1:
            inputs = {name: x[:, start : start + length] for name, x in text.inputs.items()}
            yield TokenizedText(inputs, pieces)


@dataclass(frozen=True)
class _NextToken:
    second_half: bool

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        ids = inputs["input_ids"] if "input_ids" in inputs else inputs["ids"]
        output = model(**inputs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        start = ids.shape[1] // 2 if self.second_half else 0
        return F.cross_entropy(logits[:, start:-1].flatten(0, 1).float(), ids[:, start + 1 :].flatten())


class _OutputChange:
    def __init__(self, model: nn.Module, batches: Sequence[Inputs]) -> None:
        with torch.no_grad():
            self._whole = {id(batch): _hidden(model(**batch)).clone() for batch in batches}

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        whole = self._whole[id(inputs)].float()
        return (_hidden(model(**inputs)).float() - whole).square().sum() / whole.square().sum()


def _hidden(output: Any) -> Tensor:
    """The last hidden states among what a model of transformers gives."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found
