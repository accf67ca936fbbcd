"""Models that call the real FlashAttention-4 are seen like those that call torch's function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from gpu.test_kernels_on_gpu import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention-4 needs a GPU"),
    pytest.mark.filterwarnings("default"),  # FlashAttention-4 and its compiler warn when they compile
]
flash4 = pytest.importorskip("flash_attn.cute", reason="FlashAttention-4 is not installed")
interface = pytest.importorskip("flash_attn.cute.interface")

HEADS, DIM, ITEMS, LENGTH = 8, 64, 2, 320
STATISTICS = ("effective_keys", "relative_entropy", "max_logit", "self_share", "previous_share")
OF_POSITIONS = ("first_share", "distance")  # in a packed batch positions are those of the batch
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.kv_heads, self.attend = kv_heads, attend
        self.q = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.kv = nn.Linear(HEADS * DIM, 2 * kv_heads * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, DIM))  # (batch, length, heads, dim)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, DIM)).unbind(-3)
        return self.out(self.attend(4 * q, k, v).flatten(-2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers of attention."""

    def __init__(self, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.words = nn.Embedding(50, HEADS * DIM)
        self.layers = nn.ModuleList(Attention(kv_heads, attend) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x


def first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def of_package(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return first(flash4.flash_attn_func(q, k, v, causal=True, **more))


def of_interface(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return first(interface.flash_attn_func(q, k, v, causal=True, **more))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = torch.arange(0, (ITEMS + 1) * LENGTH, LENGTH, dtype=torch.int32, device=q.device)
    lengths = {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH, "causal": True}
    flat = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    out = first(interface.flash_attn_varlen_func(*flat, cu_seqlens_q=starts, cu_seqlens_k=starts, **lengths))
    return out.unflatten(0, (ITEMS, LENGTH))


def torchs(q: Tensor, k: Tensor, v: Tensor, window: int = LENGTH, scale: float | None = None) -> Tensor:
    i = torch.arange(LENGTH, device=q.device)
    show = (i[:, None] >= i) & (i[:, None] - i <= window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, show, scale=scale, enable_gqa=grouped).transpose(1, 2)


CASES: dict[str, tuple[int, Attend, Attend]] = {  # key heads, the model's function, and what torch computes
    "of the package": (HEADS, of_package, torchs),
    "of the interface, grouped": (2, of_interface, torchs),
    "a window": (HEADS, partial(of_interface, window_size=(63, 0)), partial(torchs, window=63)),
    "a scale, grouped": (2, partial(of_package, softmax_scale=0.05), partial(torchs, scale=0.05)),
    "with lse": (HEADS, partial(of_package, return_lse=True), torchs),
    "packed, grouped": (2, packed, torchs),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_model_that_calls_it_has_the_table_of_one_that_calls_torch(name: str) -> None:
    kv_heads, attend, same = CASES[name]
    models = []
    for function in (attend, same):
        torch.manual_seed(1)
        models.append(Model(kv_heads, function).to(DEVICE, torch.bfloat16))
    ids = torch.randint(0, 50, (ITEMS, LENGTH), device=DEVICE)
    before = flash4.flash_attn_func, interface.flash_attn_func, interface.flash_attn_varlen_func
    plain = models[0](ids)
    with regard.watch(models[0]) as seen:
        models[0](ids)
    with regard.watch(models[1]) as true:
        models[1](ids)
    assert not seen.missed
    assert (flash4.flash_attn_func, interface.flash_attn_func, interface.flash_attn_varlen_func) == before
    assert torch.equal(models[0](ids), plain)
    assert len(seen.heads) == len(true.heads) == 2 * HEADS
    for a, b in zip(seen.heads, true.heads, strict=True):
        for what in STATISTICS if "packed" in name else (*STATISTICS, *OF_POSITIONS):
            assert getattr(a, what) == pytest.approx(getattr(b, what), rel=2e-2, abs=2e-2), what
