"""The error of fp16, bf16 and fp32 against float64 as the logits grow, and what overflows in fp16."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import KNOWN
from ..functional import attention, why
from ..scores import Balanced
from ..softmax import stable
from .base import Figure, Progress, Row, Study, canvas, counted

__all__ = ["Precision"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ARITHMETIC = ("float32", "as stored")
_STORED, _INPUTS = "each step stored", "inputs rounded"
_SINGLE = 2.0**-24
_FORMS = ("plain", "query first", "balanced")
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Precision(Study):
    """The error of every backend that runs here, against float64 on the same inputs and on unrounded inputs."""

    name: ClassVar[str] = "precision"
    brief: ClassVar[str] = "Half precision is accurate if computed in float32"
    claim: ClassVar[str] = (
        "If half-precision inputs are computed in float32, the result is as close to float64 as its dtype allows, "
        "however large the logits; if every step is stored in the dtype of the inputs, the error grows with the "
        "logits. The error of rounding q and k themselves grows with the logits too, and no backend can undo it. If "
        "q·k is stored in float16, it overflows above 65,504 and gives NaN. Scaling before the product (balanced: "
        "q/d^¼ and k/d^¼) overflows only if the logit itself is that large. It saves the range, not the digits."
    )
    test: ClassVar[str] = (
        "For every backend, dtype and logit scale the largest error against float64 on the same inputs is at most "
        "2 · (u + 2⁻²⁴ · the largest logit) · max|v|, where u is the unit roundoff of the dtype: the rounding of the "
        "result, plus that of float32 logits. The errors are ordered by u, float32 < float16 < bfloat16; and for the "
        "half precisions at the largest scale, storing each step or rounding the inputs costs over 4 times as much. In "
        "float16, the plain form gives NaN exactly where q·k exceeds 65,504, and the forms that scale first exactly "
        "where the logit does; the form under test is finite somewhere that the plain one is not. The backends are "
        "finite and within the bound everywhere; a stored form that is finite where the plain one is not exceeds it."
    )
    caption: ClassVar[str] = (
        "The largest error of the output against float64. Solid: the worst of our backends on the same inputs; for the "
        "half precisions it levels off at the rounding of the result. Dotted: every step stored in the dtype. Dashed: "
        "the cost of rounding q, k and v beforehand, whichever backend computes. Right: q and k with entries of one "
        "size, in float16, with every step stored; a cross marks NaN."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"dtypes": _DTYPES, "arithmetic": _ARITHMETIC, "rescue": _FORMS}

    logit_scales: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0, 64.0)  # the standard deviation of the logits
    length: int = 96
    dim: int = 32
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    arithmetic: str = "float32"  # under test: the backends (float32), or every step "as stored"
    entries: tuple[float, ...] = (15.0, 30.0, 60.0, 120.0)  # the size of those of q and k in the rows on overflow
    wide_dim: int = 64  # d in the rows on overflow
    rescue: str = "balanced"  # the form that, by the claim, is finite where the plain one overflows

    def suit(self) -> None:
        """The inputs themselves must fit into float16."""
        if max(self.entries) > _LARGEST / 2:
            self.refuse("entries", f"at most {_LARGEST / 2:g}, half of what float16 can hold")

    def measure(self, progress: Progress) -> list[Row]:
        """Attend in each dtype, on each backend, at each scale of the logits."""
        exact = torch.randn(3, 1, 2, self.length, self.dim, dtype=torch.float64)
        dtypes = counted(self.dtypes, progress, stop=0.8)
        rows = [self._errors(exact, dtype, scale) for dtype in dtypes for scale in self.logit_scales]
        return rows + [self._overflow(entry) for entry in self.entries]

    def _errors(self, exact: Tensor, dtype: str, logit_scale: float) -> Row:
        scale = logit_scale / math.sqrt(self.dim)
        rounded = exact.to(_DTYPES[dtype])
        truth = attention(*rounded.double(), scale=scale, backend="reference")
        ideal = attention(*exact, scale=scale, backend="reference")
        largest = (rounded[0].double() @ rounded[1].double().mT).abs().max().item() * scale
        return {
            "dtype": dtype,
            "logit scale": logit_scale,
            "bound": 2.0 * (_roundoff(dtype) + _SINGLE * largest) * rounded[2].abs().max().item(),
            **_backend_errors(rounded, truth, scale),
            _STORED: _max_error(_attend_in_dtype(rounded, scale), truth),
            _INPUTS: _max_error(truth, ideal),
        }

    def _overflow(self, entry: float) -> Row:
        """The errors in float16 if all entries of q and k are near `entry`, and the logits about 2 apart."""
        exact = torch.randn(3, 1, 2, self.length, self.wide_dim, dtype=torch.float64)
        exact[:2] = entry + exact[:2] * (2.0 / entry)
        rounded, scale = exact.to(torch.float16), self.wide_dim**-0.5
        truth = attention(*rounded.double(), scale=scale, backend="reference")
        largest = (rounded[0].double() @ rounded[1].double().mT).max().item()
        forms = {form: _max_error(_attend_in_dtype(rounded, scale, form), truth) for form in _FORMS}
        return {
            "entries": entry,
            "largest q·k": largest,
            "largest logit": largest * scale,
            "gives NaN": ", ".join(form for form, error in forms.items() if math.isnan(error)) or "none",
            **forms,
            "regard": max(_backend_errors(rounded, truth, scale).values()),
            "bound": 2.0 * (_roundoff("float16") + _SINGLE * largest * scale) * rounded[2].abs().max().item(),
        }

    def holds(self, rows: list[Row]) -> bool:
        """Errors and overflows as claimed."""
        wide = [row for row in rows if "entries" in row]
        return self._errors_hold([row for row in rows if "dtype" in row]) and self._overflows_hold(wide)

    def _overflows_hold(self, rows: list[Row]) -> bool:
        predicted = all(
            math.isnan(row[form]) == (row["largest q·k" if form == "plain" else "largest logit"] > _LARGEST)
            for row in rows
            for form in _FORMS
        )
        rescued = [row for row in rows if math.isnan(row["plain"]) and not math.isnan(row[self.rescue])]
        rounds = all(row[self.rescue] > row["bound"] for row in rescued)
        return predicted and bool(rescued) and rounds and all(row["regard"] <= row["bound"] for row in rows)

    def _errors_hold(self, rows: list[Row]) -> bool:
        """Errors within the bound, ordered by the unit roundoff, and growing where the claim says so."""
        errors = {(row["dtype"], row["logit scale"]): self._error_under_test(row) for row in rows}
        by_roundoff = sorted(self.dtypes, key=_roundoff)
        ordered = all(
            errors[finer, scale] < errors[coarser, scale]
            for finer, coarser in pairwise(by_roundoff)
            for scale in self.logit_scales
        )
        wide = [row for row in rows if row["logit scale"] == max(self.logit_scales) and row["dtype"] != "float32"]
        grown = all(min(row[_STORED], row[_INPUTS]) > 4 * _worst_backend(row) for row in wide)
        return ordered and grown and all(self._error_under_test(row) <= row["bound"] for row in rows)

    def _error_under_test(self, row: Row) -> float:
        return float(row[_STORED]) if self.arithmetic == "as stored" else _worst_backend(row)

    def draw(self, rows: list[Row]) -> Figure:
        """Error against the scale of the logits, one colour per dtype; and against the entries of q and k."""
        figure, (left, right) = canvas(10.0, 4.8, columns=2)
        for colour, dtype in enumerate(self.dtypes):
            own = [row for row in rows if row.get("dtype") == dtype]
            scales = [row["logit scale"] for row in own]
            left.loglog(scales, [_worst_backend(row) for row in own], f"C{colour}o-", label=f"{dtype}, worst backend")
            left.loglog(scales, [row[_STORED] for row in own], f"C{colour}x:", label=f"{dtype}, {_STORED}")
            left.loglog(scales, [row[_INPUTS] for row in own], f"C{colour}--", lw=1, label=f"{dtype}, {_INPUTS}")
        left.set(xlabel="standard deviation of the logits", ylabel="largest error of the output")
        left.set_xticks(self.logit_scales, [f"{scale:g}" for scale in self.logit_scales])
        figure.legend(handles=left.lines, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        self._draw_overflow(right, [row for row in rows if "entries" in row])
        for axes in (left, right):
            axes.minorticks_off()
        return figure

    def _draw_overflow(self, axes: Any, rows: list[Row]) -> None:
        entries = [row["entries"] for row in rows]
        for colour, form in enumerate((*_FORMS, "regard")):
            axes.loglog(entries, [row[form] for row in rows], f"C{colour}o-", ms=10 - 2 * colour, label=form)
            lost = [row["entries"] for row in rows if math.isnan(row[form])]
            height = 0.98 - 0.04 * colour
            axes.plot(lost, [height] * len(lost), f"C{colour}x", transform=axes.get_xaxis_transform())
        axes.axhline(10.0, color="black", lw=0.8, ls=":")
        axes.annotate("NaN above this line", (0.02, 12.0), xycoords=("axes fraction", "data"), fontsize=8)
        axes.set(xlabel=f"size of the entries of q and k, d = {self.wide_dim}", ylabel="largest error in float16")
        axes.set_ylim(top=50.0)
        axes.set_xticks(entries, [f"{entry:g}" for entry in entries])
        axes.legend(frameon=False, fontsize=8)


def _attend_in_dtype(inputs: Tensor, scale: float, form: str = "plain") -> Tensor:
    """The formula with every step rounded to the dtype of the inputs, as a naive implementation does.

    `plain` multiplies q·k by the scale; `query first` scales q beforehand, and `balanced` both q and k (by d^-¼).
    """
    dtype = inputs.dtype
    query, key, value = inputs.unbind()
    if form == "balanced":
        query, key, _ = Balanced().prepare(query, key)
    elif form == "query first":
        query = query * scale
    logits = (query.float() @ key.float().mT).to(dtype)
    if form == "plain":
        logits = (logits * scale).to(dtype)
    return (stable(logits).float() @ value.float()).to(dtype)


def _backend_errors(inputs: Tensor, truth: Tensor, scale: float) -> dict[str, float]:
    """The largest error of every backend that runs here."""
    refusals = why(*inputs, scale=scale).refusals
    runs = [name for name in KNOWN if not refusals[name]]
    return {name: _max_error(attention(*inputs, scale=scale, backend=name), truth) for name in runs}


def _max_error(output: Tensor, truth: Tensor) -> float:
    return (output.double() - truth).abs().max().item()


def _roundoff(dtype: str) -> float:
    return torch.finfo(_DTYPES[dtype]).eps / 2


def _worst_backend(row: Row) -> float:
    """The largest error among the backends."""
    return max(float(row[name]) for name in KNOWN if name in row)
