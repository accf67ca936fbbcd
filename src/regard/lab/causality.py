"""Nothing comes from the future; and what a large negative number does that −inf does not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..backends import KNOWN
from ..functional import attention, observe, why
from ..masks import causal
from .base import Row, Study, Tell, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Causality"]

_LADDER = (-3.0, -10.0, -30.0, -60.0, -1000.0)
_SEEING, _BLIND = "hidden weight, row that sees keys", "hidden weight, row that sees none"


@dataclass(frozen=True)
class Causality(Study):
    """Gradients and bits against the offset of a key, and constants against −inf for rows that see much or nothing."""

    name: ClassVar[str] = "causality"
    claim: ClassVar[str] = (
        "Under a causal mask no gradient and no bit of a row comes from later keys. Adding −1e9 instead of masking "
        "gives the same bits in float32 to rows that see a key, but a row that sees none averages all values where the "
        "mask gives zeros; and float16 has no −1e9: it becomes −inf."
    )
    test: ClassVar[str] = (
        "On every backend that runs here, the gradient is exactly 0 at every later key and not at the others, and "
        "changing later keys and values changes no bit; with the constant no seeing row's bits differ from the mask's, "
        "blind rows are the mean of the values to 1e−6 against exact zeros, and the constant overflows float16."
    )
    caption: ClassVar[str] = (
        "Left: the largest gradient of a row's output with respect to a key and its value, by where the key stands; "
        "later ones have none at all. Right: the weight that goes to hidden keys. For a row that sees a key it falls "
        "with the constant and ends at exactly 0; for a row that sees none, every finite constant leaves it all there."
    )
    least: ClassVar[dict[str, float]] = {"length": 3, "offset": -math.inf, "constant": -math.inf}

    length: int = 8
    dim: int = 16
    offset: int = 0  # row i sees the keys up to i + offset
    constant: float = -1e9  # what is added instead of masking

    def measure(self, tell: Tell) -> list[Row]:
        """Gradients, bits, constants."""
        q, k, v = torch.randn(3, 1, 2, self.length, self.dim)
        rows = self._gradients(q, k, v)
        tell(0.5)
        rows += self._bits(q, k, v)
        tell(0.7)
        return rows + self._constants(q, k, v) + self._hidden(q, k, v)

    def _backends(self, q: Tensor) -> list[str]:
        refusals = why(q, q, q, mask=causal(self.offset)).refusals
        return [name for name in KNOWN if not refusals[name]]

    def _gradients(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """The largest gradient with respect to keys and values at each offset j − i, on any backend."""
        n, largest = self.length, torch.zeros(self.length, self.length)
        for name in self._backends(q):
            key, value = k.clone().requires_grad_(), v.clone().requires_grad_()
            output = attention(q, key, value, mask=causal(self.offset), backend=name)
            pull = torch.randn_like(output)
            for i in range(n):
                found = torch.autograd.grad((output * pull)[..., i, :].sum(), (key, value), retain_graph=True)
                reach = torch.stack(found).abs().amax((0, 1, 2, 4))  # (M,)
                largest[i] = torch.maximum(largest[i], reach)
        steps = [(j, largest.diagonal(j).max().item()) for j in range(1 - n, n)]
        return [
            _row("gradient", f"{j:+d}" if j else "0", found, 0.0 if j > 0 else "> 0", (found == 0.0) == (j > 0))
            for j, found in steps
        ]

    def _bits(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """How many rows change when everything later is replaced."""
        rows = []
        for name in self._backends(q):
            before, changed = attention(q, k, v, mask=causal(self.offset), backend=name), 0
            for i in range(self.length):
                other = [
                    torch.cat([x[..., : i + 1, :], 1e3 * torch.randn_like(x[..., i + 1 :, :])], -2) for x in (k, v)
                ]
                after = attention(q, *other, mask=causal(self.offset), backend=name)
                changed += _differ(before[..., : i + 1, :], after[..., : i + 1, :])
            rows.append(_row("rows whose bits the future changes", name, changed, 0, changed == 0))
        return rows

    def _constants(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """The constant as a bias against the mask, which hides everything from the first two rows."""
        mask = causal(self.offset - 2)
        bias = torch.where(mask.dense(self.length, self.length), 0.0, self.constant)
        mean, named = v.mean(-2, keepdim=True), f"{self.constant:g}"
        rows = []
        for name in ("chunked", "reference"):
            masked, biased = (attention(q, k, v, backend=name, **how) for how in ({"mask": mask}, {"bias": bias}))
            differ = _differ(masked[..., 2:, :], biased[..., 2:, :])
            zeros, average = masked[..., :2, :].abs().max().item(), (biased - mean)[..., :2, :].abs().max().item()
            rows += [
                _row(f"rows that see keys and differ, {named}", name, differ, 0, differ == 0),
                _row("a row that sees none, masked: |output|", name, zeros, 0.0, zeros == 0.0),
                _row(f"the same with {named}: |output − mean of v|", name, average, "< 1e-06", average < 1e-6),
            ]
        stored = {dtype: torch.tensor(self.constant).to(dtype).item() for dtype in (torch.float16, torch.bfloat16)}
        for dtype, value in stored.items():
            overflows = value == -torch.inf
            expected = "−inf" if dtype == torch.float16 else "finite"
            case = str(dtype).removeprefix("torch.")
            found = "−inf" if overflows else f"{value:g}"
            rows.append(_row(f"{named} stored as", case, found, expected, overflows == (expected == "−inf")))
        return rows

    def _hidden(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """The weight on hidden keys under ever lower constants."""
        seen = causal(self.offset - 2).dense(self.length, self.length)
        rows = []
        for constant in (*sorted({*_LADDER, self.constant}, reverse=True), -torch.inf):
            weights = observe(q, k, v, bias=torch.where(seen, 0.0, constant)).weights()
            shares = (weights * ~seen).sum(-1).amax((0, 1))  # (N,)
            none, some = shares[:2].max().item(), shares[2:].max().item()
            named = "−inf" if constant == -torch.inf else f"{constant:g}"
            low = constant < -200  # e⁻²⁰⁰ is no float32
            rows += [
                _row(_SEEING, named, some, 0.0 if low else "> 0", (some == 0.0) == low),
                _row(_BLIND, named, none, float(named != "−inf"), abs(none - (named != "−inf")) < 1e-6),
            ]
        return rows

    def holds(self, rows: list[Row]) -> bool:
        """Everything agrees."""
        return all(row["agrees"] for row in rows)

    def draw(self, rows: list[Row]) -> Figure:
        """Gradients by offset, and hidden weight by constant."""
        figure, (left, right) = canvas(9.5, 3.9, columns=2)
        reach = [(int(row["case"]), row["found"]) for row in rows if row["check"] == "gradient"]
        left.bar([j for j, _ in reach], [found for _, found in reach], color="C0")
        left.plot(
            [j for j, found in reach if found == 0],
            [0.0] * sum(found == 0 for _, found in reach),
            "C1o",
            label="exactly 0",
        )
        left.axvline(0.5, color="black", lw=1, ls=":")
        left.set(xlabel="key's place − row's place", ylabel="largest gradient")
        left.legend(frameon=False, loc="upper right")
        for check, marker, label in ((_SEEING, "o-", "a row that sees a key"), (_BLIND, "s--", "a row that sees none")):
            some = [row for row in rows if row["check"] == check]
            right.plot([row["case"] for row in some], [row["found"] for row in some], marker, label=label)
        right.set_yscale("symlog", linthresh=1e-30)
        right.set_yticks([0.0, 1e-30, 1e-20, 1e-10, 1.0], ["0", "1e−30", "1e−20", "1e−10", "1"])
        right.minorticks_off()
        right.set(xlabel="what is added to hidden logits", ylabel="weight on hidden keys")
        right.legend(frameon=False, loc="lower left")
        return figure


def _row(check: str, case: str, found: float | str, expected: float | str, agrees: bool) -> Row:
    return {"check": check, "case": case, "found": found, "expected": expected, "agrees": agrees}


def _differ(x: Tensor, y: Tensor) -> int:
    """How many rows are not the same to the bit."""
    return int((x != y).any(-1).sum())
