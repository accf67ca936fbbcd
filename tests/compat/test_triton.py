"""Every private or version-dependent symbol of Triton and Gluon that the package uses is there."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from types import ModuleType

import pytest

from regard.compat import triton as compat

GLUON_NEEDED_FOR = {
    "TensorDescriptor": "the Hopper kernels take queries, keys and values as TMA descriptors",
    "group_barrier": "warps of one program wait for each other",
    "tma_add": "dQ is added up across programs by TMA",
    "tma_load": "the producer warp loads tiles by TMA",
    "tma_store": "outputs are stored by TMA",
}


def gluon() -> ModuleType:
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    try:
        return importlib.import_module("regard.compat.gluon")
    except (ImportError, AttributeError) as error:
        triton = importlib.import_module("triton")
        pytest.fail(
            f"regard.compat.gluon does not import with Triton {triton.__version__}: {error}. It is needed because the "
            f"Hopper kernels are written in Gluon. Mend it in src/regard/compat/gluon.py."
        )


def test_every_name_has_a_test() -> None:
    tested = [
        "INTERPRETED",
        "Address",
        "load",
        "starter",
        "with_base",
    ]  # the last two in tests/kernels/test_launch_cache.py
    assert compat.__all__ == tested, "write a test here for each new name of compat.triton"
    assert sorted(gluon().__all__) == sorted(GLUON_NEEDED_FOR), "say in GLUON_NEEDED_FOR why each name is needed"


@pytest.mark.parametrize("value", ["0", "1"])
def test_interpreted_is_what_triton_reads_from_the_environment(value: str) -> None:
    pytest.importorskip("triton")
    script = "import triton, regard.compat.triton as ours; print(ours.INTERPRETED, triton.knobs.runtime.interpret)"
    env = {**os.environ, "TRITON_INTERPRET": value, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == [str(value == "1")] * 2, (
        f"regard.compat.triton.INTERPRETED and Triton disagree: {done.stdout} {done.stderr}. It is needed because the "
        f"backend `triton` takes tensors on a CPU only under the interpreter."
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tma_load", ["tensor_desc", "coord", "group_barrier", "result"]),
        ("tma_store", ["tensor_desc", "coord", "src"]),
        ("tma_add", ["tensor_desc", "coord", "src"]),
        ("group_barrier", []),
    ],
)
def test_an_operation_of_gluon_is_a_builtin_with_the_arguments_that_kernels_pass(
    name: str, arguments: list[str]
) -> None:
    operation = getattr(gluon(), name)
    why = f"regard.compat.gluon.{name} changed; it is needed because {GLUON_NEEDED_FOR[name]}"
    assert getattr(operation, "__triton_builtin__", False) or hasattr(operation, "arg_names"), why
    given = list(inspect.signature(getattr(operation, "fn", operation)).parameters.values())
    positional = [p for p in given if not p.name.startswith("_")]
    assert len(positional) >= len(arguments), why
    assert all(p.default is not p.empty for p in positional[len(arguments) :]), why


def test_a_tensor_descriptor_is_made_from_a_tensor_and_a_block() -> None:
    why = f"TensorDescriptor changed; it is needed because {GLUON_NEEDED_FOR['TensorDescriptor']}"
    names = set(inspect.signature(gluon().TensorDescriptor).parameters)
    assert {"base", "shape", "strides", "block_shape", "layout"} <= names, why


def test_load() -> None:
    """A kernel's `run` builds its launcher when it is read; a kernel that compiles elsewhere is waited for first."""
    from types import SimpleNamespace

    kernel = SimpleNamespace(run="its launcher")
    assert compat.load(kernel) == "its launcher"
    assert compat.load(SimpleNamespace(result=lambda: kernel)) == "its launcher"


def test_an_address_is_a_number_and_a_tensor_to_those_who_ask() -> None:
    place = compat.Address(64)
    assert (place.data_ptr(), place + 16) == (64, 80)
    assert isinstance(place, int)
