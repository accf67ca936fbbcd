"""Our kernels on a CUDA device: odd shapes, overflow, the same bits always, poisoned memory, large sizes, graphs."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from contract_cases import agree, plain_results, results, truth
from regard import biases

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HALVES = [torch.bfloat16, torch.float16]
ROWS = ("output", "lse", "entropy", "max_logit")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    made = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=made, device=DEVICE, dtype=torch.float32).to(dtype)


def inputs(
    n: int, m: int, d: int = 64, batch: int = 2, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    shapes = (batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, d)
    return [random(*s, dtype=dtype, seed=at).requires_grad_() for at, s in enumerate(shapes)]


def rows_and_gradients(tensors: list[Tensor], more: list[Tensor] | None = None, **kwargs: Any) -> list[Tensor]:
    """What a forward and a backward pass of our kernels give."""
    seen = regard.observe(*tensors, **kwargs, backend="triton")
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    loss = seen.output.float().sin().sum() + lse.sin().sum() + seen.entropy.square().sum()
    grads = torch.autograd.grad(loss, [*tensors, *(more or [])])
    return [*(getattr(seen, name).detach() for name in ROWS), *grads]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Exact: against float64, as exact as plain torch in the same dtype.

ODD = ((1, 239), (239, 1), (3, 799), (799, 3), (113, 203), (128, 217), (1023, 1024), (2048, 2048))


def as_exact_as_plain_torch(tensors: list[Tensor], causal: bool, what: str) -> None:
    n, m = tensors[0].shape[2], tensors[1].shape[2]
    kwargs = {"mask": regard.causal()} if causal else {}
    written = {"mask": regard.causal().dense(n, m, device=DEVICE)} if causal else {}
    true, true_grads = truth(tensors, kwargs)
    ordinary, ordinary_grads = plain_results(tensors, written)
    found, grads = results("triton", tensors, kwargs)
    agree(found, true, ordinary, 2, f"{what}: result")
    agree(grads, true_grads, ordinary_grads, 3, f"{what}: gradient")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("d", [59, 64, 111, 128, 256])
def test_odd_shapes_are_as_exact_as_plain_torch(d: int, dtype: torch.dtype) -> None:
    """Odd dims have rows that the copy engine can fetch where lengths are even, by space between them."""
    for n, m in ODD:
        if d % 16 and n % 2 != m % 2 and (d, dtype) != (59, torch.bfloat16):
            continue  # one more variant of every kernel; one dim has them
        width = d if n % 2 else -(-d // 16) * 16
        for causal in (False, True):
            tensors = inputs(n, m, width, batch=1, heads=2, kv_heads=1, dtype=dtype)
            tensors = [x.detach()[..., :d].requires_grad_() for x in tensors]
            as_exact_as_plain_torch(tensors, causal, f"({n}, {m}){' causal' * causal}")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_do_not_overflow(causal: bool, dtype: torch.dtype) -> None:
    query, key, value = (x.detach() for x in inputs(1024, 1024, 128, batch=1, heads=2, kv_heads=1, dtype=dtype))
    tensors = [x.requires_grad_() for x in (query * 5, key * 3, value)]
    as_exact_as_plain_torch(tensors, causal, "large")


# Deterministic: the same bits at every run, and whatever the batch.


def of_bits(n: int, m: int) -> Tensor:
    return torch.rand(n, m, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE) > 0.4


REPEATED: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": regard.causal()},
    "bits": lambda: {"mask": of_bits(513, 700)},
    "dropout": lambda: {"mask": regard.causal(), "dropout": 0.3},
    "table and dropout": lambda: {"bias": biases.relative(random(4, 33, dtype=torch.float32)), "dropout": 0.3},
}


@pytest.mark.parametrize("name", REPEATED)
def test_two_hundred_runs_give_the_same_bits(name: str) -> None:
    kwargs, tensors = REPEATED[name](), inputs(513, 700)
    learnt = [t.requires_grad_() for t in kwargs["bias"].tensors] if "bias" in kwargs else []

    def once() -> list[Tensor]:
        torch.manual_seed(11)
        return rows_and_gradients(tensors, learnt, **kwargs)

    first = once()
    assert all(same_bits(once(), first) for _ in range(199))


BATCHED: dict[str, Callable[[int], Any]] = {
    "plain": lambda items: None,
    "causal": lambda items: regard.causal(),
    "padding": lambda items: regard.padding([400, 0, 513][:items]),
    "bits": lambda items: of_bits(513, 513).expand(items, 1, 513, 513),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_sequence_does_not_depend_on_its_batch(name: str) -> None:
    tensors = inputs(513, 513, batch=3)
    whole = rows_and_gradients(tensors, mask=BATCHED[name](3))
    alone = rows_and_gradients([t.detach()[:1].clone().requires_grad_() for t in tensors], mask=BATCHED[name](1))
    assert same_bits([x[:1] for x in whole], alone)


@pytest.mark.parametrize("n", [1, 5])
def test_few_queries_do_not_depend_on_their_batch(n: int) -> None:
    tensors = inputs(n, 5000, batch=3, heads=8, kv_heads=2)
    for mask in (None, regard.padding([4999, 7, 300])):
        alone_mask = None if mask is None else regard.padding([4999])
        whole = rows_and_gradients(tensors, mask=mask)
        alone = rows_and_gradients([t.detach()[:1].clone().requires_grad_() for t in tensors], mask=alone_mask)
        assert same_bits([x[:1] for x in whole], alone)


@pytest.mark.parametrize("n", [1, 9])
def test_few_queries_against_many_keys_agree_with_float64(n: int) -> None:
    query, key, value = (x.detach() for x in inputs(n, 4100, heads=8))
    for kwargs in (
        {},
        {"mask": regard.causal()},
        {"mask": regard.padding([4097, 0]), "sink": random(8, dtype=torch.float32)},
        {"bias": biases.alibi(torch.linspace(0.001, 0.1, 8, device=DEVICE)), "softcap": 3.0},
    ):
        seen = regard.observe(query, key, value, **kwargs, backend="triton")
        true = regard.observe(query.double(), key.double(), value.double(), **kwargs, backend="reference")
        for name in ROWS:
            tolerance = 1e-2 if name == "output" else 2e-3
            torch.testing.assert_close(
                getattr(seen, name).double(), getattr(true, name).double(), atol=tolerance, rtol=tolerance
            )


# Memory: nothing is read that was not written, and nothing beside the tensors.


def poison() -> None:
    """Leave freed memory behind in which every bit is set: NaN for all floats, −1 for integers."""
    pieces = [
        torch.full((size,), -1, dtype=torch.int32, device=DEVICE) for size in (2**27, *[2**18] * 40, *[2**12] * 200)
    ]
    del pieces


def guarded(x: Tensor, before: int, after: int) -> tuple[Tensor, Tensor]:
    """The same numbers in the midst of NaN, rows and dims before and after those of each head; and all of it."""
    b, h, n, d = x.shape
    room = torch.full((b + 1, h + 1, n + 9, before + d + after), math.nan, device=DEVICE, dtype=x.dtype)
    room[:b, :h, 3 : 3 + n, before : before + d] = x.detach()
    return room[:b, :h, 3 : 3 + n, before : before + d], room


POISONED: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": regard.causal()},
    "padding": lambda: {"mask": regard.padding([130, 0])},
    "bits": lambda: {"mask": of_bits(133, 201)},
    "bias and sink": lambda: {"bias": random(4, 133, 201, dtype=torch.float32), "sink": random(4, dtype=torch.float32)},
    "dropout": lambda: {"dropout": 0.3},
}


@pytest.mark.parametrize(
    ("name", "d"), [*((name, 64) for name in POISONED), ("plain", 59), ("causal", 59), ("bias and sink", 59)]
)
def test_poisoned_memory_and_guard_bands_leave_no_trace(name: str, d: int) -> None:
    kwargs = POISONED[name]()
    learnt = [x.requires_grad_() for x in kwargs.values() if isinstance(x, Tensor) and x.dtype == torch.float32]
    tensors = inputs(133, 201, d)
    torch.manual_seed(5)
    clean = rows_and_gradients(tensors, learnt, **kwargs)
    for before, after in ((8, 64 - d + 8), (1, 2)):  # rows that the copy engine can fetch, and rows that it cannot
        views, rooms = zip(*(guarded(x, before, after) for x in tensors), strict=True)
        poison()
        torch.manual_seed(5)
        found = rows_and_gradients([x.requires_grad_() for x in views], learnt, **kwargs)
        for x, true in zip(found, clean, strict=True):
            torch.testing.assert_close(x, true, atol=2e-2, rtol=2e-2)
        for view, room, x in zip(views, rooms, tensors, strict=True):
            assert torch.equal(view, x)
            assert int(room.isfinite().sum()) == x.numel()


def test_passes_in_poisoned_memory_leave_no_trace() -> None:
    query, key, value = (x.detach() for x in inputs(133, 201))
    for mask in (None, regard.causal(), of_bits(133, 201)):
        true = regard.observe(query.double(), key.double(), value.double(), mask=mask, backend="reference")
        views = [guarded(x, 1, 2)[0] for x in (query, key, value)]
        poison()
        seen = regard.observe(*views, mask=mask, backend="triton")
        for found, expected in (
            (seen.received, true.received),
            (seen.gradient_health, true.gradient_health),
            (seen.distance, true.distance),
            (seen.map(3, 70), true.map(3, 70)),
            (seen.top(5)[0], true.top(5)[0]),
            (seen.weights(), true.weights()),
        ):
            torch.testing.assert_close(found.double(), expected.double(), atol=2e-3, rtol=1e-2)


def test_few_queries_in_poisoned_memory_leave_no_trace() -> None:
    query, key, value = (x.detach() for x in inputs(1, 3000, heads=8))
    for mask in (None, regard.padding([2999, 0])):
        clean = regard.observe(query, key, value, mask=mask, backend="triton")
        for before, after in ((8, 8), (1, 2)):
            views = [guarded(x, before, after)[0] for x in (query, key, value)]
            poison()
            seen = regard.observe(*views, mask=mask, backend="triton")
            for name in ROWS:
                torch.testing.assert_close(getattr(seen, name), getattr(clean, name), atol=2e-2, rtol=2e-2)


# Size: offsets in 64 bits, and masks over many keys.


needs_much_memory = pytest.mark.xdist_group("much memory")


@pytest.fixture
def room() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


REACH = 64


def near(tensors: list[Tensor], head: int, row: int) -> tuple[Tensor, list[Tensor]]:
    """One row by float64 math: its output, and the query, keys and values that have a part in it, as leaves."""
    query, key, value = tensors
    lo = max(0, row - REACH)
    parts = [query[0, head, row], key[0, head, lo : row + 1], value[0, head, lo : row + 1]]
    q, k, v = (x.detach().double().requires_grad_() for x in parts)
    return torch.softmax(k @ q / math.sqrt(q.shape[-1]), 0) @ v, [q, k, v]


@needs_much_memory
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("heads", "d"), [(20, 128), (41, 59)])
def test_more_than_two_billion_numbers(heads: int, d: int) -> None:
    """Rows that the copy engine can fetch (128 dims), and rows that it cannot (59)."""
    n = 900_000
    made = torch.Generator(DEVICE).manual_seed(0)
    shape = (1, heads, n, d)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(generator=made) for _ in range(3)]
    assert all(x.requires_grad_().numel() > 2**31 for x in tensors)
    seen = regard.observe(*tensors, mask=regard.window(REACH), backend="triton")
    last, first = slice(n - 3, n), n - 3 - REACH
    loss = seen.output[0, -1, last].float().square().sum()
    grads = torch.autograd.grad(loss, tensors)
    for head in (0, heads // 2, heads - 2, heads - 1):
        for row in (0, 100, n // 2, n - 1):
            true, _ = near(tensors, head, row)
            torch.testing.assert_close(seen.output[0, head, row].detach().double(), true, atol=2e-2, rtol=2e-2)
    expected = [torch.zeros(REACH + 3, d, dtype=torch.float64, device=DEVICE) for _ in range(3)]
    for row in range(n - 3, n):
        output, (q, k, v) = near(tensors, heads - 1, row)
        dq, dk, dv = torch.autograd.grad(output.square().sum(), (q, k, v))
        keys = slice(row - REACH - first, row + 1 - first)
        expected[0][row - first] = dq
        expected[1][keys] += dk
        expected[2][keys] += dv
    for g, true in zip(grads, expected, strict=True):
        torch.testing.assert_close(g[0, -1, first:].double(), true, atol=2e-2, rtol=2e-2)
        assert not g[0, :-1, ::1000].any()
        assert not g[0, -1, :first].any()
    del grads, loss
    total = seen.received.double().sum(-1)
    torch.testing.assert_close(total, torch.full_like(total, n), atol=0, rtol=1e-4)
    assert seen.map(3, 3).isfinite().all()


MANY = 120_000
WIDE: dict[str, Callable[[], Any]] = {
    "strided or window": lambda: regard.strided(1000) | regard.window(500),
    "predicate": lambda: regard.predicate(lambda b, h, i, j: (j % 977 == i + b) | (j >= 119_999 - h)),
    "keep": lambda: regard.padding(torch.arange(2 * MANY, device=DEVICE).view(2, MANY) % 7 == 0),
    "causal and lengths": lambda: regard.causal() & regard.padding([MANY, 70_001]),
}


@needs_much_memory
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("n", [150, 2])
def test_a_hundred_and_twenty_thousand_keys_with_a_mask(name: str, n: int) -> None:
    mask, tensors = WIDE[name](), inputs(n, MANY, heads=2, kv_heads=1)
    doubled = [x.detach().double().requires_grad_() for x in tensors]
    seen = regard.observe(*tensors, mask=mask, backend="triton")
    true = regard.observe(*doubled, mask=mask, backend="reference")
    for at in ROWS:
        tolerance = 1e-2 if at == "output" else 2e-3
        torch.testing.assert_close(
            getattr(seen, at).double(), getattr(true, at).double(), atol=tolerance, rtol=tolerance
        )
    found = torch.autograd.grad(seen.output.float().square().sum(), tensors)
    for g, t in zip(found, torch.autograd.grad(true.output.square().sum(), doubled), strict=True):
        torch.testing.assert_close(g.double(), t, atol=1e-2 * max(1.0, float(t.abs().max())), rtol=2e-2)


@needs_much_memory
@pytest.mark.usefixtures("room")
def test_a_square_of_forty_thousand_with_holes_agrees_in_some_rows() -> None:
    n = 40_000
    query, key, value = (x.detach() for x in inputs(n, n, batch=1, heads=2, kv_heads=1))
    keep = torch.rand(n, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE) > 0.3
    seen = regard.observe(query, key, value, mask=regard.causal() & regard.padding(keep), backend="triton")
    rows = torch.tensor([0, 1, 127, 128, 20_000, n - 1], device=DEVICE)
    allowed = (torch.arange(n, device=DEVICE) <= rows[:, None]) & keep
    true = regard.observe(query[:, :, rows].double(), key.double(), value.double(), mask=allowed, backend="reference")
    for name in ROWS:
        torch.testing.assert_close(getattr(seen, name)[:, :, rows].double(), getattr(true, name), atol=1e-2, rtol=1e-2)


# Graphs: captured by CUDA, compiled by torch.


def captured(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


lengths_then, lengths_now = [300, 0], [17, 512]


@pytest.mark.parametrize("name", ["causal", "padding", "a padding made before"])
@pytest.mark.parametrize("how", ["attention", "observe", "gradients"])
def test_a_captured_graph_follows_its_inputs(name: str, how: str) -> None:
    tensors = inputs(512, 512)
    lengths = torch.tensor(lengths_then, device=DEVICE)
    before = regard.padding(lengths)

    def call() -> list[Tensor]:
        masks = {
            "causal": regard.causal,
            "padding": lambda: regard.padding(lengths),
            "a padding made before": lambda: before,
        }
        mask = masks[name]()
        if how == "attention":
            return [regard.attention(*tensors, mask=mask, backend="triton").detach()]
        if how == "gradients":
            return rows_and_gradients(tensors, mask=mask)
        seen = regard.observe(*tensors, mask=mask, backend="triton")
        return [getattr(seen, at).detach() for at in ROWS]

    graph, static = captured(call)
    graph.replay()
    first = [x.clone() for x in static]
    assert same_bits(first, call())
    with torch.no_grad():
        for at, x in enumerate(tensors):
            x.copy_(random(*x.shape, seed=at + 10))
    lengths.copy_(torch.tensor(lengths_now))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits([x.clone() for x in static], call())
    assert not any(torch.equal(a, b) for a, b in zip(first, static, strict=True))


def test_a_mask_first_met_in_a_capture_is_right_outside_of_it() -> None:
    tensors = [x.detach() for x in inputs(512, 512)]
    captured(lambda: [regard.attention(*tensors, mask=regard.window(99), backend="triton")])  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = regard.attention(*tensors, mask=regard.window(98), backend="triton")
    outside = regard.attention(*tensors, mask=regard.window(98), backend="triton")
    true = regard.attention(*(x.double() for x in tensors), mask=regard.window(98), backend="reference")
    torch.testing.assert_close(outside.double(), true, atol=2e-2, rtol=2e-2)
    graph.replay()
    assert torch.equal(static, outside)


def test_dropout_in_a_capture_is_refused() -> None:
    x = inputs(64, 64, heads=2)[0].detach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x + 1  # a graph without any kernel makes torch warn
        with pytest.raises(regard.errors.BackendError, match="would drop the same weights at every replay"):
            regard.attention(x, x, x, dropout=0.1, backend="triton")


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def learnt(*shape: int) -> tuple[Tensor]:
    return (random(*shape, dtype=torch.float32).requires_grad_(),)


COMPILED: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[], tuple[Tensor, ...]]]] = {
    "plain": (dict, tuple),
    "causal": (lambda: {"mask": regard.causal()}, tuple),
    "window": (lambda: {"mask": regard.window(30, 2)}, tuple),
    "padding": (lambda lengths: {"mask": regard.padding(lengths)}, lambda: (torch.tensor([100, 0], device=DEVICE),)),
    "sink": (lambda sink: {"sink": sink}, lambda: learnt(4)),
    "bias": (lambda bias: {"bias": bias}, lambda: learnt(4, 512, 512)),
}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_call_is_one_graph_and_means_the_same(name: str, backend: str) -> None:
    make, give = COMPILED[name]
    tensors, more = inputs(512, 512), give()
    leaves = [*tensors, *(x for x in more if x.requires_grad)]

    def call(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        return regard.attention(query, key, value, **make(*more), backend=backend)

    compiler = "inductor" if name in ("causal", "padding") else "aot_eager"
    found, eager = torch.compile(call, fullgraph=True, backend=compiler)(*tensors, *more), call(*tensors, *more)
    upstream = random(*eager.shape, seed=7)
    torch.testing.assert_close(found, eager, atol=1e-2, rtol=2e-2)
    for g, t in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (found, eager)), strict=True):
        torch.testing.assert_close(g, t, atol=1e-2, rtol=2e-2)


# What is chosen, and what is compiled.


def test_why_names_our_kernels() -> None:
    query, key, value = (x.detach() for x in inputs(256, 256))
    assert regard.why(query, key, value, backend="triton").backend == "triton"
    assert regard.why(query, key, value, observe=True).backend == "triton"
    for kwargs in ({"softcap": 3.0}, {"sink": random(4, dtype=torch.float32)}, {"dropout": 0.1}):
        plan = regard.why(query, key, value, **kwargs)
        assert plan.backend == "triton"
        assert "→ triton" in str(plan)
    assert "by triton" in repr(regard.observe(query, key, value))


def variants() -> int:
    """How many variants of our kernels Triton has compiled in this process."""
    from triton.runtime.jit import JITFunction

    from regard.kernels.portable import backward, bias_gradient, decode, forward, statistics

    modules = (backward, bias_gradient, decode, forward, statistics)
    kernels = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())


def looked_at(mask: Any, n: int, m: int) -> None:
    tensors = inputs(n, m)
    rows_and_gradients(tensors, mask=mask)
    seen = regard.observe(*(x.detach() for x in tensors), mask=mask, backend="triton")
    seen.received, seen.gradient_health, seen.top(3), seen.map(4, 4)


def test_a_new_mask_of_a_known_kind_compiles_nothing() -> None:
    looked_at(regard.causal(), 1024, 1024)
    looked_at(regard.strided(3), 1024, 1024)
    before = variants()
    assert before > 0
    for mask in (regard.causal(offset=5), regard.window(17, 3), regard.blocks(90), regard.padding([5, 1000])):
        looked_at(mask, 1024, 1024)
    for mask in (regard.strided(7) | regard.window(9), of_bits(1024, 1024), of_bits(2, 1024).view(2, 1, 1, 1024)):
        looked_at(mask, 1024, 1024)
    looked_at(regard.causal(), 999, 1001)
    looked_at(regard.padding([700, 3]), 1000, 1000)
    looked_at(regard.strided(5), 999, 1001)
    assert variants() == before
