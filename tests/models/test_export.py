"""Programs that leave Python: torch.export and ONNX, with plain operators only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import regard
from architectures import NAMED, build, drawn, of_today
from regard.errors import ArgumentError
from regard.models.huggingface import register

SHORT, LONG = torch.randn(3, 2, 4, 7, 8).unbind(), torch.randn(3, 3, 4, 12, 8).unbind()
ANY_LENGTH = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
PADDED = torch.zeros(2, 6, dtype=torch.bool)
PADDED[0, 4:] = True
PADDED[1] = True  # an item that nobody sees anything of


class Attention(nn.Module):
    """A call of regard.attention as a module."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, **self.given)


class SelfAttention(nn.Module):
    """MultiheadAttention of a sequence with itself; padding is given with the input."""

    def __init__(self, need_weights: bool = False, is_causal: bool = False, **given: Any) -> None:
        super().__init__()
        self.inner = regard.nn.MultiheadAttention(16, 4, batch_first=True, **given)
        self.flags = {"need_weights": need_weights, "is_causal": is_causal}

    def forward(self, x: Tensor, padded: Tensor | None = None) -> tuple[Tensor, ...]:
        found = self.inner(x, x, x, key_padding_mask=padded, **self.flags)
        return tuple(part for part in found if part is not None)


