"""Word vectors for illustrations: two sentences with vectors made by hand, and any word by its letters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SOURCE", "TARGET", "hashed", "known"]

SOURCE = ("the", "black", "cat", "often", "wants", "cold", "milk")
TARGET = ("le", "chat", "noir", "veut", "souvent", "du", "lait", "froid")

# Made by hand so that the picture is easy to read, and therefore evidence of nothing: a word's meaning weighs 3, its
# part of speech 1.8, and "du" has no English counterpart. `regard.lab` has an alignment that is learned.
_SPEECH = {
    "article": {"the": "definite", "le": "definite"},
    "adjective": {"black": "black", "cold": "cold", "noir": "black", "froid": "cold"},
    "noun": {"cat": "cat", "milk": "milk", "chat": "cat", "lait": "milk"},
    "verb": {"wants": "want", "veut": "want"},
    "adverb": {"often": "often", "souvent": "often"},
}
_MEANINGS = {
    **{word: {meaning: 3.0, part: 1.8} for part, words in _SPEECH.items() for word, meaning in words.items()},
    "du": {"article": 2.0, "milk": 1.0},
}
_FEATURES = tuple(sorted({feature for meaning in _MEANINGS.values() for feature in meaning}))


def known(words: Sequence[str]) -> Tensor:
    """Embed words of the built-in example by hand: one row per word, one column per meaning or part of speech.

    >>> known(["cat", "chat"]).shape
    torch.Size([2, 12])
    >>> bool((known(["cat"]) == known(["chat"])).all())
    True
    """
    return torch.tensor([[_MEANINGS[word].get(feature, 0.0) for feature in _FEATURES] for word in words], device="cpu")


def hashed(words: Sequence[str], dim: int = 256, sharpness: float = 6.0) -> Tensor:
    """Embed any words by the letters they share: each n-gram of 2 to 4 characters adds ±1 at a hashed index.

    A word's logit with itself, q·k / √dim, is `sharpness`; words that share no n-gram are near 0.

    >>> light, lights, dark = hashed(["light", "lights", "dark"]) / 256**0.25
    >>> round(float(light @ light), 3)
    6.0
    >>> bool(light @ lights > 3.0 > 1.5 > light @ dark)
    True
    """
    rows = torch.zeros(len(words), dim, device="cpu")
    for row, word in zip(rows, words, strict=True):
        for ngram in _ngrams(word):
            digest = int.from_bytes(hashlib.blake2b(ngram.encode("utf-8", "surrogatepass"), digest_size=8).digest())
            row[(digest >> 1) % dim] += 1.0 if digest & 1 else -1.0
    length = math.sqrt(sharpness * math.sqrt(dim))
    return torch.nn.functional.normalize(rows, dim=-1) * length


def _ngrams(word: str) -> list[str]:
    marked = f"<{word.casefold()}>"
    return [marked[start : start + size] for size in (2, 3, 4) for start in range(len(marked) - size + 1)]
