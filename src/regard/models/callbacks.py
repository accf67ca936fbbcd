"""The Monitor as a callback for Lightning and the transformers Trainer; each package is imported only when needed."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import MissingPackageError
from .monitor import Monitor

__all__ = ["lightning_callback", "trainer_callback"]


def trainer_callback(every: int = 100, log: Any = None) -> Any:
    """Create a TrainerCallback that monitors the model of a transformers Trainer.

    Steps are counted as by the Trainer: optimizer updates, from 1. `log` is anything that a Monitor takes; with the
    trainer itself, the scalars go wherever it reports::

        trainer.add_callback(regard.models.callbacks.trainer_callback(every=100, log=trainer))
    """
    base = _imported("trainer_callback", "transformers", "TrainerCallback", "transformers")

    class TrainerMonitor(base):  # type: ignore[misc, valid-type]
        """Monitors attention from the beginning of training to its end."""

        monitor: Monitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if self.monitor is not None:  # an earlier training ended in an error
                self.monitor.stop(flush=False)
            self.monitor = Monitor(model, every, log).start()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.monitor is not None:
                self.monitor.step(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.monitor is not None:
                self.monitor.flush()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.monitor is not None:
                self.monitor.stop()

    return TrainerMonitor()


def lightning_callback(every: int = 100, log: Any = None) -> Any:
    """Create a Lightning Callback that monitors the module in training.

    Steps are the trainer's `global_step`. `log` is anything that a Monitor takes; without it, the scalars go to the
    trainer's own loggers::

        Trainer(callbacks=[regard.models.callbacks.lightning_callback(every=100)])
    """
    base = _imported("lightning_callback", "lightning.pytorch", "Callback", "lightning", "pytorch_lightning")

    class LightningMonitor(base):  # type: ignore[misc, valid-type]
        """Monitors attention from the start of `fit` to its end."""

        monitor: Monitor | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.monitor = Monitor(pl_module, every, _TrainerLoggers(trainer) if log is None else log)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self.monitor is not None:
                self.monitor.step(trainer.global_step)
                self.monitor.open()  # Lightning calls training_step, not the module

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self.monitor is not None:
                self.monitor.close()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.monitor is not None:
                self.monitor.close()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.monitor is not None:
                self.monitor.stop()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self.monitor is not None:
                self.monitor.stop(flush=False)

    return LightningMonitor()


class _TrainerLoggers:
    """All the loggers of a Lightning trainer as one."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def log_metrics(self, scalars: dict[str, float], step: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(scalars, step=step)


def _imported(who: str, module: str, name: str, package: str, other: str = "") -> Any:
    """Import a class, from one of two possible modules, or say which package is missing."""
    for path in filter(None, (module, other)):
        try:
            return getattr(importlib.import_module(path), name)
        except ModuleNotFoundError as error:
            missing = error
    raise MissingPackageError(
        f"{who}: it needs the package {package}. Install it with pip install {package}."
    ) from missing
