"""Five scores on one task: what each can learn, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ..functional import attention, observe
from ..scores import Additive, Bilinear, Cosine, Gaussian, Score, Temperature
from ..softmax import stable
from .base import Progress, Row, Study, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Scores"]

_NAMES = ("dot", "bilinear", "additive", "cosine", "Gaussian")
_MIB = 2**20


@dataclass(frozen=True)
class Scores(Study):
    """Align sentences of two languages whose word vectors differ by a rotation.

    A sentence is a random sample of words, its translation is a permutation of it, and each word must find its
    counterpart. Each score is trained alone, and with learned projections of queries and keys.
    """

    name: ClassVar[str] = "scores"
    claim: ClassVar[str] = (
        "Dot product, cosine and Gaussian compare vectors in a shared space: without learned projections they cannot "
        "align two languages whose vectors are rotated against each other. Bilinear and additive scores have matrices "
        "of their own and can. A bilinear score learns the rotation itself and generalizes to unseen words; an "
        "additive one, trained in the same way, learns the words it saw, and costs the most time and memory."
    )
    test: ClassVar[str] = (
        "Without projections the scores claimed to learn reach 95 % on new sentences, and the others stay under 40 % "
        "(chance is 1 in the words of a sentence); with projections all reach 95 %. On unseen words bilinear exceeds "
        "75 %, and additive stays under half of that. Additive takes over twice the time of dot, and its plain formula "
        "saves over half as many numbers as there are pairs times hidden units."
    )
    caption: ClassVar[str] = (
        "Accuracy on new sentences, for trained words (dark) and unseen words (pale); the dotted line is chance. "
        "Right: the time of attention, forward and backward, and the memory that the plain formula saves for the "
        "backward pass, as multiples of the dot product."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"learners": _NAMES}

    dim: int = 16
    words: int = 64
    sentence: int = 16
    hidden: int = 32
    steps: int = 120
    length: int = 256  # of the timed sequences
    learners: tuple[str, ...] = ("bilinear", "additive")  # the scores that, by the claim, learn without projections

    def suit(self) -> None:
        """A sentence has each word at most once."""
        if self.words < self.sentence:
            self.refuse("words", f"at least as many as a sentence has, {self.sentence}")

    def measure(self, progress: Progress) -> list[Row]:
        """Train every model, then time them all."""
        rotation = _rotation(self.dim)
        seen, unseen = (_Languages(x, x @ rotation) for x in torch.randn(2, self.words, self.dim))
        models = [_Model(name, projected, self) for projected in (False, True) for name in _NAMES]
        rows: list[Row] = []
        for done, model in enumerate(models):
            model.train_on(seen, self.steps, self.sentence)
            rows.append(
                {
                    "score": model.name,
                    "projections": model.projected,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "trained words": model.accuracy(seen, self.sentence),
                    "unseen words": model.accuracy(unseen, self.sentence),
                }
            )
            progress(0.9 * (done + 1) / len(models))
        for row, costs in zip(rows, self._costs(models), strict=True):
            row.update(costs)
        return rows

    def _costs(self, models: list[_Model]) -> list[Row]:
        """Time as a multiple of the dot product's, the best of 20 interleaved rounds; and bytes saved for backward."""
        q, k, v = (torch.randn(self.length, self.dim).requires_grad_() for _ in range(3))

        def seconds(model: _Model) -> float:
            begin = time.perf_counter()
            model.attend(q, k, v).sum().backward()
            return time.perf_counter() - begin

        best = [min(each) for each in zip(*([seconds(model) for model in models] for _ in range(20)), strict=True)]
        return [
            {
                "time / dot": seconds_spent / best[0],
                "plain keeps, MiB": _saved_bytes(partial(model.plain, q, k, v)) / _MIB,
                "regard keeps, MiB": _saved_bytes(partial(model.attend, q, k, v)) / _MIB,
            }
            for model, seconds_spent in zip(models, best, strict=True)
        ]

    def holds(self, rows: list[Row]) -> bool:
        """Which scores learn, which generalize, and what they cost."""
        bare = {row["score"]: row for row in rows if not row["projections"]}
        learns = all((row["trained words"] > 0.95) == (name in self.learners) for name, row in bare.items())
        fails = all(row["trained words"] < 0.4 for name, row in bare.items() if name not in self.learners)
        projected = all(row["trained words"] > 0.95 for row in rows if row["projections"])
        product, network = bare["bilinear"], bare["additive"]
        generalizes = product["unseen words"] > 0.75 and network["unseen words"] < product["unseen words"] / 2
        numbers = network["plain keeps, MiB"] * _MIB / 4
        costly = network["time / dot"] > 2.0 and numbers > 0.5 * self.length**2 * self.hidden
        return learns and fails and projected and generalizes and costly

    def draw(self, rows: list[Row]) -> Figure:
        """Accuracy without and with projections, and the costs."""
        figure, panels = canvas(11.5, 3.8, columns=3)
        places = range(len(_NAMES))
        for axes, projected in zip(panels[:2], (False, True), strict=True):
            some = [row for row in rows if row["projections"] == projected]
            for shift, what, colour in ((-0.2, "trained words", "C0"), (0.2, "unseen words", "#a9c9e3")):
                axes.bar([x + shift for x in places], [row[what] for row in some], 0.38, color=colour, label=what)
            axes.axhline(1 / self.sentence, color="black", lw=1, ls=":", label="chance")
            axes.set(ylim=(0, 1.02), title="with learned projections" if projected else "the score alone")
        panels[0].set(ylabel="accuracy")
        panels[0].legend(frameon=False, loc="upper right", fontsize=8)
        bare = rows[: len(_NAMES)]
        for shift, what, label in ((-0.2, "time / dot", "time"), (0.2, "plain keeps, MiB", "memory")):
            multiples = [row[what] / bare[0][what] for row in bare]
            bars = panels[2].bar(
                [x + shift for x in places], multiples, 0.38, color="C1" if shift < 0 else "C2", label=label
            )
            panels[2].bar_label(bars, [f"{m:.1f}" if m < 9.95 else f"{m:.0f}" for m in multiples], fontsize=7)
        panels[2].set(yscale="log", ylabel="× dot", title="cost of the score alone", ylim=(0.5, None))
        panels[2].legend(frameon=False, loc="upper right", fontsize=8)
        for axes in panels:
            axes.set_xticks(places, _NAMES, rotation=30, ha="right")
            axes.grid(visible=False, axis="x")
        return figure


