"""Why an additive score is no dot product, and a dot product no additive score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import scores
from .base import Row, Study, Tell, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Parity"]

Function = Callable[[Tensor, Tensor], Tensor]
"""Of queries (Q, 1, d) and keys (Q, M, d), one or more numbers a pair."""

_NOTHING = 1e-12
_EVEN = ("dot product", "cosine", "bilinear", "Gaussian")


@dataclass(frozen=True)
class Parity(Study):
    """What (q, k) → (−q, −k) does to each score, and how well one kind of score can imitate another.

    An imitation is a least-squares fit to pairs drawn together with their mirror images: by the hidden units
    tanh(W₁q + W₂k) of an additive score, by such units with a bias inside, and by the products qᵢkⱼ of a bilinear
    score. It is judged on new pairs, after taking from each row its mean, which the softmax does not see.

    >>> Parity(units=32).run().verdict, Parity(units=32, bias=True).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "parity"
    claim: ClassVar[str] = (
        "Dot-product scores are even, s(−q, −k) = s(q, k), and additive scores vᵀtanh(W₁q + W₂k) are odd, "
        "s(−q, −k) = −s(q, k); only 0 is both, so neither can be the other, whatever its weights."
    )
    test: ClassVar[str] = (
        "Of no score more than 10⁻¹² is of the other parity; of what the softmax sees of a dot product, the units of "
        "an additive score explain less than 10⁻¹², and of an additive score the products explain as little."
    )
    caption: ClassVar[str] = (
        "How much of each score each kind can imitate. The units of an additive score get nothing of any even score, "
        "and products get nothing of the additive one: against the parity no number of units helps. A bias inside the "
        "tanh breaks the parity, and such units do come near a dot product."
    )

    dim: int = 3
    queries: int = 64
    keys: int = 48
    units: int = 256
    bias: bool = False  # whether the additive score that the claim is tried with has one inside its tanh

    def measure(self, tell: Tell) -> list[Row]:
        """Mirror every pair, and fit every score by each kind."""
        fitted, asked = self._pairs(), self._pairs()
        tried = self._tried()
        kinds = {
            "tanh units": self._units(bias=False),
            "tanh units, bias": self._units(bias=True),
            "products": lambda query, key: (query[..., :, None] * key[..., None, :]).flatten(-2),
        }
        rows: list[Row] = [{"score": name, **_parts(score(*asked))} for name, score in tried.items()]
        for step, (kind, features) in enumerate(kinds.items()):
            shares = _explained(list(tried.values()), features, fitted, asked)
            for row, share in zip(rows, shares, strict=True):
                row[f"by {kind}"] = share
            tell((step + 1) / len(kinds))
        return rows

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Queries (2Q, 1, d) with keys (2Q, M, d) of their own; the second half mirrors the first."""
        query = torch.randn(self.queries, 1, self.dim, dtype=torch.float64)
        key = torch.randn(self.queries, self.keys, self.dim, dtype=torch.float64)
        return torch.cat([query, -query]), torch.cat([key, -key])

    def _tried(self) -> dict[str, Function]:
        even = (scores.Scaled(), scores.Cosine(), scores.Bilinear(self.dim, self.dim), scores.Gaussian(1.0))
        named: dict[str, Function] = {name: _of(score) for name, score in zip(_EVEN, even, strict=True)}
        additive = _of(scores.Additive(self.dim, self.dim + self.bias, hidden=16))
        named["additive"] = lambda query, key: additive(query, _with_one(key) if self.bias else key)
        return named

    def _units(self, bias: bool) -> Function:
        """The hidden units of a wide additive score, each as a function of its own."""
        score = scores.Additive(self.dim, self.dim + bias, hidden=self.units).double()

        def units(query: Tensor, key: Tensor) -> Tensor:
            side, other, _ = score.prepare(query, _with_one(key) if bias else key)
            return torch.tanh(side + other).detach()

        return units

    def holds(self, rows: list[Row]) -> bool:
        """Each of one parity, and nothing of it explained by the other."""
        by = {row["score"]: row for row in rows}
        pure = all(by[name]["odd"] < _NOTHING for name in _EVEN) and by["additive"]["even"] < _NOTHING
        imitated = (by["dot product"]["by tanh units"], by["additive"]["by products"])
        return pure and all(abs(share) < _NOTHING for share in imitated)

    def draw(self, rows: list[Row]) -> Figure:
        """A group of bars for each score."""
        figure, axes = canvas(8.5, 3.8)
        kinds = {
            "by tanh units": "units of an additive score",
            "by tanh units, bias": "the same with a bias",
            "by products": "products qᵢkⱼ",
        }
        for place, (kind, label) in enumerate(kinds.items()):
            middles = [i + (place - 1) * 0.27 for i in range(len(rows))]
            heights = [max(0.0, row[kind]) for row in rows]
            axes.bar(middles, heights, width=0.25, label=label)
            for middle, height in zip(middles, heights, strict=True):
                axes.text(middle, height + 0.01, f"{height:.2f}", ha="center", color="0.3", fontsize="small")
        words = [f"{row['score']}\n({_parity(row)})" for row in rows]
        axes.set_xticks(range(len(rows)), words)
        axes.set(ylabel="share explained", ylim=(0.0, 1.3), yticks=[0.0, 0.25, 0.5, 0.75, 1.0])
        axes.legend(frameon=False, ncols=3, loc="upper center")
        axes.grid(visible=False, axis="x")
        return figure


def _of(score: scores.Score) -> Function:
    score = score.double()
    return lambda query, key: score(query, key).detach().squeeze(-2)


def _with_one(key: Tensor) -> Tensor:
    """Keys with a 1 at their end, which mirroring leaves alone: its weight is a bias."""
    return pad(key, (0, 1), value=1.0)


def _parts(logits: Tensor) -> Row:
    """The shares of the even and of the odd part, where the second half of the logits mirrors the first."""
    here, there = logits.chunk(2)
    parts = {"even": ((here + there) / 2).square().sum(), "odd": ((here - there) / 2).square().sum()}
    return {name: (part / (parts["even"] + parts["odd"])).item() for name, part in parts.items()}


def _explained(
    tried: list[Function], features: Function, fitted: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]
) -> list[float]:
    """R² of the best combination of features for each score, row means aside."""
    X, new_X = (_centred(features(*pairs)) for pairs in (fitted, asked))
    Y, new_Y = (_centred(torch.stack([score(*pairs) for score in tried], -1)) for pairs in (fitted, asked))
    weights = torch.linalg.lstsq(X, Y, driver="gelsd", rcond=1e-9).solution
    missed: Tensor = (new_Y - new_X @ weights).square().sum(0) / new_Y.square().sum(0)
    return [1.0 - share for share in missed.tolist()]


def _centred(x: Tensor) -> Tensor:
    """Numbers (Q, M, …) less the mean over the keys, all pairs in one dimension."""
    return (x - x.mean(1, keepdim=True)).flatten(0, 1)


def _parity(row: Row) -> str:
    return "even" if row["odd"] < _NOTHING else "odd" if row["even"] < _NOTHING else "neither"
