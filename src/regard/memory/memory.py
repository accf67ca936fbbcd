"""A content-addressable memory: attention whose keys and values stay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from ..core.contexts import outside_context
from ..errors import ArgumentError, DtypeError
from ..nn.arguments import optional_score
from ..scores import Score
from ..scores.base import whole
from . import arguments
from . import readout as answers
from . import streaming as stream
from .disk_store import Store, save
from .in_memory_store import Held
from .index import DTYPES, Index
from .progress import Progress, Report
from .reading import Asked, Reading
from .snapshot import Chunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.ranks import Ranks
    from .distributed_read import Question

__all__ = ["Memory"]

_SHARD = 1 << 26  # bytes of a shard that save and compact write


class Memory:
    """Hold keys with values, and read them by likeness: an average weighted by softmax(score(query, key) / T).

    The score is q·k/√d, or one of `regard.scores`. A read over everything is exact, in linear memory; as the
    temperature falls it tends to the value of the nearest key, as it rises to the mean of all values. Gradients reach
    queries, the score's parameters, and the rows that were written as tensors that require one: these are held as they
    are, so that a step of an optimiser on them is seen.

    `save` writes a folder and `Memory.open` reads it, however large: rows are mapped a few megabytes at a time. There,
    gradients reach queries and the score's parameters, once; what is on disk has none.

    >>> import torch, regard
    >>> memory = Memory(key_dim=2, value_dim=1)
    >>> memory.write(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[10.0], [20.0]]))
    tensor([0, 1])
    >>> memory.read(torch.tensor([5.0, 0.0]), temperature=0.1)
    tensor([10.])
    >>> memory
    Memory(2 rows, key_dim=2, value_dim=1, float32, in memory)
    """

    def __init__(
        self,
        key_dim: int,
        value_dim: int,
        score: Score | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.key_dim, self.value_dim = whole("Memory", "key_dim", key_dim), whole("Memory", "value_dim", value_dim)
        self.score, self.dtype = optional_score("Memory", score), arguments.floating("Memory", dtype)
        self.device = torch.device("cpu" if device is None else device)
        self._rows: Held | Store | None = Held(self.key_dim, self.value_dim, self.dtype, self.device)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "r",
        *,
        score: Score | None = None,
        device: torch.device | str | None = None,
        part: tuple[int, int] | None = None,
    ) -> Memory:
        """Open what `save` wrote, to read it (as many as like) or to append to it (one at a time).

        A reader sees what the writer has done with its next call. A score's parameters are not in the folder: a memory
        that was saved with a score is opened with one. `part=(rank, ranks)` opens one of so many equal parts of the
        rows, to read: with a group, the ranks then answer for the whole folder.
        """
        if mode not in ("r", "a"):
            raise ArgumentError(f"Memory.open: mode must be 'r' to read or 'a' to append. Got {mode!r}.")
        place = torch.device("cpu" if device is None else device)
        share = arguments.part("Memory.open", part, mode)
        store = Store(arguments.path("Memory.open", path), mode, place, "Memory.open", share)
        index = store.index
        if index.score is not None and score is None:
            store.close()
            raise ArgumentError(
                f"Memory.open: it was saved with a score, {index.score}, and would read otherwise without. "
                f"Give one like it as score=."
            )
        memory = cls(index.key_dim, index.value_dim, score, dtype=DTYPES[index.dtype], device=place)
        memory._rows = store
        return memory

    def write(self, keys: Tensor, values: Tensor, ids: Tensor | Sequence[int] | None = None) -> Tensor:
        """Add rows, keys (n, key_dim) with values (n, value_dim) or one of each, and give their ids, (n,).

        Without `ids` they are numbered on. On disk the rows are safe once this returns; write many at a time, as each
        write makes a file.
        """
        rows = self._open("write")
        who = "Memory.write"
        keys, values = arguments.rows(who, self, keys, values)
        if isinstance(rows, Store):
            arguments.graphless(who, keys, values)
        given = arguments.ids(who, ids, self.device)
        if given is None:
            given = torch.arange(rows.next_id, rows.next_id + len(keys), device=self.device)
        else:
            arguments.new(who, given, rows, len(keys))
        if len(keys):
            rows.write(keys, values, given)
        return given

    @overload
    def read(
        self,
        queries: Tensor,
        temperature: float | Tensor = 1.0,
        top: int | None = None,
        observe: Literal[False] = False,
        progress: bool | Report | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> Tensor: ...

    @overload
    def read(
        self,
        queries: Tensor,
        temperature: float | Tensor = 1.0,
        top: int | None = None,
        *,
        observe: Literal[True],
        progress: bool | Report | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> Reading: ...

    @outside_context()  # its rows are no parts of a sequence, whatever the context
    def read(
        self,
        queries: Tensor,
        temperature: float | Tensor = 1.0,
        top: int | None = None,
        observe: bool = False,
        progress: bool | Report | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> Tensor | Reading:
        """Average the values of all rows for queries (…, dim), or of the `top` strongest: (…, value_dim).

        `observe=True` gives a `Reading` instead: output, lse, entropy, max_logit and, with `top`, ids and weights.
        `progress` is True for a bar, a function of (done, total), or None: a bar on a terminal, on long reads.

        With a `group` of torch.distributed every rank asks its own queries (or none) of the rows of all ranks, and all
        ranks must call. A gradient reaches what one without a group does, as that of the sum of all ranks' losses;
        `Reading.ranks` tells with `top` who holds which row, and ties go to the lower rank.

        >>> memory = Memory(1, 1)
        >>> ids = memory.write(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[5.0], [6.0], [7.0]]))
        >>> memory.read(torch.tensor([[9.0]]), top=2, observe=True).ids
        tensor([[2, 1]])
        """
        who = "Memory.read"
        if group is not None:
            from ..distributed.ranks import Ranks
            from . import distributed_read as over

            ranks = Ranks.of(who, group)
            found = over.read(ranks, lambda: self._question(ranks, queries, temperature, top, observe, progress))
            return found.shaped(queries.shape[:-1]) if observe else found.shaped(queries.shape[:-1]).output
        rows = self._open("read")
        asked, lead = self._asked(queries, temperature), queries.shape[:-1]
        source = rows.snapshot()
        k = arguments.top(who, top, source.count)
        with Progress(progress, answers.steps(source, asked, k)) as seen:
            if k is None and not observe:
                return answers.averaged(source, asked, self._chunk, seen).reshape(*lead, self.value_dim)
            if k is None:
                found = answers.observed(source, asked, self._chunk, seen)
            else:
                found = answers.of_strongest(source, asked, k, self._chunk, seen)
        return found.shaped(lead) if observe else found.shaped(lead).output

    def delete(self, ids: Tensor | Sequence[int]) -> None:
        """Take rows out, by their ids."""
        rows = self._open("delete")
        given = arguments.ids("Memory.delete", ids, self.device)
        if given is None:
            raise DtypeError("Memory.delete: ids must be whole numbers in one dimension. Got None.")
        arguments.known("Memory.delete", given, rows)
        if len(given):
            rows.delete(given)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as a new folder, whole or not at all; this memory stays where it is."""
        rows = self._open("save")
        names = {dtype: name for name, dtype in DTYPES.items()}
        score = None if self.score is None else repr(self.score)
        index = Index(self.key_dim, self.value_dim, names[self.dtype], score, next_id=rows.next_id)
        save(rows.snapshot(), index, arguments.path("Memory.save", path), self._shard_rows)

    def compact(self) -> None:
        """Write what is left into few large shards, after many small writes or deletions; a memory on disk only."""
        rows = self._open("compact")
        if isinstance(rows, Store):
            rows.compact(self._shard_rows)

    def close(self) -> None:
        """Let another process write, and forget the rows."""
        if isinstance(self._rows, Store):
            self._rows.close()
        self._rows = None

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return self._open("len").count

    def __iter__(self) -> Iterator[Chunk]:
        """Go through the rows in the order of writing, some thousands at a time: (keys, values, ids)."""
        for chunk, _ in self._open("iter").snapshot().chunks(self._chunk):
            yield chunk

    def __repr__(self) -> str:
        if self._rows is None:
            return "Memory(closed)"
        where = f"on disk at {self._rows.folder}" if isinstance(self._rows, Store) else "in memory"
        score = "" if self.score is None else f"{self.score!r}, "
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Memory({len(self)} rows, key_dim={self.key_dim}, value_dim={self.value_dim}, {score}{dtype}, {where})"

    def _open(self, what: str) -> Held | Store:
        if self._rows is None:
            raise ArgumentError(f"Memory.{what}: it is closed. Open it again with Memory.open(path).")
        return self._rows

    def _asked(self, queries: Tensor, temperature: float | Tensor) -> Asked:
        arguments.queries("Memory.read", self, queries)
        divisor = arguments.temperature("Memory.read", temperature, self.device)
        return Asked(queries.reshape(-1, queries.shape[-1]), self.score, divisor)

    def _question(
        self,
        ranks: Ranks,
        queries: Tensor,
        temperature: float | Tensor,
        top: int | None,
        observe: bool,
        progress: bool | Report | None,
    ) -> Question:
        """What this rank says in a read over a group; it raises about its arguments here."""
        from .distributed_read import Question

        rows, asked = self._open("read"), self._asked(queries, temperature)
        k = arguments.top("Memory.read", top)
        Progress(progress, 0)
        source, state = rows.snapshot(), "each rank's own"
        if isinstance(rows, Store) and rows.part != (0, 1):
            arguments.part_of("Memory.read", rows.part, (ranks.rank, ranks.count))
            state = f"the same folder with {rows.state}"
        return Question(source, asked, k, observe, self._chunk, self.value_dim, progress, state)

    @property
    def _row_bytes(self) -> int:
        return (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def _chunk(self) -> int:
        return stream.chunk_rows(self._row_bytes)

    @property
    def _shard_rows(self) -> int:
        return max(_SHARD // self._row_bytes, 1)
