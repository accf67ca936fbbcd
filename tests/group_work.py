"""Processes that form a group over gloo and work through cases together, started once for many cases."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest

Case = Callable[[int, Path], None]
"""What one rank does, given its number and a folder that all ranks share."""


def run(module: str, names: list[str], ranks: int, timeout: float = 60.0) -> dict[str, list[str]]:
    """What went wrong in cases of a module's CASES, a text for each rank: nothing, where all is well."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")  # which imports torch once, and forks before anything runs
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "numpy", "hypothesis"])
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        given = (module, names, ranks, here, timeout)
        children = [context.Process(target=_work, args=(rank, *given), daemon=True) for rank in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join(240)
            if child.is_alive():
                child.kill()
        said = [json.loads(file.read_text()) if (file := here / f"{r}.json").exists() else {} for r in range(ranks)]
    return {name: [one.get(name, "it did not come to an end") for one in said] for name in names}


def once(module: str, names: list[str], ranks: int, base: Path) -> dict[str, list[str]]:
    """The same, run by one test worker for all of them; `base` is pytest's folder."""
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{module}.json"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.write_text(json.dumps(run(module, names, ranks)))
    found: dict[str, list[str]] = json.loads(place.read_text())
    return found


def _work(rank: int, module: str, names: list[str], ranks: int, folder: Path, timeout: float) -> None:
    tests = Path(__file__).resolve().parent
    sys.path[:0] = [str(tests), str(tests.parent / "src")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cases: dict[str, Case] = importlib.import_module(module).CASES
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    said: dict[str, str] = {}
    for name in names:
        place = folder / name
        place.mkdir(exist_ok=True)
        torch.manual_seed(0)
        try:
            cases[name](rank, place)
            said[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test tells it
            said[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # a group that lost a rank does not end by itself
