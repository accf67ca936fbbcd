"""HTML for notebooks: tables, pictures and frames that need no network and take the colours of the page around them."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

__all__ = [
    "block",
    "escaped",
    "fact_table",
    "frame",
    "gallery",
    "listed",
    "matrix",
    "note",
    "paragraph",
    "picture",
    "shown",
    "shown_lines",
    "table",
]

_JOINERS = "\u200c\u200d"  # they shape letters and do not affect a terminal
_UNSAFE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_LINE = "1px solid color-mix(in srgb, currentColor 18%, transparent)"
_STYLE = (
    ".regard{font-size:13px;line-height:1.45;max-width:100%;margin:.3em 0}"
    ".regard .wide{overflow-x:auto}"
    ".regard .name{font-weight:600;margin:0 0 .4em}"
    ".regard table{border-collapse:collapse;margin:0 0 .5em;font-size:inherit;background:none;color:inherit}"
    ".regard th,.regard td{padding:.15em .7em;text-align:left!important;vertical-align:top;border:0;background:none;"
    "color:inherit;white-space:normal}"
    ".regard tr{background:none!important}"
    f".regard thead th{{border-bottom:{_LINE};font-weight:600;white-space:nowrap;vertical-align:bottom}}"
    f".regard tbody tr+tr>*{{border-top:{_LINE}}}"
    ".regard .n{text-align:right!important;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".regard tbody th{font-weight:600;white-space:nowrap}"
    ".regard ul{margin:0 0 .5em;padding-left:1.2em}"
    ".regard p{margin:0 0 .5em}"
    ".regard .note{opacity:.7}"
    ".regard .plain tr+tr>*{border-top:0}"
    ".regard .gallery{display:flex;flex-wrap:wrap;gap:.8em}"
    ".regard figure{margin:0}.regard figcaption{font-size:12px;opacity:.8}"
    ".regard .card{background:#fff;border-radius:6px;max-width:100%}"
    ".regard svg{display:block;max-width:100%;height:auto;margin:0 0 .4em}"
    ".regard .problem::marker{color:#d33}.regard .problem b{color:#d33}"
    ".regard iframe{width:100%;border:0;border-radius:6px;background:Canvas}"
)


def shown(word: str) -> str:
    r"""Make `word` safe to show: escape characters that would move the cursor or change the text direction.

    >>> print(shown("caf\u00e9"), shown("\x1b[31mred"), shown("\u202etxt"))
    café \x1b[31mred \u202etxt
    """
    return "".join(
        char
        if char in _JOINERS or unicodedata.category(char) not in _UNSAFE
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in word
    )


def shown_lines(text: str) -> str:
    """`shown`, line by line."""
    return "\n".join(map(shown, text.split("\n")))


def escaped(text: object) -> str:
    """Text that no browser takes for markup.

    >>> escaped("<b>") + escaped("\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(shown(str(text)))


def block(name: str, *parts: str) -> str:
    """One output: its name, and its parts below each other; tables and pictures scroll if they are too wide."""
    body = "".join(f'<div class="wide">{part}</div>' for part in parts if part)
    title = f'<div class="name">{escaped(name)}</div>' if name else ""
    return f'<div class="regard"><style>{_STYLE}</style>{title}{body}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of texts; the columns in `numbers` are aligned to the right.

    >>> table(["layer", "entropy"], [["L0", "1.2"]], numbers=[1])[:46]
    '<table><thead><tr><th>layer</th><th class="n">'
    """
    right = dict.fromkeys(numbers, ' class="n"')
    names = "".join(f"<th{right.get(at, '')}>{escaped(name)}</th>" for at, name in enumerate(head))
    lines = (
        "<tr>" + "".join(f"<td{right.get(at, '')}>{escaped(cell)}</td>" for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def fact_table(facts: Mapping[str, object]) -> str:
    """Names and facts, one per line."""
    lines = "".join(
        f"<tr><th scope='row'>{escaped(name)}</th><td>{escaped(fact)}</td></tr>" for name, fact in facts.items()
    )
    return f"<table><tbody>{lines}</tbody></table>"


def listed(lines: Iterable[tuple[str, bool]]) -> str:
    """Sentences as a list, each with whether it is a problem."""
    items = (
        f'<li class="problem"><b>problem:</b> {escaped(text)}</li>' if problem else f"<li>{escaped(text)}</li>"
        for text, problem in lines
    )
    return f"<ul>{''.join(items)}</ul>"


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escaped(text)}</p>"


def note(text: str) -> str:
    """A remark in a fainter tone."""
    return f'<p class="note">{escaped(text)}</p>'


def matrix(caption: str, cells: Sequence[Sequence[str]], shades: Sequence[Sequence[float]] = ()) -> str:
    """Numbers as a grid under a caption; a shade from 0 to 1 colours the ground of its number."""
    lines = []
    for y, row in enumerate(cells):
        parts = []
        for x, cell in enumerate(row):
            strength = round(60 * shades[y][x]) if y < len(shades) and x < len(shades[y]) else 0
            ground = f' style="background:color-mix(in srgb, #3b82f6 {strength}%, transparent)"' if strength else ""
            parts.append(f'<td class="n"{ground}>{escaped(cell)}</td>')
        lines.append(f"<tr>{''.join(parts)}</tr>")
    grid = f'<table class="plain"><tbody>{"".join(lines)}</tbody></table>' if lines else ""
    return f"<p>{escaped(caption)}</p>{grid}"


def gallery(pictures: Iterable[tuple[str, Sequence[Sequence[float]]]], side: float = 112.0) -> str:
    """Small pictures side by side, each over its label."""
    figures = "".join(
        f"<figure>{picture(cells, label, side, most=side)}<figcaption>{escaped(label)}</figcaption></figure>"
        for label, cells in pictures
    )
    return f'<div class="gallery">{figures}</div>'


def picture(cells: Sequence[Sequence[float]], label: str, side: float = 256.0, most: float = 16.0) -> str:
    """A matrix of shares from 0 to 1 as an SVG in the colour of the text: 0 is blank, 1 is solid.

    >>> picture([[1.0, 0.0], [1.0, 1.0]], "causal()").count("<path")
    1
    """
    height, width = len(cells), max(map(len, cells), default=0)
    if not height or not width:
        return note(f"{label}: empty")
    size = min(most, side / max(height, width))
    shapes: dict[int, list[str]] = {}
    for y, row in enumerate(cells):
        x = 0
        for strength, run in groupby(round(max(0.0, min(1.0, share)) * 255) for share in row):
            length = len(list(run))
            if strength:
                shapes.setdefault(strength, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    paths = "".join(
        f'<path d="{"".join(parts)}"' + (f' fill-opacity="{strength / 255:.3g}"' if strength < 255 else "") + "/>"
        for strength, parts in sorted(shapes.items())
    )
    return (
        f'<svg role="img" aria-label="{escaped(label)}" width="{width * size:.0f}" height="{height * size:.0f}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor" shape-rendering="crispEdges" '
        f'style="border:{_LINE}">{paths}</svg>'
    )


def frame(page: str, height: int) -> str:
    """A whole HTML page in a frame of its own, whose scripts reach nothing outside of it."""
    inside = page.replace("&", "&amp;").replace(
        "'", "&#39;"
    )  # a page has many double quotes, so these stay as they are
    return (
        f'<iframe sandbox="allow-scripts" style="height:{height}px" title="attention report" '
        f"srcdoc='{inside}'></iframe>"
    )
