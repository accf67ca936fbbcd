"""Under torch.compile: one graph for every call of the contract, with the numbers and gradients of eager mode."""

from __future__ import annotations

import inspect
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp

import regard
from contract_cases import ARGUMENTS, BY_NAME, CASES, MASKS, SCORES, Case, leaves
from regard.biases import Bias
from regard.chunked.engine import ChunkedEngine
from regard.compat.torch import not_compiled
from regard.core.validation import pose
from regard.errors import MaskError
from regard.masks import Mask
from regard.masks.index import Index, indices
from regard.scores import Prepared, Score
from regard.scores.pointwise import Pointwise


@dataclass(frozen=True, eq=False, repr=False)
class Parity(Mask):
    step: int

    def allows(self, i: Index, j: Index, n: int, m: int) -> Tensor:
        i, j = indices(i, j)
        return (i - j) % self.step == 0


class Cityblock(Score):
    pairwise = True

    def __init__(self) -> None:
        super().__init__()
        self.factor_of_query = nn.Parameter(torch.tensor(2.0))

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(query * self.factor_of_query, key)

    @staticmethod
    def pair(query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:
        return -(query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1)


class Tilted(Bias):
    """No dataclass, so a compiled call writes it out."""

    def __init__(self, slope: Tensor) -> None:
        self.slope = slope

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slope,)

    @property
    def heads(self) -> int:
        return 1

    def tile(self, tensors: tuple[Tensor, ...], i: Tensor, j: Tensor, n: int, m: int) -> Tensor:
        return tensors[0] * (i[:, None] - j)[None]

    def to(self, device: torch.device | str) -> Tilted:
        return Tilted(self.slope.to(device))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inputs(
    n: int = 12, m: int | None = None, batch: int = 2, heads: int = 2, kv_heads: int | None = None
) -> list[Tensor]:
    made = torch.Generator().manual_seed(n)
    m, kv_heads = n if m is None else m, heads if kv_heads is None else kv_heads
    shapes = (batch, heads, n, 8), (batch, kv_heads, m, 8), (batch, kv_heads, m, 8)
    return [torch.randn(s, generator=made).requires_grad_() for s in shapes]


def compiled(
    function: Callable[..., Any], backend: str = "aot_eager", fullgraph: bool = True, **more: Any
) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=fullgraph, **more)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad(output, leaves, upstream))


def agree(function: Callable[..., Tensor], eager: Callable[..., Tensor], leaves: list[Tensor], *more: Any) -> None:
    """Hold output and gradients against the same call outside of torch.compile."""
    found, expected = function(*leaves, *more), eager(*leaves, *more)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=regard.causal())


def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=regard.padding(lengths))


LENGTHS = torch.tensor([5, 12])


SEED = 3


