"""A short training run with unscaled scores, with 1/√d and with 1/d."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from ..functional import attention, observe
from .base import Figure, Progress, Row, Study, canvas

__all__ = ["Training"]

_POWERS = {"none": 0.0, "√d": 0.5, "d": 1.0}
_SLOWER = "none, rate ÷ 3"
_EVERY = 10  # steps between two points of a curve


@dataclass(frozen=True)
class Training(Study):
    """Train a residual stack of self-attention to look up words, with three scalings and several seeds.

    A sequence pairs every word with a random value, and asks for the values of some of the words. The only way to know
    them is to attend to the right pair. Every batch is new, so the loss is that on unseen sequences.
    """

    name: ClassVar[str] = "training"
    brief: ClassVar[str] = "Unscaled scores stall learning: their gradient is noise"
    claim: ClassVar[str] = (
        "Unscaled scores stall learning, but not because the gradient vanishes. In a residual stack it is larger than "
        "with 1/√d, most of all for W_q and W_k; but it is noise: on two batches it points in unrelated directions. A "
        "smaller learning rate gets such a model moving. Where W_q and W_k get little gradient is under 1/d: all "
        "weights start out nearly equal, and the model learns later than with 1/√d."
    )
    test: ClassVar[str] = (
        "For every seed: with the scaling under test the loss ends under a tenth of ln(values), which is the loss of "
        "guessing; unscaled it ends above 0.9 of that. (With a third of the learning rate and three times the steps "
        "it ends below 0.95 of it, on average over the seeds.) Before the first step and on average over the run, the "
        "unscaled gradient is over 1.5 times that of the scaling under test. For W_q and W_k alone it is over 3 times "
        "as large at the start, with less than half the cosine between two batches; divided by d it is under a third. "
        "On average, the scaling under test halves the loss first; d does so before the end."
    )
    caption: ClassVar[str] = (
        "Left: the loss, as the mean over the seeds; dotted is that of guessing. Middle: the norm of the whole "
        "gradient; the stalled models have the largest. Right: before the first step, one point per seed: the norm of "
        "the gradient of W_q and W_k, against its cosine between two batches."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"scaling": _POWERS}
    least: ClassVar[dict[str, float]] = {"values": 2, "steps": 2 * _EVERY}

    layers: int = 2
    dim: int = 64
    words: int = 16
    values: int = 8
    batch: int = 8
    steps: int = 120
    seeds: int = 3
    rate: float = 3e-3  # the learning rate of Adam
    scaling: str = "√d"  # the scaling that the claim is tested with

    def measure(self, progress: Progress) -> list[Row]:
        """Train every model; those of one scaling are trained together, each with its own seed."""
        runs = {name: (power, self.rate, self.steps) for name, power in _POWERS.items()}
        runs[_SLOWER] = (0.0, self.rate / 3, 3 * self.steps)
        total, done = 6 * self.steps, 0
        rows: list[Row] = []
        curves: dict[str, _Curves] = {}
        for name, (power, rate, steps) in runs.items():
            models = _Models(self, self.dim**-power)
            start, entropy = models.first_gradients(), models.entropy()
            found = curves[name] = models.fit(rate, steps, partial(_tell, progress, done, total))
            done += steps
            columns = {
                "gradient at start": start.norm,
                "of W_q, W_k": start.matching_norm,
                "cosine of two batches": start.cosine,
                "mean gradient": found.gradient.mean(0),
                "entropy at start": entropy,
                "entropy at end": models.entropy(),
                "loss at end": found.loss[-_EVERY:].mean(0),
            }
            for seed in range(self.seeds):
                numbers = {column: values[seed].item() for column, values in columns.items()}
                halved = found.first_below(self.chance / 2, seed)
                rows.append({"scaling": name, "seed": seed, **numbers, "loss halved at step": halved})
        return rows + self._curve_rows(curves)

    def _curve_rows(self, curves: dict[str, _Curves]) -> list[Row]:
        """Loss and gradient, as the mean over the seeds, every ten steps."""
        rows: list[Row] = []
        for step in range(_EVERY, max(len(each.loss) for each in curves.values()) + 1, _EVERY):
            row: Row = {"step": step}
            for name, each in curves.items():
                row[f"loss, {name}"] = each.loss[step - _EVERY : step].mean().item() if step <= len(each.loss) else None
            for name, each in curves.items():
                row[f"gradient, {name}"] = (
                    each.gradient[step // _EVERY - 1].mean().item() if step <= len(each.loss) else None
                )
            rows.append(row)
        return rows

    @property
    def chance(self) -> float:
        """The loss of a model that guesses."""
        return math.log(self.values)

    def holds(self, rows: list[Row]) -> bool:
        """Every seed behaves as claimed."""
        by_run = {name: [row for row in rows if row.get("scaling") == name] for name in (*_POWERS, _SLOWER)}
        seeds = zip(by_run[self.scaling], by_run["none"], by_run["d"], strict=True)
        moving = fmean(row["loss at end"] for row in by_run[_SLOWER]) < 0.95 * self.chance
        halved = {name: fmean(map(_halved, some)) for name, some in by_run.items()}
        first = all(halved[self.scaling] < halved[name] for name in _POWERS if name != self.scaling)
        return (
            moving
            and first
            and all(
                ours["loss at end"] < 0.1 * self.chance
                and none["loss at end"] > 0.9 * self.chance
                and none["gradient at start"] > 1.5 * ours["gradient at start"]
                and none["mean gradient"] > 1.5 * ours["mean gradient"]
                and none["of W_q, W_k"] > 3 * ours["of W_q, W_k"]
                and by_d["of W_q, W_k"] < ours["of W_q, W_k"] / 3
                and none["cosine of two batches"] < 0.5 * ours["cosine of two batches"]
                and math.isfinite(_halved(by_d))
                for ours, none, by_d in seeds
            )
        )

    def draw(self, rows: list[Row]) -> Figure:
        """Loss, gradient, and how well batches agree."""
        figure, (left, middle, right) = canvas(11.5, 3.8, columns=3)
        points = [row for row in rows if "step" in row]
        for colour, name in enumerate(_POWERS):
            own = [row for row in rows if row.get("scaling") == name]
            agreement = [row["cosine of two batches"] for row in own]
            right.plot(agreement, [row["of W_q, W_k"] for row in own], f"C{colour}o", label=_label(name))
        for name, style in zip((*_POWERS, _SLOWER), ("C0-", "C1-", "C2-", "C0--"), strict=True):
            for axes, what in ((left, "loss"), (middle, "gradient")):
                known = [(row["step"], row[f"{what}, {name}"]) for row in points if row[f"{what}, {name}"] is not None]
                axes.plot(*zip(*known, strict=True), style, label=_label(name))
        left.axhline(self.chance, color="black", lw=1, ls=":")
        left.set(xlabel="step", ylabel="loss", ylim=(0, None))
        left.legend(frameon=False, fontsize=8)
        middle.set(xlabel="step", ylabel="norm of the gradient", yscale="log")
        right.axvline(0.0, color="0.5", lw=0.8)
        right.set(xlabel="cosine between two batches", ylabel="gradient of W_q, W_k at the start", yscale="log")
        return figure


@dataclass(frozen=True)
class _Gradients:
    """The gradient of each seed before the first step, (seeds,) each."""

    norm: Tensor
    matching_norm: Tensor  # of W_q and W_k, which decide who matches whom
    cosine: Tensor  # between two batches, of W_q and W_k


@dataclass(frozen=True)
class _Curves:
    """Loss (steps, seeds) and gradient norm (points, seeds) of a run."""

    loss: Tensor
    gradient: Tensor

    def first_below(self, level: float, seed: int) -> int | None:
        """The first step by which the mean loss of ten steps has fallen below a level."""
        below = (self.loss[:, seed].unfold(0, _EVERY, 1).mean(-1) < level).nonzero()
        return int(below[0]) + _EVERY if len(below) else None


class _Models(nn.Module):
    """One residual stack per seed, trained side by side: every parameter has a leading dimension for the seeds."""

    def __init__(self, study: Training, scale: float) -> None:
        super().__init__()
        self.study, self.scale = study, scale
        self.generator = torch.Generator().manual_seed(0)  # the same batches for every scaling
        d, layers = study.dim, study.layers
        self.word = self._parameter(study.words, d)
        self.value = self._parameter(study.values, d)
        self.into = self._parameter(layers, d, 3 * d, deviation=d**-0.5)  # W_q, W_k and W_v side by side
        self.out = self._parameter(layers, d, d, deviation=d**-0.5)
        self.head = self._parameter(d, study.values, deviation=d**-0.5)

    def _parameter(self, *shape: int, deviation: float = 1.0) -> nn.Parameter:
        """A normal parameter (seeds, …); a seed gives the same numbers whatever the scaling and the other seeds."""
        place = len(list(self.parameters()))
        generators = [torch.Generator().manual_seed(100 * seed + place) for seed in range(self.study.seeds)]
        drawn = [torch.randn(shape, generator=generator) for generator in generators]
        return nn.Parameter(torch.stack(drawn) * deviation)

    def forward(self, values: Tensor, asked: Tensor, entropies: list[Tensor] | None = None) -> Tensor:
        """The logits (seeds, batch, asked, values) of the words asked for, given the value of every word."""
        seeds = torch.arange(len(values))[:, None, None]
        x = torch.cat([self.word[:, None] + self.value[seeds, values], self.word[seeds, asked]], 2)
        for layer in range(self.study.layers):
            h = rms_norm(x, x.shape[-1:])
            query, key, value = _mapped(h, self.into[:, layer]).chunk(3, -1)
            if entropies is not None:
                entropies.append(observe(query, key, value, scale=self.scale).entropy)
            x = x + _mapped(attention(query, key, value, scale=self.scale), self.out[:, layer])
        read = rms_norm(x[:, :, values.shape[-1] :], x.shape[-1:])
        return _mapped(read, self.head)

    def _sequences(self, batch: int) -> tuple[Tensor, Tensor]:
        """New sequences per seed: the values of all words, and the words asked for, half as many."""
        study = self.study
        values = torch.randint(study.values, (study.seeds, batch, study.words), generator=self.generator)
        asked = torch.randint(study.words, (study.seeds, batch, -(-study.words // 2)), generator=self.generator)
        return values, asked

    def _losses(self, batch: int) -> Tensor:
        """The loss of each seed on new sequences."""
        values, asked = self._sequences(batch)
        logits = self(values, asked)
        losses = cross_entropy(logits.flatten(0, 2), values.gather(-1, asked).flatten(), reduction="none")
        means: Tensor = losses.unflatten(0, (len(values), -1)).mean(-1)
        return means

    def _gradients(self) -> tuple[Tensor, Tensor]:
        """The gradient on new sequences, whole and for W_q and W_k alone, (seeds, parameters) each."""
        found = torch.autograd.grad(self._losses(4 * self.study.batch).sum(), [*self.parameters()])
        (into,) = (gradient for gradient, p in zip(found, self.parameters(), strict=True) if p is self.into)
        return torch.cat([one.flatten(1) for one in found], 1), into[..., : 2 * self.study.dim].flatten(1)

    def first_gradients(self) -> _Gradients:
        """Norms and agreement, as means over four pairs of batches, four times as large as those of the training."""
        pairs = [(self._gradients(), self._gradients()) for _ in range(4)]
        whole = torch.stack([gradient for pair in pairs for gradient, _ in pair])
        one, other = (torch.stack([pair[side][1] for pair in pairs]) for side in range(2))
        cosine = torch.cosine_similarity(one, other, dim=-1).mean(0)
        return _Gradients(whole.norm(dim=-1).mean(0), torch.cat([one, other]).norm(dim=-1).mean(0), cosine)

    @torch.no_grad()
    def entropy(self) -> Tensor:
        """The mean entropy of all rows of each seed, as a share of the largest."""
        entropies: list[Tensor] = []
        values, asked = self._sequences(self.study.batch)
        self(values, asked, entropies)
        largest = math.log(values.shape[-1] + asked.shape[-1])
        return torch.stack(entropies).mean((0, 2, 3)) / largest

    def fit(self, rate: float, steps: int, tell: Callable[[int], None]) -> _Curves:
        """Train with Adam; the models do not influence each other."""
        optimiser = torch.optim.Adam(self.parameters(), lr=rate)
        losses, norms = [], []
        for step in range(1, steps + 1):
            optimiser.zero_grad()
            loss = self._losses(self.study.batch)
            loss.sum().backward()
            losses.append(loss.detach())
            if step % _EVERY == 0:
                gradients = [p.grad.flatten(1) for p in self.parameters() if p.grad is not None]
                norms.append(torch.cat(gradients, 1).norm(dim=-1))
                tell(step)
            optimiser.step()
        return _Curves(torch.stack(losses), torch.stack(norms))


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the tokens (seeds, batch, tokens, dim) of each seed by its matrix (seeds, dim, other)."""
    product: Tensor = (x.flatten(1, 2) @ weight).unflatten(1, x.shape[1:3])
    return product


def _tell(progress: Progress, before: int, total: int, step: int) -> None:
    progress((before + step) / total)


def _halved(row: Row) -> float:
    step = row["loss halved at step"]
    return math.inf if step is None else float(step)


def _label(name: str) -> str:
    return name.replace("none", "unscaled") if name.startswith("none") else f"divided by {name}"