def operators(graph: torch.fx.Graph) -> Iterator[str]:
    """The namespaces of every operator in a graph and its subgraphs."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            yield node.target.namespace
    for _, inner in graph.owning_module.named_children():
        if isinstance(inner, torch.fx.GraphModule):
            yield from operators(inner.graph)


def exported(model: nn.Module, *args: Tensor, **given: Any) -> ExportedProgram:
    program = torch.export.export(model.eval(), args, **given)
    assert set(operators(program.graph)) == {"aten"}
    return program


CALLS = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "window": {"mask": regard.window(2)},
    "blocks and a prefix": {"mask": regard.blocks(4) & regard.causal() | regard.prefix(2)},
    "softcap": {"mask": regard.causal(), "softcap": 2.0},
    "sink": {"sink": torch.linspace(-1, 1, 4)},
    "alibi": {"bias": regard.biases.alibi(torch.linspace(0.1, 1, 4)), "mask": regard.causal()},
    "cosine": {"score": regard.scores.Cosine()},
}


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS.keys())
def test_an_exported_call_gives_the_same(given: dict[str, Any]) -> None:
    model = Attention(**given)
    found = exported(model, *SHORT).module()(*SHORT)
    torch.testing.assert_close(found, model(*SHORT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [regard.causal(), regard.window(2)], ids=repr)
def test_an_exported_call_runs_at_every_length(mask: regard.Mask) -> None:
    model = Attention(mask=mask)
    program = exported(model, *SHORT, dynamic_shapes=(ANY_LENGTH,) * 3)
    for inputs in (SHORT, LONG):
        torch.testing.assert_close(program.module()(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_plain_and_causal_calls_are_exported_as_torchs_own_function() -> None:
    for given in ({}, {"mask": regard.causal()}):
        graph = exported(Attention(**given), *SHORT).graph
        assert [n.target.overloadpacket for n in graph.nodes if n.op == "call_function"] == [
            torch.ops.aten.scaled_dot_product_attention
        ]


def test_hidden_keys_leave_no_trace_in_an_exported_program() -> None:
    model = Attention(mask=regard.window(0) & regard.padding(torch.tensor([3, 7])))
    query, key, value = (x.clone() for x in SHORT)
    program = exported(model, query, key, value)
    expected = model(query, key, value)
    key[0, :, 3:], value[0, :, 3:] = torch.nan, torch.inf
    found = program.module()(query, key, value)
    torch.testing.assert_close(found, expected)
    assert not found[0, :, 3:].any()


def test_a_call_with_a_batch_that_depends_on_data_is_exported() -> None:
    class OfSome(nn.Module):
        def __init__(self, mask: regard.Mask | None) -> None:
            super().__init__()
            self.mask = mask

        def forward(self, x: Tensor, some: Tensor) -> Tensor:
            x = x[some]
            mask = regard.padding(torch.full((x.shape[0],), 5)) if self.mask is None else self.mask
            return regard.attention(x, x, x) + regard.attention(x, x, x, mask=mask)

    x, some = torch.randn(3, 2, 7, 8), torch.tensor([True, False, True])
    by_head = regard.predicate(lambda batch, head, i, j: i + head >= j)
    for mask in (None, regard.causal(), by_head):
        model = OfSome(mask)
        program = torch.export.export(model, (x, some)).module()
        for which in (some, ~some, some & ~some):
            torch.testing.assert_close(program(x, which), model(x, which), rtol=1e-5, atol=1e-5)


def test_dropout_is_not_exported() -> None:
    with pytest.raises(ArgumentError, match=r"attention: dropout .* model\.eval\(\)"):
        torch.export.export(Attention(dropout=0.5), SHORT)


def test_an_exported_module_returns_its_weights() -> None:
    model, x = SelfAttention(need_weights=True, num_kv_heads=2), torch.randn(3, 9, 16)
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "padded": None}
    program = exported(model, torch.randn(2, 6, 16), None, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(x, None), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "BertForMaskedLM"])
def test_an_exported_hugging_face_model_gives_the_same(name: str) -> None:
    register()
    model, keep = build(NAMED[name], "regard"), torch.ones(2, 11, dtype=torch.int64)
    keep[1, :5] = 0
    given = {"input_ids": drawn(2, 11), "attention_mask": keep}
    given |= {} if name.startswith("Bert") else {"use_cache": False}
    program = torch.export.export(model, (), given)
    assert set(operators(program.graph)) == {"aten"}
    given |= {"input_ids": drawn(2, 11, seed=3), "attention_mask": torch.ones_like(keep)}
    found, expected = program.module()(**given).logits, model(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_exported_hugging_face_model_runs_at_every_length() -> None:
    register()
    small = replace(NAMED["MistralForCausalLM"], settings=of_today(sliding_window=4, num_hidden_layers=1))
    model, free = build(small, "regard"), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    given = {"input_ids": drawn(2, 11), "attention_mask": torch.ones(2, 11, dtype=torch.int64), "use_cache": False}
    shapes = {"input_ids": free, "attention_mask": free, "use_cache": None}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    for length in (3, 14):
        given |= {"input_ids": drawn(3, length), "attention_mask": torch.ones(3, length, dtype=torch.int64)}
        torch.testing.assert_close(program(**given).logits, model(**given).logits, rtol=1e-5, atol=1e-5)


def ran(model: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Run an ONNX model with onnxruntime if it is installed, or else with the reference of onnx itself."""
    feed = {given.name: x.numpy() for given, x in zip(model.graph.input, inputs, strict=True)}
    try:
        session = import_module("onnxruntime").InferenceSession(model.SerializeToString())
    except ModuleNotFoundError:
        session = import_module("onnx.reference").ReferenceEvaluator(model)
    return [torch.from_numpy(found) for found in session.run(None, feed)]


ONNX = {
    "weights": (regard.nn.ScaledDotProductAttention(), SHORT),
    "causal, rotary and grouped": (
        SelfAttention(is_causal=True, num_kv_heads=2, rotary=True),
        (torch.randn(2, 6, 16),),
    ),
    "padded, one item whole": (SelfAttention(), (torch.randn(2, 6, 16), PADDED)),
}


@pytest.mark.filterwarnings("default::FutureWarning")  # of torch about its own parts
@pytest.mark.parametrize(("model", "inputs"), ONNX.values(), ids=ONNX.keys())
def test_a_module_becomes_an_onnx_model_of_standard_operators(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    made = torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False).model_proto
    import_module("onnx").checker.check_model(made)
    assert {node.domain for node in made.graph.node} == {""}
    assert not made.functions
    with torch.no_grad():
        expected = model(*inputs)
    found = ran(made, inputs)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
