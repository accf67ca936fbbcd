"""The Hopper backward without a GPU: it compiles for sm_90 and fits the chip, what it refuses, and who runs instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hopper_compiled
import regard
from hopper_compiled import RECENT, N, biased, compiles, fits, machine_code, warmed, work
from regard import warmup
from regard.kernels import ahead, launch
from regard.kernels.arguments import (
    BIAS_ALIBI,
    BIAS_RELATIVE,
    BIAS_TENSOR,
    BackwardRows,
    BiasArgs,
    DropoutArgs,
    KernelArgs,
)
from regard.kernels.block_lists import NONE
from regard.kernels.block_mask import BlockMask
from regard.kernels.engine import TritonEngine
from regard.kernels.hopper import backward_launch as chip
from sass import inner_loops, lost_operands

hopper, variants = hopper_compiled.hopper, hopper_compiled.variants

DIMS = (64, 80, 96, 128, 192, 256)
BIASES = {"alibi": BIAS_ALIBI, "tensor": BIAS_TENSOR, "relative": BIAS_RELATIVE}
KINDS = ("plain", "spans", "bits", *BIASES)
# What each run compiles, some 10 s each.
EVERY_DAY = [("spans", 96, False), ("spans", 128, False), ("bits", 64, True)]
# Bytes of a thread that find no register, at most, by Triton 3.6 and by 3.9: for dims up to 64, 96, 128 or 256, without
# and with the gradient of entropy.
SPILLED = {
    ("plain", 64, False): (16, 0), ("spans", 64, False): (64, 32), ("bits", 64, False): (56, 32),
    ("alibi", 64, False): (0, 0), ("tensor", 64, False): (32, 40), ("relative", 64, False): (32, 40),
    ("plain", 64, True): (16, 0), ("spans", 64, True): (64, 32), ("bits", 64, True): (56, 32),
    ("alibi", 64, True): (0, 0), ("tensor", 64, True): (32, 40), ("relative", 64, True): (32, 40),
    ("plain", 96, False): (40, 32), ("spans", 96, False): (112, 112), ("bits", 96, False): (120, 120),
    ("alibi", 96, False): (120, 128), ("tensor", 96, False): (168, 288), ("relative", 96, False): (160, 272),
    ("plain", 96, True): (40, 32), ("spans", 96, True): (112, 112), ("bits", 96, True): (120, 120),
    ("alibi", 96, True): (128, 128), ("tensor", 96, True): (168, 272), ("relative", 96, True): (160, 296),
    ("plain", 128, False): (24, 24), ("spans", 128, False): (104, 104), ("bits", 128, False): (104, 96),
    ("alibi", 128, False): (104, 80), ("tensor", 128, False): (128, 224), ("relative", 128, False): (296, 264),
    ("plain", 128, True): (24, 32), ("spans", 128, True): (112, 104), ("bits", 128, True): (96, 104),
    ("alibi", 128, True): (120, 40), ("tensor", 128, True): (120, 216), ("relative", 128, True): (256, 264),
    ("plain", 256, False): (40, 128), ("spans", 256, False): (112, 200), ("bits", 256, False): (96, 176),
    ("alibi", 256, False): (144, 176), ("tensor", 256, False): (120, 120), ("relative", 256, False): (152, 120),
    ("plain", 256, True): (128, 208), ("spans", 256, True): (200, 280), ("bits", 256, True): (168, 256),
    ("alibi", 256, True): (176, 224), ("tensor", 256, True): (152, 192), ("relative", 256, True): (176, 192),
}  # fmt: skip
DQ_GROUP_WAITS = 2 * 3 + 1  # of each consumer group three for a block of rows, and one of the group that computes dQ
WAITS = 2 * 4 + 1  # of each group four, and one behind the last of the group that is late
CHUNKED_WAITS = DQ_GROUP_WAITS + 1  # the group that computes dQ waits for each chunk
WIDE_WAITS = 2 * 6  # four, and two behind the last, for the parts of dQ
D192_WAITS = 2 * 7  # five, and two behind the last, for dK and dQ


def rows_of(w: KernelArgs, entropy: bool = False, dO: Tensor | None = None) -> BackwardRows:
    """The row statistics of a backward pass."""
    dO = w.value.new_zeros(*w.rows, w.value.shape[3]) if dO is None else dO
    level, log_row_sum, delta = (torch.zeros(w.rows) for _ in range(3))
    g, mean = (torch.zeros(w.rows), torch.zeros(w.rows)) if entropy else (None, None)
    return BackwardRows(dO, level, log_row_sum, delta, g, mean, torch.zeros(1, dtype=torch.int32))


def made_for(w: KernelArgs, entropy: bool = False, tile: chip.BackwardTile | None = None) -> Any:
    """The kernel for a work."""
    tile = tile or chip.tile_for(w)
    seen = torch.ones(*w.rows[:2], w.m, dtype=torch.int8) if w.kind in (BIAS_TENSOR, BIAS_RELATIVE) else None
    arguments, options = chip.backward_arguments(w, rows_of(w, entropy), chip.workspace_for(w, tile), tile, seen)
    return chip.kernel_for(tile).warmup(**arguments, grid=(1,), **options)


@lru_cache
def compiled(kind: str, dim: int, entropy: bool) -> Any:
    return made_for(work(dim, **biased(BIASES[kind])) if kind in BIASES else work(dim, kind), entropy)


def every(dims: tuple[int, ...]) -> Iterator[Any]:
    for dim in dims:
        for kind in KINDS:
            for entropy in (False, True):
                marks = [] if (kind, dim, entropy) in EVERY_DAY else [pytest.mark.slow]
                yield pytest.param(kind, dim, entropy, marks=marks)


every_kernel = pytest.mark.parametrize(("kind", "dim", "entropy"), [*every(DIMS)])
every_narrow_kernel = pytest.mark.parametrize(("kind", "dim", "entropy"), [*every(DIMS[:4])])


@compiles
@every_kernel
def test_a_backward_compiles_for_hopper_and_spills_no_more_than_is_pinned(
    kind: str, dim: int, entropy: bool, hopper: None
) -> None:
    kernel = compiled(kind, dim, entropy)
    fits(kernel, SPILLED[kind, min(size for size in (64, 96, 128, 256) if size >= dim), entropy][RECENT])
    assert "cp.reduce.async.bulk.tensor" in kernel.asm["ptx"]


def waits_as_written(kernel: Any, w: KernelArgs, tile: chip.BackwardTile) -> None:
    """The assembler waits for products where the kernel does; one that cannot have them in flight waits for each."""
    written = WIDE_WAITS if tile.wide else D192_WAITS if tile.d192 else DQ_GROUP_WAITS if tile.dq_group else WAITS
    if tile.chunked:
        written = CHUNKED_WAITS
    if w.block_mask.kind != NONE and w.drop.keys is None and not tile.wide:
        written += 2  # a wait for S behind the loads of the mask of a partial block, and one where there are none
    assert kernel.asm["ptx"].count("wgmma.wait_group") == written
    waits = machine_code(kernel).count("WARPGROUP.DEPBAR")
    assert waits <= 2 * written, f"{waits} waits, {written} are written"


@compiles
@every_kernel
def test_products_run_beside_what_comes_after_them(kind: str, dim: int, entropy: bool, hopper: None) -> None:
    w = work(dim, kind if kind not in ("plain", *BIASES) else "none")
    waits_as_written(compiled(kind, dim, entropy), w, chip.tile_for(w))


DQ_GROUP, WHOLE, WIDE = chip.DQ_GROUP, chip.BackwardTile(), chip.BackwardTile(wide=True)
OPERANDS: list[Any] = [
    ("spans", {"scales": torch.ones(4)}, DQ_GROUP),
    *(
        pytest.param(kind, more, tile, marks=pytest.mark.slow)
        for kind in ("none", "spans", "bits")
        for more in ({}, {"softcap": 9.0}, {"scales": torch.ones(4)})
        for tile in (DQ_GROUP, WHOLE, WIDE, chip.CHUNKED)
        if (kind, "scales" in more, tile) != ("spans", True, DQ_GROUP)
    ),
]


@compiles
@pytest.mark.parametrize(("kind", "more", "tile"), OPERANDS)
def test_no_product_finds_its_operand_overwritten(
    kind: str, more: dict[str, Any], tile: chip.BackwardTile, hopper: None
) -> None:
    """The assembler of Triton 3.6 does so to operands in registers that a loop does not change."""
    kernel = made_for(work(256 if tile.wide else 96 if tile.chunked else 64, kind, **more), tile=tile)
    code = machine_code(kernel)
    assert any("HGMMA" in line for loop in inner_loops(code) for line in loop)  # else nothing was looked at
    assert lost_operands(code) == []


def adding(kernel: Any) -> list[str]:
    """The code of the warps that add dQ to memory."""
    parts = re.split(r"\bpartition\d+\(", kernel.asm["ttgir"])[1:]
    return [part.split("ttg.warp_return")[0] for part in parts if "async_tma_reduce" in part]


def first_visit(code: str) -> tuple[int, bool]:
    """What a warp adds to the count of earlier visits to find its own first one, and whether loops carry that count."""
    (of,) = re.findall(r"%own\w* = arith\.andi (%\w+), %c1_i32", code)
    added = re.search(rf"{of} = arith\.addi (%\w+), %c1_i32", code)
    earlier = added[1] if added else of
    counted = re.findall(r"iter_args\(.*?\)|\^bb0\(.*?:$", code, re.MULTILINE)
    return int(added is not None), any(re.search(rf"{earlier}(:| =)", names) for names in counted)


@compiles
@every_narrow_kernel
def test_the_two_warps_that_add_take_every_other_block_of_rows_over_all_heads(
    kind: str, dim: int, entropy: bool, hopper: None
) -> None:
    # Triton 3.6 loses a count that the innermost loop carries, too.
    found = [first_visit(code) for code in adding(compiled(kind, dim, entropy))]
    assert found == [(0, True), (1, True)]


@compiles
@pytest.mark.slow
def test_products_that_have_too_few_registers_are_found_by_their_waits(hopper: None) -> None:
    w, tile = work(128), chip.BackwardTile(registers=152)
    with pytest.raises(AssertionError, match="waits"):
        waits_as_written(made_for(w, tile=tile), w, tile)


DROPPED = DropoutArgs(torch.zeros(2, 4, N, dtype=torch.int64), 5, 1.1)
MORE = {"softcap": 9.0, "scales": torch.ones(4)}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("w", "stack"),
    [
        (work(64, "spans", drop=DROPPED), (72, 72)),
        (work(96, "spans", drop=DROPPED), (200, 392)),
        (work(128, "spans", drop=DROPPED), (208, 368)),
        (work(256, "spans", drop=DROPPED), (160, 224)),
        (work(64, "spans", drop=DROPPED, **MORE, **biased(BIAS_ALIBI)), (200, 216)),
        (work(96, "bits", drop=DROPPED, **MORE, **biased(BIAS_TENSOR)), (576, 656)),
        (work(128, "bits", drop=DROPPED, **MORE, **biased(BIAS_TENSOR)), (592, 656)),
        (work(256, "bits", drop=DROPPED, **MORE, **biased(BIAS_RELATIVE)), (424, 552)),
    ],
    ids=[f"{what} at {dim}" for what in ("dropout", "all") for dim in (64, 96, 128, 256)],
)
def test_all_else_compiles_for_hopper_together(w: KernelArgs, stack: tuple[int, int], hopper: None) -> None:
    kernel = made_for(w, entropy=w.softcap is not None)
    fits(kernel, stack[RECENT])
    waits_as_written(kernel, w, chip.tile_for(w))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "of_values", "stack"),
    [
        (64, 128, (72, 64)),
        (80, 96, (112, 112)),
        (96, 64, (72, 80)),
        (128, 64, (72, 80)),
        (192, 128, (112, 184)),
        (64, 256, (112, 200)),
        (256, 64, (112, 104)),
    ],
)
def test_keys_and_values_may_have_dims_of_their_own(
    dim: int, of_values: int, stack: tuple[int, int], hopper: None
) -> None:
    w = work(dim, "spans")
    w.value = torch.zeros(2, 2, N, of_values, dtype=torch.bfloat16)
    kernel = made_for(w)
    fits(kernel, stack[RECENT])
    waits_as_written(kernel, w, chip.tile_for(w))


@pytest.mark.parametrize(
    ("key_heads", "m", "narrow", "wide"),  # for each tile without and with a mask
    [
        ((8, 4), 1, (32, 32), (32, 32)),
        ((8, 4), 300, (32, 32), (16, 16)),  # 27 would leave 5 alone
        ((4, 8), 5000, (4, 16), (2, 8)),  # 40 or 79 programs each, of which 8 or 9 run at a time under a mask
        ((1, 32), 40000, (1, 4), (1, 2)),
        ((31, 1), 5000, (4, 16), (2, 8)),
        ((1, 1), 5000, (1, 1), (1, 1)),
    ],
)
def test_as_many_heads_are_scheduled_together_as_fill_the_chip_in_equal_shares(
    key_heads: tuple[int, int], m: int, narrow: tuple[int, int], wide: tuple[int, int]
) -> None:
    items, heads = key_heads
    spans = torch.zeros(1, 1, 1, dtype=torch.int32)
    q, k = torch.zeros(items, 2 * heads, 1, 8), torch.zeros(items, heads, 1, 8).expand(items, heads, m, 8)
    for tile, expected in ((chip.BackwardTile(), narrow), (chip.BackwardTile(wide=True), wide)):
        for mask, swizzle in zip((BlockMask(1, m), BlockMask(1, m, spans, spans)), expected, strict=True):
            assert chip._swizzle(KernelArgs(q, k, k, mask), tile) == swizzle


def reasons(w: KernelArgs, dO: Tensor | None = None) -> list[str]:
    return [r for r in chip.refuses(w, rows_of(w, dO=dO)) if not re.search("capability|interpreter", r)]


HALF = torch.zeros(2, 4, N, 72, dtype=torch.bfloat16)
DOUBLE = {"kind": BIAS_TENSOR, "bias": BiasArgs(torch.zeros(4, N, N, dtype=torch.float64), 0, N * N, N, 1)}
FAR = {"kind": BIAS_TENSOR, "bias": BiasArgs(torch.zeros(1), 0, 0, 2**31 // (N - 1) + 1, 1)}


@pytest.mark.parametrize(
    ("w", "dO", "reason"),
    [
        (work(264), None, "at most 256"),
        (work(64, **FAR), None, "a bias are counted in 31 bits"),
        (work(64, **DOUBLE), None, "got torch.float64"),
        (work(64), HALF[..., 4:68], "the output's gradient"),
        (work(64), HALF.mT.contiguous().mT[..., :64], "the output's gradient"),
        (work(64), torch.zeros(2, 4, N, 64), "the output's gradient: torch.float32"),
        (work(64), torch.zeros(2, 4, N, 64, dtype=torch.float16), "the output's gradient: torch.float16"),
    ],
)
def test_a_refusal_says_why(w: KernelArgs, dO: Tensor | None, reason: str) -> None:
    (only,) = reasons(w, dO)
    assert reason in only


def test_rows_and_keys_that_cannot_be_counted_are_refused() -> None:
    def long(n: int, m: int = 1, dim: int = 64) -> list[str]:
        q, k = (torch.zeros(1, heads, 1, dim, dtype=torch.bfloat16) for heads in (2, 1))
        w = KernelArgs(q.expand(1, 2, n, dim), k.expand(1, 1, m, dim), k.expand(1, 1, m, dim), BlockMask(n, m))
        rows = torch.zeros(1, 1, 1)
        return [r for r in chip.refuses(w, BackwardRows(w.query, rows, rows, rows, None, None, rows)) if "31 bits" in r]

    assert long(2**29 - 127)
    assert not long(2**29 - 128)
    assert long(2**30 // 3 - 126, dim=96)
    assert not long(2**30 // 3 - 127, dim=96)
    assert long(2**27 - 127, dim=256)
    assert not long(2**27 - 128, dim=256)
    assert long(1, 2**30 - 15)
    assert not long(1, 2**30 - 16)


@pytest.mark.parametrize(
    "w",
    [
        work(8),
        work(72),
        work(128, "bits"),
        work(128, "spans", drop=DROPPED),
        work(256, **MORE, **biased(BIAS_ALIBI)),
        work(192, **biased(BIAS_TENSOR)),
        work(64, **biased(BIAS_RELATIVE)),
    ],
)
def test_all_else_is_taken(w: KernelArgs) -> None:
    assert reasons(w) == []
    assert reasons(w, torch.zeros(2, N, 4, w.value.shape[3], dtype=torch.bfloat16).transpose(1, 2)) == []


@compiles
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_postprocess_of_dq_moves_16_bytes_at_a_time(
    dim: int, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def start(key: Any, kernel: Any, programs: int, arguments: Any, options: Any, changing: Any) -> None:
        made.append(kernel.warmup(**arguments, grid=(1,), **options))

    monkeypatch.setattr(chip.launch_cache, "start", start)
    w = work(dim)
    tile = chip.tile_for(w)
    chip.postprocess_dq(w, chip.workspace_for(w, tile), tile)
    code = made[0].asm["ptx"]
    assert code.count("ld.global.v4.b32") == 64 * dim // 128 // 4
    assert set(re.findall(r"st\.global[.a-z0-9]*", code)) == {"st.global.v4.b32"}


POSTPROCESS, HIDDEN = "regard.kernels.hopper.dq_sums.dq_postprocess", "regard.kernels.hopper.nonfinite.attended"
OURS = {"regard.kernels.hopper.backward.backward", POSTPROCESS}
WIDE_OURS = {"regard.kernels.hopper.backward_wide.backward", POSTPROCESS}
QUERIES, KEYS = "regard.kernels.portable.backward.backward_dq", "regard.kernels.portable.backward.backward_dkdv"


def gradients(variants: set[tuple[str, str]], wanted: str = "qkv", dim: int = 64, **more: Any) -> set[str]:
    """The kernels that make gradients in a call that asks for those of q, k or v."""
    inputs = [
        torch.zeros(2, heads, length, dim, dtype=torch.bfloat16, requires_grad=name in wanted)
        for name, heads, length in (("q", 4, 300), ("k", 2, 200), ("v", 2, 200))
    ]
    variants.clear()
    regard.attention(*inputs, backend="triton", **more).sum().backward()
    return {name for name, _ in variants} & {*OURS, *WIDE_OURS, HIDDEN, QUERIES, KEYS}


@compiles
def test_the_look_at_keys_that_a_bias_may_hide_is_a_launch_that_can_be_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "_compile", lambda launch, device, turn: ahead._FRONT_ENDS.leave(turn))
    with ahead.collecting(torch.device("cpu")) as threads:
        chip.seen_keys(work(64, **biased(BIAS_RELATIVE)), 64, 128)
    assert [thread.name for thread in threads] == ["regard compiles attended"]


@compiles
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"bias": regard.biases.alibi(torch.ones(4))}, True),
        ({"bias": regard.biases.relative(torch.zeros(4, 9))}, True),
        ({"bias": torch.zeros(300, 200)}, True),
        ({"bias": torch.zeros(300, 200, requires_grad=True)}, False),
        ({"dropout": 0.5}, False),
    ],
    ids=["plain", "alibi", "relative", "tensor", "learnt", "dropout"],
)
def test_a_backward_is_compiled_with_its_forward_unless_more_is_wanted(
    more: dict[str, Any], expected: bool, variants: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Any] = []
    run = TritonEngine._compile

    def noted(engine: TritonEngine, x: Any, needs: Any) -> Any:
        wanted.append(needs)
        return run(engine, x, needs)

    monkeypatch.setattr(TritonEngine, "_compile", noted)
    gradients(variants, **more)
    assert any(needs is not None for needs in wanted) == expected


@compiles
@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ("qkv", OURS),
        ("qk", OURS),
        ("qv", OURS),
        ("q", {QUERIES}),
        ("k", {KEYS}),
        ("v", {KEYS}),
        ("kv", {KEYS}),
    ],
)
def test_one_kernel_makes_all_gradients_and_the_portable_ones_those_of_one_side(
    wanted: str, kernels: set[str], variants: set[tuple[str, str]]
) -> None:
    assert gradients(variants, wanted, mask=regard.causal()) == kernels


@compiles
@pytest.mark.parametrize(
    ("more", "kernels"),
    [
        ({"dim": 136}, WIDE_OURS),
        ({"dim": 96, "dropout": 0.1}, OURS),
        ({"dim": 128, "dropout": 0.1}, OURS),
        ({"bias": torch.zeros(300, 200)}, {*OURS, HIDDEN}),  # whose −inf may hide keys
        ({"dim": 256, "bias": torch.zeros(300, 200)}, {*WIDE_OURS, HIDDEN}),
        ({"softcap": 1e4}, {QUERIES, KEYS}),  # refused
    ],
)
def test_the_problem_decides_which_kernel_computes_gradients(
    more: dict[str, Any], kernels: set[str], variants: set[tuple[str, str]]
) -> None:
    assert gradients(variants, **more) == kernels


@compiles
def test_gradients_have_the_shapes_of_their_inputs_and_unscaled_ones_are_float32(
    variants: set[tuple[str, str]],
) -> None:
    w = work(64, "spans", scales=torch.ones(4))
    found = launch.backward(w, rows_of(w))
    assert [x.shape for x in found[:3] if x is not None] == [w.query.shape, w.key.shape, w.value.shape]
    assert [x.dtype for x in found[:3] if x is not None] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert found.vector is None
    assert {name for name, _ in variants} == OURS


@compiles
@warmed
@pytest.mark.parametrize(("dim", "kernels"), [(64, OURS), (256, WIDE_OURS)])
def test_masks_lengths_and_grouped_heads_compile_nothing_that_warmup_has_not(
    variant: str, masks: list[Any], dim: int, kernels: set[str], variants: set[tuple[str, str]]
) -> None:
    for _ in warmup.warm(warmup.plan(dims=[dim], variants=[variant]), device="cpu"):
        pass
    assert {name for name, _ in variants} >= kernels
    before = set(variants)
    for mask in masks:
        for heads in (1, 2, 4):
            q, k, v = (
                torch.zeros(2, *shape, dim, dtype=torch.bfloat16, requires_grad=True)
                for shape in ((4, 1000), (heads, 700), (heads, 700))
            )
            regard.attention(q, k, v, mask=mask, backend="triton").sum().backward()
    assert sorted(name for name, _ in variants - before) == []
