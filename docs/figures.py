"""Figures for the docs: matplotlib SVG in the page's text colour, the same bytes on every build."""

from __future__ import annotations

import html
import io
import itertools
import logging
import re
import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

INK = "#0f1e2d"  # replaced by the page's text colour, light or dark
TEAL, ORANGE, VIOLET, ROSE, BLUE, GREY = "#0d9488", "#e07b39", "#8672d8", "#d1495b", "#4c8dd6", "#8a8f98"

_count = itertools.count(1)

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "regard",
        "font.size": 11,
        "axes.prop_cycle": matplotlib.cycler(color=[TEAL, ORANGE, VIOLET, ROSE, BLUE, GREY]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
)


def on_startup(**_: object) -> None:
    """Let the pages import this file, and let --strict count the warnings that --quiet would hide."""
    torch.set_num_threads(1)  # one order of sums, and so the same digits, on every machine
    sys.path.insert(0, str(Path(__file__).parent))
    logging.getLogger("mkdocs").setLevel(logging.WARNING if "--quiet" in sys.argv or "-q" in sys.argv else logging.INFO)


def svg(figure: Figure, caption: str) -> str:
    """Return a figure as HTML: inline SVG with a caption."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(r"#([0-7][0-9a-f])\1\1\b", "currentColor", drawn)  # dark greys would be invisible on a dark page
    place = f"figure{next(_count)}-"  # ids must be unique on a page with several figures
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{place}", drawn)
    words = html.escape(caption)
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
    return f'<figure class="made" data-search-exclude>{drawn}<figcaption>{words}</figcaption></figure>'
