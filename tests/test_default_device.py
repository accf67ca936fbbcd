"""Calls run on the device of their tensors, whatever `torch.set_default_device` says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import regard
from contract_cases import BY_NAME, CASES, results

PACKAGE = Path(regard.__file__).parent
CREATIONS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros"),
}
# Experiments draw their own data, and a memory its rows, on the default device; so do modules their parameters.
FREE = ("lab", "memory")


def unnamed(path: Path) -> list[str]:
    """Creations of tensors that name no device, but for the parameters of modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parameters = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Parameter"
        for argument in node.args
    }
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in CREATIONS
        and id(node) not in parameters
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_tensor_that_the_package_creates_names_its_device() -> None:
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in FREE]
    assert not [found for path in paths for found in unnamed(path)]


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
def test_the_contract_holds_under_the_default_device_meta(backend: str) -> None:
    for case in CASES[::3] if backend == "auto" else CASES[1::6]:
        tensors, options = case.inputs()
        expected = results(backend, tensors, options)
        with torch.device("meta"):
            found = results(backend, tensors, options)
            output = regard.attention(*tensors, **options, backend=backend)
        assert torch.allclose(output, found[0][0])
        for kind, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), (case.name, kind)


@torch.no_grad()
def test_masks_statistics_and_modules_work_under_the_default_device_meta() -> None:
    tensors, _ = BY_NAME["plain square"].inputs(torch.float32)
    cached = regard.nn.MultiheadAttention(8, 2, rotary=True)
    x = torch.randn(5, 2, 8)
    with torch.device("meta"):
        masks = [
            regard.causal(),
            regard.padding([3, 40]),
            regard.documents([0] * 20 + [1] * 21),
            regard.packed([20, 21]),
            regard.prefix([1, 2]) | regard.global_tokens([1]),
            regard.predicate(lambda b, h, i, j: (i + j) % 3 > 0),
        ]
        for mask in masks:
            seen = regard.observe(*tensors, mask=mask)
            for found in (seen.received, seen.map(3, 3), *seen.top(2), seen.distance, seen.weights(rows=[0, 2])):
                assert found.device.type == "cpu"
            assert 0 < mask.density(41, 41) < 1
        assert regard.causal().picture(2, 2)
        assert regard.attention(*tensors, dropout=0.3).device.type == "cpu"
        cache = regard.nn.KVCache()
        cached(x, x, x, cache=cache, need_weights=False)
        output, _ = cached(x, x, x, cache=cache, need_weights=False)
    assert output.device.type == "cpu"
