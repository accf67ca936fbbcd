"""Look into a model built from torch's own modules, without changing it: what does each head do, and what is wrong?

A `torch.nn.TransformerEncoder` with random weights is watched while it runs. Then three of its heads are broken on
purpose, in ways that happen in training: exploding logits, a head that copies another, a head that cannot tell keys
apart. The findings name them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import regard

DIM, HEADS, LAYERS, TOKENS = 64, 4, 2, 128
SIZE = DIM // HEADS


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def head(layer: nn.Module, part: int, number: int) -> Tensor:
    """The rows of the input projection that give the queries (part 0) or keys (part 1) of one head."""
    start = part * DIM + number * SIZE
    return layer.self_attn.in_proj_weight.data[start : start + SIZE]


def break_it(model: nn.TransformerEncoder) -> None:
    for part in (0, 1):
        head(model.layers[0], part, 0).mul_(40.0)  # logits grow by 1,600
        head(model.layers[0], part, 2).copy_(head(model.layers[0], part, 1))
        head(model.layers[1], part, 3).zero_()


@torch.no_grad()
def look(model: nn.Module, x: Tensor) -> regard.models.Seen:
    plain = model(x)
    with regard.watch(model) as seen:
        same = model(x)
    print(f"{seen}; the output changed by {(plain - same).abs().max():.0e}")
    print(seen.table())
    for finding in seen.findings():
        print(" ·", finding)
    print()
    return seen


def main() -> int:
    torch.manual_seed(0)
    model, x = encoder(), torch.randn(2, TOKENS, DIM)
    print("as created")
    before = look(model, x)
    break_it(model)
    print("with three broken heads")
    after = look(model, x)
    strongest = before.diff(after).strongest()[0]
    print(f"the largest change is in head {strongest.head} of {strongest.layer}: entropy {strongest.entropy:+.2f}")
    known, found = ({finding.rule for finding in seen.findings()} for seen in (before, after))
    expected = {"logits", "collapsed", "duplicate", "uniform"}
    print(f"new findings: {', '.join(sorted(found - known))}")
    return 0 if expected <= found - known else 1


if __name__ == "__main__":
    sys.exit(main())
