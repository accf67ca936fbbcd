"""The launch cache: a launch that is started again passes the arguments that a first one would, and keeps no tensor."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from recorded_launches import STARTS, record_launches
from regard.core.rows import Rows
from regard.kernels import ahead, launch_cache
from regard.kernels.arguments import NO_ENTROPY, BackwardRows, DropoutArgs, KernelArgs
from regard.kernels.block_lists import addresses
from regard.kernels.block_mask import block_mask
from regard.kernels.hopper import backward_launch, forward_launch
from regard.kernels.portable import launch as portable_launch

CPU = torch.device("cpu")
ARG_NAMES = forward_launch.forward.arg_names


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch, {"forward": (forward_launch, "forward")})


def work(d: int = 64, mask: regard.Mask | None = None, heads: int = 4, n: int = 300, **more: Any) -> KernelArgs:
    made = block_mask(mask, n, n, CPU)
    x = (torch.randn(2, h, n, d, dtype=torch.bfloat16) for h in (heads, 2, 2))
    return replace(KernelArgs(*x, made, 0.125), **more)


def hows() -> list[str]:
    return [start.how for start in STARTS]


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
def test_a_launch_that_is_started_again_has_the_arguments_of_a_first_one(d: int, mask: Any, entropy: bool) -> None:
    forward_launch.launch_forward(work(d, mask), entropy)
    w = work(d, mask)
    found = forward_launch.launch_forward(w, entropy)
    assert hows() == ["first", "again"]
    arguments, _ = forward_launch.forward_arguments(w, found, entropy, forward_launch.tile_for(w))
    expected = tuple(arguments[name] for name in ARG_NAMES)
    first, again = STARTS
    assert tuple(map(comparable, again.arguments)) == tuple(map(comparable, expected))
    assert again.programs == first.programs
    named = dict(zip(ARG_NAMES, again.arguments, strict=True))
    assert all(named[name].base is x for name, x in (("q", w.query), ("k", w.key), ("v", w.value)))
    assert named["o"] is None or named["o"].base is found.output
    assert named["output"] is found.output
    assert named["lse"] is found.lse
    assert named["row_max"] is found.max_logit
    assert named["log_row_sum"] is found.log_row_sum
    assert named["entropy"] is found.entropy


OTHERS: dict[str, dict[str, Any]] = {
    "sink": {"sink": torch.zeros(4)},
    "scales": {"scales": torch.ones(4)},
    "dropout": {"drop": DropoutArgs(torch.zeros(2, 4, 300, dtype=torch.int64), 5, 1.1)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_sinks_scales_and_dropout_are_those_of_the_new_call(name: str) -> None:
    forward_launch.launch_forward(work(**OTHERS[name]), True)
    part = {
        key: x.clone() if isinstance(x, torch.Tensor) else x._replace(keys=x.keys + 1)
        for key, x in OTHERS[name].items()
    }
    forward_launch.launch_forward(work(**part), True)
    assert hows() == ["first", "again"]
    given = dict(zip(ARG_NAMES, STARTS[1].arguments, strict=True))
    ((key, x),) = part.items()
    assert given[{"sink": "sinks"}.get(key, key)] is x


def test_the_cache_keeps_no_tensor_of_a_call() -> None:
    w = work(mask=regard.padding(torch.tensor([5, 200])))
    found = forward_launch.launch_forward(w, True)
    kept = [weakref.ref(x) for x in (w.query, w.key, w.value, w.block_mask, *found)]
    del w, found
    STARTS.clear()
    gc.collect()
    assert len(launch_cache._LAUNCHES) == 1
    assert not any(x() is not None for x in kept)


CHANGES = {
    "length": {"n": 301},
    "heads": {"heads": 2},
    "dim": {"d": 128},
    "scale": {"scale": 0.5},
    "cap": {"softcap": 9.0},
    "kind of mask": {"mask": regard.causal()},
    "sink": {"sink": torch.zeros(4)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_a_first_one(change: str) -> None:
    forward_launch.launch_forward(work(), True)
    forward_launch.launch_forward(work(**CHANGES[change]), True)
    forward_launch.launch_forward(work(), False)
    assert hows() == ["first"] * 3


def test_other_strides_dtypes_and_alignments_are_first_calls() -> None:
    w = work()
    forward_launch.launch_forward(w, True)
    forward_launch.launch_forward(replace(w, key=w.key.transpose(1, 2).contiguous().transpose(1, 2)), True)
    forward_launch.launch_forward(replace(w, query=w.query.half(), key=w.key.half(), value=w.value.half()), True)
    odd = torch.zeros(8)
    for sink in (odd[:4], odd[1:5]):
        forward_launch.launch_forward(replace(w, sink=sink), True)
    assert hows() == ["first"] * 5


def test_masks_of_one_kind_share_a_launch() -> None:
    lengths = torch.tensor([5, 200])
    for mask in (regard.causal(), regard.window(2000), regard.padding(lengths), regard.padding(lengths + 1)):
        w = work(mask=mask)
        forward_launch.launch_forward(w, True)
        lists = dict(zip(ARG_NAMES, STARTS[-1].arguments, strict=True))["lists"]
        tile = forward_launch.tile_for(w)
        assert lists is w.block_mask.by_rows(tile.BM, tile.BN, tile.rows_before(w.n))
    assert hows() == ["first", "again", "again", "again"]
    for mask in (regard.window(9, 2), regard.window(30)):  # narrow ones have a tile of their own
        forward_launch.launch_forward(work(mask=mask), True)
    assert hows()[4:] == ["first", "again"]


def test_a_profiler_is_told_of_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    forward_launch.launch_forward(work(), True)
    forward_launch.launch_forward(work(), True)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda _: None)
    forward_launch.launch_forward(work(), True)
    assert hows() == ["first", "again", "by grid"]


def test_few_launches_are_kept() -> None:
    for n in range(launch_cache._SIZE + 20):
        launch_cache.store(n, n)
    assert len(launch_cache._LAUNCHES) == launch_cache._SIZE
    assert launch_cache.find(0) is None
    assert launch_cache.find(n) == n


def test_zeros_are_zeros() -> None:
    assert launch_cache.zeros(5, CPU).tolist() == [0] * 5


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.strided(5)], ids=repr)
def test_a_shortcut_passes_the_arguments_of_a_first_launch(
    mask: Any, entropy: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_launch, "is_current_device", lambda device: True)
    shortcuts = launch_cache.Shortcuts()
    first = work(mask=mask, shortcuts=shortcuts, sink=torch.zeros(4))
    forward_launch.launch_forward(first, entropy)
    run = shortcuts.forward
    assert run is not None
    w = work(mask=mask, shortcuts=shortcuts, sink=torch.ones(4))
    made = run(w.query, w.key, w.value, w.sink, w.block_mask, apart)
    assert made is not None
    output, statistics = made
    lse, row_max, log_row_sum, *last = statistics if apart else statistics.unbind()
    found = Rows(output, lse, last[0] if last else NO_ENTROPY, row_max, log_row_sum)
    assert bool(last) is entropy
    tile = forward_launch.tile_for(w)
    before = tile.rows_before(w.n)
    arguments, _ = forward_launch.forward_arguments(w, found, entropy, tile)
    assert hows() == ["first", "again"]
    given, expected = dict(zip(ARG_NAMES, STARTS[1].arguments, strict=True)), arguments
    for name in ("lse", "row_max", "log_row_sum", *(["entropy"] if entropy else [])):
        assert given.pop(name).data_ptr() == expected.pop(name).data_ptr()
    lists = expected.pop("lists")
    assert addresses(given.pop("lists")) == addresses(lists)
    assert w.block_mask.for_launch(tile.BM, tile.BN, before) == addresses(lists)  # from the second call on
    assert all(comparable(x) == comparable(expected[name]) for name, x in given.items())


@pytest.mark.parametrize(
    ("mask", "dim"),
    [(None, 128), (regard.causal(), 128), (regard.strided(5), 128), (None, 96), (regard.window(70), 96)],
    ids=repr,
)
def test_a_shortcut_of_the_backward_passes_the_arguments_of_first_launches(
    mask: Any, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"main": (backward_launch, "backward"), "postprocess": (backward_launch, "dq_postprocess")}
    record_launches(monkeypatch, {**kernels, "preprocess": (portable_launch, "backward_preprocess_kernel")})
    monkeypatch.setattr(backward_launch, "is_current_device", lambda device: True)
    monkeypatch.setattr(backward_launch, "cuda_allocator", forward_launch.cuda_allocator)
    shortcuts = launch_cache.Shortcuts()

    def long_way(w: KernelArgs, rows: Rows, dO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        delta, lse, empty = portable_launch.backward_preprocess(w, rows, dO, None)
        given = BackwardRows(dO, lse, rows.log_row_sum, delta, None, None, empty)
        return backward_launch.launch_backward(w, given)

    first, again = (work(dim, mask, n=256, shortcuts=shortcuts) for _ in range(2))
    rows, dO = first.new_rows(False), torch.randn_like(first.new_rows(False).output)
    long_way(first, rows, dO)
    run = shortcuts.backward
    assert run is not None
    STARTS.clear()
    tensors = [weakref.ref(x) for x in (first.query, first.key, first.value)]
    del first
    assert all(x() is None for x in tensors)  # a shortcut keeps none of the call that it was made from
    found = run(
        again.query, again.key, again.value, rows.output, rows.max_logit, rows.log_row_sum, dO, again.block_mask
    )
    assert found is not None
    short, names = STARTS.copy(), ("preprocess", "main", "postprocess")
    assert [(start.how, start.kernel) for start in short] == [("again", name) for name in names]
    preprocess, main, postprocess = (start.arguments for start in short)
    assert preprocess[2][0] is rows.output
    assert preprocess[2][3:] == (rows.max_logit, rows.log_row_sum)
    given = dict(zip(backward_launch.backward.arg_names, main, strict=True))
    for name, x in (("q", again.query), ("k", again.key), ("v", again.value), ("do", dO)):
        for chunk in (name, name + "b") if dim == 96 else (name,):
            assert given[chunk].base.data_ptr() == x.data_ptr()
    last = dict(zip(backward_launch.dq_postprocess.arg_names, postprocess, strict=True))
    assert all(x is y for x, y in zip((last["dq"], given["dk"], given["dv"]), found, strict=True))
    assert given["dq_sums"].base == last["dq_sums"]
    assert dim != 96 or given["dq_sums_b"].base == last["dq_sums"]
    assert given["lse"].base == preprocess[2][1]
    assert preprocess[5] == given["dq_sums"].base + 4 * math.prod(given["dq_sums"].shape)  # flags lie behind the sums
    STARTS.clear()
    long_way(again, rows, dO)
    for start, other in zip(short, STARTS, strict=True):
        assert (start.kernel, start.programs) == (other.kernel, other.programs)
        assert tuple(map(without_places, start.arguments)) == tuple(map(without_places, other.arguments))


def without_places(x: Any) -> Any:
    """An argument with None for a tensor or its address."""
    if isinstance(x, torch.Tensor) or (isinstance(x, int) and x > 2**32) or x is None:
        return None
    if hasattr(x, "block_shape"):
        return x.shape, x.strides, x.block_shape, x.layout
    return tuple(map(without_places, x)) if isinstance(x, tuple) else x


@pytest.mark.parametrize(("heads", "n", "has"), [(4, 301, True), (2, 300, True), (2, 301, True), (1, 301, False)])
def test_statistics_in_one_tensor_begin_at_multiples_of_16_bytes(heads: int, n: int, has: bool) -> None:
    shortcuts = launch_cache.Shortcuts()
    w = work(n=n, shortcuts=shortcuts)
    forward_launch.launch_forward(replace(w, query=w.query[:, :heads], key=w.key[:, :1], value=w.value[:, :1]), False)
    assert (shortcuts.forward is not None) is has


def test_a_shortcut_is_not_taken_where_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [True]
    monkeypatch.setattr(forward_launch, "is_current_device", lambda device: here[0])
    shortcuts = launch_cache.Shortcuts()
    w = work(mask=regard.causal(), shortcuts=shortcuts)
    forward_launch.launch_forward(w, True)
    run, q, k, v = shortcuts.forward, w.query, w.key, w.value
    assert run is not None
    assert run(q, k, v, None, w.block_mask, False) is not None
    beside = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    assert run(beside, k, v, None, w.block_mask, False) is None  # at another address than a multiple of 16
    assert run(q, k, v, None, work(mask=regard.strided(5)).block_mask, False) is None  # another kind of mask
    here[0] = False
    assert run(q, k, v, None, w.block_mask, False) is None  # another current device
    here[0] = True
    launch_cache.clear()
    assert shortcuts.forward is None


def test_a_launch_is_not_found_while_launches_are_collected() -> None:
    """It would start its kernel, on lists of a mask that were not computed."""
    launch = launch_cache.Launch(lambda **tensors: None, lambda *names: lambda *given: None)
    launch_cache.store("a launch", launch)
    launch_cache.store("a route", True)
    with ahead.collecting(torch.device("cpu")):
        assert launch_cache.find("a launch") is None
        assert launch_cache.find("a route") is True
    assert launch_cache.find("a launch") is launch
    launch_cache.clear()
