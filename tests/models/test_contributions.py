"""What heads write: weights times values, and shares in the residual stream, against full matrices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.models import builtin, contributions, value_weighted

HEADS, DIM, SIZE = 4, 3, 8


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("kind", ["causal", "alibi", "bias", "sink"])
def test_value_weighted_weights_are_those_of_full_matrices(kind: str, projected: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, HEADS, 6, 5), torch.randn(2, 2, 6, 5), torch.randn(2, 2, 6, DIM)
    options = {
        "causal": {"mask": regard.causal()},
        "alibi": {"bias": regard.biases.alibi(torch.linspace(0.1, 1.0, HEADS))},
        "bias": {"bias": torch.randn(1, 1, 6, 6)},
        "sink": {"sink": torch.randn(HEADS)},
    }[kind]
    seen = regard.observe(q, k, v, **options)
    W = torch.randn(SIZE, HEADS * DIM)
    values = v.repeat_interleave(2, 1)
    if projected:
        values = torch.einsum("bhmd,ehd->bhme", values, W.unflatten(1, (HEADS, DIM)))
    weighted = seen.weights() * values.norm(dim=-1)[:, :, None, :]
    found = value_weighted(seen, W if projected else None)
    torch.testing.assert_close(found.weights(), weighted / weighted.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)
    if kind != "sink":
        torch.testing.assert_close((found.lse - seen.lse).exp(), weighted.sum(-1), atol=1e-4, rtol=1e-4)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(self.heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(SIZE), Attention()

    def forward(self, x: Tensor) -> Tensor:
        self.entered = x
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_contributions_are_what_each_head_adds_to_the_stream() -> None:
    model = Model()
    with torch.no_grad(), contributions(model) as written:
        model(torch.randn(2, 7, SIZE))
    assert written.layers == ["blocks.0.attention", "blocks.1.attention"]
    for at, block in enumerate(model.blocks):
        W = block.attention.out.weight.detach().unflatten(1, (HEADS, DIM))
        added = torch.einsum("bhnd,ehd->bhne", block.attention.heads, W).double()
        total = added.sum(1, keepdim=True)
        for head, one in enumerate(written.heads[at * HEADS : (at + 1) * HEADS]):
            length = added[:, head].norm(dim=-1)
            assert one.written == pytest.approx(float(length.mean()), rel=1e-4)
            assert one.layer_share == pytest.approx(
                float((added[:, head] * total[:, 0]).sum() / total.square().sum()), abs=1e-4
            )
            assert one.stream_share == pytest.approx(float((length / block.entered.norm(dim=-1)).mean()), rel=1e-4)
    assert "stream_share" in str(written)
    assert str(written.table(sort="written")).count("L1") >= HEADS
    with pytest.raises(ArgumentError, match="sort must be one of"):
        written.table(sort="size")


def test_the_projections_of_torch_and_of_the_built_in_model_are_found() -> None:
    layer = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.0, batch_first=True)
    ids = torch.arange(20)[None]
    for model, given, heads in (
        (nn.TransformerEncoder(layer, 2), torch.randn(2, 5, SIZE), 4),
        (builtin.load(), ids, 32),
    ):
        with torch.no_grad(), contributions(model) as written:
            model(given)
        assert len(written.heads) == heads
        assert all(0 < one.stream_share < 10 for one in written.heads)
        size = heads // len(written.layers)
        assert math.fsum(one.layer_share for one in written.heads[:size]) == pytest.approx(1.0, abs=1e-4)


def test_wrong_arguments_are_refused() -> None:
    seen = regard.observe(*torch.randn(3, 1, 2, 4, 4).unbind())
    with pytest.raises(ShapeError, match="must be \\(dim, heads · Dv\\), here \\(…, 8\\)"):
        value_weighted(seen, torch.randn(3, 5))
    with pytest.raises(DtypeError, match="it takes an Observation"):
        value_weighted(3)  # type: ignore[arg-type]
