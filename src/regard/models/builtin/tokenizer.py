"""The tokenizer of the built-in model: byte-pair encoding, for any text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from ...errors import ArgumentError, DtypeError, FileError

__all__ = ["Tokenizer", "words"]

_BYTES = 256
# Every character matches one of these; a word includes the space before it. The length limits keep encoding linear:
# pairs are merged only within a word.
_WORD = re.compile(
    r"'(?:[sdmt]|ll|re|ve)(?!\w)"
    r"| ?[^\W\d_]{1,32}"
    r"| ?\d{1,3}"
    r"| ?(?:[^\w\s]|_){1,32}"
    r"|\s{1,16}(?!\S)"
    r"|\s{1,16}"
)


def words(text: str) -> list[bytes]:
    """Split `text` into the words within which bytes are merged; half of a surrogate pair becomes U+FFFD.

    >>> words("It's 1851, Ishmael.")
    [b'It', b"'s", b' 185', b'1', b',', b' Ishmael', b'.']
    """
    valid = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return [word.encode() for word in _WORD.findall(valid)]


class Tokenizer:
    """Turns text into tokens and back: 256 bytes, and one more token for each merged pair of tokens.

    >>> tokenizer = Tokenizer([(ord("a"), ord("b")), (256, ord("c"))])
    >>> tokenizer.encode("abcab")
    [257, 256]
    >>> tokenizer.decode([257, 256]), tokenizer.pieces([257, 256]), len(tokenizer)
    ('abcab', ['abc', 'ab'], 258)
    """

    def __init__(self, merges: Iterable[Sequence[int]]) -> None:
        self._bytes = [bytes([value]) for value in range(_BYTES)]
        self._merged: dict[tuple[int, int], int] = {}
        for first, second in merges:
            if not (0 <= first < len(self) and 0 <= second < len(self)):
                raise ArgumentError(
                    f"Tokenizer: a merge must join two existing tokens, below {len(self)}. Got ({first}, {second})."
                )
            self._merged[first, second] = len(self)
            self._bytes.append(self._bytes[first] + self._bytes[second])
        self._tokens_of = lru_cache(maxsize=1 << 14)(self._merge)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read the merges from a JSON file, {"merges": [[first, second], …]}."""
        try:
            merges = json.loads(Path(path).read_text(encoding="utf-8"))["merges"]
        except OSError as error:
            raise FileError(f"Tokenizer: the vocabulary {path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                f'Tokenizer: {path} is not a vocabulary; it must be JSON with a list of "merges".'
            ) from error
        return cls(merges)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._bytes)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens)"

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; half of a surrogate pair, which UTF-8 text never has, becomes U+FFFD."""
        if not isinstance(text, str):
            raise DtypeError(f"encode: text must be a string. Got {type(text).__name__}.")
        return [token for word in words(text) for token in self._tokens_of(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes_of("decode", ids)).decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        r"""The text of each token; bytes that are only part of a character are shown as \x..

        >>> Tokenizer([]).pieces("né".encode())
        ['n', '\\xc3', '\\xa9']
        """
        return [piece.decode("utf-8", "backslashreplace") for piece in self._bytes_of("pieces", ids)]

    def _bytes_of(self, who: str, ids: Iterable[int]) -> list[bytes]:
        found = []
        for token in map(int, ids):
            if not 0 <= token < len(self):
                raise ArgumentError(f"{who}: a token must be from 0 to {len(self) - 1}. Got {token}.")
            found.append(self._bytes[token])
        return found

    def _merge(self, word: bytes) -> tuple[int, ...]:
        """Merge the pair that was learned first until none is left."""
        tokens = list(word)
        while True:
            pairs = [(self._merged.get(pair, len(self)), at) for at, pair in enumerate(pairwise(tokens))]
            merged, at = min(pairs, default=(len(self), 0))
            if merged == len(self):
                return tuple(tokens)
            tokens[at : at + 2] = [merged]
