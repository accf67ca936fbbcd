"""Machine code of Hopper, read for faults that no number shows on a machine without the chip."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["lost_operands"]


class Line(NamedTuple):
    at: int  # address
    text: str


def lines(sass: str) -> list[Line]:
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)
    return [Line(int(at, 16), text) for at, text in found]


def loops(code: list[Line]) -> list[tuple[int, int]]:
    """First and last address of every loop: a branch that goes back."""
    jumps = ((line.at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line.text)) for line in code)
    return [(int(to.group(1), 16), at) for at, to in jumps if to and int(to.group(1), 16) <= at]


_WIDTHS = {"LDSM.16.M88.4": 4, ".128": 4, ".64": 2}


def written(text: str) -> range:
    """The registers that an instruction writes; none for stores, branches and products, which write their sums."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    name, _, rest = text.partition(" ")
    if name.startswith(("ST", "BRA", "BAR", "HGMMA", "SYNCS", "UTMA", "RED", "R2UR")):
        return range(0)
    first = re.match(r"(?:[UP]?P\w+,\s*)*R(\d+)\b", rest)
    if not first:
        return range(0)
    width = next((n for ending, n in _WIDTHS.items() if name.startswith(("LD", "IMAD.WIDE")) and ending in name), 1)
    return range(int(first.group(1)), int(first.group(1)) + (2 if "WIDE" in name else width))


def lost_operands(sass: str) -> list[str]:
    """Products in loops whose left operand is overwritten in its registers, and not filled before the next turn."""
    code = lines(sass)
    known = loops(code)
    lost = []
    for line in code:
        operand = re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line.text)
        around = [loop for loop in known if loop[0] <= line.at <= loop[1]]
        if not operand or not around:
            continue
        start, end = min(around, key=lambda loop: loop[1] - loop[0])
        registers = range(int(operand.group(1)), int(operand.group(1)) + 4)
        writers = [other.at for other in code if start <= other.at <= end and set(written(other.text)) & set(registers)]
        if writers and min(writers) > line.at:
            lost.append(f"{line.at:04x} {line.text}")
    return lost
