"""What was seen of a model: its layers, its heads in numbers, and what they show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.files import write_text
from regard.report.look import HeadLook, LayerLook, Look, Remark
from regard.report.tables import HeadTable

from .findings import Finding, Rule, find
from .heads import STATISTICS, Head, portrait

__all__ = ["Difference", "Seen"]

_SIDE = 64  # cells of a pooled map, along each side
_STRONGEST = 16  # keys that a report names for each row


@dataclass
class _Layer:
    """What is kept of a layer: sums over its calls, and the last of them."""

    last: Observation
    map: Tensor  # (heads, height, width)
    totals: dict[str, Tensor]
    counts: dict[str, Tensor]  # the calls in which a number had a meaning

    def heads(self, name: str) -> list[Head]:
        means = {key: (total / self.counts[key]).tolist() for key, total in self.totals.items()}
        means["max_logit"] = self.totals["max_logit"].tolist()
        return [
            Head(name, head, **{key: values[head] for key, values in means.items()}) for head in range(len(self.map))
        ]


@dataclass
class Seen:
    """What `watch` saw: per head statistics and a pooled map, per layer the last Observation; never the weights.

    >>> import torch, regard
    >>> block = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    >>> with regard.watch(block) as seen:
    ...     _ = block(torch.randn(1, 10, 16))
    >>> seen
    Seen(1 layer, 2 heads, 1 call)
    >>> seen.layers, seen["self_attn"].received.shape
    (['self_attn'], torch.Size([1, 2, 10]))
    """

    tokens: Tensor | None = None  # (batch, n), if the model was called with whole numbers
    calls: int = 0
    missed: dict[str, str] = field(default_factory=dict)  # calls that could not be observed, and why
    _kept: dict[str, _Layer] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = {"layer": len(self._kept), "head": len(self.heads), "call": self.calls}
        return f"Seen({', '.join(f'{n} {what}' if n == 1 else f'{n} {what}s' for what, n in counts.items())})"

    @property
    def layers(self) -> list[str]:
        """The modules that attended, by name, in the order of their first calls."""
        return list(self._kept)

    @property
    def heads(self) -> list[Head]:
        """One record a head, layer by layer."""
        return [head for name, layer in self._kept.items() for head in layer.heads(name)]

    def __getitem__(self, layer: str) -> Observation:
        return self._layer(layer).last

    def map(self, layer: str) -> Tensor:
        """The pooled weights of the layer's last call, mean over the batch: (heads, height, width), 64 × 64 at most."""
        return self._layer(layer).map

    def add(self, name: str, seen: Observation) -> None:
        """Take note of a call."""
        self.calls += 1
        if not math.prod(seen.shape):
            return
        heads = seen.shape[-3]
        while name in self._kept and len(self._kept[name].map) != heads:  # another attention of the same module
            name += "#"
        now = portrait(seen, _SIDE)
        known = {key: x.isnan().logical_not() for key, x in now.numbers.items()}
        fresh = {key: torch.where(known[key], x, 0.0) for key, x in now.numbers.items() if key != "max_logit"}
        fresh["max_logit"] = now.numbers["max_logit"]  # a NaN must be seen
        kept = self._kept.get(name)
        if kept is None:
            self._kept[name] = _Layer(seen, now.map, fresh, {key: x.long() for key, x in known.items()})
            return
        kept.last, kept.map = seen, now.map
        for key, x in fresh.items():
            kept.counts[key] += known[key]
            kept.totals[key] = torch.maximum(kept.totals[key], x) if key == "max_logit" else kept.totals[key] + x

    def findings(self, rules: Iterable[Rule] | None = None) -> list[Finding]:
        """What is wrong or notable, in words with numbers, problems first; `regard.models.findings` has the rules."""
        return find(self, rules)

    def table(self, by_layer: bool = False) -> HeadTable:
        """The heads and their numbers as a table, or the means of each layer: print it, or give it to rich."""
        if not by_layer:
            return HeadTable([(head.layer, str(head.head), _numbers(head)) for head in self.heads])
        rows = []
        for name, layer in self._kept.items():
            heads = [_numbers(head) for head in layer.heads(name)]
            means = {key: fmean(head[key] for head in heads) for key in STATISTICS}
            means["max_logit"] = max(head["max_logit"] for head in heads)
            rows.append((name, f"all {len(heads)}", means))
        return HeadTable(rows)

    def to_json(self, path: str | Path) -> None:
        """Write layers, heads and findings; a number that has no meaning is null."""
        found = {
            "layers": self.layers,
            "heads": [{key: _plain(value) for key, value in asdict(head).items()} for head in self.heads],
            "findings": [asdict(finding) for finding in self.findings()],
            "missed": self.missed,
        }
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n", "to_json")

    def diff(self, other: Seen) -> Difference:
        """Compare head by head: `other` less this. Layers pair by name, or by their order if no name is shared."""
        if not isinstance(other, Seen):
            raise ArgumentError(f"diff: it compares with another Seen. Got {type(other).__name__}.")
        theirs = {(head.layer, head.head): head for head in other.heads}
        if not any((head.layer, head.head) in theirs for head in self.heads):
            renamed = dict(zip(other.layers, self.layers, strict=False))
            theirs = {(renamed.get(layer, layer), head): it for (layer, head), it in theirs.items()}
        pairs = [(head, theirs.pop((head.layer, head.head), None)) for head in self.heads]
        changes = [
            replace(a, **{name: getattr(b, name) - getattr(a, name) for name in STATISTICS})
            for a, b in pairs
            if b is not None
        ]
        return Difference(changes, [a for a, b in pairs if b is None], list(theirs.values()))

    def look(self, tokens: Sequence[str] | None = None, title: str = "attention", item: int = 0) -> Look:
        """What a report shows of one batch item; `tokens` are the texts of its tokens, else positions stand in."""
        layers = [self._look(name, tokens, item) for name in self.layers]
        remarks = [Remark(f.rule, f.level, f.text, f.layer, f.heads) for f in self.findings()]
        shapes = {self[name].shape[-2:] for name in self.layers}
        sizes = " and ".join(f"{n:,} × {m:,}" for n, m in sorted(shapes))
        facts = {"layers": str(len(layers)), "heads": str(len(self.heads)), "queries × keys": sizes}
        return Look(title, facts, layers, remarks)

    def _look(self, name: str, tokens: Sequence[str] | None, item: int) -> LayerLook:
        seen, numbers = self[name], self._layer(name).heads(name)
        n, m = seen.shape[-2:]
        lead = math.prod(seen.shape[:-3])
        if not 0 <= item < lead:
            raise ArgumentError(f"look: item must be from 0 to {lead - 1}, the batch that was seen. Got {item}.")
        texts = list(tokens) if tokens is not None else []
        queries, keys = (texts if len(texts) == size else list(map(str, range(size))) for size in (n, m))
        if texts and len(texts) == m and n < m:
            queries = texts[m - n :]
        weights, index = (_item(x, item).cpu() for x in seen.top(min(_STRONGEST, m)))
        grid = _item(seen.map(min(_SIDE, n), min(_SIDE, m)), item).float().cpu()
        return LayerLook(
            name,
            queries,
            keys,
            [HeadLook(h, _numbers(head), grid[h], (weights[h].float(), index[h])) for h, head in enumerate(numbers)],
        )

    def _layer(self, name: str) -> _Layer:
        if name not in self._kept:
            known = ", ".join(map(repr, self._kept)) or "none; did the model run inside of watch, and does it call "
            known += "" if self._kept else "scaled_dot_product_attention, regard or torch.nn.MultiheadAttention?"
            raise ArgumentError(f"Seen: no attention was seen in {name!r}. Seen: {known}.")
        return self._kept[name]


@dataclass(frozen=True)
class Difference:
    """Two looks at models, head by head: the numbers of `heads` are those of the second less those of the first."""

    heads: list[Head]
    only_first: list[Head]
    only_second: list[Head]

    def strongest(self) -> list[Head]:
        """The heads that changed, those first whose weights moved most: by the largest change of a share."""
        return sorted((head for head in self.heads if _moved(head)), key=_moved, reverse=True)

    def table(self, most: int = 20) -> HeadTable:
        """The heads that changed most, as a table of differences."""
        rows = [(head.layer, str(head.head), _numbers(head)) for head in self.strongest()[:most]]
        return HeadTable(rows, signed=True)


def _moved(head: Head) -> float:
    shares = ("relative_entropy", "first_share", "self_share", "previous_share", "saturated_share", "concentration")
    return max((abs(x) for x in (getattr(head, name) for name in shares) if not math.isnan(x)), default=0.0)


def _numbers(head: Head) -> dict[str, float]:
    return {name: getattr(head, name) for name in STATISTICS}


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _item(x: Tensor, item: int) -> Tensor:
    """One batch item of (…, H, a, b)."""
    return x.reshape(-1, *x.shape[-3:])[item]
