"""The Hopper kernels on their chip: they run, give the same bits always, are exact, and touch nothing beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import CASES, Case, agree, plain_results, results, truth
from gpu.test_core_on_gpu import moved
from gpu.test_kernels_on_gpu import (
    DEVICE,
    ROWS,
    captured,
    guarded,
    inputs,
    of_bits,
    random,
    rows_and_gradients,
    same_bits,
)
from regard import biases, scores
from regard.compat.torch import cuda_allocator
from regard.kernels import launch_cache
from regard.kernels.block_lists import BITS
from regard.kernels.block_mask import block_mask
from regard.kernels.hopper import backward_launch, configs, forward_launch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="the Hopper kernels need a GPU of compute capability 9.0"),
]
N, M = 1025, 1150  # of 8 heads and two items
FORWARD = "regard.kernels.hopper.forward.forward"
BACKWARD, WIDE_BACKWARD = "regard.kernels.hopper.backward.backward", "regard.kernels.hopper.backward_wide.backward"
PASSES = "regard.kernels.hopper.statistics"
DROPOUT_KEYS = "regard.kernels.portable.dropout_keys.write_keys"
PORTABLE = {
    "regard.kernels.portable.forward.forward",
    "regard.kernels.portable.backward.backward_dkdv",
    "regard.kernels.portable.backward.backward_dq",
}

MADE: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "full": lambda n, m: {},
    "causal": lambda n, m: {"mask": regard.causal()},
    "window": lambda n, m: {"mask": regard.window(170, 9)},
    "padding": lambda n, m: {"mask": regard.padding([m - 30, 0])},
    "bits": lambda n, m: {"mask": of_bits(n, m)},
    "bias": lambda n, m: {"bias": random(8, n, m, dtype=torch.float32, seed=4).requires_grad_()},
    "alibi": lambda n, m: {"bias": biases.alibi(torch.linspace(0.01, 0.2, 8, device=DEVICE))},
    "relative": lambda n, m: {"bias": biases.relative(random(8, 129, dtype=torch.float32, seed=5))},
    "gqa": lambda n, m: {"mask": regard.causal()},
    "dropout": lambda n, m: {"dropout": 0.3},
}
HEADS = {"gqa": 2}  # of keys; all others have as many as queries


def made(name: str, d: int, n: int = N, m: int = M, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Any]:
    return inputs(n, m, d, heads=8, kv_heads=HEADS.get(name, 8), dtype=dtype), MADE[name](n, m)


def learnt(kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in kwargs.values() if isinstance(x, Tensor) and x.requires_grad]


def upstream(tensors: list[Tensor]) -> Tensor:
    query, _, value = tensors
    return random(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=8)


def output_and_gradients(tensors: list[Tensor], dO: Tensor, **kwargs: Any) -> list[Tensor]:
    """What a forward and a backward pass without statistics give, as in training."""
    torch.manual_seed(11)
    output = regard.attention(*tensors, **kwargs, backend="triton")
    return [output.detach(), *torch.autograd.grad(output, [*tensors, *learnt(kwargs)], dO)]


def everything(tensors: list[Tensor], **kwargs: Any) -> list[Tensor]:
    """The same, and then with every statistic and its part in the gradients."""
    plain = output_and_gradients(tensors, upstream(tensors), **kwargs)
    torch.manual_seed(11)
    return [*plain, *rows_and_gradients(tensors, learnt(kwargs), **kwargs)]


# They run.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are started, by module and name."""
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    run = JITFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if not options.get("warmup"):  # which only compiles
            names.append(f"{self.fn.__module__}.{self.fn.__name__}")
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", noted)
    launch_cache.clear()  # cached launches do not call it
    return names


@pytest.mark.parametrize(("name", "d"), [*((name, d) for name in MADE for d in (64, 192)), ("full", 40), ("full", 96)])
def test_the_chips_own_kernels_run(name: str, d: int, started: list[str]) -> None:
    tensors, kwargs = made(name, d)
    output = regard.attention(*tensors, **kwargs, backend="triton")
    assert set(started) - ({DROPOUT_KEYS} if name == "dropout" else set()) == {FORWARD}
    started.clear()
    torch.autograd.grad(output, [*tensors, *learnt(kwargs)], upstream(tensors))
    assert (WIDE_BACKWARD if d > 128 else BACKWARD) in started
    assert not PORTABLE.intersection(started)


