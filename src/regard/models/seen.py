"""Seen: what `watch` saw of a model, as statistics, findings, tables, differences and reports."""

from __future__ import annotations

import json
import math
import os
import tempfile
import webbrowser
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from regard.display import block, frame, note
from regard.errors import ArgumentError, RegardError
from regard.report import page
from regard.report.files import json_safe, write_text
from regard.report.look import MAX_CELLS, MOST_PAIRS, HeadLook, LayerLook, Look, Remark
from regard.report.provenance import provenance
from regard.report.tables import HeadTable

from .difference import Difference
from .findings import Finding, Findings, Rule, find
from .head_statistics import STATISTICS, Head
from .loading import random_weights_text
from .record import MAP_SIDE, AttentionRecord

__all__ = ["Seen"]

Tell = Callable[[str], None]
TableRow = tuple[str, str, dict[str, float]]
_LONGEST_FRAMED = 512  # rows or keys; a longer text makes a large and slow page
_FRAME_HEIGHT = 720  # pixels
_AROUND_FRAME = 6_000  # bytes around the page, and of its characters that are escaped


class _CachedFindings(NamedTuple):
    """The findings of all rules, and what they were computed from."""

    calls: int
    tokens: Tensor | None
    findings: Findings


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

    def findings(self, rules: Iterable[Rule] | None = None, tell: Tell | None = None) -> Findings:
        """What is wrong or notable, in words and numbers, problems first; `regard.models.findings` has the rules.

        `tell`, if given, is called with the name of each rule when it is done.
        """
        if rules is not None:
            return find(self, rules, tell)
        cached = self._cached
        if cached is None or cached.calls != self.calls or cached.tokens is not self.tokens:
            cached = self._cached = _CachedFindings(self.calls, self.tokens, find(self, None, tell))
        return Findings(cached.findings, self.layers)

    def table(self, by_layer: bool = False, *, layer: str | int | None = None, sort: str | None = None) -> HeadTable:
        """The heads and their statistics as a table, or the means per layer; print it, or pass it to rich.

        `layer` shows the heads of one layer, given by its name or its place; `sort` is a statistic, the largest first.
        """
        if sort is not None and sort not in STATISTICS:
            raise ArgumentError(f"table: sort must be a statistic: {', '.join(STATISTICS)}. Got {sort!r}.")
        some = self.layers if layer is None else [self._known(layer)]
        rows = [row for name in some for row in (self._means(name) if by_layer else self._rows(name))]
        if sort is not None:
            rows.sort(key=lambda row: (math.isnan(row[2][sort]), -row[2][sort]))
        return HeadTable(rows, layers=self.layers)

    def _rows(self, name: str) -> list[TableRow]:
        return [(name, str(head.head), head.numbers()) for head in self._heads_of(name)]

    def _means(self, name: str) -> list[TableRow]:
        heads = [head.numbers() for head in self._heads_of(name)]
        means = {key: fmean(head[key] for head in heads) for key in STATISTICS}
        largest = [head["max_logit"] for head in heads]
        means["max_logit"] = math.nan if any(map(math.isnan, largest)) else max(largest)
        return [(name, f"all {len(heads)}", means)]

    def _known(self, layer: str | int) -> str:
        self[layer]  # an error names the layers that there are
        return self.layer_name(layer)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: Iterable[str] | None = None,
        title: str | None = None,
        item: int = 0,
    ) -> Path:
        """Write the interactive report on one batch item as one HTML file that opens from disk, and return its path.

        `tokens` are the texts of its tokens; without them the report shows `texts`, or positions.
        """
        return page.write(self.look(tokens, title, item), path)

    def show(self, *, tokens: Iterable[str] | None = None, title: str | None = None, item: int = 0) -> Path:
        """Write the report into a temporary folder, open it in a browser, and return its path."""
        path = Path(tempfile.mkdtemp(prefix="regard-")) / "report.html"
        self.save(path, tokens=tokens, title=title, item=item)
        webbrowser.open(path.as_uri())
        return path

    def _repr_html_(self) -> str:
        """The report in a frame, or a summary if the text is long."""
        parts = [] if self.layers else [note("no attention was seen")]
        parts += [note(f"not seen: {layer or 'the model itself'}: {why}") for layer, why in self.missed.items()]
        if not self.layers:
            return block(repr(self), *parts)
        try:
            if max(max(self[name].shape[-2:]) for name in self.layers) <= _LONGEST_FRAMED:
                return block(
                    "", frame(page.render(self.look(), page.EMBEDDED_LIMIT - _AROUND_FRAME), _FRAME_HEIGHT), *parts
                )
            shown = [self.findings()._repr_html_(), self.table(by_layer=True)._repr_html_()]
            parts.append(note('the text is long: seen.save("report.html") writes the report, and seen.show() opens it'))
        except RegardError as error:  # such as tensors that were changed since
            shown = [note(str(error))]
        return block(repr(self), *shown, *parts)

    def to_json(self, path: str | Path) -> None:
        """Write layers, heads and findings as JSON; an undefined number becomes null."""
        found = {
            "layers": self.layers,
            "heads": [{key: json_safe(value) for key, value in asdict(head).items()} for head in self.heads],
            "findings": [_as_object(finding) for finding in self.findings()],
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
        names = (
            zip(self.layers, other.layers, strict=False) if by_order else ((x, x) for x in self if x in other.layers)
        )
        calls = {one: (self[one], other[two]) for one, two in names}
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
        return Difference(changes, rest, list(theirs.values()), (mine, others), by_order, self.layers, calls)

    def look(
        self, tokens: Iterable[str] | None = None, title: str | None = None, item: int = 0, tell: Tell | None = None
    ) -> Look:
        """What a report shows of one batch item, with the texts of its `tokens`.

        Without tokens it shows `texts`, if somebody gave them, or else positions.

        `tell`, if given, is called with the name of each layer when it is done.
        """
        items = min((math.prod(self[name].shape[:-3]) for name in self.layers), default=1)
        if type(item) is not int or not 0 <= item < items:
            raise ArgumentError(f"look: item must be from 0 to {items - 1}, an index into the batch. Got {item!r}.")
        texts = self._texts(tokens) if tokens is not None else self._texts_of(item, items)
        layers = []
        for name in self.layers:
            layers.append(self._look(name, texts, item))
            if tell is not None:
                tell(name)
        remarks = [Remark(f.rule, f.level, f.says, *place) for f in self.findings() for place in f.places]
        shapes = {self[name].shape[-2:] for name in self.layers}
        sizes = " and ".join(f"{n:,} × {m:,}" for n, m in sorted(shapes))
        facts = {"layers": str(len(layers)), "heads": str(len(self.heads)), "queries × keys": sizes, **provenance()}
        if items > 1:
            facts["batch item"] = f"{item} of 0 to {items - 1}; statistics are means over all"
        if self.missed:
            names = [name or "the model itself" for name in self.missed]
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            facts["calls not seen in"] = ", ".join(names[:3]) + more
        if self.random_weights:
            facts["random weights"] = random_weights_text(self.random_weights)
        return Look(self.title if title is None else title, facts, layers, remarks)

    def _texts_of(self, item: int, items: int) -> list[str]:
        """The `texts` of one batch item, checked; empty if there are none."""
        found = self.texts_by_item()
        if len(found) not in (0, 1, items):
            raise ArgumentError(
                f"Seen: texts must be the texts of the tokens, one list or one per batch item, {items}. "
                f"Got {len(found)} lists."
            )
        return self._one_per_token(found[item if len(found) > 1 else 0], "Seen", "texts") if found else []

    def _texts(self, tokens: Iterable[str]) -> list[str]:
        """Check that the tokens are strings, and that some layer has as many queries or keys."""
        must = "look: tokens must be the texts of the tokens, a list of strings"
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ArgumentError(f"{must}. Got {type(tokens).__name__}; decode the token ids one by one.")
        texts = list(tokens)
        other = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
        if other is not None:
            kind = type(texts[other]).__name__
            raise ArgumentError(f"{must}. Got {kind} at index {other}; decode the token ids one by one.")
        return self._one_per_token(texts, "look", "tokens")

    def _one_per_token(self, texts: list[str], caller: str, name: str) -> list[str]:
        """Check that some layer has as many queries or keys as there are texts."""
        sizes = sorted({size for name in self.layers for size in self[name].shape[-2:]})
        if sizes and len(texts) not in sizes:
            wanted = " or ".join(f"{size:,}" for size in sizes)
            raise ArgumentError(
                f"{caller}: {name} must be one per query or one per key of a layer, {wanted}. Got {len(texts):,}; "
                f"without {name}, the report shows positions."
            )
        return texts

    def _heads_of(self, name: str) -> list[Head]:
        return [head for head in self.heads if head.layer == name]

    def _look(self, name: str, texts: list[str], item: int) -> LayerLook:
        seen, numbers = self[name], self._heads_of(name)
        n, m = seen.shape[-2:]
        lead = math.prod(seen.shape[:-3])
        queries, keys = (texts if len(texts) == size else list(map(str, range(size))) for size in (n, m))
        if texts and len(texts) == m and n < m:
            queries = texts[m - n :]
        weights, index = (_item(x, item).cpu() for x in self.strongest(name))
        side = MAP_SIDE if n * m > MOST_PAIRS else MAX_CELLS
        kept = lead == 1 and side == MAP_SIDE
        grid = self.map(name) if kept else _item(seen.map(min(side, n), min(side, m)), item).float().cpu()
        return LayerLook(
            name,
            queries,
            keys,
            [HeadLook(h, head.numbers(), grid[h], (weights[h].float(), index[h])) for h, head in enumerate(numbers)],
        )


def _as_object(finding: Finding) -> dict[str, object]:
    """A finding as JSON shows it."""
    places = [{"layer": layer, "heads": list(heads)} for layer, heads in finding.places]
    found = asdict(finding) | {"places": places, "value": json_safe(finding.value)}
    return {name: found[name] for name in ("rule", "level", "text", "layer", "heads", "value", "places")}


def _item(x: Tensor, item: int) -> Tensor:
    """One batch item of (…, H, a, b)."""
    return x.reshape(-1, *x.shape[-3:])[item]
