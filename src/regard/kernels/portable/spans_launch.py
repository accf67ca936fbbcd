"""Launch the kernel of `spans` for a mask's terms: the memory for its results, its arguments, what is cached."""

# fmt: off
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.torch import is_capturing, raw_stream
from ...compat.triton import INTERPRETED, grid_starter
from .. import ahead
from ..block_lists import MULTIPLE, KeyOrder, SpanLists
from ..span_terms import ENDS, LENGTHS, Sizes, SpanTerms
from .spans import CHUNK, spans

__all__ = ["launch_spans"]

_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
_MOST_LENGTHS = 256  # documents whose lengths each program sums up itself
_TICKETS: dict[tuple[int | None, int], Tensor] = {}  # by device and stream: launches on a stream follow one another
_STARTERS: dict[tuple[int | None, bool], Callable[[int, Sequence[Any]], None]] = {}  # by device, and by whether blocks are listed by keys


class _Plan(NamedTuple):
    """A launch for some sizes, whatever the mask. Places are counted in int32; −1 for what is not wanted."""

    size: int
    counts: list[int]  # of lo, hi, bounds, seen, the flag, begin, end, rank and base; 0 for what is not wanted
    places: tuple[int, ...]  # of lo, hi, bounds, seen, the flag, begin, end, rank and base
    programs: tuple[int, int, int, int]
    strides: dict[str, int]  # fields of BlockLists


