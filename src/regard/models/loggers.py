"""Destinations for scalars: a TensorBoard writer, a Weights & Biases run, a trainer, or any function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import DtypeError

__all__ = ["Report", "reporter"]

Report = Callable[[dict[str, float], int], object]
"""Takes all scalars of one step by name, and the step number."""


def reporter(log: Any) -> Report:
    """Return the function that passes the scalars of a step to `log`, which is recognised by its methods.

    - `add_scalar(name, value, step)`: TensorBoard's SummaryWriter, one call per scalar;
    - `log_metrics(scalars, step=…)`: a Lightning logger, a Comet experiment, the module mlflow; one call per step;
    - `log(scalars)` and `callback_handler`: a transformers Trainer, which knows its step itself;
    - `log(scalars, step=…)`: a Weights & Biases run, or the module wandb; one call per step;
    - a function `log(name, value, step)`; several of these in a list or tuple; or None, for nothing.

    >>> seen = []
    >>> reporter(lambda *scalar: seen.append(scalar))({"loss": 0.5, "speed": 2.0}, 7)
    >>> seen
    [('loss', 0.5, 7), ('speed', 2.0, 7)]
    """
    if log is None:
        return lambda scalars, step: None
    if isinstance(log, list | tuple):
        return _several([reporter(one) for one in log])
    if isinstance(log, logging.Logger):
        raise DtypeError(
            "Monitor: log must take scalars, and a logging.Logger takes messages. "
            "Give a function, such as lambda name, value, step: logger.info('%d %s %g', step, name, value)."
        )
    if callable(getattr(log, "add_scalar", None)):
        return _one_by_one(log.add_scalar)
    if callable(getattr(log, "log_metrics", None)):
        return lambda scalars, step: log.log_metrics(scalars, step=step)
    if callable(getattr(log, "log", None)):
        if hasattr(log, "callback_handler"):
            return lambda scalars, step: log.log(scalars)
        return lambda scalars, step: log.log(scalars, step=step)
    if callable(log):
        return _one_by_one(log)
    raise DtypeError(
        f"Monitor: log must be a SummaryWriter, a wandb run, a Lightning logger, a Trainer, or a function "
        f"log(name, value, step). Got {type(log).__name__}."
    )


def _one_by_one(write: Callable[[str, float, int], object]) -> Report:
    def report(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            write(name, value, step)

    return report


def _several(reports: Iterable[Report]) -> Report:
    def report(scalars: dict[str, float], step: int) -> None:
        for one in reports:
            one(scalars, step)

    return report
