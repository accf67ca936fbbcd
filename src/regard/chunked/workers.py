"""Strips side by side: each thread of a pool takes one strip at a time, and its operations use no other thread.

BLAS libraries split sums among their threads, so their bits depend on how many there are. Here an operation never has
more than one thread, and strips that add to the same keys do so in the order of the strips: the bits are the same
whatever `torch.get_num_threads()` is. Where torch keeps state per thread that the pool would lack (transforms,
dispatch modes, a profiler), and where a function of the user is called, strips are computed one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import has_thread_state
from ..core.folded import FoldedProblem
from ..core.tiling import KeyRun, Strip, TileSizes, strips
from ..masks import Mask
from ..masks.predicate import Predicate
from .tile_ops import Workspace

__all__ = ["Turn", "for_each_strip"]

_MOST = 32  # threads: more would wait for the interpreter's lock
_WORTHWHILE = 2**15  # logits of a strip: fewer take less time than handing them to a thread
_ONE_THREAD_KEYS = 128  # BLAS libraries do not split a sum over fewer keys


class Turn:
    """A strip's place in the order in which strips add to keys that they share."""

    def wait(self, run: KeyRun) -> None:
        """Wait until earlier strips have added to these keys."""

    def done(self, run: KeyRun) -> None:
        """Let later strips add to these keys."""


Work = Callable[[Strip, Workspace, Turn], None]


def for_each_strip(x: FoldedProblem, tile_sizes: TileSizes, work: Work, together: bool = True) -> None:
    """Call `work` for every strip that sees a key; side by side if `together` and if that pays."""
    sizes = tile_sizes.per_thread if x.query.device.type == "cpu" else tile_sizes
    found = [strip for strip in strips(x.spec, x.query.shape, sizes) if strip.runs]
    threads = _threads(x) if together else 1
    if threads > 1:
        groups = x.query.shape[2]
        large = any(_logits(strip, groups) >= _WORTHWHILE for strip in found)
        workers = min(threads, len(found)) if large else 1
        if (workers > 1 or any(map(_may_be_split, found))) and _run(found, work, threads, workers):
            return
    workspace, turn = Workspace(), Turn()
    for strip in found:
        work(strip, workspace, turn)


def _logits(strip: Strip, groups: int) -> int:
    """How many logits the largest tile of a strip has."""
    return (
        _matrices(strip)
        * groups
        * (strip.rows.stop - strip.rows.start)
        * max(run.stop - run.start for run in strip.runs)
    )


def _matrices(strip: Strip) -> int:
    return (strip.batch.stop - strip.batch.start) * (strip.heads.stop - strip.heads.start)


def _may_be_split(strip: Strip) -> bool:
    """Whether the bits of a product may depend on the number of threads: with several matrices, each has one thread."""
    return _matrices(strip) == 1 and any(run.stop - run.start > _ONE_THREAD_KEYS for run in strip.runs)


def _threads(x: FoldedProblem) -> int:
    """How many strips may be computed at once."""
    tensors = (x.query, x.key, x.value, x.bias, *x.shared)
    plain = all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu") for t in tensors)
    if not plain or x.spec.pair is not None or _asks_the_user(x.spec.mask) or hasattr(_LOCAL, "worker"):
        return 1
    return 1 if has_thread_state() else min(torch.get_num_threads(), _MOST)


def _asks_the_user(mask: Mask | None) -> bool:
    """Whether a function of the user decides the mask: it is called in the thread of the call."""
    if mask is None or isinstance(mask, Predicate):
        return mask is not None
    parts = (getattr(mask, name, None) for name in mask.__dataclass_fields__)
    return any(_asks_the_user(part) for part in parts if isinstance(part, Mask))


class _StoppedError(Exception):
    """Another strip failed, or the call was interrupted."""


