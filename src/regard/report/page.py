"""The report: one HTML file that opens from disk and shows a model's heads: maps, statistics, tokens."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from functools import cache
from pathlib import Path

from ..errors import ArgumentError, DtypeError
from .files import asset, write_text
from .look import Look
from .page_budget import EMBEDDED_LIMIT, LIMIT
from .page_data import page_data, script_json
from .terminal import shown

__all__ = ["EMBEDDED_LIMIT", "policy", "render", "write"]

_SCRIPTS = tuple(
    f"page.{part}.js" for part in ("start", "colour", "grid", "heads", "map", "tokens", "lines", "findings", "address")
)


def render(look: Look, limit: int = LIMIT, *, atlas: str = "") -> str:
    """Render `look` as one HTML page that needs no network: at most `limit` bytes, and deterministic to the byte.

    The less room there is, the coarser the maps and the fewer keys per query; 300,000 bytes suit a page inside a
    notebook. With `atlas`, an address, the page links to an atlas of the same model and text.

    >>> import torch
    >>> from regard.report.look import HeadLook, LayerLook, Look
    >>> head = HeadLook(0, {"entropy": 0.0}, torch.eye(2), (torch.ones(2, 1), torch.tensor([[0], [1]])))
    >>> page = render(Look("Cats", {}, [LayerLook("encoder.0", ["a", "cat"], ["a", "cat"], [head])], []))
    >>> page.startswith("<!doctype html>"), "<title>Cats</title>" in page
    (True, True)
    """
    _check_look(look, "render")
    if not any(layer.heads for layer in look.layers):
        raise ArgumentError(
            "render: the look has no heads to show. Call the model inside `with regard.watch(model) as seen:`, then "
            "use seen.look()."
        )
    empty = _assemble(look.title, "")
    data = page_data(look, limit - len(empty.encode()) - len(atlas.encode()))
    page = _assemble(look.title, script_json(data | {"atlas": atlas}))
    size = len(page.encode())
    if size > limit:
        raise ArgumentError(
            f"render: the page would take {size:,} bytes, more than {limit:,}, even with the coarsest maps. Report "
            f"fewer layers at a time, or fewer facts."
        )
    return page


def write(look: Look, path: str | os.PathLike[str], limit: int = LIMIT) -> Path:
    """Write the page of `look` to `path`, atomically, in at most `limit` bytes."""
    _check_look(look, "write")
    return write_text(path, render(look, limit), "write")


def policy() -> str:
    """The content security policy of every page: it admits only our own style and script."""
    return (
        f"default-src 'none'; style-src '{_hash(_style())}'; script-src '{_hash(_script())}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def _check_look(look: object, who: str) -> None:
    if not isinstance(look, Look):
        raise DtypeError(
            f"{who}: look must be a Look. Got {type(look).__name__}; `with regard.watch(model) as seen:` gives one by "
            f"seen.look(tokens=…)."
        )


def _assemble(title: str, data: str) -> str:
    """The page around its data."""
    heading = html.escape(shown(title))
    parts = {"policy": html.escape(policy()), "style": _style(), "script": _script()}
    pieces = {"title": heading, "data": data, **parts}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], asset(__package__, "page.html"))


@cache
def _style() -> str:
    return asset(__package__, "page.css")


@cache
def _script() -> str:
    """All scripts as one, without indentation and lines of comment, which are a tenth of a small page."""
    parts = "\n".join(asset(__package__, name) for name in (*_SCRIPTS, "page.js"))
    short = re.sub(r"^[ ]+|^//.*\n", "", re.sub(r"^[ ]*//.*\n", "", parts, flags=re.MULTILINE), flags=re.MULTILINE)
    return f'(() => {{\n"use strict";\n{short}}})();\n'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
