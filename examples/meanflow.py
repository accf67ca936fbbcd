"""Train a transformer that draws a polygon in one step: MeanFlow, whose loss contains a tangent through attention.

A flow carries noise e at time 1 to data x at time 0. Flow matching learns its velocity v(z, t), and drawing takes many
small steps along it. MeanFlow (Geng et al., 2025) learns the mean velocity u(z, r, t) between two times, so that a
single step from 1 to 0 is enough: x = e − u(e, 0, 1). Differentiating (t − r)·u = ∫ v gives what it is trained with,

    u = v − (t − r)·du/dt,    du/dt = ∂u/∂z·v + ∂u/∂t,

and du/dt is a Jacobian-vector product: `torch.func.jvp` gives u and du/dt together, in memory linear in the length. At
r = t this is flow matching, so one model has both. The data are regular polygons of random size, place and direction,
as sets of corners. No corner knows where to go unless it attends to the others, and a drawing can be checked: all
corners are equally far from their centre.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

CORNERS, DIM, HEADS, LAYERS = 5, 64, 4, 2
STEPS, BATCH, RATE, DRAWN = 600, 128, 3e-3, 4096
APART = 0.5  # the share of pairs r < t; at r = t the loss is flow matching's
SMALLEST, LARGEST = 0.8, 1.2  # radius


class MeanVelocity(nn.Module):
    """u(z, r, t) of a set of points z (batch, points, 2); the order of the points does not matter."""

    def __init__(self, attend: Callable[..., Tensor] = regard.attention) -> None:
        super().__init__()
        self.attend = attend
        self.point, self.times = nn.Linear(2, DIM), nn.Sequential(nn.Linear(10, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS))
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        wide = 4 * DIM
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, wide), nn.SiLU(), nn.Linear(wide, DIM)) for _ in range(LAYERS)
        )
        self.velocity = nn.Linear(DIM, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        waves = [f(k * x) for x in (t, t - r) for k in (1.5, 3.0) for f in (torch.sin, torch.cos)]
        x = self.point(z) + self.times(torch.stack([t, t - r, *waves], -1))[:, None]
        for at in range(LAYERS):
            q, k, v = self.qkv[at](self.norms[2 * at](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out[at](self.attend(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.mlp[at](self.norms[2 * at + 1](x))
        return self.velocity(x)


def polygons(count: int) -> Tensor:
    radius = SMALLEST + (LARGEST - SMALLEST) * torch.rand(count, 1)
    angles = torch.rand(count, 1) + torch.arange(CORNERS) / CORNERS
    corners = radius[..., None] * torch.stack([(2 * torch.pi * angles).cos(), (2 * torch.pi * angles).sin()], -1)
    return corners + 0.5 * torch.randn(count, 1, 2)


def loss(model: MeanVelocity) -> Tensor:
    """The MeanFlow loss of a batch."""
    x, e = polygons(BATCH), torch.randn(BATCH, CORNERS, 2)
    t, r = torch.randn(2, BATCH).sigmoid().sort(0, descending=True).values
    r = torch.where(torch.rand(BATCH) < APART, r, t)
    z, v = x + t[:, None, None] * (e - x), e - x
    u, du_dt = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du_dt.detach()
    error = (u - target).square().mean((1, 2))
    return (error / (error.detach() + 0.1)).mean()  # a weight for each polygon, against the few large errors


def trained() -> MeanVelocity:
    torch.manual_seed(0)
    model = MeanVelocity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def drawn(model: MeanVelocity, steps: int, mean: bool) -> Tensor:
    """Polygons from noise in so many steps, by the mean velocity of each step or by the velocity at its start."""
    torch.manual_seed(1)
    z = torch.randn(DRAWN, CORNERS, 2)
    for t, r in pairwise(torch.linspace(1.0, 0.0, steps + 1)):
        z = z - (t - r) * model(z, (r if mean else t).expand(DRAWN), t.expand(DRAWN))
    return z


def judged(polygons: Tensor) -> tuple[float, float]:
    """The mean radius, and by how much the corners of one polygon differ in theirs, relative to it."""
    radius = (polygons - polygons.mean(1, keepdim=True)).norm(dim=-1)
    return radius.mean().item(), (radius.std(1) / radius.mean(1)).mean().item()


def refused() -> str:
    """What torch's own function does with the same loss."""
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            loss(MeanVelocity(F.scaled_dot_product_attention)).backward()
    except (RuntimeError, NotImplementedError) as error:
        return f"refuses the same loss: {str(error).splitlines()[0]}"
    return "handles the same loss here"


def main() -> int:
    torch.set_num_threads(1)  # the tensors are too small to share
    model = trained()
    rows = {
        "the data": polygons(DRAWN),
        "noise": torch.randn(DRAWN, CORNERS, 2),
        "velocity, 1 step": drawn(model, 1, mean=False),
        "velocity, 32 steps": drawn(model, 32, mean=False),
        "mean velocity, 1 step": drawn(model, 1, mean=True),
    }
    print(f"{'':24}{'mean radius':>13}{'unevenness of the corners':>29}")
    found = {name: judged(points) for name, points in rows.items()}
    for name, (radius, uneven) in found.items():
        print(f"{name:24}{radius:>13.3f}{uneven:>29.1%}")
    print(f"torch's flash attention {refused()}")
    (true, _), (_, noise), (radius, uneven) = found["the data"], found["noise"], found["mean velocity, 1 step"]
    return 0 if abs(radius / true - 1) < 0.15 and uneven < 0.6 * noise else 1


if __name__ == "__main__":
    sys.exit(main())