@lru_cache(maxsize=512)
def _plan(sizes: Sizes, needs_spans: bool, needs_seen: bool) -> _Plan:
    n, m, (items, heads), BM, BN, before, inner = sizes
    leads, by_keys = items * heads, before is None
    row_blocks, key_blocks = -(-(n + (before or 0)) // BM), -(-m // BN)
    blocks = key_blocks if by_keys else row_blocks
    N, M, B, K, R = (-(-x // MULTIPLE) * MULTIPLE for x in (n, m, 4 * blocks, key_blocks, row_blocks))
    counts = [
        *([leads * N] * 2 if needs_spans else [0] * 2), leads * B, *([-(-leads * M // 64) * MULTIPLE, MULTIPLE] if needs_seen else [0] * 2),
        *([leads * M, leads * M, leads * K, leads * R] if by_keys else [0] * 4),
    ]
    *places, size = accumulate(counts, initial=0)
    wanted = [place if count else -1 for place, count in zip(places, counts, strict=True)]
    programs = [-(-x // CHUNK) for x in (N if needs_spans else 0, M if needs_seen or by_keys else 0, B // 2, key_blocks, row_blocks)]
    item, head = int(items > 1), int(heads > 1)
    strides = {"block_item": item * heads * B, "block_head": head * B}
    strides |= {"item": item * heads * N, "head": head * N} if needs_spans else {}
    strides |= {"seen_item": item * heads * M, "seen_head": head * M, "inner": MULTIPLE * inner} if needs_seen else {}
    return _Plan(
        size, counts, tuple(wanted),
        (programs[0], programs[1], programs[2], programs[3] + programs[4] if by_keys else 0), strides,
    )


def launch_spans(terms: SpanTerms, sizes: Sizes, device: torch.device, known: SpanLists) -> SpanLists:
    """The lists of these sizes, flat; what `known` lists of the same mask have already is not computed again.

    Lists by keys take lo and hi from there.
    """
    n, m, (items, heads), BM, BN, before, _ = sizes
    by_keys, needs_spans, needs_seen = before is None, known.addresses.lo is None, known.addresses.seen is None
    if by_keys and needs_spans:
        raise RuntimeError("lists by keys follow those by rows")
    plan = _plan(sizes, needs_spans, needs_seen)
    memory = torch.empty(plan.size, dtype=torch.int32, device=device)
    ticket = _ticket(device) if needs_seen else None
    kept, numbers = _numbers(terms)
    at = memory.data_ptr()
    _launch(items * heads * sum(plan.programs), device, (
        at, *plan.places, 0 if ticket is None else ticket.data_ptr(), *numbers,
        n, m, max(n, m, numbers[-2]).bit_length(), BM, BN, before or 0, items * heads, *plan.programs, by_keys,
    ))
    del kept, ticket  # the kernel is in the queue, and memory is used again in the order of the queue
    lo, hi, bounds, seen, flag, *_ = plan.places
    new: dict[str, Any] = {"bounds": at + 4 * bounds, **plan.strides}
    if needs_spans:
        new |= {"lo": at + 4 * lo, "hi": at + 4 * hi}
    if needs_seen:
        new |= {"seen": at + 4 * seen, "all_keys_visible": at + 4 * flag}
    return SpanLists(
        known.addresses._replace(**new), lambda: known.lists._replace(**_tensors(memory, plan, needs_spans, needs_seen)),
        (lambda: KeyOrder(*memory.split_with_sizes(plan.counts)[5:])) if by_keys else None, memory,
    )


def _tensors(memory: Tensor, plan: _Plan, needs_spans: bool, needs_seen: bool) -> dict[str, Any]:
    """The fields of lists that a launch has computed, as tensors."""
    lo, hi, bounds, seen, flag, *_ = memory.split_with_sizes(plan.counts)
    new: dict[str, Any] = {"bounds": bounds, **plan.strides}
    if needs_spans:
        new |= {"lo": lo, "hi": hi}
    if needs_seen:
        new |= {"seen": seen.view(torch.int8), "all_keys_visible": flag}
    return new


def _numbers(terms: SpanTerms) -> tuple[list[Tensor], tuple[int, ...]]:
    """The tensors that the kernel reads, and its arguments from `least` to `wide`."""
    least, most, until, offset, offset_least, offset_most, length, size, block_offset, block_offsets, table, rows, keys, _ = terms
    kept: list[Tensor] = []
    tables, count, wide = (0, 0, 0, 0), 0, 0
    if rows is not None and keys is not None:
        if table == LENGTHS and rows.shape[0] > _MOST_LENGTHS:
            table, rows = ENDS, rows.cumsum(0)
            keys = rows
        count, wide = rows.shape[-1], int(rows.dtype == torch.int64)
        tables = (*_address(rows, kept), *_address(keys, kept))
    return kept, (
        least, most, until, *_per_item_arguments(offset, kept), offset_least, offset_most, *_per_item_arguments(length, kept),
        size, block_offset, *_per_item_arguments(block_offsets, kept), table, *tables, count, wide,
    )


def _per_item_arguments(x: Tensor | None, kept: list[Tensor]) -> tuple[int, int]:
    """The address of one number per item, and the step from item to item."""
    if x is None:
        return 0, -1
    kept.append(x.contiguous())
    return kept[-1].data_ptr(), int(x.shape[0] > 1)


def _address(x: Tensor, kept: list[Tensor]) -> tuple[int, int]:
    """The address of a table, and the step from item to item in bytes."""
    kept.append(x.contiguous())
    return kept[-1].data_ptr(), x.shape[-1] * x.element_size() if x.dim() > 1 and x.numel() > x.shape[-1] else 0


def _ticket(device: torch.device) -> Tensor:
    """A counter at zero, which the kernel leaves at zero."""
    if device.type != "cuda" or is_capturing():  # a captured graph may run beside others
        return torch.zeros(1, dtype=torch.int64, device=device)
    key = (device.index, raw_stream(device))
    found = _TICKETS.get(key)
    if found is None:
        found = _TICKETS[key] = torch.zeros(1, dtype=torch.int64, device=device)
    return found


def _launch(programs: int, device: torch.device, values: tuple[int, ...]) -> None:
    """Start the kernel; after the first time without Triton's inspection of the arguments, for which nothing is compiled."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(programs, torch.device("cuda", torch.cuda.current_device()), values)
        return
    key = (device.index, bool(values[-1]))
    start = _STARTERS.get(key)
    if start is not None:
        if not ahead.is_collecting():
            start(programs, values)
        return
    named = dict(zip(spans.arg_names, values, strict=True))
    if ahead.collect(spans, named, _OPTIONS, variant := ("spans", *key)):
        return
    ahead.wait_for(spans, variant)
    compiled = spans[(programs,)](**named, **_OPTIONS)
    if not INTERPRETED and compiled is not None:
        _STARTERS[key] = grid_starter(compiled.result() if hasattr(compiled, "result") else compiled)
