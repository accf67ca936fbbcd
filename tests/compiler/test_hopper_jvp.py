"""The Hopper jvp without a GPU: it compiles for sm_90 and fits the chip; what it refuses, and what it is given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hopper_compiled
import regard
from hopper_compiled import RECENT, SHARED, biased, compiles, fits, machine_code, work
from regard.compat.triton import INTERPRETED
from regard.core.rows import Rows
from regard.kernels.arguments import BIAS_ALIBI, DropoutArgs, KernelArgs, Tangents
from regard.kernels.block_mask import BlockMask
from regard.kernels.hopper import configs, forward_launch, jvp_launch
from sass import inner_loops

# Bytes of a thread that find no register, at most, by Triton 3.6 and by 3.9; all others have room. True: with entropy.
SPILLED = {
    ("none", 128, False): (88, 360), ("none", 128, True): (392, 408), ("spans", 64, True): (0, 64),
    ("spans", 128, False): (184, 488), ("spans", 128, True): (432, 576), ("bits", 64, True): (0, 64),
    ("bits", 128, False): (232, 480), ("bits", 128, True): (424, 568),
}  # fmt: skip
hopper, variants = hopper_compiled.hopper, hopper_compiled.variants


def moving(w: KernelArgs, which: str = "qkv") -> Tangents:
    tensors = {"q": w.query, "k": w.key, "v": w.value}
    return Tangents(*(torch.zeros_like(x) if name in which else None for name, x in tensors.items()))


def arguments(w: KernelArgs, entropy: bool = False, which: str = "qkv") -> tuple[dict[str, Any], dict[str, Any]]:
    found = w.new_rows(entropy)
    moved = Rows(torch.empty_like(found.output), torch.empty_like(found.lse), torch.empty_like(found.lse))
    return jvp_launch.jvp_arguments(w, moving(w, which), found, moved, jvp_launch.TILES[jvp_launch.padded(w)])


def compiled(w: KernelArgs, entropy: bool = False, which: str = "qkv") -> Any:
    given, options = arguments(w, entropy, which)
    return jvp_launch.jvp.warmup(**given, grid=(1,), **options)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "spans", "bits"])
def test_a_jvp_compiles_for_hopper_and_spills_no_more_than_is_pinned(
    mask: str, dim: int, entropy: bool, hopper: None
) -> None:
    fits(compiled(work(dim, mask), entropy), stack=SPILLED.get((mask, dim, entropy), (0, 0))[RECENT])


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("which", ["q", "k", "qk", "qv", "kv"])
def test_a_tensor_without_a_tangent_has_no_product(which: str, hopper: None) -> None:
    kernel = compiled(work(64), which=which)
    fits(kernel)
    loop = max((x for x in map("\n".join, inner_loops(machine_code(kernel))) if "HGMMA" in x), key=len)
    assert loop.count("HGMMA") == 4 * (
        3 + len(which)
    )  # a product has 64 / 16 instructions; Q Kᵀ, P V and (P∘t) V are always there


def test_heads_share_the_cache_with_the_tangents_of_their_keys_and_values() -> None:
    q, k = (torch.zeros(1, 9, rows, 64, dtype=torch.bfloat16) for rows in (1, 32768))
    w = KernelArgs(q, k, k, BlockMask(1, 32768), scale=0.1)
    assert forward_launch.heads_in_l2(w) == 3
    assert arguments(w)[0]["swizzle"] == 2


@compiles
def test_the_softmax_runs_beside_the_products_of_the_block_before(hopper: None) -> None:
    kernel = compiled(work(64))
    fits(kernel)
    loops = [x for x in map("\n".join, inner_loops(machine_code(kernel))) if "HGMMA" in x]
    assert len(loops) == 2  # one per group
    for loop in loops:
        assert loop.count("HGMMA") == 4 * 6
        assert not re.search(r"\b(LDS|STS|LDL|STL)\b", loop)
        before, after, rest = loop.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert before.count("MUFU.EX2") == loop.count("MUFU.EX2") == 32 + 2
        assert "HGMMA" in after  # T, beside which O and A are rescaled
        assert after.count("FMUL") >= 64
        assert "HGMMA" not in rest


def test_every_tile_fits_the_chip() -> None:
    for dim, tile in jvp_launch.TILES.items():
        rows = 2 * tile.BM + 4 * tile.stages * tile.BN
        assert rows * dim * 2 <= SHARED - 1024
        assert 128 % tile.BN == 0
        assert configs.producer_registers(tile.groups, tile.registers) >= 24


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"dim": 136}, "up to 128"),
        ({"softcap": 3.0}, "no cap"),
        ({"scales": torch.ones(4)}, "one positive scale"),
        (biased(BIAS_ALIBI), "no bias"),
        ({"drop": DropoutArgs(torch.zeros(2, 4, 300, dtype=torch.int64), 5, 1.1)}, "no dropout"),
        ({}, "compute capability 9.0"),
    ],
)
def test_a_refusal_says_why(what: dict[str, Any], reason: str) -> None:
    w = work(**what)
    assert any(reason in r for r in jvp_launch.refuses(w, moving(w))) or INTERPRETED


def test_tangents_can_be_a_reason_to_refuse() -> None:
    w = work()
    here = set(jvp_launch.refuses(w, moving(w)))
    assert set(jvp_launch.refuses(w, moving(w, "v"))) - here == {"neither queries nor keys have a tangent"}
    scaled = moving(w)._replace(scales=torch.ones(4))
    assert set(jvp_launch.refuses(w, scaled)) - here == {"it has one positive scale, no cap and no bias"}
    odd = moving(w)._replace(key=torch.zeros(2, 2, 300, 65, dtype=torch.bfloat16)[..., :64])
    (reason,) = set(jvp_launch.refuses(w, odd)) - here
    assert reason.startswith("TMA cannot describe the tangent of key")


def test_queries_and_values_of_different_dims_share_a_padded_one() -> None:
    w = work(80)
    w.value = w.value[..., :40].contiguous()
    given, _ = arguments(w)
    assert given["D"] == 128
    assert given["v"].block_shape == given["dk"].block_shape == [1, 1, 64, 128]
    assert given["o"].shape[3] == 40


@compiles
def test_calls_take_the_kernel_unless_it_refuses(variants: set[tuple[str, str]]) -> None:
    q = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)

    def kernels(dtype: torch.dtype, **kwargs: Any) -> set[str]:
        variants.clear()
        x = q.to(dtype)
        torch.func.jvp(lambda x: regard.attention(x, x, x, backend="triton", **kwargs), (x,), (x,))
        return {name for name, _ in variants}

    assert kernels(torch.bfloat16) == kernels(torch.bfloat16, mask=regard.causal()) == {"regard.kernels.hopper.jvp.jvp"}
    assert kernels(torch.bfloat16, softcap=3.0) == kernels(torch.float32) == {"regard.kernels.portable.jvp.jvp"}
