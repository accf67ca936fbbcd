"""How long is a MeanFlow training step, with tangents in all layers, beside jvp_flash_attention and plain torch?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _device import DEVICE, Peer, Row, at_least, each, measured, over, peak, random, report, start, verdict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

LAYERS, HIDDEN, TOKENS, CHANNELS = 4, 1024, 8192, 16
SHAPES = {f"d{d}, n{n}": (d, n) for d in (64, 128) for n in (1024, 8192)}
MUST = 1.2  # times the speed of jvp_flash_attention
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def normed(x: Tensor) -> Tensor:
    """x at a root mean square of 1. Torch's own norms give bf16 a float32 tangent, which linear layers refuse."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class Block(nn.Module):
    """A block of a diffusion transformer; the times scale and shift what its two parts read."""

    def __init__(self, attend: Attend, dim: int) -> None:
        super().__init__()
        self.attend, self.dim = attend, dim
        self.modulate = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        a, b, c, d = self.modulate(times)[:, None].chunk(4, -1)
        q, k, v = self.qkv(normed(x) * (1 + a) + b).unflatten(-1, (3, -1, self.dim)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(normed(x) * (1 + c) + d)))


class MeanVelocity(nn.Module):
    """u(z, r, t): the mean velocity of a flow between two times."""

    def __init__(self, attend: Attend, dim: int) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(CHANNELS, HIDDEN), nn.Linear(HIDDEN, CHANNELS)
        self.times = nn.Sequential(nn.Linear(2, HIDDEN), nn.SiLU())
        self.blocks = nn.ModuleList(Block(attend, dim) for _ in range(LAYERS))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        x, times = self.begin(z), self.times(torch.stack([t, t - r], -1))
        for block in self.blocks:
            x = block(x, times)
        return self.end(x)


def main() -> None:
    rows = each({name: partial(row, name) for name in SHAPES})
    note = (
        f"Milliseconds by CUDA events, in turns. A step is the MeanFlow loss of {TOKENS:,} tokens and its gradients: u "
        "and du/dt by torch.func.jvp in z and t, then backward from u; du/dt is detached. `dense` is torch's function "
        "with the matrix in memory, the only one of its kernels with a tangent. MiB above the model. "
        f"Must: ≥ {MUST} × the speed of jvp_flash_attention."
    )
    report("meanflow", f"A MeanFlow training step, bf16, {LAYERS} layers of {HIDDEN:,}: ms", rows, note)


def row(name: str) -> Row:
    d, n = SHAPES[name]
    peers = {
        "regard": Peer(step_of(partial(regard.attention, backend="triton"), d, n)),
        "jvp_flash_attention": Peer(lambda: theirs(d, n)()),
        "dense": Peer(step_of(dense, d, n)),
    }
    ms, _ = measured(name, peers)
    faster = over(ms["jvp_flash_attention"], ms["regard"])
    return {
        "case": name,
        **ms,
        "jvp_flash_attention / regard": faster,
        **{f"MiB {what}": used for what, used in peak(name, peers).items()},
        "holds": verdict({"faster": at_least(faster, MUST)}),
    }


def step_of(attend: Attend, d: int, n: int) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = MeanVelocity(attend, d).to(DEVICE, torch.bfloat16)
    x, e = random(TOKENS // n, n, CHANNELS), random(TOKENS // n, n, CHANNELS)
    t, r = torch.rand(2, TOKENS // n, device=DEVICE).sort(0, descending=True).values.bfloat16()
    z, v = x + t[:, None, None] * (e - x), e - x

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        u, du_dt = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        loss: Tensor = (u - v + (t - r)[:, None, None] * du_dt.detach()).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


_THEIRS: dict[tuple[int, int], Callable[[], Tensor]] = {}


def theirs(d: int, n: int) -> Callable[[], Tensor]:
    """A step with jvp_flash_attention, which is imported here so that a missing package is a reason in the report."""
    if (d, n) not in _THEIRS:
        from jvp_flash_attention.jvp_attention import JVPAttn

        _THEIRS[d, n] = step_of(JVPAttn.fwd_dual, d, n)
    return _THEIRS[d, n]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


if __name__ == "__main__":
    start(main)
