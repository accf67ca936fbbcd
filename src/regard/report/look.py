"""What a report shows, as plain data: a model's layers, their heads, and remarks on them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import ArgumentError, ShapeError

__all__ = ["LEVELS", "MAX_CELLS", "MOST_PAIRS", "HeadLook", "LayerLook", "Look", "Remark"]

LEVELS = ("problem", "notable")
MAX_CELLS = 256  # along each side of a map: shorter texts are shown weight by weight
MOST_PAIRS = 2048**2  # with more, a map of so many cells would take another long pass over the weights


@dataclass(frozen=True, eq=False)
class HeadLook:
    """One head: its statistics, its pooled map, and the strongest keys of each query.

    `map` holds the mean weight in each cell of a grid over queries × keys, as `Observation.map` gives it; `strongest`
    holds weights and keys, each (queries, k), as `Observation.top` gives them: −1 where fewer keys are visible.
    """

    head: int
    statistics: dict[str, float]
    map: Tensor
    strongest: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        weights, keys = self.strongest
        if self.map.dim() != 2 or not self.map.numel():
            raise ShapeError(
                f"HeadLook: map must be (height, width) with at least one cell. Got {tuple(self.map.shape)}; "
                f"pass the map of one head of one batch item."
            )
        if weights.dim() != 2 or weights.shape != keys.shape:
            raise ShapeError(
                f"HeadLook: strongest must be weights and keys, each (queries, k), as top(k) gives them. "
                f"Got {tuple(weights.shape)} and {tuple(keys.shape)}."
            )


@dataclass(frozen=True)
class LayerLook:
    """One layer: its name, the tokens of its queries and of its keys, and its heads.

    >>> import torch
    >>> head = HeadLook(0, {"entropy": 0.0}, torch.eye(2), (torch.ones(2, 1), torch.tensor([[0], [1]])))
    >>> LayerLook("encoder.0", ["a", "cat"], ["a", "cat"], [head]).heads[0].statistics
    {'entropy': 0.0}
    """

    name: str
    queries: list[str]
    keys: list[str]
    heads: list[HeadLook]

    def __post_init__(self) -> None:
        n, m = len(self.queries), len(self.keys)
        for one in self.heads:
            weights, keys = one.strongest
            height, width = one.map.shape
            if len(weights) != n:
                raise ShapeError(
                    f"LayerLook: {self.name!r} has {n} queries, but head {one.head} has the strongest keys of "
                    f"{len(weights)}. Give one text per query."
                )
            if keys.numel() and not -1 <= int(keys.min()) <= int(keys.max()) < m:
                raise ArgumentError(
                    f"LayerLook: {self.name!r} has {m} keys, but head {one.head} names keys from {int(keys.min())} "
                    f"to {int(keys.max())}. Give one text per key; −1 means none."
                )
            if height > n or width > m:
                raise ShapeError(
                    f"LayerLook: the map of head {one.head} in {self.name!r} is {height} × {width} for {n} queries "
                    f"and {m} keys; no cell may be empty. Request a smaller map."
                )
            first = self.heads[0]
            if one.map.shape != first.map.shape or weights.shape != first.strongest[0].shape:
                raise ShapeError(
                    f"LayerLook: all heads of {self.name!r} must have maps of one shape and the same number of "
                    f"strongest keys. Head {one.head} has {height} × {width} and {weights.shape[1]}, head {first.head} "
                    f"has {first.map.shape[0]} × {first.map.shape[1]} and {first.strongest[0].shape[1]}."
                )


@dataclass(frozen=True)
class Remark:
    """One finding: the rule that raised it, its level, a sentence, and the layer and heads that it concerns.

    >>> Remark("dead-head", "problem", "Head 3 attends to nothing.", "encoder.0", (3,)).level
    'problem'
    """

    rule: str
    level: str
    text: str
    layer: str
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ArgumentError(f"Remark: level must be {' or '.join(map(repr, LEVELS))}. Got {self.level!r}.")


@dataclass(frozen=True)
class Look:
    """What a report shows: a title, facts about the run, the layers in order, and remarks.

    >>> Look("a model", {"tokens": "256"}, [], []).facts
    {'tokens': '256'}
    """

    title: str
    facts: dict[str, str]
    layers: list[LayerLook]
    remarks: list[Remark]
