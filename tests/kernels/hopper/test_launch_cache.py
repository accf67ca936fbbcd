"""The launch cache of the Hopper forward: a cached launch passes the arguments that a first one would."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from regard.kernels.arguments import DropoutArgs, KernelArgs
from regard.kernels.block_mask import block_mask
from regard.kernels.hopper import configs, forward_launch, launch_cache

CPU = torch.device("cpu")
STARTS: list[tuple[Any, tuple[Any, ...]]] = []  # how, and with which arguments


class Compiled:
    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: STARTS.append((("cached", grid), args))


class Kernel:
    """Stands for the kernel: records its arguments, and returns a compiled one."""

    arg_names = forward_launch.forward.arg_names

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(**arguments: Any) -> Compiled:
            STARTS.append((("first", (*grid, 1, 1)), tuple(arguments[name] for name in self.arg_names)))
            return Compiled()

        return run


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_launch, "forward", Kernel())
    monkeypatch.setattr(launch_cache, "_LAUNCHES", {})
    STARTS.clear()


def work(d: int = 64, mask: regard.Mask | None = None, heads: int = 4, n: int = 300, **more: Any) -> KernelArgs:
    made = block_mask(mask, n, n, CPU)
    x = (torch.randn(2, h, n, d, dtype=torch.bfloat16) for h in (heads, 2, 2))
    return replace(KernelArgs(*x, made, 0.125), **more)


def comparable(x: Any) -> Any:
    """An argument as something that equals another with the same numbers in the same places."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    if hasattr(x, "block_shape"):
        return id(x.base), x.shape, x.strides, x.block_shape, x.layout
    return tuple(map(comparable, x)) if isinstance(x, tuple) else x


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(9, 2), regard.strided(5)], ids=repr)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_a_cached_launch_has_the_arguments_of_a_first_one(d: int, mask: Any, entropy: bool) -> None:
    forward_launch.launch_forward(work(d, mask), entropy)
    w = work(d, mask)
    found = forward_launch.launch_forward(w, entropy)
    assert [how for (how, _), _ in STARTS] == ["first", "cached"]
    arguments, _ = forward_launch.forward_arguments(w, found, entropy, forward_launch.tile_for(w))
    expected = tuple(arguments[name] for name in Kernel.arg_names)
    assert len(STARTS[1][1]) == len(Kernel.arg_names)
    assert tuple(map(comparable, STARTS[1][1])) == tuple(map(comparable, expected))
    assert STARTS[0][0][1] == STARTS[1][0][1]  # the grid
    given = dict(zip(Kernel.arg_names, STARTS[1][1], strict=True))
    assert all(given[name].base is x for name, x in (("q", w.query), ("k", w.key), ("v", w.value)))
    assert given["o"] is None or given["o"].base is found.output
    assert given["output"] is found.output
    assert given["lse"] is found.lse
    assert given["row_max"] is found.max_logit
    assert given["log_row_sum"] is found.log_row_sum
    assert given["entropy"] is found.entropy


def test_the_cache_keeps_no_tensor_of_a_call() -> None:
    forward_launch.launch_forward(work(), True)
    (launch,) = launch_cache._LAUNCHES.values()
    described = [x for x in launch.arguments.values() if hasattr(x, "block_shape")]
    assert len(described) == 4
    assert all(d.base is None for d in described)
    assert not any(isinstance(x, torch.Tensor) for x in launch.arguments.values())


def test_a_launch_is_dropped_with_its_mask() -> None:
    mask = regard.padding(torch.tensor([5, 200]))
    forward_launch.launch_forward(replace(work(), block_mask=block_mask(mask, 300, 300, CPU)), True)
    assert len(launch_cache._LAUNCHES) == 1
    del mask
    gc.collect()
    assert not launch_cache._LAUNCHES


CHANGES = {
    "length": {"n": 301},
    "heads": {"heads": 2},
    "dim": {"d": 128},
    "scale": {"scale": 0.5},
    "cap": {"softcap": 9.0},
    "mask": {"mask": regard.causal()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_a_first_one(change: str) -> None:
    forward_launch.launch_forward(work(), True)
    forward_launch.launch_forward(work(**CHANGES[change]), True)
    forward_launch.launch_forward(work(), False)
    assert [how for (how, _), _ in STARTS] == ["first"] * 3


def test_other_strides_are_a_first_call() -> None:
    w = work()
    forward_launch.launch_forward(w, True)
    forward_launch.launch_forward(replace(w, key=w.key.transpose(1, 2).contiguous().transpose(1, 2)), True)
    forward_launch.launch_forward(replace(w, query=w.query.half(), key=w.key.half(), value=w.value.half()), True)
    assert [how for (how, _), _ in STARTS] == ["first"] * 3


@pytest.mark.parametrize(
    "part",
    [
        {"sink": torch.zeros(4)},
        {"scales": torch.ones(4)},
        {"drop": DropoutArgs(torch.zeros(2, 4, 300, dtype=torch.int64), 5, 1.1)},
    ],
    ids=["sink", "scales", "dropout"],
)
def test_calls_with_other_parts_are_not_cached(part: dict[str, Any]) -> None:
    for _ in range(2):
        forward_launch.launch_forward(work(**part), True)
    assert [how for (how, _), _ in STARTS] == ["first"] * 2


def test_a_changed_mask_is_a_first_call() -> None:
    lengths = torch.tensor([5, 200])
    mask = regard.padding(lengths)
    for change in (False, False, True):
        if change:
            lengths[0] = 7
        w = work()
        w = replace(w, block_mask=block_mask(mask, 300, 300, CPU))
        forward_launch.launch_forward(w, True)
    assert [how for (how, _), _ in STARTS] == ["first", "cached", "first"]


def test_another_tile_is_a_first_call() -> None:
    tile = configs.config(64)
    try:
        for other in (None, tile._replace(persistent=False), tile._replace(BN=64), None):
            configs.override(64, False, other)
            forward_launch.launch_forward(work(), True)
    finally:
        configs.override(64, False, None)
    assert [how for (how, _), _ in STARTS] == ["first", "first", "first", "cached"]


def test_a_call_whose_mask_is_another_one_in_the_same_place_is_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "id", lambda x: 1, raising=False)
    for mask in (regard.causal(), regard.window(9, 2), regard.strided(5)):
        forward_launch.launch_forward(work(mask=mask), True)
    assert [how for (how, _), _ in STARTS] == ["first"] * 3


def test_a_launch_that_is_used_again_stays_longest() -> None:
    forward_launch.launch_forward(work(n=300), True)
    for n in range(1, launch_cache._SIZE):
        forward_launch.launch_forward(work(n=n), True)
    forward_launch.launch_forward(work(n=300), True)
    forward_launch.launch_forward(work(n=200), True)  # one too many: the second of all goes
    forward_launch.launch_forward(work(n=300), True)
    forward_launch.launch_forward(work(n=1), True)
    assert [how for (how, _), _ in STARTS[-4:]] == ["cached", "first", "cached", "first"]


def test_few_launches_are_cached() -> None:
    for n in range(1, 200):
        forward_launch.launch_forward(work(n=n), True)
    assert len(launch_cache._LAUNCHES) == launch_cache._SIZE
