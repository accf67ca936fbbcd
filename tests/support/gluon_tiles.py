"""Tiles of numbers, pointers and the arithmetic of Triton's language, by numpy. Layouts mean nothing here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Array = np.ndarray


class Dtype:
    """A dtype of Triton: how numpy computes with it, and how memory holds it."""

    def __init__(self, name: str, number: Any, raw: Any = None) -> None:
        self.name, self.number, self.raw = name, np.dtype(number), np.dtype(number if raw is None else raw)
        self.element_ty = self  # of a pointer

    def __str__(self) -> str:
        return self.name

    @property
    def primitive_bitwidth(self) -> int:
        return self.raw.itemsize * 8

    def is_floating(self) -> bool:
        return self.number.kind == "f"

    def encode(self, x: Array) -> Array:
        """Numbers as memory holds them."""
        if self.name != "bf16":
            return x.astype(self.raw)
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)

    def decode(self, raw: Array) -> Array:
        """The numbers that memory holds."""
        if self.name != "bf16":
            return raw.astype(self.number)
        return (np.asarray(raw, np.uint32) << 16).astype(np.uint32).view(np.float32)


NAMES = {
    "int1": Dtype("int1", bool),
    "int8": Dtype("int8", np.int8),
    "int16": Dtype("int16", np.int16),
    "int32": Dtype("int32", np.int32),
    "uint32": Dtype("uint32", np.uint32),
    "int64": Dtype("int64", np.int64),
    "bfloat16": Dtype("bf16", np.float32, np.uint16),
    "float16": Dtype("fp16", np.float16),
    "float32": Dtype("fp32", np.float32),
}
INT1, INT32, INT64, BF16, FP16, FP32 = (
    NAMES[name] for name in ("int1", "int32", "int64", "bfloat16", "float16", "float32")
)
RANK = list(NAMES.values())
TORCH = {torch.bool: INT1, **{getattr(torch, name): dtype for name, dtype in NAMES.items() if name != "int1"}}


def promoted(a: Dtype, b: Dtype) -> Dtype:
    return FP32 if {a.name, b.name} == {"fp16", "bf16"} else max(a, b, key=RANK.index)


class Tile:
    """Numbers in registers."""

    type = SimpleNamespace(layout=None)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, x: Any, dtype: Dtype) -> None:
        self.x, self.dtype = np.asarray(x, dtype.number), dtype

    shape = property(lambda self: list(self.x.shape))

    def __bool__(self) -> bool:
        return bool(self.x)

    def __index__(self) -> int:
        return int(self.x)

    def __getitem__(self, at: Any) -> Tile:
        return Tile(self.x[at], self.dtype)

    def to(self, dtype: Dtype, bitcast: bool = False) -> Tile:
        if bitcast:
            return Tile(
                dtype.decode(np.ascontiguousarray(self.dtype.encode(self.x)).view(dtype.raw).reshape(self.x.shape)),
                dtype,
            )
        return Tile(dtype.decode(dtype.encode(self.x)), dtype)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.x.reshape(shape), self.dtype)

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile(self.x.transpose(order), self.dtype)

    def split(self) -> tuple[Tile, Tile]:
        return Tile(self.x[..., 0], self.dtype), Tile(self.x[..., 1], self.dtype)

    def __neg__(self) -> Tile:
        return Tile(-self.x, self.dtype)

    def __invert__(self) -> Tile:
        return Tile(~self.x, self.dtype)


def tile(x: Any) -> Tile:
    """A number as a tile."""
    if isinstance(x, Tile):
        return x
    if isinstance(x, bool | np.bool_):
        return Tile(x, INT1)
    if isinstance(x, int):
        return Tile(x, INT32 if -(2**31) <= x < 2**31 else INT64)
    if isinstance(x, float):
        return Tile(x, FP32)
    raise TypeError(f"a kernel cannot compute with {x!r}")


def together(*args: Any) -> tuple[Dtype, list[Array]]:
    """Numbers in the dtype of their results: a constant of Python takes that of a tile."""
    tiles = [x for x in args if isinstance(x, Tile)]
    dtype = tiles[0].dtype if tiles else tile(args[0]).dtype
    for x in tiles[1:] if tiles else map(tile, args[1:]):
        dtype = promoted(dtype, x.dtype)
    if not dtype.is_floating() and any(isinstance(x, float) for x in args):
        dtype = FP32
    if dtype is INT1 and any(isinstance(x, int) and not isinstance(x, bool) for x in args):
        dtype = INT32
    return dtype, [(x.x if isinstance(x, Tile) else np.asarray(x)).astype(dtype.number) for x in args]


def binary(compute: Callable[[Array, Array], Any], compares: bool = False) -> Any:
    def forth(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        dtype, (a, b) = together(self, other)
        return Tile(compute(a, b), INT1) if compares else rounded(compute(a, b), dtype)

    return forth


def rounded(x: Any, dtype: Dtype) -> Tile:
    return Tile(BF16.decode(BF16.encode(np.asarray(x))) if dtype is BF16 else x, dtype)


def floor_divide(a: Array, b: Array) -> Array:
    """Division that rounds towards 0, as the chip's."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)) if a.dtype.kind == "i" else a // b


