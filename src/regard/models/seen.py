"""What was seen of a model: its layers, its heads in numbers, and what they show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.observation import Observation
from regard.report.files import plain, write_text
from regard.report.look import HeadLook, LayerLook, Look, Remark
from regard.report.page_budget import keys_worth
from regard.report.tables import HeadTable

from .difference import Difference
from .findings import Finding, Rule, find
from .head_statistics import STATISTICS, Head, measure_heads

__all__ = ["Seen"]

_SIDE = 64  # cells of a pooled map, along each side
_STRONGEST = 16  # keys that a report names for each row, at most

Tell = Callable[[str], None]


@dataclass
class _Layer:
    """What is kept of a layer: sums over its calls, and the last of them."""

    last: Observation
    map: Tensor  # (heads, height, width)
    totals: dict[str, Tensor]
    counts: dict[str, Tensor]  # the calls in which a number had a meaning
    strongest: tuple[Tensor, Tensor] | None = None  # of the last call, once asked for

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
    _judged: tuple[Tensor | None, list[Finding]] | None = field(default=None, compare=False)  # by all rules, of tokens

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

    def strongest(self, layer: str) -> tuple[Tensor, Tensor]:
        """The strongest keys of each row in the layer's last call, as `Observation.top` gives them, found once.

        There are 16, or of long texts as many as a report can hold, 3 at least.
        """
        kept = self._layer(layer)
        if kept.strongest is None:
            worth = keys_worth([one.last.shape[-3:] for one in self._kept.values()], _STRONGEST)
            kept.strongest = kept.last.top(min(worth, kept.last.shape[-1]))
        return kept.strongest

    def add(self, name: str, seen: Observation) -> None:
        """Take note of a call."""
        self.calls += 1
        self._judged = None
        if not math.prod(seen.shape):
            why = f"a call had nothing to see: its weights are {seen.shape} as (batch, heads, queries, keys)"
            self.missed.setdefault(name, why)
            return
        heads = seen.shape[-3]
        while name in self._kept and len(self._kept[name].map) != heads:  # another attention of the same module
            name += "#"
        now = measure_heads(seen, _SIDE)
        known = {key: x.isnan().logical_not() for key, x in now.numbers.items()}
        fresh = {key: torch.where(known[key], x, 0.0) for key, x in now.numbers.items() if key != "max_logit"}
        fresh["max_logit"] = now.numbers["max_logit"]  # a NaN must be seen
        kept = self._kept.get(name)
        if kept is None:
            self._kept[name] = _Layer(seen, now.map, fresh, {key: x.long() for key, x in known.items()})
            return
        kept.last, kept.map, kept.strongest = seen, now.map, None
        for key, x in fresh.items():
            kept.counts[key] += known[key]
            kept.totals[key] = torch.maximum(kept.totals[key], x) if key == "max_logit" else kept.totals[key] + x

    def findings(self, rules: Iterable[Rule] | None = None, tell: Tell | None = None) -> list[Finding]:
        """What is wrong or notable, in words with numbers, problems first; `regard.models.findings` has the rules.

        `tell`, if given, is called with the name of each rule when it has judged.
        """
        if rules is not None:
            return find(self, rules, tell)
        if self._judged is None or self._judged[0] is not self.tokens:
            self._judged = self.tokens, find(self, None, tell)
        return list(self._judged[1])

    def table(self, by_layer: bool = False) -> HeadTable:
        """The heads and their numbers as a table, or the means of each layer: print it, or give it to rich."""
        if not by_layer:
            return HeadTable([(head.layer, str(head.head), head.numbers()) for head in self.heads])
        rows = []
        for name, layer in self._kept.items():
            heads = [head.numbers() for head in layer.heads(name)]
            means = {key: fmean(head[key] for head in heads) for key in STATISTICS}
            largest = [head["max_logit"] for head in heads]
            means["max_logit"] = math.nan if any(map(math.isnan, largest)) else max(largest)
            rows.append((name, f"all {len(heads)}", means))
        return HeadTable(rows)

    def to_json(self, path: str | Path) -> None:
        """Write layers, heads and findings; a number that has no meaning is null."""
        found = {
            "layers": self.layers,
            "heads": [{key: plain(value) for key, value in asdict(head).items()} for head in self.heads],
            "findings": [asdict(finding) for finding in self.findings()],
            "missed": self.missed,
        }
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n", "to_json")

    def diff(self, other: Seen) -> Difference:
        """Compare head by head: `other` less this. Layers pair by name, or by their order if no name is shared."""
        if not isinstance(other, Seen):
            raise ArgumentError(f"diff: it compares with another Seen. Got {type(other).__name__}.")
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
        mine, others = ([len(layer.map) for layer in seen._kept.values()] for seen in (self, other))
        rest = [a for a, b in pairs if b is None]
        return Difference(changes, rest, list(theirs.values()), (mine, others), by_order)

    def look(
        self, tokens: Iterable[str] | None = None, title: str = "attention", item: int = 0, tell: Tell | None = None
    ) -> Look:
        """What a report shows of one batch item; `tokens` are the texts of its tokens, else positions stand in.

        `tell`, if given, is called with the name of each layer when it has been looked at.
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
        facts = {"layers": str(len(layers)), "heads": str(len(self.heads)), "queries × keys": sizes}
        if self.missed:
            names = [name or "the model itself" for name in self.missed]
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            facts["calls not seen in"] = ", ".join(names[:3]) + more
        return Look(title, facts, layers, remarks)

    def _texts(self, tokens: Iterable[str] | None) -> list[str]:
        """The texts of the tokens, if they are texts and some layer has as many queries or keys."""
        if tokens is None:
            return []
        rule = "look: tokens must be the texts of the tokens, a list of strings"
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ArgumentError(f"{rule}. Got {type(tokens).__name__}; decode the token ids one by one.")
        texts = list(tokens)
        other = next((place for place, text in enumerate(texts) if not isinstance(text, str)), None)
        if other is not None:
            kind = type(texts[other]).__name__
            raise ArgumentError(f"{rule}. Got {kind} at place {other}; decode the token ids one by one.")
        sizes = sorted({size for name in self.layers for size in self[name].shape[-2:]})
        if sizes and len(texts) not in sizes:
            wanted = " or ".join(f"{size:,}" for size in sizes)
            raise ArgumentError(
                f"look: tokens must be as many as the queries or the keys of a layer, {wanted}. Got {len(texts):,}; "
                f"without tokens, positions stand in."
            )
        return texts

    def _look(self, name: str, texts: list[str], item: int) -> LayerLook:
        seen, numbers = self[name], self._layer(name).heads(name)
        n, m = seen.shape[-2:]
        lead = math.prod(seen.shape[:-3])
        if type(item) is not int or not 0 <= item < lead:
            raise ArgumentError(f"look: item must be from 0 to {lead - 1}, the batch that was seen. Got {item!r}.")
        queries, keys = (texts if len(texts) == size else list(map(str, range(size))) for size in (n, m))
        if texts and len(texts) == m and n < m:
            queries = texts[m - n :]
        weights, index = (_item(x, item).cpu() for x in self.strongest(name))
        grid = self.map(name) if lead == 1 else _item(seen.map(min(_SIDE, n), min(_SIDE, m)), item).float().cpu()
        return LayerLook(
            name,
            queries,
            keys,
            [HeadLook(h, head.numbers(), grid[h], (weights[h].float(), index[h])) for h, head in enumerate(numbers)],
        )

    def _layer(self, name: str) -> _Layer:
        if name not in self._kept:
            known = ", ".join(map(repr, self._kept)) or "none; did the model run inside of watch, and does it call "
            known += "" if self._kept else "scaled_dot_product_attention, regard or torch.nn.MultiheadAttention?"
            raise ArgumentError(f"Seen: no attention was seen in {name!r}. Seen: {known}.")
        return self._kept[name]


def _item(x: Tensor, item: int) -> Tensor:
    """One batch item of (…, H, a, b)."""
    return x.reshape(-1, *x.shape[-3:])[item]
