"""The statistics a page knows by name: their label, unit and meaning."""

from __future__ import annotations

__all__ = ["STATISTICS", "describe"]

# By name: the label, the unit and the meaning.
STATISTICS: dict[str, tuple[str, str, str]] = {
    "entropy": ("Entropy", "nats", "−Σ p ln p over the keys, mean over the queries"),
    "relative_entropy": (
        "Relative entropy",
        "",
        "entropy divided by the logarithm of the number of visible keys: 1 is uniform",
    ),
    "effective_keys": ("Effective keys", "keys", "exp(entropy): how many keys a query effectively attends to"),
    "max_logit": ("Largest logit", "", "the largest logit that entered the softmax"),
    "first_share": ("On the first key", "%", "the weight on the first visible key, mean over the queries"),
    "self_share": ("On itself", "%", "the weight of a token on itself, mean over the queries"),
    "previous_share": ("On the previous key", "%", "the weight on the previous token, mean over the queries"),
    "saturated_share": ("Saturated rows", "%", "queries with more than 0.99 of their weight on one key"),
    "distance": ("Distance", "tokens", "how far away the attended keys are, weighted mean, averaged over the queries"),
    "concentration": ("Concentration", "", "Σ p² over the keys: 1 if one key has all the weight"),
    "cost_of_ablation": ("Cost of ablation", "", "how much the loss rises when this head alone is ablated"),
    "estimated_cost": ("Estimated cost", "", "the same to first order, from the gradient of the loss"),
}


def describe(name: str) -> dict[str, str | int]:
    """Label, unit, factor to the unit, and meaning of a statistic; an unknown one is labelled by its name.

    >>> describe("entropy")["unit"], describe("my_own")["label"]
    ('nats', 'My own')
    """
    label, unit, meaning = STATISTICS.get(name, (name.replace("_", " ").strip().capitalize() or name, "", ""))
    return {"name": name, "label": label, "unit": unit, "factor": 100 if unit == "%" else 1, "meaning": meaning}