def test_what_each_key_receives_and_maps_have_kernels_of_the_chip(started: list[str]) -> None:
    seen = regard.observe(*(x.detach() for x in inputs(N, M, 128)), mask=regard.causal(), backend="triton")
    seen.received, seen.map(16, 16)
    assert set(started) == {FORWARD, f"{PASSES}.received", f"{PASSES}.pooled"}


def test_what_the_chips_own_kernels_refuse_runs_on_the_portable_ones(started: list[str]) -> None:
    whole = inputs(N, M, 64, heads=8, kv_heads=8, dtype=torch.float32)
    beside = [guarded(x, 1, 2)[0].requires_grad_() for x in inputs(N, M, 64, heads=8, kv_heads=8)]
    added = scores.Additive(64, 64, 16).to(DEVICE, torch.bfloat16)
    for tensors, score in ((whole, None), (beside, None), (inputs(33, 40, 64), added)):
        output = regard.attention(*tensors, score=score, backend="triton")
        torch.autograd.grad(output, tensors, upstream(tensors))
    assert not any(".hopper." in kernel for kernel in started)
    assert PORTABLE.issubset(started)


def test_a_cap_that_hardly_caps_is_as_exact_as_any(started: list[str]) -> None:
    tensors = [x.detach() for x in inputs(N, M, 64)]
    output = regard.attention(*tensors, softcap=1e6, backend="triton")
    assert set(started) == {"regard.kernels.portable.forward.forward"}
    true = regard.attention(*(x.double() for x in tensors), softcap=1e6, backend="reference")
    torch.testing.assert_close(output.double(), true, atol=1e-2, rtol=1e-2)


# The same bits: at every run, in every batch, in whatever form the mask is given, however the work is dealt out.


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("name", ["full", "causal", "window", "padding", "bits", "gqa"])
def test_programs_that_take_many_blocks_of_rows_change_no_bit(
    name: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 8 * N  # nearly 700 blocks or more
    tensors, kwargs = made(name, d, n, n)
    assert configs.config(d).persistent

    def found(programs: int) -> list[Tensor]:
        monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: programs)
        launch_cache.clear()  # which keep the old number
        seen = regard.observe(*(x.detach() for x in tensors), **kwargs, backend="triton")
        return [getattr(seen, row) for row in ROWS]

    one_each = found(10**6)
    for programs in (132, 29):
        assert same_bits(found(programs), one_each)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("name", ["full", "causal", "bits", "gqa", "dropout"])
def test_programs_that_take_many_blocks_of_keys_change_no_gradient(
    name: str, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, kwargs = made(name, d, N, 4 * M)
    dO = upstream(tensors)

    def found(programs: int) -> list[Tensor]:
        monkeypatch.setattr(forward_launch, "multiprocessors", lambda device: programs)
        launch_cache.clear()  # which keep the old number
        return output_and_gradients(tensors, dO, **kwargs)

    one_each = found(10**6)
    for programs in (132, 29, 1):
        assert same_bits(found(programs), one_each)


@pytest.mark.parametrize("d", [64, 128])
def test_a_graph_deals_out_its_blocks_anew_at_each_replay(d: int) -> None:
    tensors = [x.detach() for x in inputs(8 * N, 8 * N, d, heads=8, kv_heads=8)]
    graph, (static,) = captured(lambda: [regard.attention(*tensors, mask=regard.causal(), backend="triton")])
    expected = regard.attention(*tensors, mask=regard.causal(), backend="triton")
    for _ in range(3):
        static.fill_(math.nan)
        graph.replay()
        assert torch.equal(static, expected)


@pytest.mark.parametrize("d", [64, 256])
def test_a_graph_looks_anew_which_keys_a_bias_hides(d: int) -> None:
    tensors = inputs(N, M, d, heads=8, kv_heads=8)
    bias = random(8, N, M, dtype=torch.float32, seed=4)
    dO = upstream(tensors)
    graph, static = captured(lambda: output_and_gradients(tensors, dO, bias=bias))
    with torch.no_grad():
        bias[..., 500:] = -math.inf
        for x in tensors[1:]:
            x[:, :, 500:] = math.nan
    graph.replay()
    assert all(x.isfinite().all() for x in static)
    assert same_bits(static, output_and_gradients(tensors, dO, bias=bias))


def test_more_heads_of_items_than_a_side_of_a_grid_has() -> None:
    tensors = inputs(16, 16, 64, batch=8192, heads=8, kv_heads=8)
    output = regard.attention(*tensors, backend="triton")
    grads = torch.autograd.grad(output, tensors, upstream(tensors))
    last = [x.detach()[-1:].clone().requires_grad_() for x in tensors]
    alone = torch.autograd.grad(regard.attention(*last, backend="triton"), last, upstream(tensors)[-1:])
    assert same_bits([x[-1:] for x in grads], list(alone))


def test_a_mask_that_another_stream_lays_out_is_waited_for() -> None:
    tensors = [x.detach() for x in inputs(N, N, 64)]
    expected = regard.attention(*tensors, mask=regard.causal(-3), backend="triton")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for offset in range(4, 24):  # of each a mask that was never laid out
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            first = regard.attention(*tensors, mask=regard.causal(-offset), backend="triton")
        second = regard.attention(*tensors, mask=regard.causal(-offset), backend="triton")
        torch.cuda.synchronize()
        assert torch.equal(first, second)
        assert not torch.equal(first, expected)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MADE)
