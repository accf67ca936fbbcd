"""The laboratory as an HTML page: every experiment with its claim, figure, numbers, test and verdict."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..display import escaped
from ..errors import ArgumentError, FileError
from ..report.files import asset, filled, source_hash, write_text
from .base import Experiment, Figure, Row
from .cells import cell, is_number, tables
from .saved import Saved, is_file_name, saved_in

__all__ = ["write"]

_LIGHT_CARD, _DARK_CARD, _DARK_TEXT = "#ffffff", "#191d23", "#e6e9ed"
_NEAR_WHITE = 0.75  # lighter text must be on a coloured background
_FOLD_FROM = 12  # rows
_SVG: Any = {"svg.hashsalt": "regard", "svg.fonttype": "path"}


def write(experiments: Sequence[Experiment], folder: str | os.PathLike[str]) -> Path:
    """Write index.html, and per experiment two figures (light and dark) and one JSON file.

    Experiments already saved in the folder stay on the page, in the order of the laboratory.

    >>> import tempfile, regard.lab
    >>> found = regard.lab.run("variance", dims=(16, 64), draws=20_000)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write([found], folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['index.html', 'variance-dark.svg', 'variance.json', 'variance.svg']
    """
    if not experiments:
        raise ArgumentError("write: experiments must hold at least one. Got none.")
    names = [experiment.name for experiment in experiments]
    bad = [name for name in names if not is_file_name(name) or names.count(name) > 1]
    if bad:
        raise ArgumentError(
            f"write: names become file names, so they must be unique and consist of a-z, 0-9 and -. Got {bad}."
        )
    place, new = _make_folder(Path(folder)), [Saved.from_experiment(experiment) for experiment in experiments]
    for experiment, saved in zip(experiments, new, strict=True):
        write_text(place / f"{saved.name}.json", saved.text(), "write")
        light, dark = _figures(experiment)
        write_text(place / f"{saved.name}.svg", light, "write")
        write_text(place / f"{saved.name}-dark.svg", dark, "write")
    before = [saved for saved in saved_in(place) if saved.name not in names]
    return write_text(place / "index.html", _page(sorted(new + before, key=_page_order)), "write")


def _page_order(saved: Saved) -> tuple[int, str]:
    """Sort key: the order of the laboratory, then unknown experiments by name."""
    from . import names

    known = names()
    return known.index(saved.name) if saved.name in known else len(known), saved.name


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(f"write: the folder {folder} cannot be created: {reason}. Choose another one.") from error
    return folder


def _figures(experiment: Experiment) -> tuple[str, str]:
    """The figure as SVG, for a light page and for a dark one."""
    figure = experiment.figure()
    light = _svg(figure, _LIGHT_CARD)
    _darken(figure)
    return light, _svg(figure, _DARK_CARD)


def _svg(figure: Figure, background: str) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context(_SVG):
        figure.savefig(out, format="svg", facecolor=background, metadata={"Date": None, "Creator": "regard"})
    return out.getvalue()


def _darken(figure: Figure) -> None:
    """Map greys, from black to white, to their counterparts on a dark page; colours stay as they are."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    unchanged = {id(text) for axis in figure.get_axes() if axis.images for text in axis.texts}
    unchanged |= {id(text) for text in figure.findobj(Text) if min(to_rgb(text.get_color())) > _NEAR_WHITE}
    parts: dict[type, tuple[str, ...]] = {
        Text: ("color",),
        Line2D: ("color", "markerfacecolor", "markeredgecolor"),
        Patch: ("facecolor", "edgecolor"),
        Collection: ("facecolor", "edgecolor"),
    }
    for artist in figure.findobj(lambda one: isinstance(one, tuple(parts)) and id(one) not in unchanged):
        for name in next(names for kind, names in parts.items() if isinstance(artist, kind)):
            dark = _on_dark(getattr(artist, f"get_{name}")())
            if dark is not None:
                getattr(artist, f"set_{name}")(dark)


def _on_dark(colour: Any) -> Any:
    """The counterparts of greys on a dark page; None if there is a colour, or nothing to map."""
    from matplotlib.colors import to_rgb, to_rgba_array

    if isinstance(colour, str) and colour in ("none", "auto", "inherit"):
        return None
    colours = to_rgba_array(colour)
    if len(colours) == 0 or (colours[:, :3].max(-1) - colours[:, :3].min(-1) > 0.02).any():
        return None
    whiteness = colours[:, :1]
    colours[:, :3] = whiteness * to_rgb(_DARK_CARD) + (1 - whiteness) * to_rgb(_DARK_TEXT)
    return colours[0] if len(colours) == 1 else colours


def _page(experiments: Sequence[Saved]) -> str:
    style = asset(__package__, "page.css")
    policy = f"default-src 'none'; style-src '{source_hash(style)}'; img-src 'self' file: data:; base-uri 'none'"
    supported = sum(experiment.verdict for experiment in experiments)
    pieces = {
        "policy": escaped(policy),
        "style": style,
        "sum": f"The measurements support {supported} of {len(experiments)} claims.",
        "links": "\n".join(map(_link, experiments)),
        "sections": "\n".join(map(_section, experiments)),
    }
    return filled(__package__, "page.html", pieces)


def _link(experiment: Saved) -> str:
    sign = '<span class="yes">✓</span>' if experiment.verdict else '<span class="no">✗</span>'
    return f'<li><a href="#{experiment.name}">{experiment.name} {sign}</a></li>'


def _section(experiment: Saved) -> str:
    name, caption = experiment.name, escaped(experiment.caption)
    said = "The measurement supports the claim" if experiment.verdict else "The measurement does not support the claim"
    kind, sign = ("yes", "✓") if experiment.verdict else ("no", "✗")
    choices = "; ".join(f"{name} = {value}" for name, value in experiment.choices.items())
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<div class="heading"><h2 id="{name}-title">{name}</h2><p class="verdict {kind}">{sign} {said}</p></div>
<p class="claim">{escaped(experiment.claim)}</p>
<figure><div class="plate" tabindex="0" role="group" aria-label="Figure of {name}"><picture>
<source srcset="{name}-dark.svg" media="(prefers-color-scheme: dark)"><img src="{name}.svg" alt="{caption}">
</picture></div><figcaption>{caption}</figcaption></figure>
<p class="test"><b>Test.</b> {escaped(experiment.test)}</p>
{_numbers(experiment)}
<p class="foot"><span>Run it: <code>regard lab {name}</code></span><a href="{name}.json">{name}.json</a></p>
<details><summary>Parameters</summary><p class="foot"><code>{escaped(choices)}</code></p></details>
</section>"""


def _numbers(experiment: Saved) -> str:
    parts = "\n".join(_table(some, experiment.name) for some in tables(experiment.rows))
    count = len(experiment.rows)
    return parts if count < _FOLD_FROM else f"<details><summary>Numbers, {count} rows</summary>\n{parts}\n</details>"


def _table(rows: list[Row], name: str) -> str:
    kinds = {key: ' class="number"' if all(is_number(row[key]) for row in rows) else "" for key in rows[0]}
    head = "".join(f'<th scope="col"{kind}>{escaped(key)}</th>' for key, kind in kinds.items())
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escaped(cell(row[key]))}</td>" for key, kind in kinds.items()) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers of {name}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
