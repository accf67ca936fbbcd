"""How measurements are taken and recorded: ratios within one run, next to the peer, on a named machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(os.environ.get("REGARD_RESULTS") or Path(__file__).parent / "results")
Row = dict[str, Any]


@cache
def machine() -> str:
    """The machine in one line."""
    name = platform.processor() or platform.machine()
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        name = next((x.split(":", 1)[1].strip() for x in listed if x.startswith("Model name")), name)
    except (OSError, subprocess.CalledProcessError):
        name = platform.machine()
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{name} ({platform.machine()}), {cores}{_gpu()}; torch {torch.__version__}{_triton()}"


def nvidia(field: str) -> str | None:
    """What nvidia-smi reports about the first GPU, if it is installed."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0].strip() if said else None


def _gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    return f", {torch.cuda.get_device_name()} (driver {nvidia('driver_version') or 'unknown'})"


def _triton() -> str:
    try:
        return f", triton {version('triton')}" if torch.cuda.is_available() else ""
    except PackageNotFoundError:
        return ""


def side_by_side(calls: dict[str, Callable[[], object]], rounds: int = 7, inner: int = 1) -> dict[str, float]:
    """The median time of each call in seconds, taken in turns, so that load on the machine affects all of them."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in _followed(range(rounds)):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(inner):
                call()
            taken[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(times) for name, times in taken.items()}


def ratio(calls: dict[str, Callable[[], object]], rounds: int = 7, inner: int = 1) -> tuple[float, dict[str, float]]:
    """The median over rounds of (first call's time / second call's time), and both median times."""
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


def report(name: str, question: str, rows: Sequence[Row], note: str = "", **more: Any) -> Path:
    """Print a table and write it to RESULTS as Markdown and JSON (with `more`); return the path of the JSON."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    written = RESULTS / f"{name}.json"
    measured = time.strftime("%Y-%m-%d")
    facts = {"question": question, "machine": machine(), "measured": measured, "note": note, **more, "rows": rows}
    written.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    written.with_suffix(".md").write_text(page(facts), encoding="utf-8")
    _show(question, *_cells(rows))
    return written


def page(facts: Mapping[str, Any]) -> str:
    """The Markdown page of a result, from its JSON."""
    columns, lines = _cells(facts["rows"])
    table = [f"| {' | '.join(line)} |" for line in (columns, *lines)]
    table.insert(1, "|---" * len(columns) + "|")
    head = f"Machine: {facts['machine']}. Measured on {facts['measured']}."
    return "\n".join([f"# {facts['question']}", "", head, "", *table, "", facts["note"]]).rstrip() + "\n"


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The columns of a table, and its lines."""
    columns = list(rows[0])
    return columns, [[_cell(row[c]) for c in columns] for row in rows]


def _cell(x: object) -> str:
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return "–" if x is None else str(x)


def _show(title: str, columns: list[str], lines: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # the GPU machine may not have it
        widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
        aligned = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in (columns, *lines))
        print(title, *aligned, machine(), sep="\n", flush=True)
        return
    table = Table(*columns, title=title, caption=machine())
    for line in lines:
        table.add_row(*line)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _followed(turns: range) -> Iterable[int]:
    """The same turns, with a progress bar on a terminal."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return turns
    return track(turns, description="measuring", transient=True, disable=not Console().is_terminal)
