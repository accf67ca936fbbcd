"""Five scores on one task: what each can learn, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ..functional import attention, observe
from ..scores import Additive, Bilinear, Cosine, Gaussian, Score, Temperature
from ..softmax import stable
from .base import Figure, Progress, Row, Study, canvas, counted
from .complexity import count, one_thread, product_flop

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
    brief: ClassVar[str] = "Which scores can align two languages, and what they cost"
    claim: ClassVar[str] = (
        "Dot product, cosine and Gaussian compare vectors in a shared space: without learned projections they cannot "
        "align two languages whose vectors are rotated against each other. Bilinear and additive scores have matrices "
        "of their own and can. A bilinear score learns the rotation itself and generalizes to unseen words; an "
        "additive one, trained in the same way, learns the words it saw, and costs the most time and memory at every "
        "d, because a network runs for every pair. A bilinear score does not: q·Wk = (Wᵀq)·k, so its matrix folds into "
        "the query, once per query, and the pairs cost what they cost with a dot product."
    )
    test: ClassVar[str] = (
        "Without projections the scores claimed to learn reach 95 % on new sentences, and the others stay under 40 % "
        "(chance is 1 in the words of a sentence); with projections all reach 95 %. On unseen words bilinear exceeds "
        "75 %, and additive stays under half of that. At every d, with d hidden units, additive takes over twice the "
        "time of dot and more than bilinear, and its plain formula saves over half as many numbers as there are pairs "
        "times hidden units; its logits take the most FLOP. The products of bilinear take exactly 2·n·d² FLOP more "
        "than those of dot (one product per query) if it is claimed to fold, and n·m times 2·d² (one per pair) if not."
    )
    caption: ClassVar[str] = (
        "Accuracy on new sentences, for trained words (dark) and unseen words (pale); the dotted line is chance. "
        "Right: the time of attention, forward and backward, and the memory that the plain formula saves for the "
        "backward pass, as multiples of the dot product at the same d."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"learners": _NAMES}

    dim: int = 16
    words: int = 64
    sentence: int = 16
    hidden: int = 32
    steps: int = 120
    length: int = 256  # of the timed sequences
    dims: tuple[int, ...] = (16, 32, 64, 128)  # at which the costs are measured
    folded: bool = True  # whether, by the claim, a bilinear score costs one product per query; else one per pair
    learners: tuple[str, ...] = ("bilinear", "additive")  # the scores that, by the claim, learn without projections

    def suit(self) -> None:
        """A sentence has each word at most once."""
        if self.words < self.sentence:
            self.refuse("words", f"at least as many as a sentence has, {self.sentence}")

    def measure(self, progress: Progress) -> list[Row]:
        """Train every model, then time them all."""
        rotation = _rotation(self.dim)
        seen, unseen = (_Languages(x, x @ rotation) for x in torch.randn(2, self.words, self.dim))
        models = [_Model(name, projected, self.dim, self.hidden) for projected in (False, True) for name in _NAMES]
        rows: list[Row] = []
        for model in counted(models, progress, stop=0.8):
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
        for dim in counted(self.dims, progress, start=0.8):
            rows += self._costs(dim)
        return rows

    def _costs(self, dim: int) -> list[Row]:
        """FLOP of the logits, CPU time of attention (the best of 10 interleaved rounds), and bytes saved."""
        models = [_Model(name, projected=False, dim=dim, hidden=dim) for name in _NAMES]
        q, k, v = (torch.randn(self.length, dim).requires_grad_() for _ in range(3))

        def seconds(model: _Model) -> float:
            begin = time.thread_time()
            model.attend(q, k, v).sum().backward()
            return time.thread_time() - begin

        with one_thread():
            rounds = [[seconds(model) for model in models] for _ in range(10)]
        best = [min(each) for each in zip(*rounds, strict=True)]
        return [
            {
                "cost of": model.name,
                "d": dim,
                "FLOP of products": product_flop(partial(model, q, k)),
                "FLOP of logits": count(partial(model, q, k)).flop,
                "time / dot": seconds_spent / best[0],
                "plain keeps, MiB": _saved_bytes(partial(model.plain, q, k, v)) / _MIB,
                "regard keeps, MiB": _saved_bytes(partial(model.attend, q, k, v)) / _MIB,
            }
            for model, seconds_spent in zip(models, best, strict=True)
        ]

    def holds(self, rows: list[Row]) -> bool:
        """Which scores learn, which generalize, and what they cost."""
        trained = [row for row in rows if "score" in row]
        bare = {row["score"]: row for row in trained if not row["projections"]}
        learns = all((row["trained words"] > 0.95) == (name in self.learners) for name, row in bare.items())
        fails = all(row["trained words"] < 0.4 for name, row in bare.items() if name not in self.learners)
        projected = all(row["trained words"] > 0.95 for row in trained if row["projections"])
        product, network = bare["bilinear"], bare["additive"]
        generalizes = product["unseen words"] > 0.75 and network["unseen words"] < product["unseen words"] / 2
        costs = {(row["cost of"], row["d"]): row for row in rows if "cost of" in row}
        return learns and fails and projected and generalizes and all(self._costs_hold(costs, d) for d in self.dims)

    def _costs_hold(self, costs: dict[tuple[str, int], Row], dim: int) -> bool:
        """The costs at one d: additive the most, bilinear one product per query or per pair."""
        dot, product, network = (costs[name, dim] for name in ("dot", "bilinear", "additive"))
        costly = network["time / dot"] > max(2.0, product["time / dot"])
        keeps = network["plain keeps, MiB"] * _MIB / 4 > 0.5 * self.length**2 * dim
        times = self.length if self.folded else self.length**2
        most = network["FLOP of logits"] == max(costs[name, dim]["FLOP of logits"] for name in _NAMES)
        more: int = product["FLOP of products"] - dot["FLOP of products"]
        return costly and keeps and most and more == times * 2 * dim**2

    def draw(self, rows: list[Row]) -> Figure:
        """Accuracy without and with projections, and the costs."""
        figure, panels = canvas(11.5, 3.8, columns=3)
        places = range(len(_NAMES))
        for axes, projected in zip(panels[:2], (False, True), strict=True):
            some = [row for row in rows if row.get("projections") == projected]
            for shift, what, colour in ((-0.2, "trained words", "C0"), (0.2, "unseen words", "#a9c9e3")):
                axes.bar([x + shift for x in places], [row[what] for row in some], 0.38, color=colour, label=what)
            axes.axhline(1 / self.sentence, color="black", lw=1, ls=":", label="chance")
            axes.set(ylim=(0, 1.02), title="with learned projections" if projected else "the score alone")
        panels[0].set(ylabel="accuracy")
        panels[0].legend(frameon=False, loc="upper right", fontsize=8)
        for axes in panels[:2]:
            axes.set_xticks(places, _NAMES, rotation=30, ha="right")
            axes.grid(visible=False, axis="x")
        self._draw_costs(panels[2], {(row["cost of"], row["d"]): row for row in rows if "cost of" in row})
        return figure

    def _draw_costs(self, axes: Any, costs: dict[tuple[str, int], Row]) -> None:
        dims = sorted(self.dims)
        for colour, name in enumerate(_NAMES):
            for what, style in (("time / dot", "o-"), ("plain keeps, MiB", "x:")):
                multiples = [costs[name, d][what] / costs["dot", d][what] for d in dims]
                label = name if what == "time / dot" else f"{name}, memory" if name == "additive" else None
                axes.loglog(dims, multiples, f"C{colour}{style}", label=label)
        axes.set(xlabel="d", ylabel="× dot", title="time (solid), memory (dotted)")
        axes.set_xticks(dims, [str(d) for d in dims])
        axes.set_yticks(ticks := [1, 10, 100], [str(tick) for tick in ticks])
        axes.set_ylim(0.4, 4000.0)
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


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

    def __init__(self, name: str, projected: bool, dim: int, hidden: int) -> None:
        super().__init__()
        self.name, self.projected = name, projected
        self.score = _score(name, dim, hidden)
        self.query, self.key = (_projection(dim) if projected else nn.Identity() for _ in range(2))

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