@dataclass(frozen=True)
class _Languages:
    """The vectors of the same words in two languages, (words, dim) each."""

    source: Tensor
    target: Tensor

    def sentences(self, count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Target sentences as queries, source sentences as keys, and the index of each query's key."""
        words = torch.rand(count, len(self.source)).argsort(-1)[:, :length]
        places = torch.rand(count, length).argsort(-1)
        return self.target[words.gather(1, places)], self.source[words], places


class _Model(nn.Module):
    """A score, with or without projections of queries and keys."""

    def __init__(self, name: str, projected: bool, study: Scores) -> None:
        super().__init__()
        self.name, self.projected = name, projected
        self.score = _score(name, study.dim, study.hidden)
        self.query, self.key = (_projection(study.dim) if projected else nn.Identity() for _ in range(2))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.score(self.query(query), self.key(key))
        return logits

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(self.query(query), self.key(key), value, score=self.score)

    def plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The formula as written, with every step saved for the backward pass."""
        return stable(self(query, key)) @ value

    def train_on(self, languages: _Languages, steps: int, length: int) -> None:
        """Train the weight of each word's own key to be large."""
        optimiser = torch.optim.Adam(self.parameters(), lr=0.02)
        for _ in range(steps):
            query, key, places = languages.sentences(32, length)
            optimiser.zero_grad()
            cross_entropy(self(query, key).flatten(0, 1), places.flatten()).backward()
            optimiser.step()

    @torch.no_grad()
    def accuracy(self, languages: _Languages, length: int) -> float:
        """How often a word's strongest key is its own, in new sentences."""
        query, key, places = languages.sentences(64, length)
        seen = observe(self.query(query), self.key(key), key, score=self.score)
        return (seen.top(1)[1][..., 0] == places).double().mean().item()


def _score(name: str, dim: int, hidden: int) -> Score:
    scores: dict[str, Score] = {
        "dot": Temperature(init=dim**0.5),
        "bilinear": Bilinear(dim, dim),
        "additive": Additive(dim, dim, hidden),
        "cosine": Cosine(temperature=0.07, learnable=True),
        "Gaussian": Gaussian(bandwidth=dim**0.25, learnable=True),
    }
    return scores[name]


def _rotation(dim: int) -> Tensor:
    """A uniformly random rotation or reflection; QR alone, without the signs, is biased."""
    found = torch.linalg.qr(torch.randn(dim, dim))
    rotation: Tensor = found.Q * found.R.diagonal().sign()
    return rotation


def _projection(dim: int) -> nn.Linear:
    """A linear map that preserves the variance of its input."""
    linear = nn.Linear(dim, dim, bias=False)
    nn.init.normal_(linear.weight, std=dim**-0.5)
    return linear


def _saved_bytes(compute: Callable[[], Tensor]) -> int:
    """The bytes that a forward pass saves for its backward pass, each storage counted once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        compute()
    return sum(storage.nbytes() for storage in storages.values())
