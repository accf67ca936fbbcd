"""The laboratory as a page: every experiment with its claim, picture, numbers, test and verdict."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, FileError
from ..report.files import asset, write_text
from ..report.terminal import shown
from .base import Experiment, Row
from .cells import cell, is_number, tables
from .saved import Saved, fits, kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write"]

_PAPER, _NIGHT, _INK = "#ffffff", "#191d23", "#e6e9ed"  # of a card, of one on a dark page, and of its text
_LIGHT = 0.75  # from which on a text can only be read on something that has a colour
_LONG = 12  # rows from which a table is folded away
_SVG: Any = {"svg.hashsalt": "regard", "svg.fonttype": "path"}


def write(experiments: Sequence[Experiment], folder: str | os.PathLike[str]) -> Path:
    """Write index.html, and beside it two pictures (for light and dark) and one JSON file of every experiment.

    Experiments that were written into the folder before stay on the page, in the order of the laboratory.

    >>> import tempfile, regard.lab
    >>> found = regard.lab.run("variance", dims=(16, 64), draws=20_000)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write([found], folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['index.html', 'variance-dark.svg', 'variance.json', 'variance.svg']
    """
    if not experiments:
        raise ArgumentError("write: there must be at least one experiment to show; got none.")
    names = [experiment.name for experiment in experiments]
    unfit = [name for name in names if not fits(name) or names.count(name) > 1]
    if unfit:
        raise ArgumentError(
            f"write: each name becomes that of files, so it must be of a-z, 0-9 and - and there once; got {unfit}."
        )
    place, new = _made(Path(folder)), [Saved.of(experiment) for experiment in experiments]
    for experiment, saved in zip(experiments, new, strict=True):
        write_text(place / f"{saved.name}.json", saved.text(), "write")
        light, dark = _pictures(experiment)
        write_text(place / f"{saved.name}.svg", light, "write")
        write_text(place / f"{saved.name}-dark.svg", dark, "write")
    before = [saved for saved in kept(place) if saved.name not in names]
    return write_text(place / "index.html", _page(sorted(new + before, key=_place)), "write")


def _place(saved: Saved) -> tuple[int, str]:
    """Where it stands on the page: as in the laboratory, and below those it has not by name."""
    from . import names

    known = names()
    return known.index(saved.name) if saved.name in known else len(known), saved.name


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(f"write: the folder {folder} cannot be made: {reason}. Give one that you may make.") from error
    return folder


def _pictures(experiment: Experiment) -> tuple[str, str]:
    """The figure for a light page and for a dark one."""
    figure = experiment.figure()
    light = _svg(figure, _PAPER)
    _darken(figure)
    return light, _svg(figure, _NIGHT)


def _svg(figure: Figure, background: str) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context(_SVG):
        figure.savefig(out, format="svg", facecolor=background, metadata={"Date": None, "Creator": "regard"})
    return out.getvalue()


def _darken(figure: Figure) -> None:
    """Turn what is grey, from black to white, to its counterpart on a dark page; colours stay as they are."""
    from matplotlib.collections import Collection
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    kept = {id(text) for axis in figure.get_axes() if axis.images for text in axis.texts}
    kept |= {id(text) for text in figure.findobj(Text) if min(to_rgb(text.get_color())) > _LIGHT}  # on a colour
    parts: dict[type, tuple[str, ...]] = {
        Text: ("color",),
        Line2D: ("color", "markerfacecolor", "markeredgecolor"),
        Patch: ("facecolor", "edgecolor"),
        Collection: ("facecolor", "edgecolor"),
    }
    for artist in figure.findobj(lambda one: isinstance(one, tuple(parts)) and id(one) not in kept):
        for name in next(names for kind, names in parts.items() if isinstance(artist, kind)):
            turned = _turned(getattr(artist, f"get_{name}")())
            if turned is not None:
                getattr(artist, f"set_{name}")(turned)


def _turned(colour: Any) -> Any:
    """The counterpart of a grey on a dark page, or of greys; None where there is a colour, or nothing to turn."""
    from matplotlib.colors import to_rgb, to_rgba_array

    if isinstance(colour, str) and colour in ("none", "auto", "inherit"):
        return None
    many = to_rgba_array(colour)
    if len(many) == 0 or (many[:, :3].max(-1) - many[:, :3].min(-1) > 0.02).any():
        return None
    share = many[:, :1]  # of white
    many[:, :3] = share * to_rgb(_NIGHT) + (1 - share) * to_rgb(_INK)
    return many[0] if len(many) == 1 else many


def _page(experiments: Sequence[Saved]) -> str:
    style = asset(__package__, "page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self' file: data:; base-uri 'none'"
    held = sum(experiment.verdict for experiment in experiments)
    pieces = {
        "policy": _escaped(policy),
        "style": style,
        "sum": f"The measurements support {held} of {len(experiments)}.",
        "links": "\n".join(map(_link, experiments)),
        "sections": "\n".join(map(_section, experiments)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], asset(__package__, "page.html"))


def _link(experiment: Saved) -> str:
    sign = '<span class="yes">✓</span>' if experiment.verdict else '<span class="no">✗</span>'
    return f'<li><a href="#{experiment.name}">{experiment.name} {sign}</a></li>'


def _section(experiment: Saved) -> str:
    name, caption = experiment.name, _escaped(experiment.caption)
    said = "The measurement supports the claim" if experiment.verdict else "The measurement does not support the claim"
    kind, sign = ("yes", "✓") if experiment.verdict else ("no", "✗")
    choices = "; ".join(f"{name} = {value}" for name, value in experiment.choices.items())
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<div class="heading"><h2 id="{name}-title">{name}</h2><p class="verdict {kind}">{sign} {said}</p></div>
<p class="claim">{_escaped(experiment.claim)}</p>
<figure><div class="plate" tabindex="0" role="group" aria-label="Picture of {name}"><picture>
<source srcset="{name}-dark.svg" media="(prefers-color-scheme: dark)"><img src="{name}.svg" alt="{caption}">
</picture></div><figcaption>{caption}</figcaption></figure>
<p class="test"><b>Test.</b> {_escaped(experiment.test)}</p>
{_numbers(experiment)}
<p class="foot"><span>Run it: <code>regard lab {name}</code></span><a href="{name}.json">{name}.json</a></p>
<details><summary>Sizes and choices</summary><p class="foot"><code>{_escaped(choices)}</code></p></details>
</section>"""


def _numbers(experiment: Saved) -> str:
    parts = "\n".join(_table(some, experiment.name) for some in tables(experiment.rows))
    count = len(experiment.rows)
    return parts if count < _LONG else f"<details><summary>Numbers, {count} rows</summary>\n{parts}\n</details>"


def _table(rows: list[Row], name: str) -> str:
    kinds = {key: ' class="number"' if all(is_number(row[key]) for row in rows) else "" for key in rows[0]}
    head = "".join(f'<th scope="col"{kind}>{_escaped(key)}</th>' for key, kind in kinds.items())
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_escaped(cell(row[key]))}</td>" for key, kind in kinds.items()) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers of {name}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _escaped(text: str) -> str:
    return html.escape(shown(text))