def call_all(calls: list[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def in_one_graph(calls: dict[str, Callable[[], Any]], backend: str) -> list[Any]:
    """The results of all calls, compiled together, since that takes half of the time; an error names the call."""
    torch.manual_seed(SEED)
    try:
        return list(compiled(call_all, backend)(list(calls.values())))
    except Exception:
        for name, call in calls.items():
            try:
                compiled(call, backend)()
            except Exception as error:
                raise AssertionError(f"{name} is not one graph: {error}") from error
        raise


def calls_of(
    cases: list[Case], function: Callable[..., Any]
) -> tuple[dict[str, Callable[[], Any]], list[list[Tensor]]]:
    calls, learnt = {}, []
    for case in cases:
        tensors, options = case.inputs(torch.float32)
        calls[case.name] = partial(function, *tensors, **options)
        learnt.append(leaves(tensors, options))
    return calls, learnt


def hold(calls: dict[str, Callable[[], Any]], learnt: list[list[Tensor]], backend: str) -> None:
    """Hold results and gradients of one graph to eager mode: to the last bit, since the same code runs."""
    found = in_one_graph(calls, backend)
    torch.manual_seed(SEED)
    for (name, call), ours, wanted in zip(calls.items(), found, learnt, strict=True):
        theirs = call()
        pairs = [(a, b) for a, b in zip(as_tuple(ours), as_tuple(theirs), strict=True) if b is not None]
        for a, b in pairs:
            assert torch.equal(a, b), f"{name}: results differ by {(a - b).abs().max():.1e}"
        for a, b in zip(*(grads_of([pair[at] for pair in pairs], wanted) for at in (0, 1)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def as_tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def grads_of(results: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    total = sum(
        (x.nan_to_num(0.0, 0.0, 0.0) * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum()
        for x in results
        if x.requires_grad
    )
    found = torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)  # one graph has all of them
    return [torch.zeros(()) if g is None else g for g in found]


def observed(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    seen = regard.observe(*tensors, **options)
    return seen.output, seen.lse, seen.entropy, seen.max_logit, seen.perplexity


def close(calls: dict[str, Callable[[], Any]], backend: str = "eager") -> None:
    found = in_one_graph(calls, backend)
    torch.manual_seed(SEED)
    for (name, call), ours in zip(calls.items(), found, strict=True):
        for a, b in zip(as_tuple(ours), as_tuple(call()), strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("part", ["arguments", "masks", "scores"])
def test_every_case_of_the_contract_is_one_graph(part: str) -> None:
    hold(*calls_of({"arguments": ARGUMENTS, "masks": MASKS, "scores": SCORES}[part], regard.attention), "eager")


def parts_of(x: object) -> set[type]:
    """The classes of a mask, a score or a bias, and of what a mask is composed of."""
    inside = [getattr(x, name) for name in getattr(x, "__dataclass_fields__", {})]
    return {type(x)}.union(*(parts_of(part) for part in inside if isinstance(part, Mask)))


def all_classes(base: type) -> set[type]:
    found = {base}.union(*map(all_classes, base.__subclasses__()))
    public = (c for c in found if c.__module__.startswith(("regard.masks", "regard.scores", "regard.biases")))
    return {c for c in public if not inspect.isabstract(c)}


def test_the_contract_has_every_mask_score_and_bias() -> None:
    """A new one fails here until a case has it, and then it is compiled by the test above."""
    given = [x for case in CASES for x in case.inputs(torch.float32)[1].values()]
    posed = [pose(*case.inputs(torch.float32)[0], **case.inputs(torch.float32)[1]).mask for case in MASKS]
    there = set[type]().union(*map(parts_of, [*given, *posed]))
    for base in (Mask, Score, Bias):
        missing = all_classes(base) - there - {Pointwise}  # which leaves the graph: tests/scores/test_pointwise.py
        assert not missing, f"not in tests/support/contract_cases.py: {sorted(c.__name__ for c in missing)}"


SOME = ["plain", "softcap", "sink", "bias with −inf", "composed", "predicate", "Gaussian", "additive together"]


def test_row_statistics_and_their_gradients_are_one_graph() -> None:
    hold(*calls_of([BY_NAME[name] for name in SOME], observed), "aot_eager")


def tensors(*shape: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made) for _ in range(3)]


def test_every_entry_point_is_one_graph() -> None:
    q, k, v = tensors(2, 4, 12, 8)
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    local, hidden = regard.window(3), torch.arange(12) > torch.tensor([[8], [11]])
    torch.manual_seed(0)
    plain, other = (
        regard.nn.MultiheadAttention(16, 4, batch_first=True, **more)
        for more in ({}, {"num_kv_heads": 2, "rotary": True, "add_zero_attn": True, "dropout": 0.2})
    )
    textbook = regard.nn.ScaledDotProductAttention(score=regard.scores.Cosine(0.3))
    close(
        {
            "dropout": lambda: regard.attention(q, k, v, mask=local, dropout=0.3),
            "scaled_dot_product_attention": lambda: regard.scaled_dot_product_attention(q, k, v, None, 0.2, True),
            "attention_with_weights": lambda: regard.attention_with_weights(q, k, v, local),
            "ScaledDotProductAttention": lambda: textbook(q, k, v, local),
            "MultiheadAttention": lambda: plain(x, x, x),
            "MultiheadAttention without weights": lambda: other(x, x, x, hidden, need_weights=False, mask=local),
            "two dimensions": lambda: regard.attention(q[0, 0], k[0, 0], v[0, 0], mask=local, softcap=2.0),
            "three dimensions": lambda: regard.attention(q[0], k[0], v[0], mask=local, softcap=2.0),
            "five dimensions": lambda: regard.attention(
                q[None], k[None], v[None], mask=local & regard.padding([7]), softcap=2.0
            ),
            "reference": lambda: regard.attention(q, k, v, mask=local, dropout=0.3, backend="reference"),
            "a backend object": lambda: regard.attention(q, k, v, backend=regard.backends.Chunked(chunk_size=5)),
        }
    )


def test_masks_made_inside_and_a_users_own_classes_are_one_graph() -> None:
    q, k, v = tensors(1, 2, 12, 8)
    ids, lengths, far = torch.arange(12) // 5, torch.tensor([9]), 4
    score, table = Cityblock(), torch.tensor([0.1])
    calls = {
        "composed": lambda: regard.attention(
            q, k, v, mask=regard.causal() & regard.padding(lengths) | regard.prefix(2)
        ),
        "documents": lambda: regard.attention(q, k, v, mask=regard.documents(ids) & regard.window(far), softcap=2.0),
        "predicate": lambda: regard.attention(q, k, v, mask=regard.predicate(lambda b, h, i, j: i - j < 3)),
        "captured": lambda: regard.attention(q, k, v, mask=regard.predicate(lambda b, h, i, j: ids[i] <= ids[j])),
        "a mask": lambda: regard.attention(q, k, v, mask=Parity(far), softcap=2.0),
        "a score": lambda: regard.attention(q, k, v, mask=regard.window(5), score=score),
        "a bias": lambda: regard.attention(q, k, v, bias=Tilted(table), softcap=2.0),
    }
    close(calls)


def test_a_graph_follows_the_masks_it_is_given() -> None:
    """What differs in numbers, tensors or captured variables is another mask, whatever was compiled before."""
    ids = torch.arange(12) // 5

    def after(t: Tensor, far: int) -> Mask:
        return regard.predicate(lambda batch, head, i, j: t[i] + far >= t[j])

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return regard.attention(q, k, v, mask=mask, softcap=2.0)

    changed = torch.tensor([4, 9])
    function, leaves = compiled(call, "eager"), [x.detach() for x in inputs()]
    masks = [after(ids, 0), after(ids, 1), after(ids % 2, 1), regard.window(2), regard.window(3), regard.window(4)]
    for mask in [*masks, regard.padding(changed), regard.padding([3, 12]), ~regard.padding(changed)]:
        assert torch.equal(function(*leaves, mask), call(*leaves, mask)), mask
    mask = regard.padding(changed)
    changed.fill_(6)
    assert torch.equal(function(*leaves, mask), call(*leaves, mask))


def test_fifty_lengths_compile_at_most_three_times() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        mask = regard.window(k.shape[2] // 2) & regard.padding(lengths)
        return regard.attention(q, k, v, mask=mask, softcap=3.0) + regard.attention(q, k, v, mask=regard.causal())

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    function = torch.compile(call, backend=counter, fullgraph=True)
    for n in range(2, 402, 8):
        q = torch.randn(1, 1, n, 4)
        found = function(q, q, q, torch.tensor([n - 1]))
        if n % 100 == 2:
            torch.testing.assert_close(found, call(q, q, q, torch.tensor([n - 1])))
    assert counter.frame_count <= 3


def test_masks_from_lists_that_depend_on_the_length_need_no_graph_of_their_own() -> None:
    masks: dict[str, Callable[[int], Mask]] = {
        "padding": lambda n: regard.padding([n - 1, n // 2]),
        "packed": lambda n: regard.packed([n // 3, n - n // 3]) & regard.causal(),
        "cu_seqlens": lambda n: regard.packed(cu_seqlens=[0, n // 3, n]),
        "global tokens": lambda n: regard.window(2) | regard.global_tokens([n // 2]),
    }

    def call(q: Tensor) -> list[Tensor]:
        return [regard.attention(q, q, q, mask=mask(q.shape[2]), softcap=4.0) for mask in masks.values()]

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    function = torch.compile(call, backend=counter, fullgraph=True)
    for n in range(20, 52, 3):
        q = torch.randn(2, 1, n, 4)
        for name, found, expected in zip(masks, function(q), call(q), strict=True):
            assert torch.equal(found, expected), name
    assert counter.frame_count <= 2


def test_late_members_of_a_compiled_observation_are_those_of_the_call() -> None:
    allowed = torch.rand(12, 12, generator=torch.Generator().manual_seed(2)) > 0.4

    def observe(q: Tensor, k: Tensor, v: Tensor) -> regard.Observation:
        return regard.observe(q * 2, k, v, mask=regard.dense(allowed), softcap=3.0)

    def changing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, table = q * 2, allowed.clone()
        seen = regard.observe(q, k, v, mask=regard.dense(table), softcap=3.0)
        q.mul_(-1.0)
        table.logical_not_()
        return seen.weights()

    x = tensors(1, 2, 12, 8)
    true = observe(*x)
    assert torch.equal(compiled(changing, "eager")(*x), true.weights())
    seen = compiled(observe, "eager")(*x)
    assert torch.equal(seen.weights(), true.weights())
    assert torch.equal(seen.received, true.received)


def test_a_nan_stays_with_the_rows_that_see_it_in_a_compiled_call() -> None:
    score = regard.scores.Bilinear(8, 8)

    written = regard.window(2).dense(12, 12)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        seen = regard.attention(q, k, v, mask=regard.window(2), softcap=3.0)
        hidden = regard.attention(q, k, v, mask=regard.window(2, offset=6), score=score, softcap=3.0)
        return seen, hidden, regard.attention(q, k, v, mask=written)

    dirty = [x.detach().clone() for x in inputs()]
    dirty[1][0, :, 3] = math.nan
    leaves = [x.requires_grad_() for x in dirty]
    found, expected = compiled(call)(*leaves), call(*leaves)
    assert found[0].isnan().any(-1).sum() == found[2].isnan().any(-1).sum() == 6  # three rows, in two heads
    wanted = [*leaves, *score.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    pulled = [
        torch.autograd.grad(sum(y.nan_to_num().square().sum() for y in some), wanted) for some in (found, expected)
    ]
    for ours, theirs in zip(*pulled, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert pulled[0][-1].isfinite().all()


def test_the_public_function_itself_compiles_in_one_graph() -> None:
    agree(compiled(regard.attention), regard.attention, inputs())


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_new_lengths_give_the_right_numbers_without_end(dynamic: bool | None) -> None:
    function = compiled(causal, dynamic=dynamic)
    for n in (12, 12, 7, 31, 1, 12):
        agree(function, causal, inputs(n))


def test_new_lengths_of_padding_need_no_new_graph() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(padded, backend=counter, fullgraph=True)
    for lengths in ([5, 12], [1, 1], [12, 0], [12, 12]):
        agree(function, padded, inputs(), torch.tensor(lengths))
    assert counter.frame_count == 1


def test_a_causal_mask_of_more_keys_than_rows_is_aligned_at_the_end() -> None:
    agree(compiled(causal), causal, inputs(5, 12))


def test_nan_in_the_padding_leaves_no_trace_in_a_compiled_call() -> None:
    query, key, value = inputs()
    hidden = (torch.arange(12) >= LENGTHS[:, None])[:, None, :, None]
    dirty = [torch.where(hidden, math.nan, x.detach()).requires_grad_() for x in (key, value)]
    found = compiled(padded)(query, *dirty, LENGTHS)
    torch.testing.assert_close(found, padded(query, key, value, LENGTHS))
    for g in gradients(found, [query, *dirty]):
        assert g.isfinite().all()


def test_a_sequence_of_no_keys_gives_zeros_in_a_compiled_call() -> None:
    leaves = inputs()
    found = compiled(padded)(*leaves, torch.tensor([0, 12]))
    assert not found[0].any()
    assert all(g.isfinite().all() for g in gradients(found, leaves))
    assert not gradients(compiled(padded)(*leaves, torch.tensor([0, 12])), leaves)[0][0].any()


def test_a_dense_mask_of_every_rank_is_one_graph() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor]) -> Tensor:
        return torch.stack([regard.attention(q, k, v, mask=regard.dense(mask)) for mask in masks])

    made = torch.Generator().manual_seed(0)
    shapes = ((12, 12), (1, 12), (2, 12, 12), (2, 1, 12, 12))
    agree(compiled(masked), masked, inputs(), [torch.rand(shape, generator=made) > 0.4 for shape in shapes])


TEXTBOOK: dict[str, Callable[..., Tensor]] = {
    "module": lambda q, k, v, mask: regard.nn.ScaledDotProductAttention()(q, k, v, mask)[0],
    "attention_with_weights": lambda q, k, v, mask: regard.attention_with_weights(q, k, v, mask)[0],
}


@pytest.mark.parametrize("name", [*TEXTBOOK, "observe"])
def test_masks_of_numbers_mean_the_same_compiled(name: str) -> None:
    """What is not 0 is visible."""
    call = TEXTBOOK.get(name, lambda q, k, v, mask: regard.observe(q, k, v, mask=mask).output)
    function = compiled(call, "eager")
    query, key, value = (x.detach() for x in inputs())
    numbers = torch.ones(12, 12).tril() * torch.tensor([2, 1, 0, 3] * 3)
    expected = regard.attention(query, key, value, mask=numbers != 0)
    torch.testing.assert_close(function(query, key, value, numbers.int()), expected)
    if name in TEXTBOOK:
        torch.testing.assert_close(function(query, key, value, (numbers != 0).float()), expected)
        assert not function(query, key, value, torch.zeros(12, 12)).any()
        with pytest.raises(RuntimeError, match="a float mask must be 0 and 1 alone"):
            function(query, key, value, numbers)


def test_a_float_mask_is_refused_where_its_values_cannot_be_read() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask)

    query, key, value = inputs()
    mask = torch.ones(12, 12).tril()
    with pytest.raises((MaskError, torch._dynamo.exc.Unsupported), match=r"float mask is refused under torch\.compile"):
        compiled(masked)(query, key, value, mask)
    torch.testing.assert_close(masked(query, key, value, mask), causal(query, key, value))


def test_a_wrong_argument_is_the_same_error_in_a_compiled_call() -> None:
    query, key, value = inputs()
    with pytest.raises(Exception, match="query and key must have the same dim"):
        compiled(plain, fullgraph=False)(query, key[..., :4], value)


def test_dropout_in_a_compiled_call_draws_from_torchs_generator() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, dropout=0.5)

    function, leaves = compiled(call), inputs()

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return function(*leaves)

    function(*leaves)
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    first = drawn(1)
    assert not torch.equal(first, function(*leaves))
    torch.manual_seed(1)
    torch.testing.assert_close(first, call(*leaves))


def test_a_compiled_module_trains_as_the_eager_one() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.outward = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.inward(x).chunk(3, -1))
            return self.outward(regard.attention(q, k, v, mask=regard.causal()).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 10, 16)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    found = torch.autograd.grad(compiled(layer)(x).square().sum(), list(layer.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_grad_and_inference_mode_compile() -> None:
    query, key, value = inputs()
    expected = causal(query, key, value).detach()
    with torch.no_grad():
        torch.testing.assert_close(compiled(causal)(query, key, value), expected)
    torch.compiler.reset()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(causal)(query, key, value), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_autocast_in_a_compiled_call_casts_as_outside(dtype: torch.dtype) -> None:
    leaves = [x.detach().double() if dtype == torch.float64 else x.detach() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(plain)(*leaves), plain(*leaves)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def gradient(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return grad(lambda q: call(q, k, v).sin().sum())(q)


def gradient_a_sample(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda *x: gradient(call, *(t[None] for t in x), w)[0])(q, k, v)


def tangent(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return jvp(lambda q: call(q, k, v), (q,), (w,))[1]


def forward_over_reverse(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return jvp(lambda q: gradient(call, q, k, v, w), (q,), (w,))[1]


def reverse_over_forward(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return grad(lambda q: tangent(lambda *x: call(*x).sin().sum(), q, k, v, w))(q)


def reverse_over_reverse(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return grad(lambda q: (gradient(call, q, k, v, w) * w).sum())(q)


def named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=regard.causal(), backend="chunked")


MOVING = (tangent, forward_over_reverse, reverse_over_forward)


def with_tangent() -> list[Tensor]:
    q, k, v = (x.detach() for x in inputs())
    return [q, k, v, torch.randn(q.shape, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("derivative", [gradient, gradient_a_sample])
def test_derivatives_inside_a_compiled_call_are_those_outside(derivative: Callable[..., Tensor]) -> None:
    x = with_tangent()
    function = compiled(lambda *x: derivative(causal, *x))
    torch.testing.assert_close(function(*x), derivative(causal, *x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_derivatives_that_break_the_graph_are_those_outside_too() -> None:
    """All of them in one test: what torch compiles between the breaks is mostly the same, and takes seconds."""
    x = with_tangent()
    for derivative, call in ((reverse_over_reverse, named), *((f, causal) for f in MOVING)):
        function = compiled(lambda *x, f=derivative, call=call: f(call, *x), fullgraph=False)
        expected = derivative(causal, *x)
        torch.testing.assert_close(
            function(*x), expected, rtol=1e-4, atol=1e-5, msg=lambda text, f=derivative: f"{f.__name__}: {text}"
        )


@pytest.mark.parametrize("derivative", [gradient, forward_over_reverse])
def test_derivatives_that_break_the_graph_may_have_no_entropy(
    derivative: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a kernel; a named tuple that a traced `_replace` made leaves the graph empty in torch 2.11."""
    forward = not_compiled(ChunkedEngine.forward)
    monkeypatch.setattr(ChunkedEngine, "forward", lambda *given: forward(*given)._replace(entropy=None))
    x = with_tangent()
    found = compiled(lambda *x: derivative(named, *x), fullgraph=False)(*x)
    torch.testing.assert_close(found, derivative(named, *x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("derivative", MOVING)
def test_forward_mode_breaks_the_graph_and_is_refused_where_none_may_break(derivative: Callable[..., Tensor]) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"`Chunked\._untraced` should not be traced"):
        compiled(lambda *x: derivative(causal, *x))(*with_tangent())


def test_a_gradient_of_a_gradient_inside_a_compiled_call_is_right_or_names_the_missing_derivative() -> None:
    """torch 2.15 computes it; older versions need `backend="chunked"`."""
    x = with_tangent()
    try:
        found = compiled(lambda *x: reverse_over_reverse(causal, *x), fullgraph=False)(*x)
    except RuntimeError as error:
        if not re.search(r"derivative for aten::_scaled_dot_product_.*_backward is not implemented", str(error)):
            raise
    else:
        torch.testing.assert_close(found, reverse_over_reverse(causal, *x), rtol=1e-4, atol=1e-5)


def test_torch_refuses_the_double_backward_of_a_compiled_call() -> None:
    q, k, v = inputs()
    (first,) = torch.autograd.grad(compiled(causal)(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward"):
        torch.autograd.grad(first.sum(), q)


def test_a_dual_tensor_has_its_tangent_in_a_compiled_call_but_not_in_a_compiled_jvp() -> None:
    q, k, v, w = with_tangent()
    true = tangent(causal, q, k, v, w)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, w)
        torch.testing.assert_close(forward_ad.unpack_dual(compiled(causal, fullgraph=False)(dual, k, v)).tangent, true)
        with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported at the moment"):
            compiled(lambda *x: tangent(causal, *x), fullgraph=False)(dual, k, v, w)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_default_compiler_of_torch_gives_the_same_numbers() -> None:
    agree(torch.compile(causal, fullgraph=True), causal, inputs())


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_default_compiler_of_torch_keeps_statistics_until_the_backward_pass_has_read_them() -> None:
    """It writes over a saved tensor after its last reader, and does not see that another one shares its memory."""

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> list[Tensor]:
        seen = regard.observe(q, k, v, mask=regard.causal())
        sunk = regard.observe(q, k, v, mask=regard.strided(3), sink=sink)
        return [
            seen.lse * seen.entropy,
            sunk.output * (sunk.lse * sunk.entropy)[..., None],
            regard.attention(q, k, v, mask=regard.causal(), sink=sink),
            regard.attention(q, k, v, mask=regard.strided(3), sink=sink.detach()),
        ]

    given = [*inputs(), torch.randn(2, requires_grad=True)]
    found, expected = torch.compile(call, fullgraph=True)(*given), call(*given)
    for a, b in zip([*found, *grads_of(found, given)], [*expected, *grads_of(expected, given)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
