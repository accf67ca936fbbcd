"""The launch cache: a call like an earlier one starts the kernel compiled then, without Triton's inspection of each argument.

That inspection, the TMA descriptors and the choice of a tile take longer on the host than many calls take on the GPU. Their
results depend only on sizes, strides, dtypes, a few numbers, the tile and the block mask (`key_of`), so they are cached for a few
dozen of these.
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
from .descriptors import with_base

__all__ = ["Launch", "add", "find", "key_of"]

_SIZE = 64
_LAUNCHES: dict[Hashable, Launch] = {}
_QUERY, _KEY, _VALUE, _OUTPUT = ("q", "qb"), ("k", "kb"), ("v", "vb"), ("o", "ob")


class Launch(NamedTuple):
    """A kernel on its grid, and what it was launched with."""

    kernel: Callable[..., object]
    arguments: dict[str, Any]  # in the order of the kernel's parameters, constants included; without tensors, and descriptors have no base
    mask: Any  # a weak reference to the block mask, which drops the launch with it; None without a mask

    def start(self, w: KernelArgs, found: Rows, lists: BlockLists, counters: Tensor | None) -> None:
        """Run the kernel for other tensors of the same sizes and strides."""
        arguments = {**self.arguments, **results(found), "lists": lists, "counters": counters}
        for names, x in ((_QUERY, w.query), (_KEY, w.key), (_VALUE, w.value), (_OUTPUT, found.output)):
            for name in names:
                arguments[name] = with_base(arguments[name], x)
        self.kernel(*arguments.values())


def results(found: Rows) -> dict[str, Any]:
    """The tensors that the kernel writes, by its parameters."""
    return {
        "output": found.output, "lse": found.lse, "row_max": found.max_logit, "log_row_sum": found.log_row_sum, "entropy": found.entropy,
    }  # fmt: skip


def key_of(w: KernelArgs, entropy: bool, tile: Tile) -> Hashable:
    """The key of a call in the cache; None for calls with parts that are not cached."""
    if w.kind != BIAS_NONE or w.drop.keys is not None or w.sink is not None or w.scales is not None:
        return None
    q, k, v = w.query, w.key, w.value
    mask = None if w.block_mask.kind == NONE else id(w.block_mask)
    layouts = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    return q.device, q.dtype, layouts, w.scale, w.softcap, mask, entropy, tile


def find(key: Hashable, w: KernelArgs) -> Launch | None:
    """The cached launch of this key, if there is one; it becomes the most recently used."""
    launch = None if key is None else _LAUNCHES.pop(key, None)
    if launch is None or (launch.mask is not None and launch.mask() is not w.block_mask):
        return None
    _LAUNCHES[key] = launch
    return launch


def add(key: Hashable, w: KernelArgs, compiled: Any, programs: int, names: list[str], arguments: Mapping[str, Any]) -> None:
    """Cache a launch of a kernel with these parameters; not in a graph capture, whose tensors exist only while the graph runs."""
    if key is None or compiled is None or is_capturing():
        return
    kernel = compiled.result() if hasattr(compiled, "result") else compiled
    cached = {name: arguments[name] for name in names}
    cached |= dict.fromkeys(("output", "lse", "row_max", "log_row_sum", "entropy", "lists", "counters"))
    cached |= {name: with_base(cached[name], None) for name in (*_QUERY, *_KEY, *_VALUE, *_OUTPUT)}
    mask = None if w.block_mask.kind == NONE else ref(w.block_mask, lambda _: _LAUNCHES.pop(key, None))
    _LAUNCHES[key] = Launch(kernel[programs, 1, 1], cached, mask)
    if len(_LAUNCHES) > _SIZE:
        _LAUNCHES.pop(next(iter(_LAUNCHES)), None)