def remainder(a: Array, b: Array) -> Array:
    return a - b * floor_divide(a, b)


OPERATORS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": floor_divide,
    "mod": remainder, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift,
}  # fmt: skip
for _name, _compute in OPERATORS.items():
    setattr(Tile, f"__{_name}__", binary(_compute))
    setattr(Tile, f"__r{_name}__", binary(lambda a, b, _compute=_compute: _compute(b, a)))
for _name, _compute in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(Tile, f"__{_name}__", binary(_compute, compares=True))


def divide(a: Any, b: Any) -> Tile:
    dtype, (x, y) = together(a, b)
    return rounded(x / y, dtype) if dtype.is_floating() else Tile(x.astype(np.float32) / y.astype(np.float32), FP32)


Tile.__truediv__ = divide  # type: ignore[attr-defined]
Tile.__rtruediv__ = lambda self, other: divide(other, self)  # type: ignore[attr-defined]


class Pointer:
    """Addresses in one tensor's memory; nothing outside of it can be read or written."""

    def __init__(self, memory: Array, dtype: Dtype, at: Array) -> None:
        self.memory, self.dtype, self.at = memory, dtype, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.dtype, self.at + (more.x if isinstance(more, Tile) else more))

    __radd__ = __add__

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.memory, self.dtype, self.at[at])

    def to(self, dtype: Dtype, bitcast: bool = False) -> Pointer:
        return self

    def _places(self, mask: Any) -> tuple[Array, Array]:
        at, mask = np.broadcast_arrays(self.at, mask.x if isinstance(mask, Tile) else np.asarray(mask))
        assert (~mask | ((at >= 0) & (at < len(self.memory)))).all(), "an address outside of the tensor"
        return np.where(mask, at, 0), mask

    def load(self, mask: Any = True, other: Any = 0) -> Tile:
        at, mask = self._places(mask)
        x = np.full(at.shape, tile(other).x, self.dtype.number)
        x[mask] = self.dtype.decode(self.memory[at[mask]])
        return Tile(x, self.dtype)

    def store(self, x: Any, mask: Any = True) -> None:
        at, mask = self._places(mask)
        self.memory[at[mask]] = np.broadcast_to(self.dtype.encode(tile(x).x), at.shape)[mask]


def pointer(x: torch.Tensor) -> Pointer:
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    whole = (
        whole.view(torch.uint8)
        if x.dtype is torch.bool
        else whole.view(torch.uint16)
        if x.dtype is torch.bfloat16
        else whole
    )
    return Pointer(whole.numpy(), TORCH[x.dtype], np.asarray(x.storage_offset()))


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        raise TypeError("a choice between pointers")
    dtype, (x, y) = together(a, b)
    return Tile(np.where(tile(condition).x, x, y), dtype)


def unary(compute: Callable[[Array], Any]) -> Callable[[Any], Tile]:
    return lambda x: Tile(compute(tile(x).x), tile(x).dtype)


def larger(a: Any, b: Any, propagate_nan: Any = None, compute: Any = (np.fmax, np.maximum)) -> Tile:
    """The larger numbers; the chip takes the other one where one is NaN, unless it is told not to."""
    dtype, (x, y) = together(a, b)
    return Tile(compute[propagate_nan is not None](x, y), dtype)


def reduction(compute: Callable[..., Any]) -> Callable[..., Tile]:
    return lambda x, axis=None: Tile(
        compute(x.x, axis=axis, dtype=x.dtype.number) if compute is np.sum else compute(x.x, axis=axis), x.dtype
    )


def broadcast(a: Tile, b: Tile) -> tuple[Tile, Tile]:
    x, y = np.broadcast_arrays(a.x, b.x)
    return Tile(x, a.dtype), Tile(y, b.dtype)


ARITHMETIC: dict[str, Any] = {
    **NAMES,
    "where": where, "maximum": larger, "minimum": partial(larger, compute=(np.fmin, np.minimum)),
    "exp2": unary(np.exp2), "log2": unary(np.log2), "abs": unary(np.abs),
    "max": reduction(np.fmax.reduce), "min": reduction(np.fmin.reduce), "sum": reduction(np.sum),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "arange": lambda first, end, layout=None: Tile(np.arange(int(first), int(end)), INT32),
    "zeros": lambda shape, dtype, layout=None: Tile(np.zeros(shape), dtype),
    "full": lambda shape, x, dtype, layout=None: Tile(np.full(shape, tile(x).x), dtype),
    "load": lambda at, mask=True, other=0, volatile=False: at.load(mask, other),
    "store": lambda at, x, mask=True: at.store(x, mask),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "expand_dims": lambda x, axis: Tile(np.expand_dims(x.x, axis), x.dtype),
    "join": lambda a, b: Tile(np.stack((a.x, b.x), -1), a.dtype),
    "broadcast": broadcast,
    "static_range": range,
    "PropagateNan": SimpleNamespace(ALL="all"),
}  # fmt: skip
