"""Under torch.compile: one graph for plain, causal and padded calls, the same numbers, and honest falls elsewhere."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp

import regard
from regard.errors import MaskError


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


def test_the_public_function_itself_compiles_in_one_graph() -> None:
    agree(compiled(regard.attention), regard.attention, inputs())


@pytest.mark.parametrize("call", [plain, causal])
def test_plain_and_causal_calls_compile_in_one_graph_with_gradients(call: Callable[..., Tensor]) -> None:
    agree(compiled(call), call, inputs())


def test_a_padded_call_compiles_in_one_graph_with_gradients() -> None:
    agree(compiled(padded), padded, inputs(), LENGTHS)


def test_grouped_heads_compile_in_one_graph() -> None:
    agree(compiled(causal), causal, inputs(heads=4, kv_heads=2))


def test_a_mask_made_outside_compiles_in_one_graph() -> None:
    for mask in (regard.causal(), regard.padding([5, 12])):
        function = compiled(lambda q, k, v, mask=mask: regard.attention(q, k, v, mask=mask))
        agree(function, lambda q, k, v, mask=mask: regard.attention(q, k, v, mask=mask), inputs())


def test_a_scale_and_torchs_signature_compile_in_one_graph() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, scale=0.3)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.scaled_dot_product_attention(q, k, v, is_causal=True)

    for call in (scaled, torchs):
        agree(compiled(call), call, inputs())


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_new_lengths_give_the_right_numbers_without_end(dynamic: bool | None) -> None:
    function = compiled(causal, dynamic=dynamic)
    for n in (12, 12, 7, 31, 1, 12):
        agree(function, causal, inputs(n))


def test_new_lengths_are_compiled_once_more_and_then_no_more() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(plain, backend=counter, fullgraph=True)
    for n in (12, 13, 20, 33, 50, 64):
        agree(function, plain, inputs(n))
    assert counter.frame_count <= 2


def test_new_lengths_of_padding_need_no_new_graph() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(padded, backend=counter, fullgraph=True)
    for lengths in ([5, 12], [1, 1], [12, 0], [12, 12]):
        agree(function, padded, inputs(), torch.tensor(lengths))
    assert counter.frame_count == 1


def test_a_causal_mask_of_more_keys_than_rows_is_aligned_at_the_end() -> None:
    agree(compiled(causal, fullgraph=False), causal, inputs(5, 12))


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


@pytest.mark.parametrize("shape", [(12, 12), (1, 12), (2, 12, 12), (2, 1, 12, 12)])
def test_a_dense_mask_of_every_rank_is_one_graph(shape: tuple[int, ...]) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=regard.dense(allowed))

    agree(compiled(masked), masked, inputs(), torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4)


TEXTBOOK: dict[str, Callable[..., Tensor]] = {
    "module": lambda q, k, v, mask: regard.nn.ScaledDotProductAttention()(q, k, v, mask)[0],
    "attention_with_weights": lambda q, k, v, mask: regard.attention_with_weights(q, k, v, mask)[0],
}


@pytest.mark.parametrize("name", [*TEXTBOOK, "observe"])
def test_masks_of_numbers_mean_the_same_compiled(name: str) -> None:
    """Graphs may break; what is not 0 is visible."""
    call = TEXTBOOK.get(name, lambda q, k, v, mask: regard.observe(q, k, v, mask=mask).output)
    function = torch.compile(call, backend="eager")
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


FALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"softcap": 2.0},
    "sink": lambda: {"sink": torch.tensor([0.5, -1.0])},
    "window": lambda: {"mask": regard.window(3)},
    "tensor mask": lambda: {"mask": torch.ones(12, 12).tril().bool()},
    "bias": lambda: {"bias": torch.randn(12, 12, generator=torch.Generator().manual_seed(0))},
    "alibi": lambda: {"bias": regard.biases.alibi(torch.tensor([0.5, 0.1]))},
    "additive": lambda: {"score": regard.scores.Additive(8, 8, 4)},
    "cosine": lambda: {"score": regard.scores.Cosine(0.2)},
    "scale a head": lambda: {"scale": torch.tensor([0.3, 0.9])},
    "reference": lambda: {"backend": "reference"},
    "chunked": lambda: {"backend": "chunked"},
}


@pytest.mark.parametrize("name", FALLS)
def test_other_features_fall_back_to_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    arguments = FALLS[name]()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q * 1.5, k, v, **arguments) + 1

    agree(compiled(call, fullgraph=False), call, inputs())


def test_a_predicate_takes_symbolic_sizes() -> None:
    mask = regard.predicate(lambda batch, head, i, j: (i - j).abs() <= batch + head)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask)

    function = compiled(call, "eager", fullgraph=False, dynamic=True)
    for batch in (2, 3):
        leaves = inputs(batch=batch, heads=3)
        torch.testing.assert_close(function(*leaves), call(*leaves))


def test_a_score_with_one_matrix_per_head_takes_a_symbolic_number_of_heads() -> None:
    score = regard.scores.Bilinear(8, 8, heads=2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, score=score)

    leaves = inputs()
    found = compiled(call, "eager", fullgraph=False, dynamic=True)(*leaves)
    torch.testing.assert_close(found, call(*leaves))


def test_dropout_in_a_compiled_call_draws_from_torchs_generator() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, dropout=0.5)

    function, leaves = compiled(call, fullgraph=False), inputs()

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


def test_observe_in_a_compiled_call_gives_the_same_statistics() -> None:
    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = regard.observe(q, k, v, mask=regard.causal())
        return seen.output + seen.entropy[..., None] + seen.lse[..., None]

    agree(compiled(look, fullgraph=False), look, inputs())


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
