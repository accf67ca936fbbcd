"""The Hopper kernels without a GPU: they compile for sm_90 and fit the chip; and what they refuse."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import hopper_compiled
import regard
from hopper_compiled import RECENT, SHARED, N, biased, compiles, fits, machine_code, warmed, work
from regard import warmup
from regard.compat.triton import INTERPRETED
from regard.core.rows import Rows
from regard.kernels.arguments import BIAS_ALIBI, BIAS_NONE, BIAS_TENSOR, DropoutArgs, KernelArgs
from regard.kernels.block_lists import SPANS
from regard.kernels.block_mask import BlockMask, _mask_bits
from regard.kernels.block_mask import block_mask as block_mask_of
from regard.kernels.hopper import configs, forward_launch
from sass import inner_loops

DIMS = (64, 96, 128, 192, 256)
KINDS = ("plain", "spans", "bits", "bias")
# What each run compiles, some 10 s each: both loops of the plain kernel; and bits and bias in one.
EVERY_DAY = [("spans", 128), ("bits, bias", 64)]
# Bytes of a thread that find no register, at most, by Triton 3.6 and by 3.9; all others have room.
SPILLED = {
    ("plain", 64): (0, 56), ("plain", 96): (32, 16), ("plain", 128): (0, 24), ("plain", 192): (0, 48),
    ("plain", 256): (24, 80), ("spans", 64): (56, 104), ("spans", 96): (64, 96),
    ("spans", 128): (32, 48), ("spans", 192): (40, 72), ("spans", 256): (40, 96),
    ("bits", 64): (32, 64), ("bits", 96): (48, 88), ("bits", 128): (24, 40),
    ("bits", 192): (24, 72), ("bits", 256): (32, 96), ("bias", 256): (0, 24),
}  # fmt: skip
hopper, variants = hopper_compiled.hopper, hopper_compiled.variants


def compiled(w: KernelArgs, tile: Any = None, entropy: bool = True) -> Any:
    """The kernel for a work."""
    tile = tile or forward_launch.tile_for(w)
    rows = [torch.empty(w.rows) for _ in range(4)]
    found = Rows(w.value.new_empty(*w.rows, w.value.shape[3]), *rows)
    arguments, options = forward_launch.forward_arguments(w, found, entropy, tile)
    return forward_launch.forward.warmup(**arguments, grid=(1,), **options)


@compiles
@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        *EVERY_DAY,
        *(
            pytest.param(kind, dim, marks=pytest.mark.slow)
            for kind in KINDS
            for dim in DIMS
            if (kind, dim) not in EVERY_DAY
        ),
    ],
)
def test_a_forward_compiles_for_hopper_and_spills_no_more_than_is_pinned(kind: str, dim: int, hopper: None) -> None:
    mask = kind.split(", ")[0]
    if "bias" in kind:
        w = work(dim, mask, torch.float16, **biased(BIAS_TENSOR))
    else:
        w = work(dim, mask)
    fits(compiled(w), stack=SPILLED.get((kind, dim), (0, 0))[RECENT])


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("mask", "spilled"), [("none", (24, 48)), ("spans", (32, 104)), ("bits", (24, 72))])
def test_a_forward_of_192_dims_with_values_of_128_spills_no_more_than_is_pinned(
    mask: str, spilled: tuple[int, int], hopper: None
) -> None:
    w = work(192, mask)
    w.value = w.value[..., :128].contiguous()
    fits(compiled(w), stack=spilled[RECENT])


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "of_values", "spilled"),
    [(64, 64, (0, 0)), (128, 128, (0, 8)), (256, 256, (32, 88)), (192, 128, (0, 64)), (80, 200, (32, 168))],
)
def test_dropout_with_a_lazy_row_max_spills_no_more_than_is_pinned(
    dim: int, of_values: int, spilled: tuple[int, int], hopper: None
) -> None:
    w = work(max(dim, of_values), "spans", drop=DropoutArgs(torch.zeros(2, 4, N, dtype=torch.int64), 5, 1.1))
    w.query, w.key, w.value = w.query[..., :dim], w.key[..., :dim], w.value[..., :of_values].contiguous()
    assert forward_launch.tile_for(w).persistent
    fits(compiled(w), stack=spilled[RECENT])


@compiles
@pytest.mark.slow
def test_all_else_compiles_for_hopper_together(hopper: None) -> None:
    keys = DropoutArgs(torch.zeros(2, 4, N, dtype=torch.int64), 5, 1.1)
    fits(compiled(work(64, "spans", softcap=9.0, sink=torch.zeros(4), scales=torch.ones(4), drop=keys)))


@compiles
@pytest.mark.slow
def test_a_tile_with_too_few_registers_is_found_by_its_spills(hopper: None) -> None:
    with pytest.raises(AssertionError, match="STACK"):
        fits(compiled(work(128), configs.Tile(2, 128, 2, 152)))


def met(block_mask: BlockMask, block: int, BM: int, BN: int) -> tuple[list[int], list[int]]:
    """The full and the partial blocks of keys that a block of rows meets, in their order."""
    where = block_mask.by_rows(BM, BN)
    if where.bounds is not None:
        first, full, until, behind = where.bounds[0, 0, 4 * block : 4 * block + 4].tolist()
        return list(range(full, until)), [*range(first, full), *range(until, behind)]
    lists = (where.full_start, where.full_entry, where.start, where.entry)
    full_start, full_entry, start, entry = (x.tolist() if x is not None else [] for x in lists)
    return (
        full_entry[full_start[block] : full_start[block + 1]],
        entry[start[block] : start[block + 1]],
    )


def as_bits(mask: Any, n: int, m: int) -> BlockMask:
    return BlockMask(n, m, mask_bits=_mask_bits(mask, n, m, torch.device("cpu")))


@pytest.mark.parametrize("shape", [(333, 333), (500, 200), (131, 400)])
@pytest.mark.parametrize("mask", [regard.strided(3) & regard.causal(), ~regard.window(20), regard.causal()], ids=str)
@pytest.mark.parametrize(("BM", "part"), [(192, 64), (256, 128)])
def test_bits_of_more_rows_than_a_block_have_a_slot_for_each_part(
    BM: int, part: int, mask: Any, shape: tuple[int, int]
) -> None:
    n, m = shape
    block_mask, dense, BN = as_bits(mask, n, m), mask.dense(n, m), 128
    where = block_mask.by_rows(BM, BN)
    assert where.slot is not None
    assert where.start is not None
    assert where.bits is not None
    bits = ((where.bits[..., None] >> torch.arange(32)) & 1).bool().flatten(2)  # (slots, rows, keys)
    seen = torch.zeros(n + BM, m + BN, dtype=torch.bool)
    for block in range(-(-n // BM)):
        full, partial = met(block_mask, block, BM, BN)
        for key in full:
            seen[block * BM : (block + 1) * BM, key * BN : (key + 1) * BN] = True
        slots = where.slot.view(-1, BM // part)[int(where.start[block]) :].tolist()
        for key, own in zip(partial, slots, strict=False):
            assert dense[block * BM : (block + 1) * BM, key * BN : (key + 1) * BN].any()
            for row, slot in zip(range(block * BM, (block + 1) * BM, part), own, strict=True):
                if slot >= 0:
                    rows = bits[slot, row % 128 : row % 128 + part]
                    seen[row : row + part, key * BN : (key + 1) * BN] = rows
    assert torch.equal(seen[:n, :m], dense)
    assert not seen[:n, m:].any()


@pytest.mark.parametrize("shape", [(777, 777), (500, 900), (900, 500)])
@pytest.mark.parametrize("mask", [regard.causal(), regard.window(150, 40)], ids=str)
def test_a_mask_has_the_same_full_and_partial_blocks_as_spans_and_as_bits(mask: Any, shape: tuple[int, int]) -> None:
    n, m = shape
    spans, bits = block_mask_of(mask, n, m, torch.device("cpu")), as_bits(mask, n, m)
    assert spans.kind == SPANS
    for block in range(-(-n // 192)):
        assert met(spans, block, 192, 128) == met(bits, block, 192, 128)


def test_blocks_of_bits_have_no_more_keys_than_a_word_list() -> None:
    w = work(64, "bits")
    found = Rows(w.value.new_empty(*w.rows, 64), *(torch.empty(w.rows) for _ in range(4)))
    with pytest.raises(ValueError, match="128 keys"):
        forward_launch.forward_arguments(w, found, False, configs.Tile(2, 256, 2, 240))


def argument(name: str, w: KernelArgs) -> Any:
    """What the forward is called with under a name."""
    found = Rows(w.value.new_empty(*w.rows, w.value.shape[3]), *(torch.empty(w.rows) for _ in range(4)))
    return forward_launch.forward_arguments(w, found, False, forward_launch.tile_for(w))[0][name]


def test_where_three_groups_do_not_fit_the_first_block_of_rows_is_the_short_one() -> None:
    """300 rows are 64 too few for two blocks of 192: the first has 128, the second all others."""
    bounds = argument("lists", work(64, "spans")).bounds  # causal: the first block, the full ones, one behind the last
    assert bounds.flatten()[:8].tolist() == [0, 0, 0, 1, 0, 0, 1, 3]


@pytest.mark.parametrize(
    ("dim", "more", "counts"),
    [(64, {}, True), (256, {}, True), (128, {"softcap": 5.0}, True), (192, {"softcap": 5.0}, False)],
)
def test_persistent_programs_have_a_work_counter_of_zero(dim: int, more: dict[str, Any], counts: bool) -> None:
    """And one retry counter per head. Where no row max is lazy, wide heads have one program per row block."""
    w = work(dim, "spans", **more)
    counters = argument("counters", w)
    assert counters.tolist() == [0] * (1 + math.prod(w.rows[:2])) if counts else counters is None


@compiles
def test_in_a_full_block_nothing_goes_between_threads_and_exponentials_run_beside_a_product(hopper: None) -> None:
    kernel = compiled(work(128, "spans"))  # one that is compiled anyway
    loops = ["\n".join(loop) for loop in inner_loops(machine_code(kernel), "HGMMA")]
    both = (
        loop for loop in loops if loop.count("HGMMA") == 2 * 128 // 16
    )  # Q Kᵀ and P V, without the first and the last
    fixed, _, safe, _ = sorted(both, key=len)  # of two groups; the safe one masks partial blocks, too
    assert safe.count("SHFL") == 4  # for the max
    assert not re.search(r"\b(SHFL|FMNMX)\b", fixed)
    assert fixed.count("FMUL") < 60 < safe.count("FMUL")  # O, 64 numbers per thread, is not rescaled
    assert not re.search(r"\b(LDS|STS|LDL|STL)\b", fixed)
    for loop in (fixed, safe):
        before, after = loop.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert before.count("MUFU.EX2") > 60 > after.count("MUFU.EX2")


@compiles
def test_a_group_has_three_copies_of_the_softmax_to_compile(hopper: None) -> None:
    ptx = compiled(work(128, "spans")).asm["ptx"]
    weights, rows = 64, 2  # of a thread
    first, safe, fixed = weights + rows, weights + 2 * rows, weights  # a factor per row; the safe loop looks at its max
    assert ptx.count("ex2.approx") == 2 * (first + safe + fixed)


def capped_loops(narrow: bool) -> tuple[int, int]:
    """Lines of PTX and powers of a kernel with a cap."""
    w = work(64, "spans", softcap=5.0)
    w.block_mask.narrow = narrow
    ptx = compiled(w, configs.config(64, narrow=True)).asm["ptx"]
    return ptx.count("\n"), ptx.count("ex2.approx")


@compiles
@pytest.mark.slow
def test_with_a_cap_and_a_narrow_mask_one_loop_takes_all_blocks(hopper: None) -> None:
    (lines, powers), (fewer_lines, fewer_powers) = capped_loops(False), capped_loops(True)
    assert fewer_lines < 0.85 * lines
    assert 0 < fewer_powers < 0.7 * powers  # two copies of the softmax, and not three


BOTH_DIMS = [*((dim, dim) for dim in DIMS), (192, 128)]
EXTRAS = [("none", 512, 256), *((extra, *dims) for extra in ("none", "bias", "dropout") for dims in BOTH_DIMS)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("extra", "dim", "of_values"), EXTRAS)
def test_every_tile_fits_the_chip_with_its_buffers(extra: str, dim: int, of_values: int, narrow: bool) -> None:
    tile = configs.config(dim, of_values, extra != "none", narrow, fast=extra != "bias")
    columns = sum(configs.value_chunks(of_values))
    values = tile.stages + (tile.groups if extra == "bias" else 0)  # blocks, with those that are cleaned
    numbers = tile.q_buffers * tile.BM * dim + tile.stages * tile.BN * dim + values * tile.BN * columns
    assert numbers * 2 <= SHARED - 1024
    assert 128 % tile.BN == 0
    assert configs.producer_registers(tile.groups, tile.registers) >= 24


def test_a_dim_is_padded_to_the_next_of_the_table() -> None:
    assert [configs.chunks(dim) for dim in (8, 64, 80, 96, 100, 129, 192, 200)] == [
        (64, 0), (64, 0), (64, 32), (64, 32), (128, 0), (128, 64), (128, 64), (256, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"vector": torch.zeros(64)}, "additive"),
        ({"dim": 264}, "at most 256"),
        ({"softcap": 1000.0}, "caps are at most 512"),
        ({"dim": 60}, "cannot describe query"),
        ({}, "compute capability 9.0"),
    ],
)
def test_a_refusal_says_why(what: dict[str, Any], reason: str) -> None:
    reasons = forward_launch.refuses(work(**what))
    assert any(reason in r for r in reasons) or INTERPRETED


def test_a_stride_that_says_nothing_is_no_reason_to_refuse() -> None:
    w = work()
    w.query = torch.zeros(1, 1, N, 64, dtype=torch.bfloat16).as_strided((1, 1, N, 64), (0, 3, 64, 1))
    assert not any("describe" in r for r in forward_launch.refuses(w))
    w.query = torch.zeros(1, 1, N, 64, dtype=torch.bfloat16).expand(2, 4, N, 64)
    assert any("describe query" in r for r in forward_launch.refuses(w))


def heads_together(heads: int, kv_heads: int, m: int) -> int:
    q, k = (torch.zeros(1, count, rows, 64, dtype=torch.bfloat16) for count, rows in ((heads, 1), (kv_heads, m)))
    return forward_launch.heads_in_l2(KernelArgs(q, k, k, BlockMask(1, m)))


def test_heads_are_scheduled_together_as_far_as_the_cache_holds_their_keys() -> None:
    assert forward_launch.heads_in_l2(work(64)) == 2 * 4
    assert heads_together(8, 2, 65536) == 2 * 4
    assert heads_together(8, 2, 131072) == 4
    assert heads_together(8, 2, 10**6) == 4  # a key head by itself


def test_heads_that_do_not_all_fit_the_cache_are_scheduled_in_equal_shares() -> None:
    """Four of nine heads at a time would leave one, whose longest row blocks would come last."""
    assert heads_together(4, 4, 32768) == heads_together(8, 8, 32768) == 4
    assert heads_together(9, 9, 32768) == 3


def test_heads_whose_keys_have_tangents_too_fill_the_cache_twice_as_fast() -> None:
    q = torch.zeros(1, 9, 32768, 64, dtype=torch.bfloat16)
    assert forward_launch.heads_in_l2(KernelArgs(q, q, q, BlockMask(32768, 32768)), tensors=4) == 2


def test_a_narrow_mask_has_tiles_of_its_own() -> None:
    w = work(128)
    w.block_mask = BlockMask(w.n, w.m, narrow=True)
    assert forward_launch.tile_for(w) == configs.config(128, narrow=True) != configs.config(128)


def test_a_bias_that_may_hide_has_tiles_of_its_own() -> None:
    assert forward_launch.tile_for(work(128)) == configs.config(128)
    assert forward_launch.tile_for(work(128, **biased(BIAS_ALIBI))) == configs.config(128)
    with_bias = configs.config(128, bias_or_dropout=True, fast=False)
    assert forward_launch.tile_for(work(128, **biased(BIAS_TENSOR))) == with_bias
    assert work(128).kind == BIAS_NONE


@compiles
@warmed
def test_warmup_compiles_what_a_call_takes(variant: str, masks: list[Any], variants: set[tuple[str, str]]) -> None:
    for _ in warmup.warm(warmup.plan(dims=[64], variants=[variant]), device="cpu"):
        pass
    names = {name for name, _ in variants}
    assert "regard.kernels.hopper.forward.forward" in names
    assert "regard.kernels.portable.forward.forward" not in names
    before = set(variants)
    q, k, v = (torch.zeros(2, *shape, 64, dtype=torch.bfloat16) for shape in ((4, 1000), (2, 700), (2, 700)))
    for mask in masks:
        regard.attention(q, k, v, mask=mask, backend="triton")
        seen = regard.observe(q, k, v, mask=mask, backend="triton")
        assert seen.received.shape == (2, 4, 700)
        assert seen.map(5, 5).shape == (2, 4, 5, 5)
        assert seen.map(40, 50).shape == (2, 4, 40, 50)
    assert sorted(name for name, _ in variants - before) == []


@compiles
def test_dims_above_256_are_taken_by_parts_of_the_columns(
    variants: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, ...]] = []
    launch = forward_launch.launch_forward

    def noted(w: KernelArgs, entropy: bool, **more: Any) -> Any:
        launched.append((w.query.shape[3], w.value.shape[3], *more["found"].output.stride()[2:]))
        return launch(w, entropy, **more)

    monkeypatch.setattr(forward_launch, "launch_forward", noted)
    q, v = torch.zeros(1, 2, 300, 512, dtype=torch.bfloat16), torch.zeros(1, 2, 300, 320, dtype=torch.bfloat16)
    regard.attention(q, q, v, backend="triton")
    assert launched == [(512, 256, 320, 1), (512, 64, 320, 1)]
    assert {name for name, _ in variants} == {"regard.kernels.hopper.forward.forward"}
    variants.clear()
    regard.attention(q, q, v, bias=torch.zeros(300, 300, dtype=torch.bfloat16), backend="triton")
    wider = torch.zeros(1, 2, 300, 576, dtype=torch.bfloat16)
    regard.attention(wider, wider, q, backend="triton")
    assert {name for name, _ in variants} == {"regard.kernels.portable.forward.forward"}


@compiles
def test_what_the_kernel_refuses_goes_to_the_portable_one(variants: set[tuple[str, str]]) -> None:
    q = torch.zeros(1, 2, 300, 64)
    regard.attention(q, q, q, backend="triton")
    assert {name for name, _ in variants} == {"regard.kernels.portable.forward.forward"}
