"""How measurements are taken and written down: ratios in one run, side by side with the peer, on a named machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def machine() -> str:
    """The machine in one line."""
    name = platform.processor() or platform.machine()
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        name = next((x.split(":", 1)[1].strip() for x in listed if x.startswith("Model name")), name)
    except (OSError, subprocess.CalledProcessError):
        name = platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{name} ({platform.machine()}), {cores}{gpu}; torch {torch.__version__}"


def side_by_side(calls: dict[str, Callable[[], object]], rounds: int = 7, inner: int = 1) -> dict[str, float]:
    """The median time in seconds of each call, taken in turns, so that a busy machine is busy for all of them."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in track(range(rounds), description="measuring", transient=True, disable=not Console().is_terminal):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            taken[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(times) for name, times in taken.items()}


def ratio(calls: dict[str, Callable[[], object]], rounds: int = 7, inner: int = 1) -> tuple[float, dict[str, float]]:
    """The median over rounds of (first call's time / second call's time), and both medians."""
    (a, first), (b, second) = calls.items()
    first(), second()
    ratios, times = [], {a: [], b: []}  # type: ignore[var-annotated]
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times[name].append((time.perf_counter() - start) / inner)
        ratios.append(times[a][-1] / times[b][-1])
    return statistics.median(ratios), {name: statistics.median(t) for name, t in times.items()}


def report(name: str, question: str, rows: Sequence[Row], note: str = "") -> None:
    """Print a table and write it as Markdown and JSON under bench/results."""
    RESULTS.mkdir(exist_ok=True)
    columns = list(rows[0])
    table = Table(title=question, caption=machine())
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_cell(row[c]) for c in columns))
    Console().print(table)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"question": question, "machine": machine(), "note": note, "rows": rows}, indent=1) + "\n"
    )
    lines = [
        f"# {question}",
        "",
        f"Machine: {machine()}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows]
    (RESULTS / f"{name}.md").write_text("\n".join([*lines, "", note, ""]).rstrip() + "\n")


def _cell(x: object) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)
