"""What Hugging Face says about masks, read as masks of ours.

Transformers describes a mask by a function of (batch, head, row, key), composed of a few known ones: causal, window,
chunk, block, padding, packed sequences. Each known one is read as the mask that means the same; any other stays a
function, evaluated block by block. No tensor of rows × keys is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import or_
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...masks import Mask, causal, documents, everything, padding, predicate, window
from ...masks.causal import Causal
from ...masks.index import joint
from ...masks.window import Window
from .lazy_mask import LazyMask

__all__ = ["Frame", "MaskBuilder"]

Rule: TypeAlias = Callable[..., Tensor]  # (batch, head, row, key) -> bool
Cells: TypeAlias = Mapping[str, Any]  # what a rule was made with


class Frame(NamedTuple):
    """How many rows and keys there are, and where the first of each stands in the sequence."""

    rows: int
    keys: int
    row_start: int | Tensor = 0
    key_start: int = 0

    @property
    def offset(self) -> int | Tensor:
        """The number of the key that stands where row 0 stands."""
        offset = self.row_start - self.key_start
        return offset.reshape(1) if isinstance(offset, Tensor) else offset

    def row_positions(self, device: torch.device) -> Tensor:
        """Where the rows stand, (rows,)."""
        return torch.arange(self.rows, device=device) + self.row_start

    def key_positions(self, device: torch.device) -> Tensor:
        """Where the keys stand, (keys,)."""
        return torch.arange(self.keys, device=device) + self.key_start

    def at_rows(self, values: Tensor) -> Tensor:
        """Take (batch, positions) where the rows stand."""
        return values[:, self.row_positions(values.device)]

    def at_keys(self, values: Tensor, beyond: int = 0) -> Tensor:
        """Take (batch, positions) where the keys stand; those that no value reaches get `beyond`."""
        end = self.key_start + self.keys
        return F.pad(values, (0, max(0, end - values.shape[1])), value=beyond)[:, self.key_start : end]


@dataclass(frozen=True)
class MaskBuilder:
    """What transformers calls for a mask: it gives a mask of ours, `LazyMask` on in the place of a tensor, or None.

    >>> maker = MaskBuilder({})
    >>> maker(batch_size=1, q_length=2, kv_length=3, mask_function=lambda batch, head, i, j: j < 2).mask
    predicate(<lambda>)
    """

    readers: Mapping[CodeType, Callable[[MaskBuilder, Cells, Frame], Mask]]
    source: Any = None  # the module of transformers that has the functions

    def __call__(self, **given: Any) -> LazyMask | Tensor | None:
        return self.make_in_a_graph(**given) if torch.compiler.is_dynamo_compiling() else self.make(**given)

    def make(
        self,
        batch_size: int,
        kv_length: int,
        q_length: int = 0,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Rule | None = None,
        attention_mask: Tensor | LazyMask | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        cache_position: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        config: object = None,
        **others: Any,
    ) -> LazyMask | Tensor | None:
        """Make the mask of `q_length` rows and `kv_length` keys; the names are those of transformers."""
        if isinstance(attention_mask, LazyMask):
            return attention_mask
        if cache_position is not None:  # what earlier versions give for q_length, q_offset and device
            q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
        compiled_step = q_length == 1 and not (allow_is_causal_skip or allow_is_bidirectional_skip)
        if isinstance(q_offset, Tensor) and not compiled_step and not torch.compiler.is_compiling():
            q_offset = int(q_offset)
        frame = Frame(q_length, kv_length, q_offset, kv_offset)
        found = [causal(frame.offset) if mask_function is None else self.read(mask_function, frame, use_vmap)]
        if attention_mask is not None:
            keep = frame.at_keys(attention_mask.bool())
            if torch.compiler.is_compiling() or compiled_step or not keep.all():
                found.append(padding(keep=keep))
        mask, alone = _all_of(found, frame), _attends_alone(config)
        if mask.trivial and (allow_is_bidirectional_skip or (allow_is_causal_skip and not alone)):
            return None
        handed = LazyMask(mask.bind(batch_size, 1), batch_size, q_length, kv_length, device)
        if alone:
            return handed.additive(dtype)
        # A step of a static cache is compiled with its mask as an input: one row as a tensor needs no new compilation.
        return handed.tensor if compiled_step else handed

    def make_in_a_graph(self, **given: Any) -> LazyMask | Tensor | None:
        """Make it under torch.compile, which cannot read what a function was made with: causal, or a tensor."""
        if isinstance(made := given.get("attention_mask"), LazyMask):
            return made
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if _attends_alone(given.get("config")):
            added: Tensor = self.source.eager_mask(**given)
            return added
        plain = given.get("mask_function") is self.source.causal_mask_function and made is None
        if plain and "q_length" in given:
            frame = Frame(given["q_length"], given["kv_length"], given["q_offset"], given["kv_offset"])
            return LazyMask(causal(frame.offset), given["batch_size"], frame.rows, frame.keys, given["device"])
        allowed: Tensor = self.source.sdpa_mask(**given)
        return allowed

    def read(self, rule: Rule, frame: Frame, one_by_one: bool = False) -> Mask:
        """Read a function of transformers; `one_by_one` says that an unknown one takes single indices only."""
        reader = self.readers.get(getattr(rule, "__code__", None))  # type: ignore[arg-type]
        if reader is None:
            return _asked(rule, frame, one_by_one)
        cells = dict(zip(rule.__code__.co_freevars, (c.cell_contents for c in rule.__closure__ or ()), strict=True))
        return reader(self, cells | {"one_by_one": one_by_one}, frame)

    @classmethod
    def for_transformers(cls) -> MaskBuilder:
        """The maker for the installed transformers: it knows the functions that do there what it takes them for."""
        source: Any = import_module("transformers.masking_utils")
        maker = cls({}, source)
        for name, (given, reader) in MASK_FUNCTIONS.items():
            rule = getattr(source, name, None)
            if rule is not None:
                rule = rule(*(getattr(source, x) if isinstance(x, str) else x for x in given)) if given else rule
                wider = cls({**maker.readers, rule.__code__: reader}, source)
                maker = wider if wider.agrees(rule) else maker
        return maker

    def agrees(self, rule: Rule) -> bool:
        """Whether a function, asked pair by pair, says what it is read as; three rows over five keys tell."""
        frame = Frame(3, 5, row_start=2, key_start=1)
        try:
            mask, truth = self.read(rule, frame), _asked(rule, frame, one_by_one=False)
        except (KeyError, TypeError):
            return False
        return torch.equal(*(x.bind(2, 1).dense(3, 5, "cpu").expand(2, 1, 3, 5) for x in (mask, truth)))


def _attends_alone(config: object) -> bool:
    """Whether a model computes attention itself, whatever it is told to use: its module knows no table of functions."""
    module = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return config is not None and module is not None and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def _causal(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return causal(frame.offset)


def _everything(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return everything()


def _sliding(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return window(cells["sliding_window"] - 1, None, frame.offset)


def _sliding_both_ways(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return window(cells["sliding_window"], cells["sliding_window"], frame.offset)


def _chunks(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    left, size = cells["left_padding"][:, None], cells["chunk_size"]
    rows, keys = frame.row_positions(left.device), frame.key_positions(left.device)
    return documents((rows - left) // size, (keys - left) // size)


def _blocks(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    ids = cells["block_sequence_ids"]
    rows, keys = frame.at_rows(ids), frame.at_keys(ids, -1)
    return documents(rows, torch.where(keys < 0, rows.amin() - 1, keys))  # below 0 is in no block


def _packed(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    ids = cells["packed_sequence_mask"]
    alone = frame == (ids.shape[1], ids.shape[1], 0, 0)
    return documents(ids) if alone else documents(frame.at_rows(ids), frame.at_keys(ids, -1))


def _padding(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return padding(keep=frame.at_keys(cells["padding_mask"].bool()))


def _and(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return _all_of([maker.read(rule, frame, cells["one_by_one"]) for rule in cells["mask_functions"]], frame)


def _or(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    return reduce(or_, (_lean(maker.read(f, frame, cells["one_by_one"]), frame) for f in cells["mask_functions"]))


def _moved(maker: MaskBuilder, cells: Cells, frame: Frame) -> Mask:
    rows, keys, row_start, key_start = frame
    moved = Frame(rows, keys, row_start + cells["q_offset"], key_start + cells["kv_offset"])
    return maker.read(cells["mask_function"], moved, cells["one_by_one"])


_IDS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]], device="cpu")
_GROUPS = torch.tensor([[-1, 0, 0, 0, -1, 1], [-1, -1, 2, 2, 2, -1]], device="cpu")
MASK_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Callable[[MaskBuilder, Cells, Frame], Mask]]] = {
    "causal_mask_function": ((), _causal),
    "bidirectional_mask_function": ((), _everything),
    "sliding_window_overlay": ((2,), _sliding),
    "sliding_window_bidirectional_overlay": ((1,), _sliding_both_ways),
    "chunked_overlay": ((2, torch.tensor([0, 1], device="cpu")), _chunks),
    "blockwise_overlay": ((_GROUPS,), _blocks),
    "packed_sequence_mask_function": ((_IDS,), _packed),
    "padding_mask_function": ((_IDS == 1,), _padding),
    "and_masks": (("causal_mask_function", lambda batch, head, i, j: j % 2 == 0), _and),
    "or_masks": (("causal_mask_function", lambda batch, head, i, j: j % 2 == 0), _or),
    "add_offsets_to_mask_function": (("causal_mask_function", 2, 1), _moved),
}
"""The functions that are read as masks: by name, what one is made with to be tried (a name is another one), by whom."""


def _all_of(masks: Iterable[Mask], frame: Frame) -> Mask:
    """The pairs that all masks allow; a causal mask and a window that stand alike are one."""
    found: list[Mask] = []
    for mask in masks:
        twin = next((other for other in found if _one_window(mask, other)), None)
        if twin is not None:
            found.remove(twin)
            left = next(w.left for w in (mask, twin) if isinstance(w, Window))
            mask = window(left, 0, frame.offset)
        found.append(mask)
    return reduce(Mask.__and__, (_lean(mask, frame) for mask in found), everything())


def _one_window(a: Mask, b: Mask) -> bool:
    pair = (a, b) if isinstance(a, Causal) else (b, a)
    if not isinstance(pair[0], Causal) or not isinstance(pair[1], Window) or pair[1].right is not None:
        return False
    return isinstance(pair[0].offset, int) and pair[0].offset == pair[1].offset


def _lean(mask: Mask, frame: Frame) -> Mask:
    """The simplest mask that allows the same pairs of this frame."""
    if not isinstance(mask, Causal | Window) or not isinstance(mask.offset, int):
        return mask
    offset, rows, keys = mask.offset, frame.rows, frame.keys
    if not isinstance(rows, int) or not isinstance(keys, int):  # symbols of torch.export, for lengths of any size
        return mask
    left, right = (None, 0) if isinstance(mask, Causal) else (mask.left, mask.right)
    if left is not None and rows - 1 + offset - left <= 0:
        left = None
    if right is not None and offset + right >= keys - 1:
        right = None
    if left is None and right is None:
        return everything()
    aligned = None if offset == keys - rows else offset
    return causal(aligned) if left is None and right == 0 else window(left, right, aligned)


def _asked(rule: Rule, frame: Frame, one_by_one: bool) -> Mask:
    """A function that is asked about every pair, where rows and keys stand."""

    def allows(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        indices = (batch, head, i + frame.row_start, j + frame.key_start)
        return (_each(rule, *indices) if one_by_one else rule(*indices)).to(i.device)

    allows.__name__ = getattr(rule, "__name__", type(rule).__name__)
    return predicate(allows)


def _each(rule: Rule, *indices: Tensor) -> Tensor:
    """Ask a function of single indices about many at once."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    shape = joint(*(x.shape for x in indices))
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    with TransformGetItemToIndex():  # lets an index under vmap pick from a tensor
        found: Tensor = torch.vmap(rule)(*(x.expand(shape).flatten() for x in indices))
    return found.reshape(shape)
