"""A small trained transformer that comes with the package: something to look at without any download."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from ...errors import FileError
from .model import Model
from .tokenizer import Tokenizer

__all__ = ["Model", "Tokenizer", "load", "tokenizer"]

_WEIGHTS = Path(__file__).with_name("weights.safetensors")
_VOCABULARY = Path(__file__).with_name("vocabulary.json")


def load(trained: bool = True) -> Model:
    """Give the built-in model, or with trained=False the same one as it was before training.

    >>> ids = torch.tensor([tokenizer().encode("Call me Ishmael.")])
    >>> load()(ids).shape == (*ids.shape, len(tokenizer()))
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would touch the generators of GPUs too
        model = Model()
    if trained:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            stored = load_file(_WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise FileError(
                f"load: the weights {_WEIGHTS} are not there, or not whole; install regard anew."
            ) from error
        model.load_state_dict({name: weight.float() for name, weight in stored.items()})
    return model.eval()


@cache
def tokenizer() -> Tokenizer:
    """Give the tokenizer of the built-in model.

    >>> tokenizer().decode(tokenizer().encode("any text ✓"))
    'any text ✓'
    """
    return Tokenizer.from_file(_VOCABULARY)
