"""Processes that form a group and run jobs together: started once, for many jobs."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PATIENCE = 600.0  # seconds for one job, on a machine whose disk or cores are busy elsewhere
Case = Callable[[int, Path], None]
"""What one rank runs, given its rank and a folder that all ranks share; it raises if something is wrong."""


class World:
    """Ranks over gloo; `run` runs one job on all of them.

    A job is a function of `jobs_of_*.py` by its name, or one of a module's CASES: "modules_over_group:dropout".
    """

    def __init__(self, size: int, timeout: float = PATIENCE) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = get_context("forkserver")  # it imports torch once, and forks before anything runs
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "regard.distributed"])
        self.size = size
        self.sound = True  # until a job fails: after that, ranks may still wait for each other
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(theirs, store, rank, size, timeout), daemon=True)
            process.start()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, job: str, *args: Any, patience: float = PATIENCE) -> list[Any]:
        """What the job returns on every rank; raise if it raised, or did not finish, on any of them."""
        answers = self.tried(job, *args, patience=patience)
        if failed := [str(answer) for answer in answers if isinstance(answer, Failed)]:
            raise AssertionError("\n".join(failed))  # all of them: most wait for the one that has the cause
        return answers

    def tried(self, job: str, *args: Any, patience: float = PATIENCE) -> list[Any]:
        """As `run`, with a Failed in place of an answer if something went wrong."""
        self.send(job, *args)
        return self.answers(patience)

    def send(self, job: str, *args: Any) -> None:
        """Start a job on all ranks."""
        for pipe in self._pipes:
            pipe.send((job, args))

    def answers(self, patience: float = PATIENCE, awaited: Sequence[int] | None = None) -> list[Any]:
        """What the ranks return, or a Failed; ranks that are not awaited must have answered already."""
        until = time.monotonic() + patience
        first = range(self.size) if awaited is None else awaited
        found = {rank: self._answer(rank, until) for rank in first}
        every = [found[rank] if rank in found else self._answer(rank, 0.0) for rank in range(self.size)]
        self.sound = self.sound and not any(isinstance(answer, Failed) for answer in every)
        return every

    def _answer(self, rank: int, until: float) -> Any:
        try:
            if self._pipes[rank].poll(max(0.0, until - time.monotonic())):
                return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return Failed(f"rank {rank} is gone")
        return Failed(f"rank {rank} did not finish")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


class Failed:
    """What went wrong on a rank."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _serve(pipe: Any, store: str, rank: int, size: int, timeout: float) -> None:
    sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent), str(HERE)]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        job, args = pipe.recv()
        torch.manual_seed(0)
        try:
            answer = _job(job, rank)(*args)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  (the test reports it)
            answer = Failed(f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)


def _job(name: str, rank: int) -> Callable[..., Any]:
    module, _, case = name.rpartition(":")
    if module:
        return partial(importlib.import_module(module).CASES[case], rank)
    jobs = [importlib.import_module(file.stem) for file in sorted(HERE.glob("jobs_of_*.py"))]
    found: Callable[..., Any] = next(getattr(module, name) for module in jobs if hasattr(module, name))
    return found