class _Queue:
    """Strips in their order, for several threads; the strips in progress, and where each of them is."""

    def __init__(self, found: Sequence[Strip], work: Work) -> None:
        self._strips = enumerate(found)
        self._work = work
        self._changed = threading.Condition()
        self._active: dict[int, _Place] = {}
        self._inference = torch.is_inference_mode_enabled()
        self._shared = Workspace()
        self._stopped = False
        self.failed: tuple[int, BaseException] | None = None  # the first strip that failed

    def drain(self) -> None:
        """Compute strips until none is left."""
        workspace = Workspace(self._shared)
        with torch.inference_mode(self._inference), torch.no_grad():
            while (place := self._take()) is not None:
                try:
                    self._work(place.strip, workspace, place)
                except _StoppedError:
                    pass
                except BaseException as error:  # noqa: BLE001  (raised again in the thread of the call)
                    self._fail(place.index, error)
                finally:
                    self._leave(place)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _take(self) -> _Place | None:
        with self._changed:
            index, strip = (0, None) if self._stopped else next(self._strips, (0, None))
            if strip is None:
                return None
            place = self._active[index] = _Place(self, index, strip)
            return place

    def _fail(self, index: int, error: BaseException) -> None:
        with self._changed:
            if self.failed is None or index < self.failed[0]:
                self.failed = index, error
        self.stop()

    def _leave(self, place: _Place) -> None:
        with self._changed:
            del self._active[place.index]
            self._changed.notify_all()

    def wait(self, place: _Place, run: KeyRun) -> None:
        with self._changed:
            while any(other.precedes(place, run) for other in self._active.values()):
                if self._stopped:
                    raise _StoppedError
                self._changed.wait()

    def move(self, place: _Place, run: KeyRun) -> None:
        with self._changed:
            place.key = run.stop
            self._changed.notify_all()


class _Place(Turn):
    """A strip in progress, and the key up to which it has added."""

    def __init__(self, queue: _Queue, index: int, strip: Strip) -> None:
        self.queue, self.index, self.strip = queue, index, strip
        self.key = strip.runs[0].start

    def precedes(self, other: _Place, run: KeyRun) -> bool:
        """Whether this strip has yet to add to keys of a later strip's run."""
        return (
            self.index < other.index
            and self.key < run.stop
            and run.start < self.strip.runs[-1].stop
            and _overlap(self.strip.batch, other.strip.batch)
            and _overlap(self.strip.heads, other.strip.heads)
        )

    def wait(self, run: KeyRun) -> None:
        self.queue.wait(self, run)

    def done(self, run: KeyRun) -> None:
        self.queue.move(self, run)


def _overlap(a: slice, b: slice) -> bool:
    return bool(a.start < b.stop and b.start < a.stop)


def _run(found: Sequence[Strip], work: Work, threads: int, workers: int) -> bool:
    """Compute strips in threads of the pool; False if there is no pool, as when the interpreter shuts down."""
    queue = _Queue(found, work)
    running: list[Future[None]] = []
    try:
        pool = _pool(threads)
        running += (pool.submit(queue.drain) for _ in range(workers))
    except RuntimeError:  # no new threads
        if not running:
            return False
    try:
        wait(running)
    except BaseException:
        queue.stop()
        wait(running)  # they write to tensors of this call
        raise
    if queue.failed is not None:
        raise queue.failed[1]
    return True


_LOCAL = threading.local()
_LOCK = threading.Lock()
_POOLS: dict[str, Any] = {}  # the pool, and how many threads it has


def _pool(threads: int) -> ThreadPoolExecutor:
    """The pool, with at least so many threads. A pool that is replaced ends its threads when it is no longer used."""
    with _LOCK:
        if _POOLS.get("threads", 0) < threads:
            _POOLS.update(pool=_started(threads), threads=threads)
        pool: ThreadPoolExecutor = _POOLS["pool"]
        return pool


def _started(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads have started."""
    inherited: list[int] = []
    _in_a_thread(lambda: inherited.append(torch.get_num_threads()))
    pool = ThreadPoolExecutor(threads, "regard", _use_no_other_thread)
    all_there = threading.Barrier(threads)
    wait([pool.submit(all_there.wait) for _ in range(threads)])
    # torch remembers the number that was set last for threads that start later, so it is set again.
    _in_a_thread(lambda: torch.set_num_threads(*inherited))
    return pool


def _use_no_other_thread() -> None:
    torch.set_num_threads(1)
    _LOCAL.worker = True


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _forget_the_pool() -> None:
    """A forked process has no thread but its own."""
    global _LOCK
    _LOCK = threading.Lock()
    _POOLS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_pool)
