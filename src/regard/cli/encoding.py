"""Print where not every character can be shown: signs and drawings fall back to ASCII, letters to their codes."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

__all__ = ["fall_back_to_ascii"]

_NAME = "regard-ascii"
_SIGNS = {
    **dict.fromkeys("−–—─━═╌", "-"),
    **dict.fromkeys("│┃║▏▎▍‖", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╞╡╪", "+"),
    **dict.fromkeys("█▉▊▋▌▓▒", "#"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("‘’′", "'"),
    "·": ".",
    "░": ".",
    "…": "~",
    "×": "x",
    "√": "sqrt ",
    "Σ": "sum ",
    "∞": "inf",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "°": " deg",
    "µ": "u",
    "∇": "grad ",
    "✓": "yes",
    "✗": "no",
    "▼": "v",
    "≈": "~",
    "θ": "theta",
    "ε": "eps",
    "κ": "kappa",
    "π": "pi",
    "λ": "lambda",
    "σ": "sigma",
    "γ": "gamma",
    "δ": "delta",
}


def fall_back_to_ascii() -> None:
    """Let stdout and stderr replace what they cannot encode, instead of raising."""
    codecs.register_error(_NAME, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_NAME)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(char: str) -> str:
    if char in _SIGNS:
        return _SIGNS[char]
    kind = unicodedata.decomposition(char)
    if kind.startswith(("<super>", "<sub>")):  # such as 10⁻³
        plain = unicodedata.normalize("NFKD", char).replace("−", "-")
        return f"{'^' if kind.startswith('<super>') else '_'}{plain}" if plain.isascii() else _code(char)
    return _code(char)


def _code(char: str) -> str:
    return char.encode("ascii", "backslashreplace").decode()
