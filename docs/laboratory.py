"""An experiment as a section of a page: claim, verdict, test, table, figure."""

from __future__ import annotations

from figures import svg

from regard.lab import Experiment, Row
from regard.lab.cells import cell, is_number, tables

MANY = 8  # rows shown directly; longer tables are collapsed


def section(experiment: Experiment) -> str:
    """Return an experiment as Markdown."""
    kind, words = ("holds", "✓ supported") if experiment.verdict else ("fails", "✗ not supported at this size")
    drawn = svg(experiment.figure(), experiment.study.caption).replace("\n", " ")
    rows = "\n\n".join(map(table, tables(experiment.rows)))
    if len(experiment.rows) > MANY:
        rows = f'<details markdown="1"><summary>{len(experiment.rows)} rows</summary>\n\n{rows}\n\n</details>'
    return f"""## {experiment.name}

{experiment.claim}

{drawn}

<span class="verdict {kind}">{words}</span> {experiment.test}

{rows}
"""


def table(rows: list[Row]) -> str:
    """Return rows with the same columns as a Markdown table."""
    numbers = {key: all(is_number(row[key]) for row in rows) for key in rows[0]}
    lines = [
        [_escaped(key) for key in numbers],
        ["--:" if number else ":--" for number in numbers.values()],
        *([_escaped(cell(row[key])) for key in numbers] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
