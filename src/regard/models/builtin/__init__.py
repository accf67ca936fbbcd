"""A small trained transformer that ships with the package: a model to inspect without any download."""

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
    """Load the built-in model, or with trained=False the same model before training.

    >>> ids = torch.tensor([tokenizer().encode("Call me Ishmael.")])
    >>> load()(ids).shape == (*ids.shape, len(tokenizer()))
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed the GPU generators
        model = Model()
    if trained:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(_WEIGHTS, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                length = (file.metadata() or {}).get("trained_length")
        except (OSError, SafetensorError) as error:
            raise FileError(f"load: the weights {_WEIGHTS} are missing or damaged; reinstall regard.") from error
        model.load_state_dict({name: weight.float() for name, weight in stored.items()})
        model.trained_length = int(length) if length else None
    return model.eval()


@cache
def tokenizer() -> Tokenizer:
    """Load the tokenizer of the built-in model.

    >>> tokenizer().decode(tokenizer().encode("any text ✓"))
    'any text ✓'
    """
    return Tokenizer.from_file(_VOCABULARY)
