"""Run Gluon kernels for Hopper in Python, without a GPU: their numbers, their barriers and their hazards.

Each partition of `warp_specialize` is a thread. Some programs run side by side, and they begin in the order of their
numbers. One thread runs at a time, and at every barrier chance decides which, from a seed. A tile is an
array of numpy, whatever its layout. What the chip does later is done as late as the kernel allows: a product reads
shared memory when it is waited for, and a TMA store at `store_wait`. What the chip may do early is done at once: a TMA
load. So a buffer that is handed on too soon gives wrong numbers, a barrier that nobody completes is a `Deadlock`, and a
product that is used before its wait raises. New shared memory holds NaN. Fences and the barriers within a group are
taken for granted: what a warp writes, the others of its group see at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gluon_tiles import (
    ARITHMETIC,
    BF16,
    FP16,
    FP32,
    INT32,
    TORCH,
    Array,
    Dtype,
    Pointer,
    Tile,
    pointer,
    tile,
    unary,
    where,
)
from regard.kernels import launch
from regard.kernels.hopper import (
    backward_192,
    backward_launch,
    backward_wide,
    chosen_launch,
    dq_semaphore,
    forward_launch,
    jvp_launch,
    ptx,
    statistics_launch,
)

__all__ = ["HOPPER", "Deadlock", "Interpreted", "in_python", "run_hopper_kernels"]


class Deadlock(Exception):  # noqa: N818
    """All partitions wait."""


class Descriptor:
    """A TMA descriptor: what is outside of the tensor reads as 0, and is not written."""

    layout = None

    def __init__(self, host: Any) -> None:
        x = host.base
        self.dtype, self.block_shape = TORCH[x.dtype], list(host.block_shape)
        x = x.detach().as_strided(host.shape, host.strides)
        self.memory = (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()

    def _inside(self, coordinates: Sequence[Any]) -> tuple[Any, Any]:
        """The places of a block that are in the tensor: there, and in the block."""
        first = [int(c) for c in coordinates]
        ends = [
            min(at + size, length) for at, size, length in zip(first, self.block_shape, self.memory.shape, strict=True)
        ]
        there = tuple(slice(max(at, 0), max(end, 0)) for at, end in zip(first, ends, strict=True))
        return there, tuple(
            slice(s.start - at, max(s.stop - at, s.start - at)) for s, at in zip(there, first, strict=True)
        )

    def load(self, coordinates: Sequence[Any], into: Shared) -> int:
        assert list(into.x.shape) == self.block_shape
        there, here = self._inside(coordinates)
        into.x[...] = 0
        into.x[here] = self.memory[there]
        return int(into.x.nbytes)

    def store(self, coordinates: Sequence[Any], block: Shared, add: bool) -> None:
        there, here = self._inside(coordinates)
        self.memory[there] = self.memory[there] + block.x[here] if add else block.x[here]


class Shared:
    """A block of shared memory."""

    def __init__(self, x: Array, dtype: Dtype) -> None:
        self.x, self.dtype = x, dtype

    shape = property(lambda self: list(self.x.shape))

    def _view(self, x: Array) -> Shared:
        assert x.size == 0 or np.shares_memory(x, self.x), "shared memory is not copied"
        return Shared(x, self.dtype)

    def index(self, at: Any) -> Shared:
        assert 0 <= int(at) < len(self.x), "a buffer outside of shared memory"
        return self._view(self.x[int(at)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        assert 0 <= int(start) <= self.x.shape[dim] - length
        return self._view(self.x[(slice(None),) * dim + (slice(int(start), int(start) + length),)])

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.x.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(self.x.reshape(shape))

    def load(self, layout: Any = None) -> Tile:
        return Tile(self.dtype.decode(self.x.copy()), self.dtype)

    def store(self, x: Tile) -> None:
        assert x.shape == self.shape, f"{x.shape} does not fit into {self.shape}"
        self.x[...] = self.dtype.encode(x.x)


class Blocks:
    """Blocks of shared memory that a number chooses."""

    def __init__(self, blocks: list[Shared]) -> None:
        self.blocks, self.shape = blocks, [len(blocks), *blocks[0].shape]

    def index(self, at: Any) -> Shared:
        assert 0 <= int(at) < len(self.blocks), "a block outside of shared memory"
        return self.blocks[int(at)]


def row_blocks(x: Shared, rows: int) -> Blocks:
    """Those of each panel of 64 columns lie before those of the next."""
    if len(x.shape) == 1:
        return Blocks([x.slice(row, rows) for row in range(0, x.shape[0], rows)])
    count, columns = x.shape
    panel = min(columns, 64)
    return Blocks(
        [
            x.slice(first, panel, 1).slice(row, rows)
            for first in range(0, columns, panel)
            for row in range(0, count, rows)
        ]
    )


class Barrier:
    """An mbarrier: a phase is complete when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, arrivals: int = 0, expected: int = 0, came: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += expected - came
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


