"""Convert the mask functions of Hugging Face transformers to regard masks.

Transformers describes a mask by a function of (batch, head, row, key), composed of a few known ones: causal, window,
chunk, block, padding, packed sequences. Each known one becomes the equivalent mask; any other stays a function,
evaluated block by block. No rows × keys tensor is built.
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
from ...masks.window import Window
from ..posing import vmapped
from .lazy_mask import LazyMask

__all__ = ["MaskBuilder", "MaskRegion"]

MaskFunction: TypeAlias = Callable[..., Tensor]  # (batch, head, row, key) -> bool
Closure: TypeAlias = Mapping[str, Any]  # the variables that a mask function closes over
Converter: TypeAlias = "Callable[[MaskBuilder, Closure, MaskRegion], Mask]"


class MaskRegion(NamedTuple):
    """The part of the full mask that a call needs: its rows and keys, and the positions at which they start."""

    rows: int
    keys: int
    row_start: int | Tensor = 0
    key_start: int = 0

    @property
    def offset(self) -> int | Tensor:
        """The index of the key at the position of row 0."""
        offset = self.row_start - self.key_start
        return offset.reshape(1) if isinstance(offset, Tensor) else offset

    def row_positions(self, device: torch.device) -> Tensor:
        """The positions of the rows, (rows,)."""
        return torch.arange(self.rows, device=device) + self.row_start

    def key_positions(self, device: torch.device) -> Tensor:
        """The positions of the keys, (keys,)."""
        return torch.arange(self.keys, device=device) + self.key_start

    def at_rows(self, values: Tensor) -> Tensor:
        """Select the rows' positions from (batch, positions)."""
        return values[:, self.row_positions(values.device)]

    def at_keys(self, values: Tensor, beyond: int = 0) -> Tensor:
        """Select the keys' positions from (batch, positions); positions beyond its end get `beyond`."""
        end = self.key_start + self.keys
        return F.pad(values, (0, max(0, end - values.shape[1])), value=beyond)[:, self.key_start : end]


class Conversion(NamedTuple):
    """How a function of transformers is converted, and with which arguments the conversion is tested."""

    arguments: tuple[Any, ...]  # to create a mask function with; a string names another function; () if it is one
    converter: Converter


