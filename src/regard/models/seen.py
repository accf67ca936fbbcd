"""Seen: what `watch` saw of a model, as statistics, findings, tables, differences and reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from regard.errors import ArgumentError
from regard.report.files import json_safe, write_text
from regard.report.look import MAX_CELLS, MOST_PAIRS, HeadLook, LayerLook, Look, Remark
from regard.report.provenance import provenance
from regard.report.tables import HeadTable

from .difference import Difference
from .findings import Finding, Rule, find
from .head_statistics import STATISTICS, Head
from .loading import random_weights_text
from .record import MAP_SIDE, AttentionRecord

__all__ = ["Seen"]

Tell = Callable[[str], None]


class _CachedFindings(NamedTuple):
    """The findings of all rules, and what they were computed from."""

    calls: int
    tokens: Tensor | None
    findings: list[Finding]


@dataclass
class Seen(AttentionRecord):
    """What `watch` saw: statistics and a pooled map per head, and the last Observation per layer; never the weights.

    >>> import torch, regard
    >>> block = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    >>> with regard.watch(block) as seen:
    ...     _ = block(torch.randn(1, 10, 16))
    >>> seen
    Seen(1 layer, 2 heads, 1 call)
    >>> seen.layers, seen["self_attn"].received.shape
    (['self_attn'], torch.Size([1, 2, 10]))
    """

    _cached: _CachedFindings | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        heads = sum(layer.size for layer in self._records.values())
        counts = {"layer": len(self.layers), "head": heads, "call": self.calls}
        return f"Seen({', '.join(f'{n} {what}' if n == 1 else f'{n} {what}s' for what, n in counts.items())})"

    def findings(self, rules: Iterable[Rule] | None = None, tell: Tell | None = None) -> list[Finding]:
        """What is wrong or notable, in words and numbers, problems first; `regard.models.findings` has the rules.

        `tell`, if given, is called with the name of each rule when it is done.
        """
        if rules is not None:
            return find(self, rules, tell)
        cached = self._cached
        if cached is None or cached.calls != self.calls or cached.tokens is not self.tokens:
            cached = self._cached = _CachedFindings(self.calls, self.tokens, find(self, None, tell))
        return list(cached.findings)

    def table(self, by_layer: bool = False) -> HeadTable:
        """The heads and their statistics as a table, or the means per layer; print it, or pass it to rich."""
        if not by_layer:
            return HeadTable([(head.layer, str(head.head), head.numbers()) for head in self.heads])
        rows = []
        for name in self.layers:
            heads = [head.numbers() for head in self._heads_of(name)]
            means = {key: fmean(head[key] for head in heads) for key in STATISTICS}
            largest = [head["max_logit"] for head in heads]
            means["max_logit"] = math.nan if any(map(math.isnan, largest)) else max(largest)
            rows.append((name, f"all {len(heads)}", means))
        return HeadTable(rows)

    def to_json(self, path: str | Path) -> None:
        """Write layers, heads and findings as JSON; an undefined number becomes null."""
        found = {
            "layers": self.layers,
            "heads": [{key: json_safe(value) for key, value in asdict(head).items()} for head in self.heads],
            "findings": [asdict(finding) for finding in self.findings()],
            "missed": self.missed,
            "random_weights": self.random_weights,
        }
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n", "to_json")

    def diff(self, other: Seen) -> Difference:
        """Compare head by head: `other` minus this. Layers pair by name, or by order if they share no name."""
        if not isinstance(other, Seen):
            raise ArgumentError(f"diff: the argument must be another Seen. Got {type(other).__name__}.")
        theirs = {(head.layer, head.head): head for head in other.heads}
        by_order = not any((head.layer, head.head) in theirs for head in self.heads)
        if by_order:
            renamed = dict(zip(other.layers, self.layers, strict=False))
            theirs = {(renamed.get(layer, layer), head): it for (layer, head), it in theirs.items()}
        pairs = [(head, theirs.pop((head.layer, head.head), None)) for head in self.heads]
        changes = [
            replace(a, **{name: getattr(b, name) - getattr(a, name) for name in STATISTICS})
            for a, b in pairs
            if b is not None
        ]
        mine, others = ([layer.size for layer in seen._records.values()] for seen in (self, other))
        rest = [a for a, b in pairs if b is None]
        return Difference(changes, rest, list(theirs.values()), (mine, others), by_order)

    def look(
        self, tokens: Iterable[str] | None = None, title: str = "attention", item: int = 0, tell: Tell | None = None
    ) -> Look:
        """What a report shows of one batch item, with the texts of its `tokens`, or positions if there are none.

        `tell`, if given, is called with the name of each layer when it is done.
        """
        texts = self._texts(tokens)
        layers = []
        for name in self.layers:
            layers.append(self._look(name, texts, item))
            if tell is not None:
                tell(name)
        remarks = [Remark(f.rule, f.level, f.text, f.layer, f.heads) for f in self.findings()]
        shapes = {self[name].shape[-2:] for name in self.layers}
        sizes = " and ".join(f"{n:,} × {m:,}" for n, m in sorted(shapes))
        facts = {"layers": str(len(layers)), "heads": str(len(self.heads)), "queries × keys": sizes, **provenance()}
        if self.missed:
            names = [name or "the model itself" for name in self.missed]
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            facts["calls not seen in"] = ", ".join(names[:3]) + more
        if self.random_weights:
            facts["random weights"] = random_weights_text(self.random_weights)
        return Look(title, facts, layers, remarks)

    def _texts(self, tokens: Iterable[str] | None) -> list[str]:
        """Check that the tokens are strings, and that some layer has as many queries or keys."""
        if tokens is None:
            return []
        must = "look: tokens must be the texts of the tokens, a list of strings"
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ArgumentError(f"{must}. Got {type(tokens).__name__}; decode the token ids one by one.")
        texts = list(tokens)
        other = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
        if other is not None:
            kind = type(texts[other]).__name__
            raise ArgumentError(f"{must}. Got {kind} at index {other}; decode the token ids one by one.")
        sizes = sorted({size for name in self.layers for size in self[name].shape[-2:]})
        if sizes and len(texts) not in sizes:
            wanted = " or ".join(f"{size:,}" for size in sizes)
            raise ArgumentError(
                f"look: tokens must be one per query or one per key of a layer, {wanted}. Got {len(texts):,}; "
                f"without tokens, the report shows positions."
            )
        return texts

    def _heads_of(self, name: str) -> list[Head]:
        return [head for head in self.heads if head.layer == name]

    def _look(self, name: str, texts: list[str], item: int) -> LayerLook:
        seen, numbers = self[name], self._heads_of(name)
        n, m = seen.shape[-2:]
        lead = math.prod(seen.shape[:-3])
        if type(item) is not int or not 0 <= item < lead:
            raise ArgumentError(f"look: item must be from 0 to {lead - 1}, an index into the batch. Got {item!r}.")
        queries, keys = (texts if len(texts) == size else list(map(str, range(size))) for size in (n, m))
        if texts and len(texts) == m and n < m:
            queries = texts[m - n :]
        weights, index = (_item(x, item).cpu() for x in self.strongest(name))
        side = MAP_SIDE if n * m > MOST_PAIRS else MAX_CELLS
        grid = self.map(name) if lead == 1 and side == MAP_SIDE else self._grid(name, side, item)
        return LayerLook(
            name,
            queries,
            keys,
            [HeadLook(h, head.numbers(), grid[h], (weights[h].float(), index[h])) for h, head in enumerate(numbers)],
        )

    def _grid(self, name: str, side: int, item: int) -> Tensor:
        """The map of one batch item: single weights if there are at most `side` queries and keys, otherwise means."""
        n, m = self[name].shape[-2:]
        return _item(self[name].map(min(side, n), min(side, m)), item).float().cpu()


def _item(x: Tensor, item: int) -> Tensor:
    """One batch item of (…, H, a, b)."""
    return x.reshape(-1, *x.shape[-3:])[item]
