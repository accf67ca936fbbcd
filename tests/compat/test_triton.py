"""Every private or version-dependent symbol of Triton and Gluon that the package uses is there."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from regard.compat import triton as compat

GLUON_NEEDED_FOR = {
    "KEYS_IN_REGISTERS": "code of Triton 3.6 has registers for the keys of the Hopper backward, that of 3.9 has none",
    "TensorDescriptor": "the Hopper kernels take queries, keys and values as TMA descriptors",
    "group_barrier": "warps of one program wait for each other",
    "row_blocks": "values that no row may attend to are set to 0 by a loop, a few rows at a time",
    "start_copy": "the keys of a list are gathered by asynchronous copies",
    "tma_add": "dQ is added up across programs by TMA",
    "tma_load": "the producer warp loads tiles by TMA",
    "tma_store": "outputs are stored by TMA",
    "warp_specialize": "the code of the consumer groups is generated once",
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
        "build_launcher",
        "grid_starter",
        "hash_compiler",
        "intermediate_code",
        "load",
        "start_driver",
        "starter",
        "warm_up",
        "with_base",
    ]  # two in tests/kernels/test_ahead.py, `starter` and `with_base` in tests/kernels/test_launch_cache.py
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
        ("start_copy", ["smem", "pointer"]),
        ("warp_specialize", ["functions_and_args", "worker_num_warps", "worker_num_regs"]),
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


def test_keys_stay_in_registers_with_the_triton_whose_code_has_room_for_them() -> None:
    version = tuple(int(x) for x in importlib.import_module("triton").__version__.split(".")[:2])
    assert gluon().KEYS_IN_REGISTERS.value == (version <= (3, 6)), GLUON_NEEDED_FOR["KEYS_IN_REGISTERS"]


def test_load() -> None:
    """A kernel's `run` builds its launcher when it is read; a kernel that compiles elsewhere is waited for first."""
    kernel = SimpleNamespace(run="its launcher")
    assert compat.load(kernel) == "its launcher"
    assert compat.load(SimpleNamespace(result=lambda: kernel)) == "its launcher"


def test_grid_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the launcher itself, unless somebody listens to launches."""
    pytest.importorskip("triton")
    from triton import knobs, runtime

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=active))
    started: list[tuple[Any, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def run(self, *given: Any) -> None:
            started.append(given)

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *given: started.append(("by grid", grid, *given))

    start = compat.grid_starter(Compiled())
    start(5, (1, 2))
    assert started.pop() == (5, 1, 1, 7, "function", "metadata", None, None, None, 1, 2)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda _: None)
    start(5, (1, 2))
    assert started == [("by grid", (5, 1, 1), 1, 2)]


def test_an_address_is_a_number_and_a_tensor_to_those_who_ask() -> None:
    place = compat.Address(64)
    assert (place.data_ptr(), place + 16) == (64, 80)
    assert isinstance(place, int)


def test_the_launcher_of_triton_3_6_gets_addresses_and_descriptors_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    drivers = importlib.import_module("triton.runtime").driver
    started: list[tuple[object, ...]] = []
    encoded: list[int] = []

    def encode(descriptor: Any, meta: str) -> list[object]:
        encoded.append(descriptor.base.data_ptr())
        return [f"{meta} at {encoded[-1]}", 7, 8]

    def launcher_of(launcher: Any, tensordesc_indices: Any, tensordesc_meta: Any) -> Any:
        return lambda: (launcher, tensordesc_indices, tensordesc_meta)

    class Descriptor:
        def __init__(self, base: torch.Tensor) -> None:
            self.base, self.block_shape = base, [1]

    class Compiled:
        function, packed_metadata = "function", "packed"
        metadata = SimpleNamespace(tensordesc_meta=["map"])
        run = SimpleNamespace(
            global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False,
            launch=launcher_of(lambda *given: started.append(given), (), ()),
        )  # fmt: skip

        def __getitem__(self, grid: tuple[int, int, int]) -> None: ...

    here = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    monkeypatch.setattr(drivers, "_active", here)
    monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT_LEN", 13, raising=False)
    monkeypatch.setattr(driver, "make_tensordesc_arg", encode, raising=False)
    x = torch.zeros(4)
    arguments = {"q": Descriptor(x), "n": 3, "out": x, "pair": (x, 2)}
    start = compat.starter(Compiled(), 9, arguments, {"q", "out", "pair"})
    y, place = torch.zeros(4), 4096
    start.by_name(out=y, pair=(y, 2), q=y)
    start.bound("pair", "q", "out", "other")((place, 2), y, place, None)
    before = (9, 1, 1, 5, "function", False, False, None, None, "packed", None, None, None)
    at = y.data_ptr()
    assert started[0] == (*before, f"map at {at}", 7, 8, 3, at, (y, 2))
    assert started[1] == (*before, f"map at {at}", 7, 8, 3, place, (place, 2))
    assert encoded == [x.data_ptr(), at]  # each address once
    with pytest.raises(RuntimeError, match="a launch needs out, pair"):
        start.bound("q")


def test_start_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for the device, for which it must be there."""
    module = pytest.importorskip("triton.runtime.driver")
    asked: list[int] = []
    monkeypatch.setattr(module.driver, "_active", SimpleNamespace(get_current_device=lambda: asked.append(0)))
    compat.start_driver()
    assert asked == [0]


def test_hash_compiler() -> None:
    """Triton keeps the hash of its files: the second time costs nothing."""
    cache = pytest.importorskip("triton.runtime.cache")
    compat.hash_compiler()
    before = cache.triton_key.cache_info()
    compat.hash_compiler()
    after = cache.triton_key.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
