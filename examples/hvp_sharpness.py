"""Measure how sharp the minimum is that gradient descent settles in: the Hessian's largest eigenvalue, during training.

Descent with step size η cannot settle where the curvature is above 2/η: it diverges. Yet training tends to increase the
curvature, so it ends at the edge of stability, near 2/η (Cohen et al., 2021). The model here uses attention: it has to
find the token with the largest mark and return the value next to it. Its Hessian is never formed. Power iteration needs
only products H·v, and attention provides them in two ways, forward over reverse and reverse over reverse. At the end
both are compared with the whole Hessian, computed by the plain formula, which so few parameters allow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp

import regard

EXAMPLES, TOKENS, FEATURES, DIM, HEADS = 32, 8, 4, 8, 2
RATES, TIME, LOOKS = (0.2, 0.1, 0.05), 160, 8  # each rate η takes TIME/η steps, and measures LOOKS times
MOST = 100  # products per sharpness
Loss = Callable[[Tensor], Tensor]
Product = Callable[[Loss, Tensor, Tensor], Tensor]


class Finder(nn.Module):
    """Map a sequence of tokens to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "auto"
        self.token, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, 1)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens).tanh()
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = regard.attention(q, k, v, backend=self.backend).transpose(1, 2).flatten(2)
        return self.head((x + self.out(seen)).tanh().mean(1))[:, 0]


def posed(model: Finder) -> Loss:
    """The loss over all examples, as a function of the model's parameters in one vector."""
    tokens = torch.randn(EXAMPLES, TOKENS, FEATURES)
    value, mark = tokens[..., 0], tokens[..., 1]
    wanted = value.gather(1, mark.argmax(1, keepdim=True))[:, 0]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def loss(weights: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        # not F.mse_loss: torch has no forward mode over its gradient
        return (functional_call(model, named, tokens) - wanted).square().mean()

    return loss


def gradient(loss: Loss, weights: Tensor) -> Tensor:
    weights = weights.detach().requires_grad_()
    return torch.autograd.grad(loss(weights), weights)[0]


def forward_over_reverse(loss: Loss, weights: Tensor, v: Tensor) -> Tensor:
    """H·v as the tangent of the gradient along v."""
    return jvp(grad(loss), (weights,), (v,))[1]


def reverse_over_reverse(loss: Loss, weights: Tensor, v: Tensor) -> Tensor:
    """H·v as the gradient of the gradient's component along v."""
    weights = weights.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(weights), weights, create_graph=True)
    return torch.autograd.grad(slope @ v, weights)[0]


def sharpness(product: Product, loss: Loss, weights: Tensor, v: Tensor) -> tuple[float, Tensor, int]:
    """Power iteration from v: the Hessian's eigenvalue of largest magnitude, its vector, and the number of products."""
    value, count = torch.tensor(torch.inf), 0
    while count < MOST:
        image, last = product(loss, weights, v), value
        value, v, count = v @ image, F.normalize(image, dim=0), count + 1
        if (value - last).abs() <= 1e-6 * value.abs():
            break
    return value.item(), v, count


def descended(loss: Loss, weights: Tensor, v: Tensor, rate: float) -> tuple[Tensor, float]:
    """Train and print the sharpness along the way; return the weights and the last sharpness."""
    print(f"step η = {rate}: the edge is at 2/η = {2 / rate:g}\n   steps      loss   sharpness   of the edge")
    steps, sharp = round(TIME / rate), 0.0
    for step in range(steps + 1):
        if step % (steps // LOOKS) == 0:
            sharp, v, _ = sharpness(reverse_over_reverse, loss, weights, v)
            print(f"   {step:5}{loss(weights):10.3g}{sharp:12.3g}{sharp * rate / 2:14.0%}", flush=True)
        if step < steps:
            weights = weights - rate * gradient(loss, weights)
    return weights, sharp


def checked(model: Finder, loss: Loss, weights: Tensor, v: Tensor) -> float:
    """Measure the same sharpness in three ways; return the relative difference."""
    print(f"the last model, {len(weights)} parameters: its sharpness in three ways")
    found = []
    for product in (forward_over_reverse, reverse_over_reverse):
        sharp, _, count = sharpness(product, loss, weights, v)
        print(f"   {product.__name__.replace('_', ' '):22}{sharp:12.6f}   {count} products")
        found.append(sharp)
    model.backend = "reference"
    values = torch.linalg.eigvalsh(hessian(loss)(weights))
    print(f"   {'the whole Hessian':22}{values[-1]:12.6f}   {len(weights)} × {len(weights)} numbers")
    found.append(values[-1].item())
    a, b = (product(loss, weights, v) for product in (forward_over_reverse, reverse_over_reverse))
    print(f"the two products differ by {(a - b).norm() / b.norm():.0e} of their norm")
    return (max(found) - min(found)) / max(found)


def main() -> int:
    torch.set_num_threads(1)  # the tensors are too small to share
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Finder()
    loss = posed(model)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    direction = F.normalize(torch.randn_like(start), dim=0)
    edges = []
    for rate in RATES:
        weights, sharp = descended(loss, start, direction, rate)
        edges.append(sharp * rate / 2)
    apart = checked(model, loss, weights, direction)
    print(f"steps from {RATES[-1]:g} to {RATES[0]:g} all end at {min(edges):.0%} to {max(edges):.0%} of their edge")
    return 0 if apart < 0.01 and min(edges) > 0.5 and max(edges) < 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
