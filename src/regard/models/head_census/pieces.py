"""The texts of token ids, and their classes: beginnings of words, numbers, punctuation, special tokens, and others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from ...errors import ArgumentError, DtypeError

__all__ = ["CLASSES", "Pieces"]

CLASSES = ("special", "word", "continuation", "number", "punctuation", "space", "other", "unknown")
"""Token classes: a word's first token and its later ones, and so on; unknown if nobody gave the texts of the ids."""

_CODE = {name: code for code, name in enumerate(CLASSES)}


class Pieces:
    """The text of each token id: a token that begins a word begins with a space.

    >>> pieces = Pieces(lambda ids: [["[CLS]", " the", "re", " 7", ","][i] for i in ids], special=[0])
    >>> [CLASSES[code] for code in pieces.classes(np.array([0, 1, 2, 3, 4]))]
    ['special', 'word', 'continuation', 'number', 'punctuation']
    """

    def __init__(
        self, texts: Callable[[Sequence[int]], Sequence[str]] | None = None, special: Collection[int] = ()
    ) -> None:
        self._texts, self._special = texts, frozenset(special)
        self._known: dict[int, str] = {}
        self._codes = np.full(0, -1, dtype=np.int64)

    @property
    def given(self) -> bool:
        """Whether there are texts at all."""
        return self._texts is not None

    def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """The text of each of these ids; empty if there are none."""
        if self._texts is None:
            return {}
        wanted = [token for token in dict.fromkeys(ids) if token not in self._known]
        if wanted:
            found = self._texts(wanted)
            if isinstance(found, str) or len(found) != len(wanted):
                raise ArgumentError(
                    "census: pieces must return one text per token id, as a list. "
                    f"Got {type(found).__name__} of length {len(found)} for {len(wanted)} ids."
                )
            other = next((text for text in found if not isinstance(text, str)), None)
            if other is not None:
                raise DtypeError(f"census: pieces must return strings. Got {type(other).__name__}.")
            self._known.update(zip(wanted, found, strict=True))
        return {token: self._known[token] for token in ids}

    def classes(self, ids: np.ndarray) -> np.ndarray:
        """The class of each id, as an index into `CLASSES`."""
        if self._texts is None:
            return np.full(ids.shape, _CODE["unknown"])
        most = int(ids.max(initial=-1))
        if most >= len(self._codes):
            self._codes = np.pad(self._codes, (0, most + 1 - len(self._codes)), constant_values=-1)
        new = np.unique(ids[self._codes[ids] < 0])
        for token, text in self.texts(new.tolist()).items():
            self._codes[token] = _CODE["special"] if token in self._special else _CODE[_class(text)]
        found: np.ndarray = self._codes[ids]
        return found


def _class(text: str) -> str:
    """The class of a token's text."""
    inner = text.strip()
    if not inner:
        return "space"
    if any(c.isalpha() for c in inner):
        return "word" if text[0].isspace() else "continuation"
    if any(c.isdigit() for c in inner):
        return "number"
    return "punctuation" if all(not c.isalnum() for c in inner) and "�" not in inner else "other"
