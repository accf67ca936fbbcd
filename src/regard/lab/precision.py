"""The error of fp16, bf16 and fp32 against float64, as the logits grow."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..backends import KNOWN
from ..functional import attention, why
from ..softmax import stable
from .base import Progress, Row, Study, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Precision"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ARITHMETIC = ("float32", "as stored")
_STORED, _INPUTS = "each step stored", "inputs rounded"
_SINGLE = 2.0**-24


@dataclass(frozen=True)
class Precision(Study):
    """The error of every backend that runs here, against float64 on the same inputs and on unrounded inputs."""

    name: ClassVar[str] = "precision"
    claim: ClassVar[str] = (
        "If half-precision inputs are computed in float32, the result is as close to float64 as its dtype allows, "
        "however large the logits; if every step is stored in the dtype of the inputs, the error grows with the "
        "logits. The error of rounding q and k themselves grows with the logits too, and no backend can undo it."
    )
    test: ClassVar[str] = (
        "For every backend, dtype and logit scale the largest error against float64 on the same inputs is at most "
        "2 · (u + 2⁻²⁴ · the largest logit) · max|v|, where u is the unit roundoff of the dtype: the rounding of the "
        "result, plus that of float32 logits. The errors are ordered by u, float32 < float16 < bfloat16; and for the "
        "half precisions at the largest scale, storing each step or rounding the inputs costs over 4 times as much."
    )
    caption: ClassVar[str] = (
        "The largest error of the output against float64. Solid: the worst of our backends on the same inputs; for the "
        "half precisions it levels off at the rounding of the result. Dotted: every step stored in the dtype. Dashed: "
        "the cost of rounding q, k and v beforehand, whichever backend computes."
    )
    among: ClassVar[dict[str, Collection[str]]] = {"dtypes": _DTYPES, "arithmetic": _ARITHMETIC}

    logit_scales: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0, 64.0)  # the standard deviation of the logits
    length: int = 96
    dim: int = 32
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    arithmetic: str = "float32"  # under test: the backends (float32), or every step "as stored"

    def measure(self, progress: Progress) -> list[Row]:
        """Attend in each dtype, on each backend, at each scale of the logits."""
        exact = torch.randn(3, 1, 2, self.length, self.dim, dtype=torch.float64)
        rows: list[Row] = []
        for step, dtype in enumerate(self.dtypes):
            rows += [self._errors(exact, dtype, scale) for scale in self.logit_scales]
            progress((step + 1) / len(self.dtypes))
        return rows

    def _errors(self, exact: Tensor, dtype: str, logit_scale: float) -> Row:
        scale = logit_scale / math.sqrt(self.dim)
        rounded = exact.to(_DTYPES[dtype])
        truth = attention(*rounded.double(), scale=scale, backend="reference")
        ideal = attention(*exact, scale=scale, backend="reference")
        largest = (rounded[0].double() @ rounded[1].double().mT).abs().max().item() * scale
        refusals = why(*rounded, scale=scale).refusals
        return {
            "dtype": dtype,
            "logit scale": logit_scale,
            "bound": 2.0 * (_roundoff(dtype) + _SINGLE * largest) * rounded[2].abs().max().item(),
            **{
                name: _max_error(attention(*rounded, scale=scale, backend=name), truth)
                for name in KNOWN
                if not refusals[name]
            },
            _STORED: _max_error(_attend_in_dtype(rounded, scale), truth),
            _INPUTS: _max_error(truth, ideal),
        }

    def holds(self, rows: list[Row]) -> bool:
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
        """Error against the scale of the logits, one colour per dtype."""
        figure, axes = canvas(7.5, 4.2)
        for colour, dtype in enumerate(self.dtypes):
            own = [row for row in rows if row["dtype"] == dtype]
            scales = [row["logit scale"] for row in own]
            axes.loglog(scales, [_worst_backend(row) for row in own], f"C{colour}o-", label=f"{dtype}, worst backend")
            axes.loglog(scales, [row[_STORED] for row in own], f"C{colour}x:", label=f"{dtype}, {_STORED}")
            axes.loglog(scales, [row[_INPUTS] for row in own], f"C{colour}--", lw=1, label=f"{dtype}, {_INPUTS}")
        axes.set(xlabel="standard deviation of the logits", ylabel="largest error of the output")
        axes.set_xticks(self.logit_scales, [f"{scale:g}" for scale in self.logit_scales])
        axes.minorticks_off()
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        return figure


def _attend_in_dtype(inputs: Tensor, scale: float) -> Tensor:
    """The formula with logits and weights rounded to the dtype of the inputs, as a naive implementation does."""
    dtype = inputs.dtype
    query, key, value = inputs.float().unbind()
    logits = ((query @ key.mT).to(dtype) * scale).to(dtype)
    return (stable(logits).float() @ value).to(dtype)


def _max_error(output: Tensor, truth: Tensor) -> float:
    return (output.double() - truth).abs().max().item()


def _roundoff(dtype: str) -> float:
    return torch.finfo(_DTYPES[dtype]).eps / 2


def _worst_backend(row: Row) -> float:
    """The largest error among the backends."""
    return max(float(row[name]) for name in KNOWN if name in row)
