"""The statistics a page knows by name: what to call them, in which unit, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable

from .look import HeadLook

__all__ = ["MEANINGS", "described", "names_of"]

# What each is called, its unit, and what it means.
MEANINGS: dict[str, tuple[str, str, str]] = {
    "entropy": ("Entropy", "nats", "−Σ p ln p over the keys, mean over the queries"),
    "relative_entropy": ("Relative entropy", "", "entropy over the logarithm of the visible keys: 1 is uniform"),
    "effective_keys": ("Effective keys", "keys", "exp(entropy): how many keys a query effectively attends"),
    "max_logit": ("Largest logit", "", "the largest logit that entered the softmax"),
    "first_share": ("On the first key", "%", "the weight on the first key that may be seen, mean over the queries"),
    "self_share": ("On itself", "%", "the weight of a token on itself, mean over the queries"),
    "previous_share": ("On the previous key", "%", "the weight on the token before, mean over the queries"),
    "saturated_share": ("Saturated rows", "%", "queries with more than 0.99 of their weight on one key"),
    "distance": ("Distance", "tokens", "how far away the attended keys are, mean over weights and queries"),
    "concentration": ("Concentration", "", "Σ p² over the keys: 1 where one key takes all"),
}


def names_of(heads: Iterable[HeadLook]) -> list[str]:
    """Every statistic that some head has, in the order in which they first come.

    >>> names_of([])
    []
    """
    return list(dict.fromkeys(name for one in heads for name in one.statistics))


def described(name: str) -> dict[str, str | int]:
    """Give label, unit, factor to the unit, and meaning of a statistic; one we do not know is called by its name.

    >>> described("entropy")["unit"], described("my_own")["label"]
    ('nats', 'My own')
    """
    label, unit, meaning = MEANINGS.get(name, (name.replace("_", " ").strip().capitalize() or name, "", ""))
    return {"name": name, "label": label, "unit": unit, "factor": 100 if unit == "%" else 1, "meaning": meaning}
