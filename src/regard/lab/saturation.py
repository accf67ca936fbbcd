"""Why large scores saturate the softmax and block its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ..functional import observe
from ..softmax import jacobian, stable
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Saturation"]

_SCORES = (20.0, 22.0, 18.0, 21.0)
_PRINTED = (0.018, 0.731, 0.002, 0.249)  # softmax(20, 22, 18, 21) according to a widely copied text


@dataclass(frozen=True)
class Saturation(Study):
    """The example (20, 22, 18, 21), and the Jacobian of the softmax as scores grow.

    J = diag(p) − p pᵀ is positive semidefinite; its trace Σ p(1 − p) is how much it passes on in total, and its norm
    how much it passes on at most.

    >>> found = Saturation(queries=8, keys=16, claimed=(0.018, 0.731, 0.002, 0.249)).run()
    >>> found.verdict, found.rows[0]["weights"]
    (False, '0.089 0.657 0.012 0.242')
    """

    name: ClassVar[str] = "saturation"
    brief: ClassVar[str] = "Large scores saturate the softmax and stop the gradient"
    claim: ClassVar[str] = (
        "Unscaled scores sharpen the softmax, and large ones saturate it: the weights of (20, 22, 18, 21) are (0.089, "
        "0.657, 0.012, 0.242), and after division by √512 only (0.247, 0.270, 0.226, 0.258). The larger the scores, "
        "the less of a gradient the Jacobian passes on; its diagonal α(1 − α) is largest at α = ½, where it is ¼."
    )
    test: ClassVar[str] = (
        "Each claimed weight is within 0.0005 of the computed one; with q·k of normal vectors the trace of the "
        "Jacobian falls with every increase of the scores, its norm stays below 2(1 − the largest weight), and without "
        "scaling the trace is less than a fifth of its value after division by √d. While one score rises past the "
        "others, its diagonal entry is largest within 0.005 of the claimed weight, and is 0.25 to 4 digits there."
    )
    caption: ClassVar[str] = (
        "Left: the example as computed, and as printed in a widely copied text, which no scale factor reproduces. "
        "Right: the trace of the Jacobian falls as scores grow, slowly up to the size that √d gives them and fast "
        "beyond; its norm first rises, while a few keys compete, and then falls too."
    )

    claimed: tuple[float, ...] = (0.089, 0.657, 0.012, 0.242)
    claimed_scaled: tuple[float, ...] = (0.247, 0.270, 0.226, 0.258)
    dim: int = 512
    claimed_peak: float = 0.5  # the weight at which the Jacobian's diagonal is largest
    sizes: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    queries: int = 128
    keys: int = 64

    def suit(self) -> None:
        """There must be one claimed weight per score."""
        for name in ("claimed", "claimed_scaled"):
            if len(getattr(self, name)) != len(_SCORES):
                self.refuse(name, f"{len(_SCORES)} weights")

    def measure(self, progress: Progress) -> list[Row]:
        """Compute the example, then scale q·k to scores of every size."""
        root = self.dim**0.5
        rows = [
            _example("(20, 22, 18, 21)", 1.0, self.claimed),
            _example("the same, as printed", 1.0, _PRINTED),
            _example(f"the same / √{self.dim}", 1 / root, self.claimed_scaled),
        ]
        query = torch.randn(self.queries, self.dim, dtype=torch.float64)
        key = torch.randn(self.keys, self.dim, dtype=torch.float64)
        for size in counted(sorted({*self.sizes, 1.0, root}), progress):
            weights = observe(query, key, key, scale=size / root).weights()
            row: Row = {"scores": "q·k, normal", "size": size, "weights": "", "claimed": "", "off by": math.nan}
            rows.append(row | _jacobian_statistics(weights))
        return [*rows, _peak(key @ query[0] / root)]

    def holds(self, rows: list[Row]) -> bool:
        """The claimed weights to half a unit in the last digit, and the Jacobian as stated."""
        example, _, scaled, *sampled, peak = rows
        exact = example["off by"] < 5e-4 and scaled["off by"] < 5e-4
        falls = all(a["trace of J"] > b["trace of J"] for a, b in pairwise(sampled))
        bounded = all(row["norm of J"] <= 2 * (1 - row["largest weight"]) + 1e-12 for row in sampled)
        at = {row["size"]: row["trace of J"] for row in sampled}
        halfway = (
            abs(peak["its weight"] - self.claimed_peak) < 5e-3 and abs(peak["largest diagonal of J"] - 0.25) < 5e-5
        )
        return exact and falls and bounded and halfway and at[self.dim**0.5] < 0.2 * at[1.0]

    def draw(self, rows: list[Row]) -> Figure:
        """Bars for the example, curves for the Jacobian."""
        figure, (left, right) = canvas(9.5, 3.8, columns=2)
        example, printed, scaled, *sampled, _ = rows
        bars = {"computed": example["weights"], "as printed": printed["claimed"], f"/ √{self.dim}": scaled["weights"]}
        for place, (label, text) in enumerate(bars.items()):
            heights = [float(part) for part in text.split()]
            left.bar([i + (place - 1) * 0.27 for i in range(len(heights))], heights, width=0.25, label=label)
        left.set_xticks(range(len(_SCORES)), [f"{score:g}" for score in _SCORES])
        left.set(xlabel="score", ylabel="weight")
        left.legend(frameon=False, loc="upper right")
        sizes = [row["size"] for row in sampled]
        for column, label in (("trace of J", "trace Σ p(1 − p)"), ("norm of J", "norm")):
            right.semilogx(sizes, [row[column] for row in sampled], marker="o", label=label)
        for size, label in ((1.0, "scaled"), (self.dim**0.5, f"unscaled,\nd = {self.dim}")):
            right.axvline(size, color="0.5", linewidth=0.8, linestyle="--")
            right.text(size * 1.1, 1.02, label, va="top", color="0.3")
        right.set(xlabel="size of the scores (standard deviation)", ylabel="Jacobian of the softmax", ylim=(0.0, 1.05))
        right.legend(frameon=False, loc="center left")
        return figure


def _example(name: str, factor: float, claimed: tuple[float, ...]) -> Row:
    weights = stable(torch.tensor(_SCORES, dtype=torch.float64) * factor)
    off = max(abs(ours - theirs) for ours, theirs in zip(weights.tolist(), claimed, strict=True))
    size = (torch.tensor(_SCORES) * factor).std(correction=0).item()
    row: Row = {
        "scores": name,
        "size": size,
        "weights": _three_decimals(weights.tolist()),
        "claimed": _three_decimals(claimed),
    }
    return row | {"off by": off} | _jacobian_statistics(weights[None])


def _jacobian_statistics(weights: Tensor) -> Row:
    """The largest weight, and norm and trace of the Jacobian, averaged over the rows."""
    J = jacobian(weights)  # (rows, m, m)
    return {
        "largest weight": weights.amax(-1).mean().item(),
        "norm of J": torch.linalg.eigvalsh(J)[:, -1].mean().item(),
        "trace of J": J.diagonal(dim1=-2, dim2=-1).sum(-1).mean().item(),
    }


def _peak(scores: Tensor) -> Row:
    """The largest diagonal entry of the Jacobian, and its weight, while the first score of the row rises."""
    shifts = torch.linspace(-20.0, 20.0, 2001, dtype=scores.dtype)
    swept = scores.repeat(len(shifts), 1)
    swept[:, 0] += shifts
    weights = stable(swept)  # (shifts, m)
    diagonal = torch.cat([jacobian(some).diagonal(dim1=-2, dim2=-1)[:, 0] for some in weights.split(64)])
    best = diagonal.argmax()
    return {
        "scores": "one of them rises",
        "largest diagonal of J": diagonal[best].item(),
        "its weight": weights[best, 0].item(),
    }


def _three_decimals(numbers: list[float] | tuple[float, ...]) -> str:
    return " ".join(f"{number:.3f}" for number in numbers)