class Product:
    """A product that the tensor cores still compute."""

    def __init__(self, a: Any, b: Shared, into: Any, use_acc: bool) -> None:
        self.a, self.b, self.into, self.use_acc = a, b, into, use_acc
        self.done: Tile | None = None
        self.shape = [a.shape[0], b.shape[1]]

    type = SimpleNamespace(layout=None)

    @property
    def x(self) -> Array:
        raise AssertionError("a product is used before it is waited for")

    def complete(self) -> Tile:
        if self.done is None:
            a, b = (x.load() if isinstance(x, Shared) else x for x in (self.a, self.b))
            assert a.dtype is b.dtype, "operands of two dtypes"
            x = a.x.astype(np.float32) @ b.x.astype(np.float32)
            if self.use_acc:
                x = x + (self.into.complete() if isinstance(self.into, Product) else self.into).x
            self.done = Tile(x, FP32)
        return self.done


class Partition(threading.Thread):
    """One partition of a program; it runs while it has the baton."""

    def __init__(self, name: str, program: int, speed: int, run: Callable[[], None], main: threading.Semaphore) -> None:
        super().__init__(name=name, daemon=True)
        self.program, self.speed = program, speed
        self._run, self._main, self.baton = run, main, threading.Semaphore(0)
        self.error: BaseException | None = None
        self.until: Callable[[], bool] = lambda: True
        self.waits_for, self.ended, self.stopped = "", False, False
        self.count: int | None = None  # what it has read from the semaphore that it waits for
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.copies: list[list[Callable[[], None]]] = [[]]  # groups; the last one is not committed

    def run(self) -> None:
        self.baton.acquire()
        try:
            if not self.stopped:
                with np.errstate(all="ignore"):
                    self._run()
                self.wait_for_stores()
        except BaseException as error:  # noqa: BLE001  the program raises it
            self.error = error
        self.ended = True
        self._main.release()

    def pause(self, until: Callable[[], bool], waits_for: str = "") -> None:
        """Let another partition run, and go on when the condition holds."""
        self.until, self.waits_for = until, waits_for
        self._main.release()
        self.baton.acquire()
        if self.stopped:
            raise SystemExit

    def wait_for_copies(self, left: int) -> None:
        """Let all groups of copies arrive but the last `left`."""
        while len(self.copies) - 1 > left:
            for copy in self.copies.pop(0):
                copy()

    def wait_for_stores(self) -> None:
        for store in self.stores:
            store()
        self.stores.clear()


Partitions = Sequence[tuple[Callable[..., None], tuple[Any, ...]]]


def run_programs(partitions: Callable[[int], Partitions], programs: int, room: int, chance: random.Random) -> None:
    """Run the programs of a launch, at most `room` at a time; `partitions` gives the partitions of one."""
    main = threading.Semaphore(0)
    threads: list[Partition] = []
    begun = 0
    try:
        while threads or begun < programs:
            while begun < programs and len({thread.program for thread in threads}) < room:
                for f, args in partitions(begun):
                    speed = chance.choice((1, 100))  # so that some fall far behind
                    threads.append(Partition(f.__name__, begun, speed, partial(f, *args), main))
                    threads[-1].start()
                begun += 1
            ready = [thread for thread in threads if thread.until()]
            if not ready:
                raise Deadlock("; ".join(f"{x.name} of program {x.program} waits for {x.waits_for}" for x in threads))
            (thread,) = chance.choices(ready, [thread.speed for thread in ready])
            thread.baton.release()
            main.acquire()
            if thread.error is not None:
                raise thread.error
            if thread.ended:
                threads.remove(thread)
    finally:
        for thread in threads:
            thread.stopped = True
            thread.baton.release()
        for thread in threads:
            thread.join(10)


def here() -> Partition:
    thread = threading.current_thread()
    assert isinstance(thread, Partition), "outside of warp_specialize"
    return thread


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    phase = int(phase)
    if bool(pred):
        here().pause(
            lambda: barrier.phase != phase, f"phase {phase} of a barrier with {barrier.missing} arrivals to come"
        )


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        barrier.arrive(int(count))
        here().pause(lambda: True)


def expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if bool(pred):
        barrier.arrive(1, expected=int(size))


def tma_load(
    descriptor: Descriptor, coordinates: Sequence[Any], barrier: Barrier, into: Shared, pred: Any = True
) -> None:
    if bool(pred):
        barrier.arrive(came=descriptor.load(coordinates, into))
        here().pause(lambda: True)


def tma_store(descriptor: Descriptor, coordinates: Sequence[Any], block: Shared, add: bool = False) -> None:
    here().stores.append(lambda: descriptor.store(coordinates, block, add))


