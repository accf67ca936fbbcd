"""Calls like one before: the kernel that was compiled then is started again, without Triton's look at every argument.

That look, the describing of tensors and the choices before them take longer on the host than many a call takes on the
GPU. What they find depends on sizes, strides, dtypes, a few numbers, the tile and the mask's layout alone (`like`), so it
is kept for a few dozen of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from ...compat.torch import is_capturing
from ...core.rows import Rows
from ..arguments import BIAS_NONE, KernelArgs
from ..block_lists import NONE, BlockLists
from .configs import Tile

__all__ = ["Call", "like", "remember", "remembered"]

_KEPT = 64
_CALLS: dict[Hashable, Call] = {}


class Call(NamedTuple):
    """A kernel on its grid, and what it was called with."""

    kernel: Callable[..., object]
    described: tuple[Any, ...]  # queries, keys, values and output, each in two chunks: how they lie, without them
    numbers: tuple[Any, ...]  # between the results and what the mask's layout says …
    sizes: tuple[Any, ...]  # … and behind that
    constants: tuple[Any, ...]
    mask: Any  # a weak reference to the layout, with which the call is forgotten; None where nothing is hidden

    def start(self, w: KernelArgs, found: Rows, where: BlockLists, counter: Tensor | None) -> None:
        """Run the kernel for other tensors that lie as those did."""
        tensors = (w.query, w.query, w.key, w.key, w.value, w.value, found.output, found.output)
        described = (d if d is None else _of(d, x) for d, x in zip(self.described, tensors, strict=True))
        out = (found.output, found.lse, found.max_logit, found.log_row_sum, found.entropy)
        self.kernel(*described, *out, *self.numbers, where, *self.sizes, counter, *self.constants)


def like(w: KernelArgs, entropy: bool, tile: Tile) -> Hashable:
    """What calls have in common that are started alike; None for those with parts that are looked at each time."""
    if w.kind != BIAS_NONE or w.drop.keys is not None or w.sink is not None or w.scales is not None:
        return None
    q, k, v = w.query, w.key, w.value
    mask = None if w.block_mask.kind == NONE else id(w.block_mask)
    lies = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    return q.device, q.dtype, lies, w.scale, w.softcap, mask, entropy, tile


def remembered(key: Hashable, w: KernelArgs) -> Call | None:
    """The call of this kind, if there was one; now it is the last."""
    call = None if key is None else _CALLS.pop(key, None)
    if call is None or (call.mask is not None and call.mask() is not w.block_mask):
        return None
    _CALLS[key] = call
    return call


def remember(
    key: Hashable, w: KernelArgs, compiled: Any, programs: int, names: list[str], args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Keep a call: its kernel, and the arguments of these names. What a captured graph makes is there only while the graph runs."""
    if key is None or compiled is None or is_capturing():
        return
    kernel = compiled.result() if hasattr(compiled, "result") else compiled
    output, strides, where, counter = map(names.index, ("output", "strides", "where", "counter"))
    described = tuple(d if d is None else _of(d, None) for d in args[:output])
    constants = tuple(options[name] for name in names[len(args) :])
    mask = None if w.block_mask.kind == NONE else ref(w.block_mask, lambda _: _CALLS.pop(key, None))
    _CALLS[key] = Call(kernel[programs, 1, 1], described, args[strides:where], args[where + 1 : counter], constants, mask)
    if len(_CALLS) > _KEPT:
        _CALLS.pop(next(iter(_CALLS)), None)


def _of(description: Any, x: Tensor | None) -> Any:
    """The same description of another tensor, which is not checked again."""
    twin = object.__new__(type(description))
    vars(twin).update(vars(description), base=x)
    return twin
