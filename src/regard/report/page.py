"""The report: one HTML file that opens from disk and shows a model's heads: maps, statistics, tokens."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from ..display import escaped
from ..errors import ArgumentError, DtypeError
from .files import asset, content_policy, filled, joined_scripts, write_text
from .look import Look
from .page_budget import EMBEDDED_LIMIT, LIMIT
from .page_data import page_data, script_json

__all__ = ["EMBEDDED_LIMIT", "policy", "render", "write"]

_PARTS = ("start", "colour", "grid", "heads", "map", "tokens", "lines", "findings", "address")
_SCRIPTS = (*(f"page.{part}.js" for part in _PARTS), "page.js")


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
            "render: there are no heads to show, since no attention was seen. Call the model inside "
            "`with regard.watch(model) as seen:`. Attention that a model computes by hand is seen only if it calls "
            "regard.attention, or torch's function."
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
    return content_policy(_style(), _script())


def _check_look(look: object, who: str) -> None:
    if not isinstance(look, Look):
        raise DtypeError(
            f"{who}: look must be a Look. Got {type(look).__name__}; `with regard.watch(model) as seen:` gives one by "
            f"seen.look(tokens=…)."
        )


def _assemble(title: str, data: str) -> str:
    """The page around its data."""
    pieces = {"title": escaped(title), "policy": escaped(policy()), "style": _style(), "script": _script()}
    return filled(__package__, "page.html", {**pieces, "data": data})


@cache
def _style() -> str:
    return asset(__package__, "page.css")


@cache
def _script() -> str:
    return f'(() => {{\n"use strict";\n{joined_scripts(__package__, _SCRIPTS)}}})();\n'
