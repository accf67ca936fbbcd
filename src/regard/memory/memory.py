"""Memory: a content-addressable store of keys and values that is read by attention."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..core.contexts import outside_context
from ..display import block, fact_table, note
from ..errors import ArgumentError, DtypeError
from ..nn.arguments import optional_score
from ..scores import Pointwise, Score
from ..scores.base import whole
from . import arguments
from .chunk import Chunk
from .disk_store import DiskSnapshot, DiskStore, Snapshot, save_snapshot
from .in_memory_store import InMemoryStore
from .index import DTYPES, Index
from .progress import Progress, Report
from .query_batch import QueryBatch
from .reading import Reading
from .readout import progress_total, read_observed, read_output, read_top_k
from .streaming import chunk_rows_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.ranks import Ranks
    from .distributed_read import ReadRequest

__all__ = ["Memory"]


class Memory:
    """Hold keys with values, and read the mean of the values, weighted by softmax(score(query, key) / T).

    The score is q·k/√d, or one of `regard.scores`. A read of all rows is exact and takes linear memory. A low
    temperature gives the value of the nearest key, a high one the mean of all values. Gradients reach the queries, the
    parameters of the score, and the rows that were written as tensors that require a gradient. Such tensors are not
    copied, so an optimiser may update them in place.

    `save` writes a folder of any size and `Memory.open` reads it, mapping a few megabytes at a time. Rows on disk have
    no gradient; queries and the parameters of the score do, but no second derivatives.

    Threads may share a memory. Changes happen one after the other; a read sees the rows of one moment.

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
        self.score, self.dtype = optional_score("Memory", score), arguments.check_dtype("Memory", dtype)
        if isinstance(score, Pointwise):
            raise ArgumentError(
                "Memory: score depends on rows and keys by their numbers, and stored keys have none. Use another score."
            )
        self.device = torch.device("cpu" if device is None else device)
        self._store: InMemoryStore | DiskStore | None = InMemoryStore(
            self.key_dim, self.value_dim, self.dtype, self.device
        )
        self._renew_lock()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "r",
        *,
        score: Score | None = None,
        device: torch.device | str | None = None,
        part: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> Memory:
        """Open a folder that `save` wrote, to read it (any number of processes) or to append to it (one at a time).

        A reader sees the changes of a writer at its next call. The parameters of a score are not in the folder, so a
        memory that was saved with a score must be opened with one. `part=(rank, ranks)` opens one of `ranks` equal
        parts of the rows for reading; in a read over a group, the ranks together then cover the whole folder.

        Each shard is compared with its checksum when it is first read. For a memory so large that one more pass over
        it takes too long, `verify=False` leaves that to `Memory.verify`.
        """
        if mode not in ("r", "a"):
            raise ArgumentError(f"Memory.open: mode must be 'r' to read or 'a' to append. Got {mode!r}.")
        device = torch.device("cpu" if device is None else device)
        rank, ranks = arguments.check_part("Memory.open", part, mode)
        if not isinstance(verify, bool):
            raise DtypeError(f"Memory.open: verify must be True or False. Got {verify!r}.")
        folder = arguments.check_path("Memory.open", path)
        store = DiskStore(folder, mode, device, "Memory.open", (rank, ranks), verify)
        index = store.index
        if index.score is not None and score is None:
            store.close()
            raise ArgumentError(
                f"Memory.open: it was saved with a score, {index.score}, and reads would differ without it. "
                f"Pass an equal one as score=."
            )
        memory = cls(index.key_dim, index.value_dim, score, dtype=DTYPES[index.dtype], device=device)
        memory._store = store
        return memory

    def write(self, keys: Tensor, values: Tensor, ids: Tensor | Sequence[int] | None = None) -> Tensor:
        """Add rows, keys (n, key_dim) with values (n, value_dim) or one of each, and return their ids, (n,).

        Without `ids`, numbering continues after the largest id so far. On disk the rows are safe once this returns.
        That takes some milliseconds, so write many rows at a time.
        """
        who = "Memory.write"
        keys, values = arguments.check_rows(who, self, keys, values)
        new_ids = arguments.check_ids(who, ids, self.device)
        with self._lock:
            store = self._opened("write")
            if isinstance(store, DiskStore):
                arguments.check_no_gradient(who, keys, values)
            if new_ids is None:
                new_ids = torch.arange(store.next_id, store.next_id + len(keys), device=self.device)
            else:
                arguments.check_ids_are_new(who, new_ids, store, len(keys))
            if len(keys):
                store.write(keys, values, new_ids)
        return new_ids

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

    @outside_context()  # its rows are not parts of a sequence
    def read(
        self,
        queries: Tensor,
        temperature: float | Tensor = 1.0,
        top: int | None = None,
        observe: bool = False,
        progress: bool | Report | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> Tensor | Reading:
        """Average the values of all rows for queries (…, dim), or of the `top` strongest rows: (…, value_dim).

        `observe=True` returns a `Reading`: output, lse, entropy, max_logit and, with `top`, ids and weights.
        `progress` is True for a bar, a function of (done, total), or None for a bar on a terminal if the read is long.

        With a `group` of torch.distributed, every rank reads the rows of all ranks with its own queries (or none), and
        all ranks must call. Gradients reach the same tensors as without a group, and are those of the sum of all ranks'
        losses. With `top`, `Reading.ranks` says which rank holds each row, and ties go to the lower rank.

        >>> memory = Memory(1, 1)
        >>> ids = memory.write(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[5.0], [6.0], [7.0]]))
        >>> memory.read(torch.tensor([[9.0]]), top=2, observe=True).ids
        tensor([[2, 1]])
        """
        who = "Memory.read"
        if group is not None:
            from ..distributed.ranks import Ranks
            from . import distributed_read

            ranks = Ranks.of(who, group)
            reading = distributed_read.read(
                ranks, lambda: self._read_request(ranks, queries, temperature, top, observe, progress)
            ).shaped(queries.shape[:-1])
            return reading if observe else reading.output
        snapshot = self._snapshot("read")
        batch, lead = self._query_batch(queries, temperature), queries.shape[:-1]
        k = arguments.check_top(who, top, snapshot.count)
        with Progress(progress, progress_total(snapshot, batch, k)) as counter:
            if k is None and not observe:
                return read_output(snapshot, batch, self._chunk_rows, counter).reshape(*lead, self.value_dim)
            if k is None:
                reading = read_observed(snapshot, batch, self._chunk_rows, counter).shaped(lead)
            else:
                reading = read_top_k(snapshot, batch, k, self._chunk_rows, counter).shaped(lead)
        return reading if observe else reading.output

    def delete(self, ids: Tensor | Sequence[int]) -> None:
        """Delete rows by their ids."""
        old_ids = arguments.check_ids("Memory.delete", ids, self.device)
        if old_ids is None:
            raise DtypeError("Memory.delete: ids must be whole numbers in one dimension. Got None.")
        with self._lock:
            store = self._opened("delete")
            arguments.check_ids_are_held("Memory.delete", old_ids, store)
            if len(old_ids):
                store.delete(old_ids)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as a new folder, completely or not at all; this memory stays where it is."""
        with self._lock:
            snapshot, next_id = self._snapshot("save"), self._opened("save").next_id
        names = {dtype: name for name, dtype in DTYPES.items()}
        score = None if self.score is None else repr(self.score)
        index = Index(self.key_dim, self.value_dim, names[self.dtype], score, next_id)
        save_snapshot(snapshot, index, arguments.check_path("Memory.save", path))

    def compact(self) -> None:
        """Rewrite a memory on disk into a few large shards, after many deletions or writes of some megabytes."""
        with self._lock:
            store = self._opened("compact")
            if isinstance(store, DiskStore):
                store.compact()

    def verify(self) -> None:
        """Read a memory on disk completely, and raise a FileError that names the shards that are damaged, if any."""
        snapshot = self._snapshot("verify")
        if isinstance(snapshot, DiskSnapshot):
            snapshot.verify("Memory.verify")

    def close(self) -> None:
        """Allow another process to write, and release the rows."""
        with self._lock:
            if isinstance(self._store, DiskStore):
                self._store.close()
            self._store = None

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        with self._lock:
            return self._opened("len").count

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over the rows in the order of writing, some thousands at a time: (keys, values, ids)."""
        for chunk, _ in self._snapshot("iter").chunks(self._chunk_rows):
            yield chunk

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renew_lock()

    def __repr__(self) -> str:
        with self._lock:
            if self._store is None:
                return "Memory(closed)"
            where = f"on disk at {self._store.path}" if isinstance(self._store, DiskStore) else "in memory"
            count = self._store.count
        score = "" if self.score is None else f"{self.score!r}, "
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Memory({count} rows, key_dim={self.key_dim}, value_dim={self.value_dim}, {score}{dtype}, {where})"

    def _repr_html_(self) -> str:
        with self._lock:
            if self._store is None:
                return block("Memory", note("it is closed; Memory.open(path) opens it again"))
            where = f"on disk at {self._store.path}" if isinstance(self._store, DiskStore) else "in memory"
            rows = self._store.count
        facts = {
            "rows": f"{rows:,}",
            "keys": f"{self.key_dim} numbers each",
            "values": f"{self.value_dim} numbers each",
            "score": "q·k/√d" if self.score is None else repr(self.score),
            "dtype": str(self.dtype).removeprefix("torch."),
            "size": f"{rows * self._row_bytes:,} bytes {where}",
        }
        return block("Memory", fact_table(facts))

    def _opened(self, what: str) -> InMemoryStore | DiskStore:
        if self._store is None:
            raise ArgumentError(f"Memory.{what}: it is closed. Open it again with Memory.open(path).")
        return self._store

    def _snapshot(self, what: str) -> Snapshot:
        with self._lock:
            return self._opened(what).snapshot()

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()
        _MEMORIES.add(self)

    def _query_batch(self, queries: Tensor, temperature: float | Tensor) -> QueryBatch:
        arguments.check_queries("Memory.read", self, queries)
        divisor = arguments.check_temperature("Memory.read", temperature, self.device)
        return QueryBatch(queries.reshape(-1, queries.shape[-1]), self.score, divisor)

    def _read_request(
        self,
        ranks: Ranks,
        queries: Tensor,
        temperature: float | Tensor,
        top: int | None,
        observe: bool,
        progress: bool | Report | None,
    ) -> ReadRequest:
        """Check the arguments of a read over a group, and build this rank's request."""
        from .distributed_read import ReadRequest

        batch = self._query_batch(queries, temperature)
        k = arguments.check_top("Memory.read", top)
        Progress(progress, 0)  # raises if `progress` is invalid
        with self._lock:
            store, snapshot, state = self._opened("read"), self._snapshot("read"), "each rank's own"
            if isinstance(store, DiskStore) and store.part != (0, 1):
                arguments.check_part_of_rank("Memory.read", store.part, ranks.rank, ranks.count)
                state = f"the same folder with {store.fingerprint}"
        return ReadRequest(snapshot, batch, k, observe, self._chunk_rows, self.value_dim, progress, state)

    @property
    def _row_bytes(self) -> int:
        return (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def _chunk_rows(self) -> int:
        return chunk_rows_for(self._row_bytes)


def _renew_locks() -> None:
    """Give a forked child locks that nobody holds: the threads that may have held them exist in its parent only."""
    for memory in list(_MEMORIES):
        memory._renew_lock()


_MEMORIES: weakref.WeakSet[Memory] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
