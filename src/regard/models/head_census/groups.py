"""Heads grouped by what they do: k-means over their profiles, each group named by what sets it apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .summary import HeadRecord

__all__ = ["PROFILE", "Group", "group_heads", "nearest_heads", "profiles"]

PROFILE = (
    "first_share",
    "self_share",
    "previous_share",
    "induction",
    "duplicate",
    "relative_entropy",
    "saturated_share",
)
"""The means that make the profile of a head, all from 0 to 1; its reach and its favourite token complete it."""

_COORDINATES = (*PROFILE, "reach", "token_share")
_FURTHEST = 2.5
_LEAST_SPREAD = 0.02  # differences below are noise
_FAVOURITE = 0.25  # of all weight on one token
_FEWEST_GROUPS, _MANY_HEADS = 4, 16  # many heads are never put into fewer groups: how sure that is, each group says
_MOST_GROUPS = 10
_ROUNDS = 50
_CLEAR, _FAIR = 0.5, 0.25  # silhouettes above which a group is clear or fair (Rousseeuw 1987)
_PLAIN = {
    "first_share": "on the first token",
    "self_share": "on itself",
    "previous_share": "on the previous token",
    "saturated_share": "saturated",
    "token_share": "on one token",
}
_WORDS = (  # the first that holds for the mean of a group names it
    ("induction", 0.3, "induction: the token after an earlier copy"),
    ("duplicate", 0.3, "duplicate tokens: earlier copies of the same token"),
    ("previous_share", 0.4, "the previous token"),
    ("self_share", 0.4, "the token itself"),
    ("first_share", 0.5, "the first token, as a sink"),
)


@dataclass(frozen=True)
class Group:
    """Heads that do much the same."""

    name: str  # what they do, in words
    places: tuple[tuple[str, int], ...]  # layer and head
    sure: float  # the mean silhouette, −1 to 1: how much nearer the heads are to each other than to the next group
    profile: dict[str, float]  # the means of the group

    @property
    def words(self) -> str:
        """How sure the grouping is, in a word."""
        if math.isnan(self.sure):
            return "alone"
        return "clear" if self.sure >= _CLEAR else "fair" if self.sure >= _FAIR else "weak"


def profiles(heads: Sequence[HeadRecord]) -> np.ndarray:
    """The profile of each head, (heads, 9): means, the log of its reach, and the share of the token that gets most.

    Each coordinate is divided by how much it differs among the heads, so that all count alike, and an outlier is no
    further away than a few such steps, so that the others do not shrink to one point beside it.
    """
    X = _raw_profiles(heads)
    steps = (X - X.mean(0)) / np.maximum(X.std(0), _LEAST_SPREAD) if len(X) else X
    return steps.clip(-_FURTHEST, _FURTHEST)


def _raw_profiles(heads: Sequence[HeadRecord]) -> np.ndarray:
    rows = []
    for one in heads:
        found = one.summaries()
        means = [found[name].mean for name in PROFILE]
        reach = math.log1p(max(0.0, found["distance"].mean)) / math.log(1025) if found["distance"].count else 0.0
        rows.append([*means, reach, one.keys[0].share if one.keys else 0.0])
    return np.nan_to_num(np.array(rows, dtype=np.float64).reshape(len(heads), len(_COORDINATES)))


def group_heads(heads: Sequence[HeadRecord]) -> list[Group]:
    """Group heads by their profiles, in as many groups as separate best; the largest group first."""
    if not heads:
        return []
    X, raw = profiles(heads), _raw_profiles(heads)
    labels = _best_labels(X)
    silhouettes = _silhouettes(X, labels)
    found = []
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        mean = dict(zip(_COORDINATES, raw[mine].mean(0).tolist(), strict=True))
        members = [heads[at] for at in mine.tolist()]
        places = tuple((one.layer, one.head) for one in members)
        sure = float(silhouettes[mine].mean()) if len(mine) > 1 else math.nan
        found.append(Group(_name(mean, members), places, sure, mean))
    found.sort(key=lambda group: (-len(group.places), group.places))
    return _distinct_names(found)


def nearest_heads(X: np.ndarray, head: int, count: int) -> list[tuple[int, float]]:
    """The heads whose profiles are nearest to that of one head, and how far they are."""
    far = np.sqrt(((X - X[head]) ** 2).sum(1))
    order = [int(at) for at in np.lexsort((np.arange(len(X)), far)) if at != head]
    return [(at, float(far[at])) for at in order[:count]]


def _best_labels(X: np.ndarray) -> np.ndarray:
    """The k-means labels that separate best; one group if no division separates anything.

    The measure is the mean silhouette of the groups, each group counting once: by heads, one outlier and a heap of all
    the others would win.
    """
    best, labels = 0.1, np.zeros(len(X), dtype=np.int64)
    fewest = _FEWEST_GROUPS if len(X) >= _MANY_HEADS else 2
    best = -1.0 if len(X) >= _MANY_HEADS and len(np.unique(X, axis=0)) > _FEWEST_GROUPS else best
    for count in range(fewest, min(_MOST_GROUPS, len(X) - 1) + 1):
        tried = _k_means(X, count)
        each = _silhouettes(X, tried)
        score = float(np.mean([each[tried == label].mean() for label in np.unique(tried)]))
        if score > best + 1e-9:
            best, labels = score, tried
    return labels


def _k_means(X: np.ndarray, count: int) -> np.ndarray:
    """Lloyd's algorithm from centres that are far apart, the first being the head nearest to the mean of all."""
    chosen = [int(((X - X.mean(0)) ** 2).sum(1).argmin())]
    while len(chosen) < count:
        chosen.append(int(_distances(X, X[chosen]).min(1).argmax()))
    centres = X[chosen]
    labels: np.ndarray = _distances(X, centres).argmin(1)
    for _ in range(_ROUNDS):
        centres = np.stack([X[labels == k].mean(0) if (labels == k).any() else centres[k] for k in range(count)])
        moved = _distances(X, centres).argmin(1)
        if (moved == labels).all():
            break
        labels = moved
    return labels


