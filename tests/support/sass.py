"""Machine code of Hopper, read for faults that no number shows on a machine without the chip."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["inner_loops", "lines", "loops", "lost_operands"]


SIZE = 0x10  # bytes of an instruction


class Line(NamedTuple):
    at: int  # address
    text: str


def lines(sass: str) -> list[Line]:
    """The instructions, and where a branch names a label, the address it stands for."""
    code: list[Line] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels of the instruction to come
    for label, at, text in re.findall(r"^\s*(\.\w+):|/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.MULTILINE):
        if label:
            waiting.append(label)
        else:
            labels |= dict.fromkeys(waiting, int(at, 16))
            waiting.clear()
            code.append(Line(int(at, 16), text))
    return [Line(at, re.sub(r"`\((\.\w+)\)", lambda name: hex(labels[name[1]]), text)) for at, text in code]


def target(text: str) -> int | None:
    """The address that a branch goes to."""
    to = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
    return int(to.group(1), 16) if to else None


def tries_again(line: Line) -> bool:
    """Whether a line goes back a few instructions: a wait at a barrier, which tries until it is complete."""
    to = target(line.text)
    return to is not None and line.at - 4 * SIZE <= to < line.at


def loops(code: list[Line]) -> list[tuple[int, int]]:
    """First and last address of every loop: a branch that goes back.

    The assembler puts some waits behind all other code; the branch from there to where the wait was is no loop.
    """
    found = []
    for before, line in zip([None, *code], code, strict=False):
        to = target(line.text)
        returns = line.text.startswith("BRA") and before is not None and tries_again(before)
        if to is not None and to < line.at and not returns:
            found.append((to, line.at))
    return found


def inner_loops(sass: str, having: str = "") -> list[list[str]]:
    """The instructions of each loop that has such an instruction, and no other such loop in it."""
    code = lines(sass)
    known = [(a, b) for a, b in loops(code) if any(having in line.text for line in code if a <= line.at <= b)]
    inner = [(a, b) for a, b in known if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in known)]
    return [[line.text for line in code if a <= line.at <= b] for a, b in inner]


_WIDTHS = {"LDSM.16.M88.4": 4, ".128": 4, ".64": 2}


def written(text: str) -> range:
    """The registers that an instruction writes; none for stores, branches and products, which write their sums."""
    text = re.sub(r"^@!?U?P\w+\s+", "", text)
    if re.match(r"LOP3\.LUT R(\d+), R\1, U?R\w+, RZ, 0xfc", text):  # in place, which keeps the value: `hold`
        return range(0)
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
