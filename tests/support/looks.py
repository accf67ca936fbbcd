"""Looks for tests: small models, really observed, over tokens that try to break out of the page."""

from __future__ import annotations

import torch
from torch import Tensor

import regard
from regard.report.look import HeadLook, LayerLook, Look, Remark

ODD = [
    *("<script>alert(1)</script>", "</script><script>document.title='broken'</script>", "<!--", "]]>", "&lt;", "\n"),
    *(
        "",
        " ",
        "  ",
        "\t",
        "\r\n",
        "\u202edlrow",
        "שלום",
        "مرحبا",
        "👩‍🚀",
        "\ud800",
        "\u2028",
        "'\"`${x}",
        "\x00",
        "\x1b[31m",
    ),
]
PROSE = """
    The attention of a reader is a scarce thing ; it goes where the eye is led , rests there for a moment , and moves
    on . A head of a transformer does the same , many times at once : it looks back at the first word , at the word
    before , at a name that came long ago . What it sees it weighs , and what it weighs it adds .
"""


def words(count: int) -> list[str]:
    """`count` tokens: odd ones first, then prose with spaces before the words and some line breaks."""
    prose = [f" {word}" if place % 29 else "\n" for place, word in enumerate(PROSE.split() * (count // 50 + 1))]
    return [*ODD, *prose][:count]


def layer(name: str, queries: list[str], keys: list[str], heads: int, *, k: int = 16, seed: int = 0) -> LayerLook:
    """Observe one layer of random heads that favour different keys: the previous one, the first one, or none."""
    n, m = len(queries), len(keys)
    generator = torch.Generator().manual_seed(seed)
    q, v = torch.randn(heads, n, 16, generator=generator), torch.randn(heads, m, 16, generator=generator)
    key = torch.randn(heads, m, 16, generator=generator)
    sharpness = torch.linspace(0.05, 0.9, heads)[torch.randperm(heads, generator=generator)]
    near = -(torch.arange(n)[:, None] - torch.arange(m) - 1).abs() / 2.0
    first = (torch.arange(m) == 0) * 7.0
    lean = torch.stack([(near, first.expand(n, m), near * 0)[(head + seed) % 3] for head in range(heads)])
    mask = regard.causal() if queries is keys else None
    seen = regard.observe(q[None], key[None], v[None], mask=mask, bias=lean, scale=sharpness)
    height, width = min(64, n), min(64, m)
    maps, (weights, indices) = seen.map(height, width)[0], seen.top(min(k, m))
    looks = [HeadLook(h, statistics(seen, h), maps[h], (weights[0, h], indices[0, h])) for h in range(heads)]
    return LayerLook(name, queries, keys, looks)


def statistics(seen: regard.Observation, head: int) -> dict[str, float]:
    """The statistics of a head, by the names that reports use; the last one is NaN."""
    entropy, visible = seen.entropy[0, head], seen.visible[0, head].double()
    return {
        "entropy": float(entropy.mean()),
        "relative_entropy": float((entropy / visible.log().clamp(min=1e-9)).clamp(max=1.0).mean()),
        "effective_keys": float(seen.perplexity[0, head].mean()),
        "max_logit": float(seen.max_logit[0, head].max()),
        "first_share": float(seen.received[0, head, 0] / len(entropy)),
        "saturated_share": float((seen.gradient_health[0, head] < 0.05).double().mean()),
        "distance": float("nan"),
    }


def example(layers: int = 12, heads: int = 12, tokens: int = 256, *, k: int = 16) -> Look:
    """A model of causal layers over one text, with remarks of both kinds."""
    text = words(tokens)
    seen = [layer(f"transformer.h.{at}.attn", text, text, heads, k=k, seed=at) for at in range(layers)]
    last = seen[-1].name
    remarks = [
        Remark("attention-sink", "notable", f"{last}: head 1 gives most of its weight to the first token.", last, (1,)),
        Remark("saturated", "problem", f"{last}: heads 0 and 2 are saturated <b>in most rows</b>.", last, (0, 2)),
        Remark("elsewhere", "notable", "A layer that is not in the page is named without a link.", "gone", (0,)),
    ]
    facts = {"model": "hand-built <i>model</i>", "tokens": str(tokens), "layers × heads": f"{layers} × {heads}"}
    return Look('Heads of <a small> model & its "text"', facts, seen, remarks)


def synthetic(layers: int, heads: int, tokens: int, *, side: int = 64, k: int = 16) -> Look:
    """A look of any size, made quickly: the same random heads in every layer."""
    generator = torch.Generator().manual_seed(0)
    height, k = min(side, tokens), min(k, tokens)
    weights: Tensor = torch.rand(heads, tokens, k, generator=generator).sort(descending=True).values / k
    keys = torch.randint(0, tokens, (heads, tokens, k), generator=generator)
    maps = torch.rand(heads, height, height, generator=generator)
    text = [f" word{place}" for place in range(tokens)]
    every = [HeadLook(at, {"entropy": 1.0}, maps[at], (weights[at], keys[at])) for at in range(heads)]
    return Look("large", {}, [LayerLook(f"layers.{at}", text, text, every) for at in range(layers)], [])
