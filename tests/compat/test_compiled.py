"""What the package knows of torch.compile's inner workings still holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.compat.compiled import (
    EagerOperatorMode,
    OperatorMode,
    operator_arguments,
    original_name,
    replace_compiled_call,
    runs_compiled,
    submodules,
)


class Names(OperatorMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_mode_sees_the_operators_of_a_graph_and_compiles_nothing_again(backend: str, compiled_first: bool) -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    attend = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=count)
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    if compiled_first:
        attend(q)
    for _ in range(2):
        with Names() as mode:
            attend(q).sum()
        assert [name for name in mode.found if "scaled_dot" in name] == [
            "aten::_scaled_dot_product_flash_attention_for_cpu"
        ]
        attend(q)
    assert len(graphs) == 1


def test_the_arguments_of_an_operator_have_names() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    given = operator_arguments(operator, (1, 2, 3, 0.0, True), {"scale": 0.5})
    assert given == {"query": 1, "key": 2, "value": 3, "dropout_p": 0.0, "is_causal": True, "scale": 0.5}


def test_compiled_modules_are_known_and_have_their_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert not runs_compiled(plain)
    inner = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(nn.ReLU()), backend="eager"))
    both = torch.compile(inner, backend="eager")
    assert runs_compiled(inner)
    assert runs_compiled(both)
    assert {original_name(name) for name, _ in both.named_modules()} == {name for name, _ in plain.named_modules()}
    shared = nn.ModuleDict({"a": both, "b": inner[0], "none": nn.Sequential()})
    shared.register_module("missing", None)
    expected = [(original_name(name), module) for name, module in shared.named_modules()]
    assert [(name, module) for name, module, _ in submodules(shared)] == expected
    assert [name for name, _, is_leaf in submodules(shared) if is_leaf] == ["a.0", "a.1.0", "none"]
    plain[1].compile(backend="eager")
    assert runs_compiled(plain)


def test_a_call_that_was_compiled_in_place_is_replaced_and_restored() -> None:
    module, calls = nn.Linear(2, 2), []
    assert replace_compiled_call(module, lambda compiled: compiled) is None
    module.compile(backend="eager")

    def noted(compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (calls.append(1), compiled(*args))[1]

    restore = replace_compiled_call(module, noted)
    assert restore is not None
    x = torch.ones(1, 2)
    expected = F.linear(x, module.weight, module.bias)
    assert torch.equal(module(x), expected)
    restore()
    assert torch.equal(module(x), expected)
    assert len(calls) == 1


def test_a_mode_for_eager_code_does_not_import_the_compiler() -> None:
    script = """
import sys, torch
from regard.scores import Pointwise
score = Pointwise(lambda s, b, h, i, j: s * 2)
score(torch.ones(2, 4), torch.ones(2, 4))
print("torch._dynamo" in sys.modules)
"""
    assert issubclass(EagerOperatorMode, OperatorMode)
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