def test_two_hundred_runs_give_the_same_bits(name: str, d: int) -> None:
    tensors, kwargs = made(name, d)
    first = everything(tensors, **kwargs)
    assert all(x.isfinite().all() for x in first if name not in ("padding", "bits"))
    assert all(same_bits(everything(tensors, **kwargs), first) for _ in range(199))


@pytest.mark.parametrize("name", ["full", "causal", "bits"])
def test_two_hundred_looks_at_the_weights_give_the_same_bits(name: str) -> None:
    tensors, kwargs = made(name, 128)

    def look() -> list[Tensor]:
        seen = regard.observe(*(x.detach() for x in tensors), **kwargs, backend="triton")
        return [seen.received, seen.map(37, 64), seen.gradient_health]

    first = look()
    assert all(same_bits(look(), first) for _ in range(199))


BATCHED: dict[str, Callable[[int, int], dict[str, Any]]] = {
    **{name: MADE[name] for name in ("full", "causal", "window", "gqa")},
    "padding": lambda n, m: {"mask": regard.padding([m - 30, 0, 77])},
    "bits": lambda n, m: {
        "mask": torch.stack([of_bits(n, m), of_bits(n, m).roll(5, 0), of_bits(n, m).roll(9, 1)])[:, None]
    },
    "bias": lambda n, m: {"bias": random(3, 8, n, m, dtype=torch.float32, seed=4).requires_grad_()},
}


def item(x: Any, at: int) -> Any:
    """The part of one item in tensors, and in what is told of three items."""
    if isinstance(x, Tensor) and x.dim() == 4 and len(x) == 3:
        return x.detach()[at : at + 1].clone().requires_grad_(x.requires_grad)
    if isinstance(x, regard.Mask) and x.lead[0] == 3:
        return x.restrict(slice(at, at + 1), slice(None))
    return x


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", BATCHED)
def test_a_sequence_does_not_depend_on_its_batch(name: str, d: int) -> None:
    n, m = 513, 640
    tensors = inputs(n, m, d, batch=3, heads=8, kv_heads=HEADS.get(name, 8))
    kwargs = BATCHED[name](n, m)
    whole = everything(tensors, **kwargs)
    for at in (0, 2):
        part = [item(x, at) for x in tensors], {key: item(x, at) for key, x in kwargs.items()}
        dO = upstream(tensors)[at : at + 1]
        torch.manual_seed(11)
        alone = [
            *output_and_gradients(part[0], dO, **part[1]),
            *rows_and_gradients(part[0], learnt(part[1]), **part[1]),
        ]
        assert same_bits([x[at : at + 1] for x in whole], alone)


SPANS: dict[str, regard.Mask] = {
    "everything": regard.everything(),
    "causal": regard.causal(),
    "window": regard.window(1016, 9),  # a narrower one has a tile of its own
    "padding": regard.padding([600]),
    "blocks": regard.blocks(90),
    "prefix": regard.prefix(257),
}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", SPANS)
def test_a_mask_has_the_same_bits_as_spans_and_as_a_tensor(name: str, d: int) -> None:
    """Beside an item with holes, which no spans can tell, a tensor's bits are read for all items."""
    tensors = inputs(N, M, d, heads=8, kv_heads=8)
    written = SPANS[name].dense(N, M, device=DEVICE).expand(1, 1, N, M)
    beside = torch.cat((written, of_bits(N, M).expand(1, 1, N, M)))
    assert block_mask(regard.dense(beside), N, M, torch.device(DEVICE)).kind == BITS
    spans = everything(tensors, mask=SPANS[name])
    assert same_bits(everything(tensors, mask=written), spans)
    assert same_bits([x[:1] for x in everything(tensors, mask=beside)], [x[:1] for x in spans])


