"""Nothing comes from the future; and how a large negative constant differs from −inf."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import KNOWN
from ..functional import attention, observe, why
from ..masks import causal
from .base import Figure, Progress, Row, Study, canvas

__all__ = ["Causality"]

_CONSTANTS = (-3.0, -10.0, -30.0, -60.0, -1000.0)
_SEES_KEYS, _SEES_NONE = "hidden weight, row that sees keys", "hidden weight, row that sees none"


@dataclass(frozen=True)
class Causality(Study):
    """Gradients and bits by the offset of a key, and constants against −inf for rows that see some keys or none."""

    name: ClassVar[str] = "causality"
    brief: ClassVar[str] = "Under a causal mask no bit depends on later keys"
    claim: ClassVar[str] = (
        "Under a causal mask no gradient and no bit of a row depends on later keys. Adding −1e9 instead of masking "
        "gives rows that see a key the same bits in float32, but a row that sees none averages all values where the "
        "mask gives zeros; and float16 cannot represent −1e9: it becomes −inf."
    )
    test: ClassVar[str] = (
        "On every backend that runs here, the gradient is exactly 0 at every later key and nonzero at the others, and "
        "changing later keys and values changes no bit. With the constant, rows that see a key have the same bits as "
        "with the mask; rows that see none are the mean of the values to 1e−6, where the mask gives exact zeros; and "
        "the constant overflows float16."
    )
    caption: ClassVar[str] = (
        "Left: the largest gradient of a row's output with respect to a key and its value, by the position of the key; "
        "it is exactly 0 for later keys. Right: the weight on hidden keys. For a row that sees a key it falls with the "
        "constant and ends at exactly 0; for a row that sees none, all the weight stays there for any finite constant."
    )
    least: ClassVar[dict[str, float]] = {"length": 3, "offset": -math.inf, "constant": -math.inf}

    length: int = 8
    dim: int = 16
    offset: int = 0  # row i sees the keys up to i + offset
    constant: float = -1e9  # what is added instead of masking

    def measure(self, progress: Progress) -> list[Row]:
        """Measure gradients, bits, and the effect of constants."""
        q, k, v = torch.randn(3, 1, 2, self.length, self.dim)
        rows = self._gradients(q, k, v)
        progress(0.5)
        rows += self._bits(q, k, v)
        progress(0.7)
        return rows + self._constants(q, k, v) + self._hidden(q, k, v)

    def _backends(self, q: Tensor) -> list[str]:
        refusals = why(q, q, q, mask=causal(self.offset)).refusals
        return [name for name in KNOWN if not refusals[name]]

    def _gradients(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """The largest gradient with respect to keys and values at each offset j − i, over all backends."""
        n, largest = self.length, torch.zeros(self.length, self.length)
        for name in self._backends(q):
            key, value = k.clone().requires_grad_(), v.clone().requires_grad_()
            output = attention(q, key, value, mask=causal(self.offset), backend=name)
            cotangent = torch.randn_like(output)
            for i in range(n):
                found = torch.autograd.grad((output * cotangent)[..., i, :].sum(), (key, value), retain_graph=True)
                gradients = torch.stack(found).abs().amax((0, 1, 2, 4))  # (M,)
                largest[i] = torch.maximum(largest[i], gradients)
        steps = [(j, largest.diagonal(j).max().item()) for j in range(1 - n, n)]
        return [
            _row("gradient", f"{j:+d}" if j else "0", found, 0.0 if j > 0 else "> 0", (found == 0.0) == (j > 0))
            for j, found in steps
        ]

    def _bits(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """How many rows change when all later keys and values are replaced."""
        rows = []
        for name in self._backends(q):
            before, changed = attention(q, k, v, mask=causal(self.offset), backend=name), 0
            for i in range(self.length):
                other = [
                    torch.cat([x[..., : i + 1, :], 1e3 * torch.randn_like(x[..., i + 1 :, :])], -2) for x in (k, v)
                ]
                after = attention(q, *other, mask=causal(self.offset), backend=name)
                changed += _count_differing(before[..., : i + 1, :], after[..., : i + 1, :])
            rows.append(_row("rows whose bits the future changes", name, changed, 0, changed == 0))
        return rows

    def _constants(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """Compare the constant, as a bias, with a mask that hides everything from the first two rows."""
        mask = causal(self.offset - 2)
        bias = torch.where(mask.dense(self.length, self.length), 0.0, self.constant)
        mean, label = v.mean(-2, keepdim=True), f"{self.constant:g}"
        rows = []
        for name in ("chunked", "reference"):
            masked, biased = (
                attention(q, k, v, backend=name, **options) for options in ({"mask": mask}, {"bias": bias})
            )
            differ = _count_differing(masked[..., 2:, :], biased[..., 2:, :])
            zeros, average = masked[..., :2, :].abs().max().item(), (biased - mean)[..., :2, :].abs().max().item()
            rows += [
                _row(f"rows that see keys and differ, {label}", name, differ, 0, differ == 0),
                _row("a row that sees none, masked: |output|", name, zeros, 0.0, zeros == 0.0),
                _row(f"the same with {label}: |output − mean of v|", name, average, "< 1e-06", average < 1e-6),
            ]
        stored = {dtype: torch.tensor(self.constant).to(dtype).item() for dtype in (torch.float16, torch.bfloat16)}
        for dtype, value in stored.items():
            overflows = value == -torch.inf
            expected = "−inf" if dtype == torch.float16 else "finite"
            case = str(dtype).removeprefix("torch.")
            found = "−inf" if overflows else f"{value:g}"
            rows.append(_row(f"{label} stored as", case, found, expected, overflows == (expected == "−inf")))
        return rows

    def _hidden(self, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
        """The weight on hidden keys for decreasing constants."""
        seen = causal(self.offset - 2).dense(self.length, self.length)
        rows = []
        for constant in (*sorted({*_CONSTANTS, self.constant}, reverse=True), -torch.inf):
            weights = observe(q, k, v, bias=torch.where(seen, 0.0, constant)).weights()
            shares = (weights * ~seen).sum(-1).amax((0, 1))  # (N,)
            none, some = shares[:2].max().item(), shares[2:].max().item()
            label = "−inf" if constant == -torch.inf else f"{constant:g}"
            low = constant < -200  # e⁻²⁰⁰ underflows float32
            rows += [
                _row(_SEES_KEYS, label, some, 0.0 if low else "> 0", (some == 0.0) == low),
                _row(_SEES_NONE, label, none, float(label != "−inf"), abs(none - (label != "−inf")) < 1e-6),
            ]
        return rows

    def holds(self, rows: list[Row]) -> bool:
        """Every row agrees with its expectation."""
        return all(row["agrees"] for row in rows)

    def draw(self, rows: list[Row]) -> Figure:
        """Gradients by offset, and weight on hidden keys by constant."""
        figure, (left, right) = canvas(9.5, 3.9, columns=2)
        gradients = [(int(row["case"]), row["found"]) for row in rows if row["check"] == "gradient"]
        left.bar([j for j, _ in gradients], [found for _, found in gradients], color="C0")
        left.plot(
            [j for j, found in gradients if found == 0],
            [0.0] * sum(found == 0 for _, found in gradients),
            "C1o",
            label="exactly 0",
        )
        left.axvline(0.5, color="black", lw=1, ls=":")
        left.set(xlabel="position of the key − position of the row", ylabel="largest gradient")
        left.legend(frameon=False, loc="upper right")
        for check, marker, label in (
            (_SEES_KEYS, "o-", "a row that sees a key"),
            (_SEES_NONE, "s--", "a row that sees none"),
        ):
            some = [row for row in rows if row["check"] == check]
            right.plot([row["case"] for row in some], [row["found"] for row in some], marker, label=label)
        right.set_yscale("symlog", linthresh=1e-30)
        right.set_yticks([0.0, 1e-30, 1e-20, 1e-10, 1.0], ["0", "1e−30", "1e−20", "1e−10", "1"])
        right.minorticks_off()
        right.set(xlabel="constant added to hidden logits", ylabel="weight on hidden keys")
        right.legend(frameon=False, loc="lower left")
        return figure


def _row(check: str, case: str, found: float | str, expected: float | str, agrees: bool) -> Row:
    return {"check": check, "case": case, "found": found, "expected": expected, "agrees": agrees}


def _count_differing(x: Tensor, y: Tensor) -> int:
    """How many rows differ in some bit."""
    return int((x != y).any(-1).sum())
