"""regard.nn.MultiheadAttention inside torch's transformer layers, in place of torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.nn import MultiheadAttention
from regard.scores import Cosine

E, H, N, L = 16, 4, 3, 6
PADDING = torch.arange(L) >= torch.tensor([[6], [4], [2]])
ADDED = torch.zeros(N, L).masked_fill(PADDING, -torch.inf)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)


def swapped(model: nn.Module, **arguments: Any) -> nn.Module:
    """Replace every attention module of torch by ours, with the same parameters if they fit."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                ours = MultiheadAttention(E, H, batch_first=child.batch_first, **arguments)
                if not arguments:
                    ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours.train(child.training))
    return model


@contextmanager
def mode(training: bool, gradients: bool) -> Iterator[None]:
    with torch.set_grad_enabled(training or gradients):
        yield


def assert_same(a: Tensor, b: Tensor, seen: Tensor | None = None) -> None:
    seen = torch.ones(a.shape[:2], dtype=torch.bool) if seen is None else seen
    torch.testing.assert_close(a[seen], b[seen], rtol=1e-5, atol=1e-5)


modes = pytest.mark.parametrize(
    ("training", "gradients"), [(True, True), (False, True), (False, False)], ids=["train", "eval", "eval, no_grad"]
)


@modes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_an_encoder_layer_gives_the_same(
    training: bool, gradients: bool, batch_first: bool, norm_first: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    layer.train(training)
    other, x = swapped(layer), torch.randn((N, L, E) if batch_first else (L, N, E))
    masks: dict[str, Any] = {"src_key_padding_mask": ADDED, "src_mask": CAUSAL, "is_causal": True} if masked else {}
    with mode(training, gradients):
        assert_same(other(x, **masks), layer(x, **masks))


@modes
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_an_encoder_whose_layers_were_swapped_gives_the_same(training: bool, gradients: bool, padded: bool) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True), 2)
    encoder.train(training)
    other, x = swapped(encoder), torch.randn(N, L, E)
    masks = {"src_key_padding_mask": PADDING} if padded else {}
    with mode(training, gradients):
        assert_same(other(x, **masks), encoder(x, **masks), ~PADDING if padded else None)


@pytest.mark.parametrize("arguments", [{"score": Cosine()}, {"num_kv_heads": 2}, {"rotary": True}], ids=str)
def test_options_beyond_torch_work_in_every_mode(arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True), 2)
    other, x = swapped(encoder, **arguments), torch.randn(N, L, E)
    found = []
    for training, gradients in ((True, True), (False, True), (False, False)):
        other.train(training)
        with mode(training, gradients):
            found.append(other(x, src_key_padding_mask=PADDING))
    assert_same(found[1], found[0], ~PADDING)
    assert_same(found[2], found[0], ~PADDING)


def test_a_decoder_layer_gives_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    other, x, memory = swapped(layer), torch.randn(N, L, E), torch.randn(N, L, E)
    masks: dict[str, Any] = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    assert_same(other(x, memory, **masks), layer(x, memory, **masks))


def test_a_sequence_that_is_all_padding_gives_no_nan_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer = swapped(nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)).eval()
    hidden = PADDING.clone()
    hidden[1] = True
    with torch.no_grad():
        assert layer(torch.randn(N, L, E), src_key_padding_mask=hidden).isfinite().all()


def test_a_nested_tensor_that_is_not_query_key_and_value_is_refused() -> None:
    attend = MultiheadAttention(E, H, batch_first=True)
    nested = torch.nested.as_nested_tensor([torch.randn(3, E), torch.randn(2, E)])
    with pytest.raises(ValueError, match="a nested tensor must be query, key and value"):
        attend(nested, nested.clone(), nested)