# Memory: nothing is read that was not written, and nothing is touched beside the tensors.

BAND = 2**17  # bytes on either side: more than a block of rows has


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Buffers around all memory that kernels are given to write, every bit of them set: NaN for all floats."""
    found: list[Tensor] = []

    def fresh(make: Callable[..., Tensor], inside: int) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            like = make(*args, **options)
            if like.is_meta:
                return like
            size = like.numel() * like.element_size()
            found.append(torch.full((2 * BAND + size,), 255, dtype=torch.uint8, device=like.device))
            room = found[-1][BAND : BAND + size]
            return room.fill_(inside).view(like.dtype).view(like.shape)

        return made

    for owner, name, inside in (
        (torch.Tensor, "new_empty", 255),
        (torch.Tensor, "new_zeros", 0),
        (torch, "empty", 255),
        (torch, "empty_like", 255),
        (torch, "zeros", 0),
        (torch, "zeros_like", 0),
    ):
        monkeypatch.setattr(owner, name, fresh(getattr(owner, name), inside))
    for launches in (forward_launch, backward_launch):
        monkeypatch.setattr(launches, "cuda_allocator", lambda size, dtype: fresh(cuda_allocator(size, dtype), 255))
    launch_cache.clear()  # remembered calls have the memory of before
    yield found
    launch_cache.clear()


def unharmed(room: Tensor) -> bool:
    return bool((room[:BAND] == 255).all()) and bool((room[-BAND:] == 255).all())


@pytest.mark.parametrize(
    ("name", "d"),
    [
        *((name, d) for name in MADE for d in (64, 128, 256)),
        ("full", 40),
        ("causal", 72),
        ("bits", 96),
        ("bias", 96),
        ("causal", 136),
    ],
)
def test_poisoned_memory_and_guard_bands_change_no_bit(name: str, d: int, request: pytest.FixtureRequest) -> None:
    """Query, key, value and dO lie in the midst of NaN, and so does all that is written."""
    tensors, kwargs = made(name, d, 301, 333)
    dO = upstream(tensors)
    clean = output_and_gradients(tensors, dO, **kwargs)
    views, around = zip(*(guarded(x, 8, 8) for x in (*tensors, dO)), strict=True)
    leaves = [x.requires_grad_() for x in views[:3]]
    rooms: list[Tensor] = request.getfixturevalue("rooms")
    for _ in range(2):  # the second call is remembered
        found = output_and_gradients(leaves, views[3], **kwargs)
        assert same_bits(found, clean)
        assert found[0].untyped_storage().data_ptr() in {x.untyped_storage().data_ptr() for x in rooms}
    assert all(map(unharmed, rooms))
    for view, room, x in zip(views, around, (*tensors, dO), strict=True):
        assert torch.equal(view, x)
        assert int(room.isfinite().sum()) == x.numel()


@pytest.mark.parametrize("name", MADE)
def test_statistics_in_poisoned_memory_have_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    tensors, kwargs = made(name, 64, 301, 333)
    torch.manual_seed(11)
    clean = rows_and_gradients(tensors, learnt(kwargs), **kwargs)
    leaves = [guarded(x, 8, 8)[0].requires_grad_() for x in tensors]
    rooms: list[Tensor] = request.getfixturevalue("rooms")
    torch.manual_seed(11)
    assert same_bits(rows_and_gradients(leaves, learnt(kwargs), **kwargs), clean)
    assert rooms
    assert all(map(unharmed, rooms))


def unseen(name: str, n: int, m: int) -> dict[str, Any]:
    """What hides the keys from the 100th on from all rows of the first item, and all keys from the first row."""
    mask = regard.causal(-1) & regard.padding([100, m])
    if name == "mask":
        return {"mask": mask}
    bias = random(2, 1, n, m, dtype=torch.float32, seed=6)
    if name == "bias":
        return {"bias": bias.masked_fill(~mask.dense(n, m, device=DEVICE), -math.inf).requires_grad_()}
    bias[0, :, :, 100:] = -math.inf  # the mask hides the rest
    return {"bias": bias.requires_grad_(), "mask": regard.causal(-1)}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["mask", "bias", "both"])
def test_values_that_nobody_may_see_leave_no_trace(name: str, d: int) -> None:
    tensors = inputs(301, 333, d)
    kwargs = unseen(name, 301, 333)
    clean = everything(tensors, **kwargs)
    assert all(x.isfinite().all() for x in clean if x.shape == tensors[0].shape)
    with torch.no_grad():
        for x in tensors[1:]:
            x[0, :, 100:] = math.nan
        tensors[0][0, :, 0] = math.nan
    assert same_bits(everything(tensors, **kwargs), clean)


@pytest.mark.parametrize("d", [64, 256])
def test_a_key_that_is_no_number_is_seen_by_the_rows_that_a_bias_shows_it_to(d: int) -> None:
    tensors, kwargs = made("bias", d, 301, 333)
    with torch.no_grad():
        kwargs["bias"][:, 1:, 200] = -math.inf  # but for the first row
        tensors[1][0, :, 200] = math.nan
    _, dq, _, _, _ = output_and_gradients(tensors, upstream(tensors), **kwargs)
    assert dq[0, :, 0].isnan().all()
    assert dq[1].isfinite().all()


# Exact: the contract, against float64.

SIZED = [
    pytest.param(replace(case, shape=replace(case.shape, d=d, dv=dv)), id=f"{case.name}, {d} and {dv}")
    for case in CASES
    for d, dv in ((64, 64), (192, 128))
]


@pytest.mark.parametrize("case", SIZED)
def test_every_case_of_the_contract_agrees_with_float64(case: Case) -> None:
    tensors, kwargs = case.inputs(torch.bfloat16)
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    there = (
        [moved(x, DEVICE, x.dtype) for x in tensors],
        {k: moved(x, DEVICE, torch.bfloat16) for k, x in kwargs.items()},
    )
    found, grads = ([x.cpu() for x in part] for part in results("triton", *there))
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


SEVERAL = [
    *((name, d, torch.bfloat16) for name in MADE if name != "dropout" for d in (64, 96, 128, 256)),
    *((name, d, torch.float16) for name in ("causal", "bias") for d in (64, 128, 192)),
]


@pytest.mark.parametrize(("name", "d", "dtype"), SEVERAL, ids=str)
def test_several_blocks_agree_with_float64(name: str, d: int, dtype: torch.dtype) -> None:
    tensors, kwargs = made(name, d, 301, 333, dtype)
    kwargs = {key: moved(x, DEVICE, dtype) for key, x in kwargs.items()}
    mask = kwargs.get("mask")
    written = {"mask": mask.dense(301, 333, device=DEVICE)} if isinstance(mask, regard.Mask) else {}
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs | written)
    found, grads = results("triton", tensors, kwargs)
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_all_together_over_many_blocks_agrees_with_float64(d: int, dtype: torch.dtype) -> None:
    """Grouped heads of which one is blind to some blocks of keys, a bias in halves, a cap, scales and sinks."""
    n, m, heads = 301, 333, 4
    tensors = inputs(n, m, d, heads=heads, kv_heads=2, dtype=dtype)
    seen = of_bits(n, m).expand(1, heads, n, m).clone()
    seen[:, 0, :, 64:200] = False
    kwargs: dict[str, Any] = {
        "mask": seen,
        "bias": random(heads, n, m, dtype=dtype, seed=4).requires_grad_(),
        "softcap": 5.0,
        "scale": torch.full((heads,), d**-0.5, dtype=dtype, device=DEVICE, requires_grad=True),
        "sink": random(heads, dtype=dtype, seed=5).requires_grad_(),
    }
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, kwargs)
    found, grads = results("triton", tensors, kwargs)
    agree(found, true, ordinary, 2, "result")
    agree(grads, true_grads, ordinary_grads, 3, "gradient")


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["full", "causal"])
def test_dropout_drops_what_the_reference_drops(mask: regard.Mask | None, d: int) -> None:
    tensors = inputs(301, 333, d)

    def found(backend: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        output = regard.attention(*leaves, mask=mask, dropout=0.3, backend=backend)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream(tensors).to(dtype))]

    for ours, true in zip(found("triton", torch.bfloat16), found("reference", torch.float64), strict=True):
        assert (ours - true).norm() < 0.01 * true.norm()
