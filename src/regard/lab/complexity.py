"""What each of the four operations of attention costs, and how that grows with n, m, d and d_v."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..functional import attention
from ..softmax import stable
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Complexity", "Count", "count", "one_thread", "product_flop"]

_OPERATIONS = ("scores", "scaling", "softmax", "average")
_FACTORS = (1, 2, 4)  # by which each size grows
_POWERS = {  # of n, m, d and d_v
    "n·m·d": (1, 1, 1, 0),
    "n·m·d_v": (1, 1, 0, 1),
    "n·m": (1, 1, 0, 0),
    "n·d": (1, 0, 1, 0),
    "n·d_v": (1, 0, 0, 1),
    "m·d": (0, 1, 1, 0),
    "n": (1, 0, 0, 0),
    "n²": (2, 0, 0, 0),
    "n²·d": (2, 0, 1, 0),
    "n·m·d²": (1, 1, 2, 0),
}


@dataclass(frozen=True)
class Complexity(Study):
    """Count and time softmax(Q Kᵀ · scale) V operation by operation, and let one size grow at a time.

    >>> Complexity(softmax="n·m·d", rounds=1).run().verdict
    False
    """

    name: ClassVar[str] = "complexity"
    brief: ClassVar[str] = "FLOP grow as n·m·d: quadratic only where n = m"
    claim: ClassVar[str] = (
        "Both products take FLOP in proportion to n·m·d (or d_v); scaling and softmax take n·m, whatever d is. So the "
        "cost is linear in the queries, in the keys and in the dim, and quadratic only where n = m. Tiles and chunks "
        "save memory, not FLOP. Scaling and softmax are few FLOP on many bytes, so their share of the time is much "
        "larger than their share of the FLOP."
    )
    test: ClassVar[str] = (
        "When one size grows by a factor of 4 and the others stay, the counted FLOP of each operation grow by the "
        "power claimed for it, to 0.01; and the total by a power of n = m of 2, to 0.01. The backends reference and "
        "chunked do exactly the FLOP of the two products. Scaling and softmax together take over twice their share "
        "of the FLOP in time. (Powers of the time are shown, but no part of the test: caches and other jobs bend them.)"
    )
    caption: ClassVar[str] = (
        "Left and middle: the FLOP of each operation as the queries, or the dims of query and key, grow; the legend "
        "has the measured powers. Right: each operation's share of the FLOP, of the bytes (if each result goes to "
        "memory) and of the time. A fused kernel keeps the n·m numbers between the products on the chip."
    )
    among: ClassVar[dict[str, Collection[str]]] = dict.fromkeys(_OPERATIONS, _POWERS)

    n: int = 256
    m: int = 384
    dim: int = 64
    value_dim: int = 32
    rounds: int = 15  # of timing; the best counts
    scores: str = "n·m·d"  # the claimed growth of each operation
    scaling: str = "n·m"
    softmax: str = "n·m"
    average: str = "n·m·d_v"

    def measure(self, progress: Progress) -> list[Row]:
        """Count and time at the base sizes, and with each size larger."""
        base = _Sizes(self.n, self.m, self.dim, self.value_dim)
        grown = [(size, base.grown(size, factor)) for size in _Sizes.NAMES for factor in _FACTORS]
        grown += [("n = m", _Sizes(self.n * f, self.n * f, self.dim, self.value_dim)) for f in _FACTORS]
        inputs = {sizes: sizes.draw() for _, sizes in grown}
        counts = {sizes: {name: count(work) for name, work in _works(*x).items()} for sizes, x in inputs.items()}
        times = _best_times(inputs, self.rounds, progress)
        rows: list[Row] = []
        for size, sizes in grown:
            flop = {f"{name}, FLOP": count.flop for name, count in counts[sizes].items()}
            spent = {f"{name}, ms": 1e3 * times[sizes][name] for name in _OPERATIONS}
            rows.append({"growing": size, **sizes.shown(), **flop, **spent})
        for name in _OPERATIONS:
            rows.append(self._operation(name, rows, counts[base], times[base]))
        return rows + [self._backend_row(name, inputs[base], counts[base]) for name in ("reference", "chunked")]

    def _operation(self, name: str, rows: list[Row], counts: Mapping[str, Count], times: Mapping[str, float]) -> Row:
        """Shares at the base sizes, and the powers of the FLOP and of the time."""
        count = counts[name]
        powers = {f"{size}: power": _power(rows, size, f"{name}, FLOP") for size in _Sizes.NAMES}
        timed = {f"{size}: power of time": _power(rows, size, f"{name}, ms") for size in _Sizes.NAMES}
        return {
            "operation": name,
            "claimed": getattr(self, name),
            **powers,
            "FLOP/byte": count.flop / count.bytes,
            "share of FLOP": count.flop / sum(each.flop for each in counts.values()),
            "share of bytes": count.bytes / sum(each.bytes for each in counts.values()),
            "share of time": times[name] / sum(times.values()),
            **timed,
        }

    def _backend_row(self, backend: str, inputs: _Inputs, counts: Mapping[str, Count]) -> Row:
        found = product_flop(lambda: attention(*inputs, backend=backend))
        products = counts["scores"].flop + counts["average"].flop
        return {
            "backend": backend,
            "FLOP of its products": found,
            "FLOP of both products": products,
        }

    def holds(self, rows: list[Row]) -> bool:
        """Powers as claimed, no FLOP saved, and a larger share of the time than of the FLOP."""
        operations = {row["operation"]: row for row in rows if "operation" in row}
        as_claimed = all(
            abs(row[f"{size}: power"] - power) < 0.01
            for name, row in operations.items()
            for size, power in zip(_Sizes.NAMES, _POWERS[getattr(self, name)], strict=True)
        )
        square = [
            {"FLOP": sum(row[f"{name}, FLOP"] for name in _OPERATIONS), **row} for row in rows if "growing" in row
        ]
        quadratic = abs(_power(square, "n = m", "FLOP") - 2.0) < 0.01
        backends = [row for row in rows if "backend" in row]
        unsaved = all(row["FLOP of its products"] == row["FLOP of both products"] for row in backends)
        elementwise = [operations[name] for name in ("scaling", "softmax")]
        slow = sum(row["share of time"] for row in elementwise) > 2 * sum(row["share of FLOP"] for row in elementwise)
        return as_claimed and quadratic and unsaved and slow

    def draw(self, rows: list[Row]) -> Figure:
        """FLOP against n and d, and shares."""
        figure, (left, middle, right) = canvas(11.5, 4.0, columns=3)
        operations = [row for row in rows if "operation" in row]
        for axes, size in ((left, "n"), (middle, "d")):
            some = [row for row in rows if row.get("growing") == size]
            for row, marker in zip(operations, "os^v", strict=True):
                flop = [each[f"{row['operation']}, FLOP"] for each in some]
                label = " ".join((row["operation"], *(f"{s}^{row[f'{s}: power']:.2f}" for s in _Sizes.NAMES)))
                axes.loglog([each[size] for each in some], flop, f"{marker}-", label=label)
            axes.set(xlabel={"n": "queries n", "d": "dim d of query and key"}[size])
            axes.set_xticks([each[size] for each in some], [f"{each[size]:,}" for each in some])
            axes.minorticks_off()
        left.set(ylabel="FLOP")
        figure.legend(handles=left.lines, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
        for shift, what in ((-0.27, "FLOP"), (0.0, "bytes"), (0.27, "time")):
            places = [x + shift for x in range(len(operations))]
            shares = [row[f"share of {what}"] for row in operations]
            bars = right.bar(places, shares, 0.26, color={"FLOP": "C0", "bytes": "C2", "time": "C1"}[what], label=what)
            right.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=7)
        right.set_xticks(range(len(operations)), _OPERATIONS)
        right.grid(visible=False, axis="x")
        right.set(ylabel="share", ylim=(0, 1.02))
        right.legend(frameon=False, fontsize=8)
        return figure


_Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Sizes:
    """The four sizes of a call."""

    NAMES: ClassVar[tuple[str, ...]] = ("n", "m", "d", "d_v")

    n: int
    m: int
    d: int
    d_v: int

    def grown(self, size: str, factor: int) -> _Sizes:
        return replace(self, **{size: getattr(self, size) * factor})

    def shown(self) -> Row:
        return {name: getattr(self, name) for name in self.NAMES}

    def draw(self) -> _Inputs:
        """Random query, key and value."""
        return torch.randn(self.n, self.d), torch.randn(self.m, self.d), torch.randn(self.m, self.d_v)


def _works(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The four operations, each as a call on the results of those before it."""
    scale = query.shape[-1] ** -0.5
    scores = query @ key.mT
    scaled = scores * scale
    weights = stable(scaled)
    return {
        "scores": lambda: query @ key.mT,
        "scaling": lambda: scores * scale,
        "softmax": partial(stable, scaled),
        "average": lambda: weights @ value,
    }


