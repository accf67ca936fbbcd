"""The report: one HTML file that opens from disk and shows a model's heads: maps, statistics, tokens."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from pathlib import Path

from ..errors import ArgumentError, DtypeError
from .files import asset, write_text
from .look import Look
from .page_budget import LIMIT
from .page_data import page_data, script_json
from .terminal import shown

__all__ = ["EMBEDDED_LIMIT", "render", "write"]

EMBEDDED_LIMIT = 300_000  # bytes of a page inside another one, such as a notebook

_SCRIPTS = ("page.start.js", "page.colour.js", "page.grid.js", "page.map.js", "page.tokens.js", "page.js")


def render(look: Look, limit: int = LIMIT) -> str:
    """Render `look` as one HTML page that needs no network: at most `limit` bytes, and deterministic to the byte.

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
    page = _assemble(look.title, script_json(page_data(look, limit - len(empty.encode()))))
    size = len(page.encode())
    if size > limit:
        raise ArgumentError(
            f"render: the page would take {size:,} bytes, more than {limit:,}, even with the coarsest maps. Report "
            f"fewer layers at a time, or fewer facts."
        )
    return page


def write(look: Look, path: str | os.PathLike[str]) -> Path:
    """Write the page of `look` to `path`, atomically."""
    _check_look(look, "write")
    return write_text(path, render(look), "write")


def _check_look(look: object, who: str) -> None:
    if not isinstance(look, Look):
        raise DtypeError(
            f"{who}: look must be a Look. Got {type(look).__name__}; `with regard.watch(model) as seen:` gives one by "
            f"seen.look(tokens=…)."
        )


def _assemble(title: str, data: str) -> str:
    """The page around its data, with a content security policy that admits only our own style and script."""
    style = asset(__package__, "page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(asset(__package__, name) for name in _SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    heading = html.escape(shown(title))
    pieces = {"title": heading, "policy": html.escape(policy), "style": style, "script": script, "data": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], asset(__package__, "page.html"))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
