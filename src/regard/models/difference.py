"""The difference between two watched runs: paired heads subtracted, and a table that says what was paired."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.functional import divergence
from regard.observation import Observation
from regard.report.files import json_safe, write_text
from regard.report.tables import HeadTable

from .head_statistics import Head

__all__ = ["Difference"]


@dataclass(frozen=True, repr=False)
class Difference:
    """Two watched runs compared head by head: the statistics of `heads` are the second minus the first."""

    heads: list[Head]
    only_first: list[Head]
    only_second: list[Head]
    sizes: tuple[list[int], list[int]] = ([], [])  # the number of heads per layer, for the first and the second
    by_order: bool = False  # the two share no layer name, so layers were paired by order
    layers: Sequence[str] = ()  # the names of the first one's layers, in order
    calls: Mapping[str, tuple[Observation, Observation]] = field(
        default_factory=dict, compare=False
    )  # paired, the last

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def strongest(self) -> list[Head]:
        """The heads that changed, sorted by the largest change of any share."""
        return sorted((head for head in self.heads if _changed(head)), key=_moved, reverse=True)

    @torch.no_grad()
    def distances(self, layer: str | int) -> Tensor:
        """How far each head of the first is from each head of the second in a layer: (heads, heads), in nats.

        It is the Jensen–Shannon divergence of their weights in the layer's last call, the mean over the rows that see
        something: 0 for heads that attend alike, log 2 for heads that attend to no common key. Both must have read
        texts of the same length. `layer` is a name of the first one, or its place.

        >>> import torch, regard
        >>> block = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
        >>> with regard.watch(block) as seen:
        ...     _ = block(torch.randn(1, 10, 16))
        >>> seen.diff(seen).distances(0).diagonal().abs().max() < 1e-6
        tensor(True)
        """
        names = list(self.calls)
        if type(layer) is int and -len(names) <= layer < len(names):
            layer = names[layer]
        if layer not in self.calls:
            known = ", ".join(map(repr, names)) or "there is none"
            raise ArgumentError(f"distances: layer must be one that both have, or its place: {known}. Got {layer!r}.")
        a, b = self.calls[str(layer)]
        rows = divergence(a, b, "js", heads="pairs")  # (…, Ha, Hb, N)
        some = torch.logical_or(*(torch.gt(seen.lse, -torch.inf).any(-2) for seen in (a, b)))  # (…, N)
        count = some.sum().clamp(min=1)
        total: Tensor = torch.where(some[..., None, None, :], rows, 0.0).sum(-1)
        return total.reshape(-1, *total.shape[-2:]).sum(0) / count

    def table(self, most: int = 20, names: tuple[str, str] = ("the first", "the second")) -> HeadTable:
        """The heads that changed most, as a table of differences; `names` are what the text calls the two.

        >>> import torch, regard
        >>> block = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
        >>> with regard.watch(block) as seen:
        ...     _ = block(torch.randn(1, 10, 16))
        >>> print(seen.diff(seen).table())
        the second minus the first: no difference (2 heads compared)
        """
        changed = self.strongest()
        rows = [(head.layer, str(head.head), head.numbers()) for head in changed[:most]]
        lines = [*self._paired(names), *self._summary(len(rows), len(changed), names)]
        return HeadTable(rows, signed=True, layers=self.layers, lines=lines)

    def to_json(self, path: str | Path, names: tuple[str, str] = ("the first", "the second")) -> None:
        """Write the differences, head by head, and the heads that only one of the two has, as JSON."""
        found = {
            "first": names[0],
            "second": names[1],
            "paired_by": "order" if self.by_order else "name",
            "heads": list(map(_as_object, self.heads)),
            "only_first": list(map(_as_object, self.only_first)),
            "only_second": list(map(_as_object, self.only_second)),
        }
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n", "to_json")

    def _summary(self, rows: int, changed: int, names: tuple[str, str]) -> list[str]:
        """What is subtracted from what, how many changed heads are shown, and how many could not be compared."""
        what = f"{names[1]} minus {names[0]}"
        undefined = sum(all(math.isnan(x) for x in head.numbers().values()) for head in self.heads)
        if changed:
            some = _counted(changed, "head")
            lines = [
                f"{what}: {some} changed" if rows == changed else f"{what}: the {rows} strongest of {some} that changed"
            ]
        elif undefined == len(self.heads):
            lines = [f"{what}: there are no heads to compare"]
        else:
            lines = [f"{what}: no difference ({_counted(len(self.heads) - undefined, 'head')} compared)"]
        return lines + (
            [f"{_counted(undefined, 'head')} could not be compared: all numbers are NaN"] if undefined else []
        )

    def _paired(self, names: tuple[str, str]) -> list[str]:
        """How layers and heads were paired, if that is not obvious, and which were left out."""
        if not (self.by_order or self.only_first or self.only_second):
            return []
        shapes = " and ".join(f"{name} has {_shape(size)}" for name, size in zip(names, self.sizes, strict=True))
        rest = [(names[0], len(self.only_first)), (names[1], len(self.only_second))]
        out = " and ".join(f"{_counted(count, 'head')} of {name}" for name, count in rest if count) or "none"
        how = f"order (named as in {names[0]})" if self.by_order else "name"
        return [f"{shapes}: layers are paired by {how} and heads by number; left out: {out}"]


def _as_object(head: Head) -> dict[str, object]:
    return {name: json_safe(value) for name, value in asdict(head).items()}


def _changed(head: Head) -> bool:
    return any(x != 0 and not math.isnan(x) for x in head.numbers().values())


def _moved(head: Head) -> float:
    shares = ("relative_entropy", "first_share", "self_share", "previous_share", "saturated_share", "concentration")
    return max((abs(x) for x in (getattr(head, name) for name in shares) if not math.isnan(x)), default=0.0)


def _shape(heads: Sequence[int]) -> str:
    """The number of layers, and of heads per layer, or in total if layers differ."""
    layers = _counted(len(heads), "layer")
    return f"{layers} of {_counted(heads[0], 'head')}" if len(set(heads)) == 1 else f"{layers} with {sum(heads)} heads"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
