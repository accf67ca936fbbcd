"""Which keys a bias and a mask hide from every row: the Hopper backward, which has one copy of its keys, must know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels.arguments import BIAS_RELATIVE, BIAS_TENSOR, BiasArgs, KernelArgs
from regard.kernels.block_mask import block_mask
from regard.kernels.hopper.backward_launch import seen_keys

L, K, H, N, M, D = 2, 2, 4, 150, 200, 24  # two heads of queries for each of keys
BAD = (3, 64, 77, 127, 128, 199)  # keys that hold what is no number
MASKS: dict[str, regard.Mask] = {
    "everything": regard.everything(),
    "causal": regard.causal(),
    "window": regard.window(30),
    "bits": regard.strided(5) & regard.causal(),
    "padding": regard.padding([100, 190]),
}


def some_bias(hidden: float) -> Tensor:
    """Of (L, H, N, M), −inf for some pairs, and for whole keys of one head or of all."""
    made = torch.Generator().manual_seed(1)
    bias = torch.randn(L, H, N, M, generator=made)
    bias[torch.rand(bias.shape, generator=made) < hidden] = -torch.inf
    bias[:, 1, :, 77] = -torch.inf
    bias[0, :, :, 127] = -torch.inf
    bias[..., :149, 128] = -torch.inf  # but for the last row
    return bias


def work(mask: regard.Mask, **kwargs: Any) -> KernelArgs:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(L, heads, n, D, generator=made) for heads, n in ((H, N), (K, M), (K, M)))
    for j in BAD:
        k[:, j % 2, j, j % D] = torch.nan if j % 3 else -torch.inf
    return KernelArgs(q, k.to(torch.bfloat16), v, block_mask(mask, N, M, torch.device("cpu")), **kwargs)


def holds(w: KernelArgs, shown: Tensor, BM: int, BN: int) -> None:
    """Keys with NaN or inf say whether some row sees them; all others may be taken as they are."""
    finite = w.key.isfinite().all(-1).repeat_interleave(H // K, 1)  # (L, H, M)
    assert int((~finite).sum()) == L * len(BAD) * H // K
    expected = shown.expand(L, H, N, M).any(2) | finite
    assert torch.equal(seen_keys(w, BM, BN).bool(), expected)
    assert not expected.all()


@pytest.mark.parametrize("BN", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_a_key_is_seen_if_mask_and_bias_show_it_to_some_row(name: str, BN: int) -> None:
    bias = some_bias(0.9)
    w = work(MASKS[name], kind=BIAS_TENSOR, bias=BiasArgs(bias, *bias.stride()))
    holds(w, MASKS[name].dense(N, M) & (bias > -torch.inf), 64, BN)


def test_a_bias_that_is_broadcast_hides_from_all() -> None:
    bias = some_bias(0.0)[0, 0, 0].clone()
    bias[[3, 199]] = -torch.inf
    w = work(regard.everything(), kind=BIAS_TENSOR, bias=BiasArgs(bias, 0, 0, 0, 1))
    holds(w, (bias > -torch.inf).expand(N, M), 64, 128)


@pytest.mark.parametrize("name", ["everything", "causal"])
def test_a_table_of_relative_positions_hides_by_its_distances(name: str) -> None:
    reach = 160
    table = torch.randn(H, 2 * reach + 1, generator=torch.Generator().manual_seed(2))
    table[:, reach - 60 :] = -torch.inf  # all but keys that are far behind their row
    w = work(MASKS[name], kind=BIAS_RELATIVE, bias=BiasArgs(table, 0, 2 * reach + 1, 0, 0, 0, reach))
    ahead = torch.arange(M) - torch.arange(N)[:, None]
    shown = MASKS[name].dense(N, M) & (table[:, ahead.clamp(-reach, reach) + reach] > -torch.inf)
    holds(w, shown, 64, 64)