def start_copy(into: Shared, at: Pointer, mask: Any = True) -> None:
    """Copy by `cp.async`; until it is waited for, the block holds NaN."""
    into.x[...] = np.full(into.x.nbytes, 0xFF, np.uint8).view(into.x.dtype).reshape(into.x.shape)
    here().copies[-1].append(lambda: into.store(at.load(mask)))


def mma(a: Any, b: Shared, into: Any, use_acc: Any = True, is_async: bool = False) -> Product:
    product = Product(a, b, into, bool(use_acc))
    here().products.append(product)
    assert is_async
    return product


def mma_wait(left: int = 0, deps: Sequence[Product] = ()) -> Any:
    """Complete all products but the last `left`."""
    me = here()
    me.pause(lambda: True)
    done, me.products = me.products[: len(me.products) - left], me.products[len(me.products) - left :]
    for product in done:
        product.complete()
    assert all(x.done is not None for x in deps), "a product is used before it is waited for"
    found = tuple(x.done for x in deps)
    return found[0] if len(found) == 1 else found


def count_up(counter: Pointer) -> Tile:
    old = counter.load()
    counter.store(old + 1)
    return old


def acquire(semaphore: Pointer) -> Tile:
    """Read a semaphore. A partition that reads the same number again waits until there is another one."""
    me, before = here(), here().count
    me.pause(lambda: int(semaphore.load()) != before, f"a semaphore that has counted {before}")
    me.count = int(semaphore.load())
    return semaphore.load()


def release(semaphore: Pointer, number: Any) -> Tile:
    here().count = None
    semaphore.store(number)
    return tile(0)


def written(x: Any) -> Tile:
    here().wait_for_stores()
    return tile(x)


def pair(dtype: Dtype) -> Callable[[Tile, Tile], Tile]:
    def packed(low: Tile, high: Tile) -> Tile:
        a, b = (dtype.encode(x.x).view(np.uint16).astype(np.uint32) for x in (low, high))
        return Tile((a | (b << 16)).astype(np.uint32).view(np.int32), INT32)

    return packed


def hidden_if(condition: Callable[..., Any]) -> Callable[..., Tile]:
    return lambda S, *rest: where(condition(*rest), float("-inf"), S)


ASSEMBLY: dict[str, Callable[..., Tile]] = {
    ptx.MASK_SPAN: hidden_if(lambda c, first, end: (c < first) | (c >= end)),
    ptx.MASK_END: hidden_if(lambda c, end: c >= end),
    ptx.MASK_BIT: hidden_if(lambda word, bit: (word & bit) == 0),
    ptx.EXP2: lambda x: unary(np.exp2)(x),
    ptx.LOG2: lambda x: unary(np.log2)(x),
    ptx.TANH: lambda x: Tile(np.tanh(x.x.astype(np.float64) * np.log(2) / 2), FP32),
    ptx.COUNT: count_up,
    ptx.BROADCAST: tile,
    ptx.HOLD: tile,
    ptx.PREFETCH: lambda at: at.load(),
    ptx.pair("bf16"): pair(BF16),
    ptx.pair("f16"): pair(FP16),
    **{ptx.LOAD_BIAS[name]: lambda at, each: (at + each).load().to(FP32) for name in ptx.LOAD_BIAS},
    dq_semaphore._ACQUIRE.value: acquire,
    dq_semaphore._RELEASE.value: release,
    dq_semaphore._WRITTEN.value: written,
}


class BarrierLayout:
    """Marks the shared memory of barriers."""


class Barriers:
    def __init__(self, number: int) -> None:
        self._barriers = [Barrier() for _ in range(number)]

    def index(self, at: Any) -> Barrier:
        return self._barriers[int(at)]


def allocate(dtype: Dtype, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Barriers(shape[0])
    size = int(np.prod(shape)) * dtype.raw.itemsize
    return Shared(np.full(size, 0xFF, np.uint8).view(dtype.raw).reshape(shape), dtype)


def assembly(code: Any, constraints: str, args: Sequence[Any], dtype: Dtype, is_pure: bool, pack: int) -> Tile:
    assert not any(isinstance(x, Product) for x in args), "a product is used before it is waited for"
    return ASSEMBLY[getattr(code, "value", code)](*args)


def no_layout(*args: Any, **named: Any) -> None:
    return None


no_layout.get_default_for = no_layout  # type: ignore[attr-defined]
LANGUAGE: dict[str, Any] = {
    **ARITHMETIC,
    **dict.fromkeys(
        (
            "SliceLayout",
            "BlockedLayout",
            "DotOperandLayout",
            "NVMMASharedLayout",
            "SwizzledSharedLayout",
            "static_assert",
        ),
        no_layout,
    ),
    "constexpr": lambda x: x,
    "to_tensor": lambda x: tile(x),
    "allocate_shared_memory": allocate,
    "inline_asm_elementwise": assembly,
}
HOPPER: dict[str, Any] = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=BarrierLayout, init=lambda x, count: x.init(count), wait=wait, arrive=arrive, expect=expect
    ),
    "tma": SimpleNamespace(store_wait=lambda left: here().wait_for_stores()),
    "tma_load": tma_load, "tma_store": tma_store, "tma_add": partial(tma_store, add=True),
    "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
    "start_copy": start_copy, "row_blocks": row_blocks,
    "async_copy": SimpleNamespace(
        commit_group=lambda: here().copies.append([]),
        wait_group=lambda left: here().wait_for_copies(int(left)),
    ),
    "fence_async_shared": lambda: None, "group_barrier": lambda: None,
    "traits_of": SimpleNamespace, "mma_layout": no_layout, "transposed_layout": no_layout,
}  # fmt: skip


