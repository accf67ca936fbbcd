"""Why an additive score cannot be a dot product, nor a dot product an additive score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import scores
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Parity"]

PairFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps queries (Q, 1, d) and keys (Q, M, d) to one or more numbers per pair."""

_ZERO = 1e-12
_EVEN = ("dot product", "cosine", "bilinear", "Gaussian")


@dataclass(frozen=True)
class Parity(Study):
    """What (q, k) → (−q, −k) does to each score, and how well one kind of score can imitate another.

    An imitation is a least-squares fit to random pairs and their mirror images: by the hidden units tanh(W₁q + W₂k) of
    an additive score, by such units with a bias, and by the products qᵢkⱼ of a bilinear score. It is evaluated on new
    pairs, after subtracting the mean of each row, to which the softmax is invariant.

    >>> Parity(units=32).run().verdict, Parity(units=32, bias=True).run().verdict
    (True, False)
    """

    name: ClassVar[str] = "parity"
    brief: ClassVar[str] = "Dot products are even and additive scores are odd"
    claim: ClassVar[str] = (
        "Dot-product scores are even, s(−q, −k) = s(q, k), and additive scores vᵀtanh(W₁q + W₂k) are odd, "
        "s(−q, −k) = −s(q, k); only 0 is both, so neither can express the other, whatever its weights."
    )
    test: ClassVar[str] = (
        "No score has more than 10⁻¹² of the opposite parity. Up to row means, the units of an additive score explain "
        "less than 10⁻¹² of a dot product, and products explain equally little of an additive score."
    )
    caption: ClassVar[str] = (
        "How much of each score each kind of feature explains. The units of an additive score explain nothing of any "
        "even score, and products explain nothing of the additive one: more units do not help against parity. A bias "
        "inside the tanh breaks the parity, and such units can approximate a dot product."
    )

    dim: int = 3
    queries: int = 64
    keys: int = 48
    units: int = 256
    bias: bool = False  # whether the additive score under test has a bias inside its tanh

    def measure(self, progress: Progress) -> list[Row]:
        """Mirror every pair, and fit every score with each kind of feature."""
        train, test = self._pairs(), self._pairs()
        tested = self._scores()
        kinds = {
            "tanh units": self._units(bias=False),
            "tanh units, bias": self._units(bias=True),
            "products": lambda query, key: (query[..., :, None] * key[..., None, :]).flatten(-2),
        }
        rows: list[Row] = [{"score": name, **_parity_shares(score(*test))} for name, score in tested.items()]
        for kind, features in counted(kinds.items(), progress):
            shares = _explained(list(tested.values()), features, train, test)
            for row, share in zip(rows, shares, strict=True):
                row[f"by {kind}"] = share
        return rows

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Queries (2Q, 1, d) and the keys of each, (2Q, M, d); the second half mirrors the first."""
        query = torch.randn(self.queries, 1, self.dim, dtype=torch.float64)
        key = torch.randn(self.queries, self.keys, self.dim, dtype=torch.float64)
        return torch.cat([query, -query]), torch.cat([key, -key])

    def _scores(self) -> dict[str, PairFunction]:
        even = (scores.Scaled(), scores.Cosine(), scores.Bilinear(self.dim, self.dim), scores.Gaussian(1.0))
        named: dict[str, PairFunction] = {name: _as_function(score) for name, score in zip(_EVEN, even, strict=True)}
        additive = _as_function(scores.Additive(self.dim, self.dim + self.bias, hidden=16))
        named["additive"] = lambda query, key: additive(query, _with_one(key) if self.bias else key)
        return named

    def _units(self, bias: bool) -> PairFunction:
        """The hidden units of a wide additive score, as features."""
        score = scores.Additive(self.dim, self.dim + bias, hidden=self.units).double()

        def units(query: Tensor, key: Tensor) -> Tensor:
            side, other, _ = score.prepare(query, _with_one(key) if bias else key)
            return torch.tanh(side + other).detach()

        return units

    def holds(self, rows: list[Row]) -> bool:
        """Every score has one parity, and features of the other parity explain nothing of it."""
        by = {row["score"]: row for row in rows}
        pure = all(by[name]["odd"] < _ZERO for name in _EVEN) and by["additive"]["even"] < _ZERO
        imitated = (by["dot product"]["by tanh units"], by["additive"]["by products"])
        return pure and all(abs(share) < _ZERO for share in imitated)

    def draw(self, rows: list[Row]) -> Figure:
        """One group of bars per score."""
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


def _as_function(score: scores.Score) -> PairFunction:
    score = score.double()
    return lambda query, key: score(query, key).detach().squeeze(-2)


def _with_one(key: Tensor) -> Tensor:
    """Append a 1, which is not mirrored, to each key: its weight is a bias."""
    return pad(key, (0, 1), value=1.0)


def _parity_shares(logits: Tensor) -> Row:
    """The shares of the even and the odd part; the second half of the logits belongs to the mirrored pairs."""
    here, there = logits.chunk(2)
    parts = {"even": ((here + there) / 2).square().sum(), "odd": ((here - there) / 2).square().sum()}
    return {name: (part / (parts["even"] + parts["odd"])).item() for name, part in parts.items()}


def _explained(
    tested: list[PairFunction], features: PairFunction, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> list[float]:
    """R² of the best linear combination of features for each score, after subtracting row means."""
    X, new_X = (_centred(features(*pairs)) for pairs in (train, test))
    Y, new_Y = (_centred(torch.stack([score(*pairs) for score in tested], -1)) for pairs in (train, test))
    weights = torch.linalg.lstsq(X, Y, driver="gelsd", rcond=1e-9).solution
    unexplained: Tensor = (new_Y - new_X @ weights).square().sum(0) / new_Y.square().sum(0)
    return [1.0 - share for share in unexplained.tolist()]


def _centred(x: Tensor) -> Tensor:
    """Subtract the mean over the keys from (Q, M, …), and flatten all pairs into one dimension."""
    return (x - x.mean(1, keepdim=True)).flatten(0, 1)


def _parity(row: Row) -> str:
    return "even" if row["odd"] < _ZERO else "odd" if row["even"] < _ZERO else "neither"
