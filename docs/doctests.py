"""Put docstring examples into code blocks: Markdown would read >>> as quotations."""

from __future__ import annotations

import doctest
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fence every example in a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring with its examples fenced."""
    pieces, session = [], ""
    for piece in doctest.DocTestParser().parse(text):
        if isinstance(piece, doctest.Example):
            first, *rest = piece.source.splitlines()
            prompted = [f">>> {first}", *(f"... {line}" for line in rest)]
            session += "\n".join(prompted) + "\n" + piece.want
        elif piece.strip():
            pieces += [_block(session), piece]
            session = ""
    return "\n".join([*pieces, _block(session)])


def _block(session: str) -> str:
    return f"\n```pycon\n{session}```\n" if session else ""
