"""The pages of a census: an overview of all heads, one page per head, and a comparison; each opens from disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..display import escaped
from ..errors import ArgumentError
from .files import asset, content_policy, filled, joined_scripts, json_safe, write_text
from .page_data import script_json

__all__ = ["HEAD_LIMIT", "OVERVIEW_LIMIT_PER_HEAD", "census_page", "write_comparison", "write_pages"]

HEAD_LIMIT = 256_000
"""The most bytes that the page of one head takes."""
OVERVIEW_LIMIT_PER_HEAD = 2_000
"""The most bytes per head that the overview takes, besides its script and style."""

_BASE = 100_000  # bytes for script and style, and for facts and groups
_SCRIPTS = ("census.start.js", "page.colour.js", "census.draw.js")
_KICKERS = {"overview": "Census of heads", "head": "Census of heads", "compare": "Two censuses compared"}


def write_pages(
    folder: Path,
    overview: Mapping[str, Any],
    heads: Iterable[tuple[str, Mapping[str, Any]]],
    rows: list[dict[str, Any]],
) -> None:
    """Write index.html, heads/*.html and heads.json into a folder that is renamed when it is complete."""
    (folder / "heads").mkdir()
    most = _BASE + OVERVIEW_LIMIT_PER_HEAD * max(1, len(overview["heads"]))
    _write(folder / "index.html", census_page("overview", str(overview["title"]), overview), most)
    for name, data in heads:
        page = census_page("head", f"{data['title']}: L{data['at'][0]} H{data['at'][1]}", data)
        _write(folder / "heads" / f"{name}.html", page, HEAD_LIMIT)
    safe = [{key: json_safe(value) for key, value in row.items()} for row in rows]
    write_text(folder / "heads.json", json.dumps(safe, indent=1, ensure_ascii=False) + "\n", "save")


def write_comparison(folder: Path, data: Mapping[str, Any]) -> None:
    """Write the page that compares two censuses, and its data."""
    page = census_page("compare", str(data["title"]), data)
    _write(folder / "index.html", page, _BASE + OVERVIEW_LIMIT_PER_HEAD * max(1, len(data["heads"])))
    write_text(folder / "moved.json", json.dumps(data, ensure_ascii=False) + "\n", "save")


def census_page(kind: str, title: str, data: Mapping[str, Any]) -> str:
    """One page: "overview", "head" or "compare"; it needs no network, and text from outside is never markup.

    >>> "<script>alert" in census_page("overview", "<script>alert(1)</script>", {"heads": []})
    False
    """
    style, script = asset(__package__, "census.css"), _script(kind)
    pieces = {
        "policy": escaped(content_policy(style, script)),
        "title": escaped(title),
        "kicker": _KICKERS[kind],
        "kind": kind,
        "style": style,
        "script": script,
        "data": script_json(data),
    }
    return filled(__package__, "census.html", pieces)


def _write(path: Path, page: str, limit: int) -> None:
    size = len(page.encode())
    if size > limit:
        raise ArgumentError(
            f"save: {path.name} would take {size:,} bytes, more than {limit:,}. Keep fewer exemplars: exemplars=4."
        )
    write_text(path, page, "save")


@cache
def _script(kind: str) -> str:
    joined = joined_scripts(__package__, (*_SCRIPTS, f"census.{kind}.js"))
    return f'addEventListener("DOMContentLoaded", () => {{\n"use strict";\n{joined}}});\n'