@dataclass(frozen=True)
class MaskBuilder:
    """Called by transformers to build a mask: a `LazyMask` in place of a tensor, or None if everything is visible.

    >>> build = MaskBuilder({})
    >>> build(batch_size=1, q_length=2, kv_length=3, mask_function=lambda batch, head, i, j: j < 2).mask
    predicate(<lambda>)
    """

    converters: Mapping[CodeType, Converter]
    source: Any = None  # the module of transformers that defines the functions

    def __call__(self, **given: Any) -> LazyMask | Tensor | None:
        return self.build_compiled(**given) if torch.compiler.is_dynamo_compiling() else self.build(**given)

    def build(
        self,
        batch_size: int,
        kv_length: int,
        q_length: int = 0,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: MaskFunction | None = None,
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
        """Build the mask for `q_length` rows and `kv_length` keys; the parameters are named by transformers."""
        if isinstance(attention_mask, LazyMask):
            return attention_mask
        if cache_position is not None:  # earlier versions pass this for q_length, q_offset and device
            q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
        compiled_step = q_length == 1 and not (allow_is_causal_skip or allow_is_bidirectional_skip)
        if isinstance(q_offset, Tensor) and not compiled_step and not torch.compiler.is_compiling():
            q_offset = int(q_offset)
        region = MaskRegion(q_length, kv_length, q_offset, kv_offset)
        found = [causal(region.offset) if mask_function is None else self.convert(mask_function, region, use_vmap)]
        if attention_mask is not None:
            keep = region.at_keys(attention_mask.bool())
            if torch.compiler.is_compiling() or compiled_step or not keep.all():
                found.append(padding(keep=keep))
        mask, eager = _intersection(found, region), _attends_eagerly(config)
        if mask.trivial and (allow_is_bidirectional_skip or (allow_is_causal_skip and not eager)):
            return None
        lazy = LazyMask(mask.bind(batch_size, 1), batch_size, q_length, kv_length, device)
        if eager:
            return lazy.additive(dtype)
        # A decoding step with a static cache is compiled with its mask as an input: a tensor avoids recompilation.
        return lazy.tensor if compiled_step else lazy

    def build_compiled(self, **given: Any) -> LazyMask | Tensor | None:
        """Build it under torch.compile, which cannot inspect closures: a causal LazyMask, or a tensor."""
        if isinstance(made := given.get("attention_mask"), LazyMask):
            return made
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if _attends_eagerly(given.get("config")):
            added: Tensor = self.source.eager_mask(**given)
            return added
        plain = given.get("mask_function") is self.source.causal_mask_function and made is None
        if plain and "q_length" in given:
            region = MaskRegion(given["q_length"], given["kv_length"], given["q_offset"], given["kv_offset"])
            return LazyMask(causal(region.offset), given["batch_size"], region.rows, region.keys, given["device"])
        allowed: Tensor = self.source.sdpa_mask(**given)
        return allowed

    def convert(self, function: MaskFunction, region: MaskRegion, use_vmap: bool = False) -> Mask:
        """Convert a function of transformers; `use_vmap` says that an unknown one accepts only single indices."""
        converter = self.converters.get(getattr(function, "__code__", None))  # type: ignore[arg-type]
        if converter is None:
            return _as_predicate(function, region, use_vmap)
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        closure = dict(zip(function.__code__.co_freevars, cells, strict=True))
        return converter(self, closure | {"use_vmap": use_vmap}, region)

    @classmethod
    def for_transformers(cls) -> MaskBuilder:
        """The builder for the installed transformers: it converts those functions that still do what we expect."""
        source: Any = import_module("transformers.masking_utils")
        builder = cls({}, source)
        for name, (arguments, converter) in MASK_FUNCTIONS.items():
            function = getattr(source, name, None)
            if function is not None:
                if arguments:  # it returns a mask function
                    function = function(*(getattr(source, x) if isinstance(x, str) else x for x in arguments))
                extended = cls({**builder.converters, function.__code__: converter}, source)
                builder = extended if extended.agrees(function) else builder
        return builder

    def agrees(self, function: MaskFunction) -> bool:
        """Whether a function and its conversion allow the same pairs, tried on three rows and five keys."""
        region = MaskRegion(3, 5, row_start=2, key_start=1)
        try:
            mask, truth = self.convert(function, region), _as_predicate(function, region, use_vmap=False)
        except (KeyError, TypeError):
            return False
        return torch.equal(*(x.bind(2, 1).dense(3, 5, "cpu").expand(2, 1, 3, 5) for x in (mask, truth)))


def _attends_eagerly(config: object) -> bool:
    """Whether a model always computes attention itself: its module does not use the table of attention functions."""
    module = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return config is not None and module is not None and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def _causal(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return causal(region.offset)


def _everything(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return everything()


def _sliding_window(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return window(closure["sliding_window"] - 1, None, region.offset)


def _bidirectional_window(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return window(closure["sliding_window"], closure["sliding_window"], region.offset)


def _chunks(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    left, size = closure["left_padding"][:, None], closure["chunk_size"]
    rows, keys = region.row_positions(left.device), region.key_positions(left.device)
    return documents((rows - left) // size, (keys - left) // size)


def _blocks(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    ids = closure["block_sequence_ids"]
    rows, keys = region.at_rows(ids), region.at_keys(ids, -1)
    return documents(rows, torch.where(keys < 0, rows.amin() - 1, keys))  # ids below 0 are in no block


def _packed(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    ids = closure["packed_sequence_mask"]
    whole = region == (ids.shape[1], ids.shape[1], 0, 0)
    return documents(ids) if whole else documents(region.at_rows(ids), region.at_keys(ids, -1))


def _padding(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return padding(keep=region.at_keys(closure["padding_mask"].bool()))


def _and(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    return _intersection([builder.convert(f, region, closure["use_vmap"]) for f in closure["mask_functions"]], region)


def _or(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    masks = (builder.convert(f, region, closure["use_vmap"]) for f in closure["mask_functions"])
    return reduce(or_, (_simplified(mask, region) for mask in masks))


def _with_offsets(builder: MaskBuilder, closure: Closure, region: MaskRegion) -> Mask:
    rows, keys, row_start, key_start = region
    moved = MaskRegion(rows, keys, row_start + closure["q_offset"], key_start + closure["kv_offset"])
    return builder.convert(closure["mask_function"], moved, closure["use_vmap"])


_IDS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]], device="cpu")
_GROUPS = torch.tensor([[-1, 0, 0, 0, -1, 1], [-1, -1, 2, 2, 2, -1]], device="cpu")
MASK_FUNCTIONS: dict[str, Conversion] = {
    "causal_mask_function": Conversion((), _causal),
    "bidirectional_mask_function": Conversion((), _everything),
    "sliding_window_overlay": Conversion((2,), _sliding_window),
    "sliding_window_bidirectional_overlay": Conversion((1,), _bidirectional_window),
    "chunked_overlay": Conversion((2, torch.tensor([0, 1], device="cpu")), _chunks),
    "blockwise_overlay": Conversion((_GROUPS,), _blocks),
    "packed_sequence_mask_function": Conversion((_IDS,), _packed),
    "padding_mask_function": Conversion((_IDS == 1,), _padding),
    "and_masks": Conversion(("causal_mask_function", lambda batch, head, i, j: j % 2 == 0), _and),
    "or_masks": Conversion(("causal_mask_function", lambda batch, head, i, j: j % 2 == 0), _or),
    "add_offsets_to_mask_function": Conversion(("causal_mask_function", 2, 1), _with_offsets),
}
"""The mask functions of transformers that have an equivalent mask."""


def _intersection(masks: Iterable[Mask], region: MaskRegion) -> Mask:
    """The pairs that all masks allow; a causal mask and a window with the same offset become one window."""
    found: list[Mask] = []
    for mask in masks:
        partner = next((other for other in found if _form_a_window(mask, other)), None)
        if partner is not None:
            found.remove(partner)
            left = next(w.left for w in (mask, partner) if isinstance(w, Window))
            mask = window(left, 0, region.offset)
        found.append(mask)
    return reduce(Mask.__and__, (_simplified(mask, region) for mask in found), everything())


def _form_a_window(a: Mask, b: Mask) -> bool:
    pair = (a, b) if isinstance(a, Causal) else (b, a)
    if not isinstance(pair[0], Causal) or not isinstance(pair[1], Window) or pair[1].right is not None:
        return False
    return isinstance(pair[0].offset, int) and pair[0].offset == pair[1].offset


def _simplified(mask: Mask, region: MaskRegion) -> Mask:
    """The simplest mask that allows the same pairs in this region."""
    if not isinstance(mask, Causal | Window) or not isinstance(mask.offset, int):
        return mask
    offset, rows, keys = mask.offset, region.rows, region.keys
    if not isinstance(rows, int) or not isinstance(keys, int):  # symbolic lengths of torch.export
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


def _as_predicate(function: MaskFunction, region: MaskRegion, use_vmap: bool) -> Mask:
    """A mask that calls the function for every pair, at the positions of its row and key."""

    def allows(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        indices = (batch, head, i + region.row_start, j + region.key_start)
        return (vmapped(function, *indices) if use_vmap else function(*indices)).to(i.device)

    allows.__name__ = getattr(function, "__name__", type(function).__name__)
    return predicate(allows)
