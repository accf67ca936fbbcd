"""Census: what the heads of a model do over a whole corpus. Merge, save, load, compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ArgumentError, MissingPackageError
from .counted_heads import CountedHeads
from .difference import CensusDifference, compare
from .folder import STATE_FILE, save
from .state import read_state

if TYPE_CHECKING:
    import pandas

__all__ = ["Census"]


class Census(CountedHeads):
    """What every head of a model does over a corpus. Merge, save, load, compare; never holds an n × n matrix.

    >>> import torch, regard
    >>> model = regard.models.builtin.load()
    >>> tokenizer = regard.models.builtin.tokenizer()
    >>> ids = torch.tensor([tokenizer.encode("one two three, one two three, one two three" * 4)])
    >>> found = regard.models.census(model, [ids], pieces=tokenizer.pieces)
    >>> found
    Census(Model: 4 layers, 32 heads, 56 tokens)
    >>> found.head(3, 0).induction.mean > 0.3
    True
    """

    def __repr__(self) -> str:
        counts = f"{len(self.layers)} layers, {len(self.heads)} heads, {self.tokens:,} tokens"
        return f"Census({self.title}: {counts})"

    def merge(self, other: Census) -> Census:
        """Both together, as if one census had counted both corpora; the order does not matter."""
        if not isinstance(other, Census):
            raise ArgumentError(f"merge: the argument must be another Census. Got {type(other).__name__}.")
        return Census(self.state.merged(other.state))

    def diff(self, other: Census) -> CensusDifference:
        """Which heads moved: `other` compared with this, such as a model after fine-tuning with the one before."""
        if not isinstance(other, Census):
            raise ArgumentError(f"diff: the argument must be another Census. Got {type(other).__name__}.")
        return compare(self, other)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a folder that opens offline in a browser (index.html) and that `load` reads, whole or not at all."""
        return save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Census:
        """Read a census that `save` wrote."""
        return cls(read_state(Path(folder) / STATE_FILE, "load"))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head: the mean and deciles 1, 5 and 9 of each statistic, and the head's group."""
        try:
            import pandas
        except ImportError as missing:
            raise MissingPackageError("to_pandas: it needs the package pandas: pip install pandas.") from missing
        return pandas.DataFrame(self.rows())
