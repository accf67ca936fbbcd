"""regard.nn.MultiheadAttention against torch.nn.MultiheadAttention: values, weights, masks and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import MultiheadAttention

N, L, S, E, H = 3, 5, 7, 12, 4
INF = float("inf")

Masks = dict[str, Tensor]


def random_hidden(*shape: int) -> Tensor:
    """Random bools, True where hidden; no row hides everything."""
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return hidden


def additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -INF)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


MASKS: dict[str, Callable[[], Masks]] = {
    "none": dict,
    "bool attn (L, S)": lambda: {"attn_mask": random_hidden(L, S)},
    "bool attn (N·H, L, S)": lambda: {"attn_mask": random_hidden(N * H, L, S)},
    "float attn (L, S)": lambda: {"attn_mask": numbers(L, S)},
    "float attn (N·H, L, S)": lambda: {"attn_mask": numbers(N * H, L, S)},
    "-inf attn (L, S)": lambda: {"attn_mask": additive(random_hidden(L, S))},
    "bool padding": lambda: {"key_padding_mask": random_hidden(N, S)},
    "float padding": lambda: {"key_padding_mask": numbers(N, S)},
    "-inf padding": lambda: {"key_padding_mask": additive(random_hidden(N, S))},
    "bool attn, bool padding": lambda: {
        "attn_mask": random_hidden(N * H, L, S),
        "key_padding_mask": random_hidden(N, S),
    },
    "float attn, float padding": lambda: {"attn_mask": numbers(L, S), "key_padding_mask": numbers(N, S)},
    "float attn, bool padding": lambda: {"attn_mask": numbers(N * H, L, S), "key_padding_mask": random_hidden(N, S)},
    "bool attn, -inf padding": lambda: {
        "attn_mask": random_hidden(L, S),
        "key_padding_mask": additive(random_hidden(N, S)),
    },
}

every_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())


def pair(**arguments: object) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dtype=torch.float64, **arguments)  # type: ignore[arg-type]
    ours = MultiheadAttention(E, H, dtype=torch.float64, **arguments)  # type: ignore[arg-type]
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(ours: MultiheadAttention, batched: bool = True) -> list[Tensor]:
    shapes = [(length, N, dim) for length, dim in ((L, E), (S, ours.kdim), (S, ours.vdim))]
    found = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if not batched:
        found = [x[:, 0] for x in found]
    elif ours.batch_first:
        found = [x.transpose(0, 1).contiguous() for x in found]
    return [x.requires_grad_() for x in found]


def assert_same(
    theirs: nn.MultiheadAttention, ours: MultiheadAttention, given: list[Tensor], **arguments: object
) -> None:
    """Compare outputs, weights, and gradients of inputs and parameters."""
    found = []
    for module in (theirs, ours):
        leaves = [*given, *(p for _, p in sorted(module.named_parameters()))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about masks of two dtypes
            output, weights = module(*given, **arguments)
        torch.manual_seed(1)
        loss = (output * torch.randn(output.shape, dtype=output.dtype)).sum()
        if weights is not None:
            loss = loss + (weights * torch.randn(weights.shape, dtype=weights.dtype)).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        found.append((output, weights, *(torch.zeros(()) if g is None else g for g in gradients)))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a.to(b.dtype), rtol=1e-9, atol=1e-11)


@every_mask
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("extra", [False, True], ids=["", "extra keys"])
def test_masks_mean_what_they_mean_in_torch(masks: Callable[[], Masks], need_weights: bool, extra: bool) -> None:
    theirs, ours = pair(batch_first=True, add_bias_kv=extra, add_zero_attn=extra)
    assert_same(theirs, ours, inputs(ours), need_weights=need_weights, **masks())


CONSTRUCTORS = [
    dict(zip(("batch_first", "bias", "add_bias_kv", "add_zero_attn"), flags, strict=True)) | dims
    for flags in product([False, True], repeat=4)
    for dims in ({}, {"kdim": 6, "vdim": 10})
]


@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=str)
def test_every_argument_of_the_constructor_means_the_same(arguments: dict[str, object]) -> None:
    theirs, ours = pair(**arguments)
    masks = {"attn_mask": random_hidden(N * H, L, S), "key_padding_mask": random_hidden(N, S)}
    for need_weights, average in ((True, True), (True, False), (False, True)):
        flags = {"need_weights": need_weights, "average_attn_weights": average}
        assert_same(theirs, ours, inputs(ours), **masks, **flags)


@pytest.mark.parametrize("arguments", CONSTRUCTORS[::3], ids=str)
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_inputs_without_a_batch_give_results_without_one(arguments: dict[str, object], need_weights: bool) -> None:
    theirs, ours = pair(**arguments)
    for masks in (
        {},
        {"attn_mask": random_hidden(L, S), "key_padding_mask": random_hidden(S)},
        {"attn_mask": numbers(H, L, S), "key_padding_mask": numbers(S)},
    ):
        for average in (True, False):
            flags = {"need_weights": need_weights, "average_attn_weights": average}
            assert_same(theirs, ours, inputs(ours, batched=False), **masks, **flags)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["self", "one memory"])
def test_one_tensor_as_query_key_and_value(batch_first: bool, kind: str) -> None:
    theirs, ours = pair(batch_first=batch_first)
    query, memory, _ = inputs(ours)
    given = [query] * 3 if kind == "self" else [query, memory, memory]
    assert_same(theirs, ours, given)
    assert_same(theirs, ours, given, need_weights=False)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_the_causal_hint_beside_a_causal_mask(padded: bool, need_weights: bool, dtype: torch.dtype) -> None:
    theirs, ours = pair()
    x = inputs(ours)[0]
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    masks = {"attn_mask": hidden if dtype == torch.bool else additive(hidden)}
    if padded:
        masks["key_padding_mask"] = torch.arange(L) >= torch.tensor([[L], [3], [1]])
    assert_same(theirs, ours, [x, x, x], is_causal=True, need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_is_causal_alone_is_the_causal_mask(need_weights: bool) -> None:
    _, ours = pair(add_zero_attn=True)
    x = inputs(ours)[0]
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    for got, want in zip(
        ours(x, x, x, is_causal=True, need_weights=need_weights),
        ours(x, x, x, attn_mask=hidden, need_weights=need_weights),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_an_additive_mask_gets_its_gradient() -> None:
    theirs, ours = pair()
    given, attn = inputs(ours), numbers(N * H, L, S).requires_grad_()
    padding = numbers(N, S).requires_grad_()
    for need_weights in (True, False):
        grads = []
        for module in (theirs, ours):
            output, _ = module(*given, padding, need_weights, attn)
            grads.append(torch.autograd.grad(output.square().sum(), [attn, padding]))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("arguments", [{}, {"kdim": 6, "vdim": 10, "add_bias_kv": True}, {"bias": False}], ids=str)
def test_state_dicts_go_both_ways_and_one_seed_draws_the_same(arguments: dict[str, object]) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, **arguments)  # type: ignore[arg-type]
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, **arguments)  # type: ignore[arg-type]
    drawn, made = theirs.state_dict(), ours.state_dict()
    assert list(drawn) == list(made)
    assert all(torch.equal(drawn[name], made[name]) for name in drawn)
    theirs.load_state_dict(MultiheadAttention(E, H, **arguments).state_dict())  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("masks", ["attn_mask", "key_padding_mask", "mask"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_a_row_that_sees_nothing_gives_heads_of_zeros_and_no_nan(masks: str, need_weights: bool) -> None:
    _, ours = pair(batch_first=True)
    given = inputs(ours)
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[2] = True
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1] = True
    choice = {"attn_mask": hidden, "key_padding_mask": padding, "mask": regard.dense(~hidden)}[masks]
    output, weights = ours(*given, need_weights=need_weights, **{masks: choice})
    rows = output[1] if masks == "key_padding_mask" else output[:, 2]
    torch.testing.assert_close(rows, ours.out_proj.bias.expand_as(rows))
    if weights is not None:
        assert not (weights[1] if masks == "key_padding_mask" else weights[:, 2]).any()
    for gradient in torch.autograd.grad(output.square().sum(), [*given, *ours.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_every_row_sees_the_extra_keys_with_and_without_the_causal_hint(extra: str) -> None:
    theirs = torch.nn.MultiheadAttention(8, 2, **{extra: True})
    ours = regard.nn.MultiheadAttention(8, 2, **{extra: True})
    ours.load_state_dict(theirs.state_dict())
    x, later = torch.randn(5, 1, 8), torch.ones(5, 5).triu(1).bool()
    shown, weights = theirs(x, x, x, attn_mask=later)  # with weights, torch shows them as well
    assert weights[..., -1].min() > 0
    for options in ({"attn_mask": later}, {"attn_mask": later, "is_causal": True}, {"is_causal": True}):
        torch.testing.assert_close(ours(x, x, x, need_weights=False, **options)[0], shown)
    hidden = theirs(x, x, x, attn_mask=later, is_causal=True, need_weights=False)[0]
    assert not torch.allclose(hidden, shown)  # its kernel aligns starts, and so hides the extra keys


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_in_evaluation_results_are_those_of_torchs_fast_path(dtype: torch.dtype, batch_first: bool) -> None:
    theirs, ours = (module.to(dtype).eval() for module in pair(batch_first=batch_first))
    x = torch.randn(*((N, S) if batch_first else (S, N)), E).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    flags = [{"need_weights": False}, {}, {"average_attn_weights": False}]
    masks: list[Masks] = [
        {},
        {"key_padding_mask": random_hidden(N, S)},
        {"attn_mask": random_hidden(S, S)},
        {"attn_mask": random_hidden(N * H, S, S)},
        {"attn_mask": random_hidden(S, S), "key_padding_mask": random_hidden(N, S)},
        {"attn_mask": random_hidden(N * H, S, S), "key_padding_mask": random_hidden(N, S)},
    ]
    for flag, mask in product(flags, masks):
        with torch.no_grad():
            found = [module(x, x, x, **flag, **mask) for module in (theirs, ours)]
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


WRONG: dict[str, dict[str, object]] = {
    "a batch beside none": {"query": torch.zeros(L, E)},
    "four dimensions": {name: torch.zeros(1, L, N, E) for name in ("query", "key", "value")},
    "padding of another length": {"key_padding_mask": random_hidden(N, S - 1)},
    "padding of another batch": {"key_padding_mask": random_hidden(N + 1, S)},
    "a mask of another length": {"attn_mask": random_hidden(L, S - 1)},
    "a mask without heads": {"attn_mask": random_hidden(N, L, S)},
    "a mask of one row": {"attn_mask": random_hidden(1, S)},
    "a mask of four dimensions": {"attn_mask": random_hidden(N, H, L, S)},
    "a mask of integers": {"attn_mask": random_hidden(L, S).int()},
    "padding of integers": {"key_padding_mask": random_hidden(N, S).int()},
    "values of another length": {"value": torch.zeros(S - 1, N, E)},
    "another batch": {"query": torch.zeros(L, N - 1, E)},
    "another dim": {"query": torch.zeros(L, N, E - 4)},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_refused(name: str) -> None:
    given = {"query": torch.zeros(L, N, E), "key": torch.zeros(S, N, E), "value": torch.zeros(S, N, E), **WRONG[name]}
    with pytest.raises((AssertionError, RuntimeError)):
        nn.MultiheadAttention(E, H)(**given)
    with pytest.raises(regard.errors.RegardError, match=r"^MultiheadAttention: "):
        MultiheadAttention(E, H)(**given)


def test_the_differences_that_the_documentation_lists() -> None:
    theirs, ours = (module.float().eval() for module in pair(add_zero_attn=True))
    x, causal = torch.randn(L, N, E), torch.ones(L, L, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True)
    hinted = {"attn_mask": causal, "is_causal": True, "need_weights": False}
    shown = ours(x, x, x, attn_mask=causal)[0]
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], shown)
    torch.testing.assert_close(ours(x, x, x, **hinted)[0], shown)
    torch.testing.assert_close(theirs(x, x, x, attn_mask=causal)[0], shown)
    assert not torch.allclose(theirs(x, x, x, **hinted)[0], shown)  # the hint hides the appended key in torch
    theirs, ours = (module.float().eval() for module in pair())
    assert theirs(x, x, x, attn_mask=torch.ones_like(causal))[0].isnan().all()
    torch.testing.assert_close(ours(x, x, x, attn_mask=torch.ones_like(causal))[0], ours.out_proj.bias.expand_as(x))