@dataclass(frozen=True)
class Count:
    """What an operation does: floating-point operations, and bytes read and written."""

    flop: int
    bytes: int


def count(work: Callable[[], Tensor]) -> Count:
    """Count what `work` does, with every call of a torch function that makes a new tensor.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> count(lambda: a @ b + 1.0).flop
    56
    """
    counter = _Counter()
    with counter:
        work()
    return Count(counter.flop, counter.bytes)


class _Counter(TorchFunctionMode):
    """Counts what every call of a torch function does: torch's own count for products, else one FLOP per element.

    A call that makes no new tensor, such as a view, costs nothing. A reduction has as many elements as its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flop = self.bytes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = None

        def call() -> None:
            nonlocal result
            result = func(*args, **(kwargs or {}))

        product = product_flop(call)
        given = [x for x in args if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in storages:
            touched = [*given, result]
            self.flop += product or max(x.numel() for x in touched)
            self.bytes += sum(x.numel() * x.element_size() for x in touched)
        return result


def product_flop(work: Callable[[], object]) -> int:
    """The FLOP of the matrix products in `work`, as torch counts them: a product and a sum are two.

    >>> product_flop(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mv: _matrix_vector_flop})
    with counter:
        work()
    return int(counter.get_total_flops())


def _matrix_vector_flop(matrix: tuple[int, ...], *_: object, **__: object) -> int:
    """The FLOP of a matrix times a vector, for which torch has no count."""
    return 2 * math.prod(matrix)


def _best_times(inputs: Mapping[_Sizes, _Inputs], rounds: int, progress: Progress) -> dict[_Sizes, dict[str, float]]:
    """The shortest CPU time of each operation at each size, in seconds, on one thread.

    Rounds are interleaved, after one to warm up; waiting for other jobs does not count.
    """
    works = {sizes: _works(*x) for sizes, x in inputs.items()}
    best = {sizes: dict.fromkeys(_OPERATIONS, math.inf) for sizes in inputs}
    with one_thread():
        for turn in counted(range(rounds + 1), progress):
            for sizes, operations in works.items():
                for name, work in operations.items():
                    work()  # brings its inputs into the cache
                    begin = time.thread_time()
                    work()
                    if turn:
                        best[sizes][name] = min(best[sizes][name], time.thread_time() - begin)
    return best


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that the CPU time of the caller is that of the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _power(rows: list[Row], size: str, column: str) -> float:
    """The power with which a column grows from the smallest to the largest of a size."""
    some = [row for row in rows if row.get("growing") == size]
    return math.log(some[-1][column] / some[0][column]) / math.log(_FACTORS[-1] / _FACTORS[0])