def _distances(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    far: np.ndarray = np.sqrt(((X[:, None] - Y[None]) ** 2).sum(-1))
    return far


def _silhouettes(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(b − a) / max(a, b), with a the mean distance to one's own group and b that to the nearest other one."""
    kinds = np.unique(labels)
    if len(kinds) < 2:
        return np.zeros(len(X))
    far = _distances(X, X)
    sums = np.stack([far[:, labels == kind].sum(1) for kind in kinds], 1)  # (heads, groups)
    sizes = np.array([(labels == kind).sum() for kind in kinds])
    own = labels[:, None] == kinds
    a = sums[own] / np.maximum(sizes[np.argmax(own, 1)] - 1, 1)
    b = np.where(own, np.inf, sums / sizes).min(1)
    scores = (b - a) / np.maximum(np.maximum(a, b), 1e-12)
    return np.where(sizes[np.argmax(own, 1)] > 1, scores, 0.0)


def _name(mean: dict[str, float], heads: list[HeadRecord]) -> str:
    for key, least, words in _WORDS:
        if mean[key] >= least:
            return words
    favourites = Counter(one.keys[0].text.strip() for one in heads if one.keys).most_common(1)
    if mean["token_share"] >= _FAVOURITE and favourites and favourites[0][0] and 2 * favourites[0][1] > len(heads):
        return f"the token “{favourites[0][0]}”"
    near, far = mean["reach"] < math.log1p(8) / math.log(1025), mean["reach"] > math.log1p(64) / math.log(1025)
    where = "near by" if near else "far away" if far else "at a middle distance"
    how = (
        "spread widely" if mean["relative_entropy"] >= 0.8 else "sharp" if mean["relative_entropy"] < 0.35 else "mixed"
    )
    return f"{how}, {where}"


def _distinct_names(groups: list[Group]) -> list[Group]:
    """Groups with the same name get what most sets them apart added."""
    found = []
    for group in groups:
        alike = [other for other in groups if other.name == group.name and other is not group]
        if not alike:
            found.append(group)
            continue
        apart = {key: group.profile[key] - np.mean([other.profile[key] for other in alike]) for key in group.profile}
        key = max(apart, key=lambda one: abs(apart[one]))
        more = "more" if apart[key] > 0 else "less"
        words = _PLAIN.get(key, key.replace("_", " "))
        found.append(Group(f"{group.name} ({more} {words})", group.places, group.sure, group.profile))
    return found