def in_python(kernel: Any, known: dict[str, Any], found: dict[int, FunctionType] | None = None) -> FunctionType:
    """A function of a kernel and those that it calls, with the names of the language as in `known`."""
    found = {} if found is None else found
    if id(kernel) in found:
        return found[id(kernel)]
    code: FunctionType = kernel.fn
    outer: dict[str, Any] = {}
    found[id(kernel)] = function = FunctionType(code.__code__, outer, code.__name__, code.__defaults__)
    for name, x in code.__globals__.items():
        if name in known:
            outer[name] = known[name]
        elif name in code.__code__.co_names:
            outer[name] = (
                in_python(x, known, found) if hasattr(x, "arg_names") else getattr(x, "fn", getattr(x, "value", x))
            )
    return function


class Interpreted:
    """Stands for a kernel: its launches run in Python, at most `room` programs at a time."""

    def __init__(self, kernel: Any, started: list[str], seed: int = 0, room: int = 1) -> None:
        self._kernel, self.arg_names, self._started = kernel, kernel.arg_names, started
        self._chance, self._room = random.Random(seed), room
        self._constant = {p.name for p in kernel.params if p.is_constexpr}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            self._started.append(self._kernel.__name__)
            begun, specialized = [0], []  # the program that begins, and its partitions

            def program_id(axis: int) -> Tile:
                thread = threading.current_thread()
                return tile(thread.program if isinstance(thread, Partition) else begun[0])

            def partitions(program: int) -> Partitions:
                if "warp_specialize" not in self._kernel.fn.__globals__:  # one group of warps
                    return [(function, tuple(arguments.values()))]
                begun[0] = program
                specialized.clear()
                function(**arguments)
                return list(specialized)

            language = SimpleNamespace(**LANGUAGE, program_id=program_id, num_programs=lambda axis: tile(grid[0]))
            known = {**HOPPER, "warp_specialize": lambda partitions, *rest: specialized.extend(partitions)}
            function = in_python(self._kernel, {**known, "gl": language, "tl": language})
            arguments = {
                name: given[name] if name in self._constant else argument(given[name]) for name in self.arg_names
            }
            with np.errstate(all="ignore"):
                run_programs(partitions, grid[0], self._room, self._chance)

        return run


def argument(x: Any) -> Any:
    """An argument of a launch as the kernel gets it."""
    if isinstance(x, torch.Tensor):
        return pointer(x)
    if isinstance(x, tuple):
        parts = map(argument, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return tile(x) if isinstance(x, bool | int | float) else x


def run_hopper_kernels(monkeypatch: pytest.MonkeyPatch, seed: int = 0, programs: int = 2) -> list[str]:
    """Let the backend "triton" run Hopper kernels in Python, with room for so many programs; the list names them."""
    started: list[str] = []
    modules = (
        (forward_launch, "forward"),
        (backward_launch, "backward"),
        (backward_wide, "backward"),
        (backward_192, "backward"),
        (jvp_launch, "jvp"),
        (chosen_launch, "chosen_forward"),
        (chosen_launch, "chosen_backward"),
    )
    for module, name in (*modules, (statistics_launch, "received_kernel"), (statistics_launch, "pooled_kernel")):
        monkeypatch.setattr(module, name, Interpreted(getattr(module, name), started, seed, programs))
    refuses = forward_launch.refuses
    monkeypatch.setattr(
        forward_launch,
        "refuses",
        lambda *args: [reason for reason in refuses(*args) if "interpreter" not in reason],
    )
    refuses_lists = chosen_launch.refuses
    monkeypatch.setattr(
        chosen_launch, "refuses", lambda w: [reason for reason in refuses_lists(w) if "not on a GPU" not in reason]
    )
    monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(launch, "on_hopper", lambda query: True)
    return started
