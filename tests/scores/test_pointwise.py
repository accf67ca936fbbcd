"""Pointwise: any function of one score and its indices, by torch's own rules, with every derivative."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard.errors import ArgumentError, DtypeError, ShapeError
from regard.scores import Additive, Pointwise, Scaled
from regard.scores.lowering import LOWERED

torch.manual_seed(0)
SLOPES, TABLE, IDS, FLAGS = torch.rand(4), torch.randn(4, 33), torch.arange(40) // 7, torch.arange(40) % 3 > 0
BUCKETS = torch.arange(80).float().sqrt().long()
Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "a table of distances": lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-16, 16) + 16],
    "rows of a table": lambda s, b, h, i, j: s + TABLE[h][(i - j).clamp(-16, 16) + 16],
    "a negative index": lambda s, b, h, i, j: s * TABLE[h, -1 - (i % 4)],
    "a table of buckets": lambda s, b, h, i, j: s + TABLE[h, BUCKETS[(i - j).abs()]],
    "softcap": lambda s, b, h, i, j: 5 * torch.tanh(s / 5),
    "a condition": lambda s, b, h, i, j: torch.where((IDS[i] == IDS[j]) | FLAGS[j], s, float("-inf")),
    "in place": lambda s, b, h, i, j: s.mul_(2.0).add_(h) * (i % 3 == 0),
    "a number": lambda s, b, h, i, j: torch.where(i // 2 == j // 2, s, torch.tensor(-1.0, device=s.device)),
    "no score": lambda s, b, h, i, j: -((i - j).float() ** 2) / 9 + b,
    "many": lambda s, b, h, i, j: (
        torch.sigmoid(s) + torch.log1p(s.abs()) * torch.cos(s) - torch.exp2(-s.clamp(-1, 1)) + torch.maximum(s, i / 9)
    ),
    "rounded": lambda s, b, h, i, j: s + (i - j) // 3 - (j - i) % 4 + torch.round(s * 2) + torch.floor(s),
    "named": lambda s, b, h, i, j: (
        nn.functional.gelu(s) + nn.functional.softplus(s) + s**3 / 9 + torch.erf(s) + 2.0**-s
    ),
    "powers": lambda s, b, h, i, j: s.abs() ** 1.7 + (1.0 + h) ** (j / 64) - (s.sign() - 2) ** (h * 1.0) / 9,
    "filled": lambda s, b, h, i, j: (
        torch.where(i >= j, s, torch.full_like(s, -torch.inf)) * torch.ones_like(i) + torch.zeros_like(s)
    ),
    "truths": lambda s, b, h, i, j: s + ((i > j) + (j > 3)) - ~((i > j) * (j > 3)) * 2,
    "buckets by logarithm": lambda s, b, h, i, j: (
        s - torch.floor(torch.log2(1.0 + (i - j).abs())) + torch.floor(torch.log10(1.0 + i * j))
    ),
    "exact powers": lambda s, b, h, i, j: torch.where(2.0 ** (13 + i // 9) == 8192 * (1 + i // 9), s, 9.0),
}


GALLERY = Path(__file__).parents[2] / "docs" / "gallery.md"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_means_the_function_on_all_pairs(name: str) -> None:
    query, key, value = torch.randn(3, 2, 4, 40, 8).unbind()
    f = FUNCTIONS["a table of distances" if name == "rows of a table" else name]  # which broadcasts
    i = torch.arange(40)
    logits = f(Scaled()(query, key), i[:2, None, None, None], i[:4, None, None], i[:, None], i)
    true = logits.expand(2, 4, 40, 40).softmax(-1) @ value
    for backend in ("reference", regard.backends.Chunked(chunk_size=16)):
        ours = regard.attention(query, key, value, score=Pointwise(FUNCTIONS[name]), backend=backend)
        torch.testing.assert_close(ours, true, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["powers", "exact powers"])
def test_powers_have_the_derivatives_of_torch(name: str) -> None:
    query, key = (torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(Pointwise(FUNCTIONS[name]), (query, key), fast_mode=True)
    assert gradgradcheck(Pointwise(FUNCTIONS[name]), (query, key), fast_mode=True)


def test_powers_of_nothing_and_to_nothing_have_the_slopes_of_torch() -> None:
    """Where the other factor of the formula is infinite, or a logarithm of 0."""
    query, key = (torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h, i, j = (
        x.view(shape) for x, shape in ((torch.arange(3), (3, 1, 1)), (torch.arange(4), (4, 1)), (torch.arange(4), (4,)))
    )

    def power(s: Tensor, b: Any, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.relu(s) ** (h * 1.0) + (i - j).abs() ** torch.relu(s)

    ours = Pointwise(power)(query, key)
    true = power(Scaled()(query, key), 0, h, i, j)
    torch.testing.assert_close(ours, true)
    slopes = (torch.autograd.grad(x.sum(), (query, key)) for x in (ours, true))
    torch.testing.assert_close(next(slopes), next(slopes))


def test_the_guide_lists_every_operation() -> None:
    """By the names under which people call them; what torch makes of operators such as + is not listed."""
    text = (GALLERY.parent / "guide" / "scores.md").read_text()
    listed = set(re.findall(r"\w+", text.partition("**Operations.**")[2].partition("\n\n")[0]))
    hidden = {"rsub", "_to_copy", "alias", "lift_fresh", "sgn"}
    named = {name for name in LOWERED if not name.startswith("__")} - hidden
    assert named <= listed, f"not in the guide: {sorted(named - listed)}"


def test_the_functions_of_the_gallery_give_what_flex_attention_gives() -> None:
    """Its code, up to the figure; on a CPU FlexAttention runs eagerly."""
    (block,) = [
        b for b in re.findall(r"```python[^\n]*\n(.*?)```", GALLERY.read_text(), re.DOTALL) if "Pointwise(" in b
    ]
    names: dict[str, Any] = {"torch": torch, "regard": regard}
    exec(block.partition("figure =")[0], names)
    query, key, value = names["q"], names["k"], names["v"]
    assert {"ALiBi", "softcap", "relative bias", "Transformer-XL", "dilated window", "NATTEN"} <= set(names["drawn"])
    for options in names["drawn"].values():
        score, mask = options.get("score"), options["mask"]
        allows = mask.f if hasattr(mask, "f") else lambda b, h, i, j: i >= j
        blocks = create_block_mask(allows, None, None, 48, 48, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = flex_attention(query, key, value, score_mod=None if score is None else score.f, block_mask=blocks)
        torch.testing.assert_close(regard.attention(query, key, value, **options), theirs, atol=1e-5, rtol=1e-5)


def f(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
    """Its slope is NaN above the diagonal, where the mask hides."""
    return s * torch.sigmoid(table.exp()[h, i - j + 4]) * torch.log1p((i - j).to(s.dtype)) - slopes[h] * s * s + b


@pytest.mark.parametrize("backend", ["reference", regard.backends.Chunked(chunk_size=2)], ids=["reference", "chunked"])
def test_every_derivative_is_exact_also_that_of_captured_tensors(backend: Any) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, h, 2, 1, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    options = {"mask": regard.causal(), "softcap": 3.0, "backend": backend}

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        score = Pointwise(lambda s, b, h, i, j: f(s, b, h, i, j, *given[3:]))
        seen = regard.observe(*given[:3], score=score, **options)
        return seen.output, seen.lse, seen.entropy

    inputs = (query, key, value, slopes, table)
    assert gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)

    score = Pointwise(f, parameters={"slopes": nn.Parameter(slopes.detach()), "table": table})
    assert [name for name, _ in score.named_parameters()] == ["slopes"]
    output = regard.attention(query, key, value, score=score, **options)
    found = torch.autograd.grad(output.sin().sum(), (score.slopes, table))
    true = torch.autograd.grad(call(*inputs)[0].sin().sum(), (slopes, table))
    assert all(torch.equal(a, b) for a, b in zip(found, true, strict=True))

    def one(t: Tensor) -> Tensor:
        return call(*(x.detach() for x in inputs[:4]), t)[0].sin().sum()

    tables = torch.stack([table.detach(), -table.detach()])
    batched = torch.func.vmap(torch.func.grad(one))(tables)
    torch.testing.assert_close(batched, torch.stack([torch.func.grad(one)(t) for t in tables]))


def test_a_batch_index_is_the_same_under_vmap() -> None:
    query = torch.randn(3, 2, 2, 5, 4)

    def call(q: Tensor) -> Tensor:
        score = Pointwise(lambda s, b, h, i, j: s * (b + 1))
        return regard.attention(q, q, q, score=score, backend="chunked")

    torch.testing.assert_close(torch.vmap(call)(query), torch.stack([call(q) for q in query]))


def test_the_base_may_be_any_score_and_minus_infinity_hides() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4).unbind()
    causal = Pointwise(lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), base=Additive(4, 4, 3))
    seen = regard.observe(query, key, value, score=causal)
    true = regard.observe(query, key, value, score=causal.base, mask=regard.causal())
    torch.testing.assert_close(seen.output, true.output)
    torch.testing.assert_close(seen.entropy, true.entropy)
    assert torch.equal(seen.visible, true.visible)
    twin = copy.deepcopy(causal)
    assert torch.equal(twin(query, key), causal(query, key))
    with pytest.raises(ArgumentError, match="base is a Pointwise itself"):
        Pointwise(lambda s, b, h, i, j: s, base=causal)


def test_a_captured_number_may_change_and_a_captured_tensor_may_be_another() -> None:
    query = torch.randn(1, 1, 3, 4)
    number, table, state = 2.0, torch.zeros(1), {"number": 1.0}

    def known(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * number + table[h]

    def unknown(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * state["number"]

    score, other, plain = Pointwise(known), Pointwise(unknown), Scaled()(query, query)
    torch.testing.assert_close(score(query, query), plain * 2)
    assert score.traced(torch.float32) is score.traced(torch.float32)
    torch.testing.assert_close(other(query, query), plain)
    number = 3.0
    torch.testing.assert_close(score(query, query), plain * 3)
    table = torch.ones(1)
    torch.testing.assert_close(score(query, query), plain * 3 + 1)
    table.add_(1.0)
    torch.testing.assert_close(score(query, query), plain * 3 + 2)
    state["number"] = 5.0
    torch.testing.assert_close(other(query, query), plain * 5)


def test_gradients_of_tables_have_the_same_bits_every_time() -> None:
    query = torch.randn(1, 2, 300, 8)
    table = torch.randn(7, requires_grad=True)
    score = Pointwise(lambda s, b, h, i, j: s + table[(i - j) % 7])
    found = [
        torch.autograd.grad(regard.attention(query, query, query, score=score, backend="chunked").square().sum(), table)
        for _ in range(3)
    ]
    assert all(torch.equal(found[0][0], x[0]) for x in found)


def test_a_tensor_of_whole_numbers_must_not_change_before_the_backward_pass() -> None:
    query, ids = torch.randn(1, 1, 4, 4, requires_grad=True), torch.arange(4)
    score = Pointwise(lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, s * 2))
    output = regard.attention(query, query, query, score=score, backend="chunked")
    ids.add_(1)
    with pytest.raises(regard.errors.ChangedError, match="of the mask or the score was changed"):
        output.sum().backward()


WRONG: dict[str, tuple[Function, type[Exception], str]] = {
    "if": (lambda s, b, h, i, j: s if i > j else -s, ArgumentError, "asks for the value of a tensor.*torch.where"),
    "item": (lambda s, b, h, i, j: s * SLOPES[0].item(), ArgumentError, "asks for the value of a tensor"),
    "a sum": (lambda s, b, h, i, j: s / s.sum(), ArgumentError, "calls sum, which it may not use"),
    "a softmax": (lambda s, b, h, i, j: s.softmax(-1), ArgumentError, "calls _softmax, which it may not use"),
    "a power of whole numbers": (lambda s, b, h, i, j: s + 2**h, ArgumentError, r"floating base, such as 2\.0 \*\* i"),
    "truths subtracted": (lambda s, b, h, i, j: s + ((i > j) - (j > 3)), ArgumentError, "of truth values"),
    "a whole tensor": (lambda s, b, h, i, j: s + SLOPES, ArgumentError, r"reads a tensor of shape \(4,\) as a whole"),
    "a truth value": (lambda s, b, h, i, j: i > j, DtypeError, "A condition is a mask: regard.predicate"),
    "nothing": (lambda s, b, h, i, j: None, DtypeError, "f must return a tensor, the new score. Got NoneType"),
    "random": (lambda s, b, h, i, j: s + torch.rand_like(s), ArgumentError, "draws random numbers"),
    "a shape": (lambda s, b, h, i, j: s * s.shape[-1], ArgumentError, "on single numbers.*IndexError"),
    "an index by score": (lambda s, b, h, i, j: TABLE[h, s.long()], ArgumentError, "depends on the score"),
    "an assignment": (lambda s, b, h, i, j: SLOPES.add_(1)[h], ArgumentError, "changes a captured tensor in place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_elementwise_gets_one_clear_sentence(name: str) -> None:
    wrong, kind, message = WRONG[name]
    query = torch.randn(1, 4, 3, 4)
    with pytest.raises(kind, match=f"Pointwise: .*{message}"):
        regard.attention(query, query, query, score=Pointwise(wrong))


def test_a_function_may_make_tensors_in_inference_mode() -> None:
    score = Pointwise(lambda s, b, h, i, j: s + torch.tensor([0.5, 2.0])[h])
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    with torch.inference_mode():
        found = regard.attention(q, q, q, score=score)
    again = regard.attention(q, q, q, score=score)
    torch.testing.assert_close(found, again.detach())
    again.sum().backward()


def test_a_parameter_may_have_any_name_that_is_free() -> None:
    table = torch.randn(2)
    score = Pointwise(lambda s, b, h, i, j, form: s + form[h], parameters={"form": table})
    q = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(score(q, q), Scaled()(q, q) + table[:, None, None])
    with pytest.raises(ArgumentError, match="'_known' cannot be the name of a parameter"):
        Pointwise(lambda s, b, h, i, j, _known: s, parameters={"_known": table})


def test_wrong_arguments_are_refused() -> None:
    query = torch.randn(1, 5, 50, 4)
    with pytest.raises(ArgumentError, match=r"f must take f\(score, batch, head, i, j\).*got f\(s\)"):
        Pointwise(lambda s: s)
    with pytest.raises(DtypeError, match=r"f must be a function.*Got int"):
        Pointwise(3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"base must be a regard.scores Score"):
        Pointwise(f, base=3, parameters={"slopes": SLOPES, "table": TABLE})  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"parameters must be a dict, of tensors by name. Got list"):
        Pointwise(f, parameters=[SLOPES])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'f' cannot be the name of a parameter"):
        Pointwise(lambda s, b, h, i, j, f: s, parameters={"f": SLOPES})
    with pytest.raises(ShapeError, match=r"reads dimension 0 of a tensor of shape \(4,\) at 0 to 4; it has 4 entries"):
        regard.attention(query, query, query, score=Pointwise(FUNCTIONS["alibi"]))
    score = Pointwise(lambda s, b, h, i, j: s + TABLE[0, i - j])
    with pytest.raises(ShapeError, match="at -49 to 49; it has 33 entries"):
        regard.attention(query, query, query, score=score)
    with pytest.raises(ArgumentError, match="Memory: score depends on rows and keys"):
        regard.memory.Memory(4, 4, score=Pointwise(lambda s, b, h, i, j: s))


@pytest.mark.parametrize(
    "index",
    [
        lambda i: torch.where(i < 4, i, 3),
        lambda i: torch.where(i >= 4, i - 4, i),
        lambda i: i - i // 4 * 4,
        lambda i: i // 2 % 7,
    ],
)
def test_an_index_that_stays_within_its_tensor_is_not_refused(index: Callable[[Tensor], Tensor]) -> None:
    query, table, i = torch.randn(1, 2, 6, 4), torch.randn(4), torch.arange(6)
    found = regard.observe(query, query, query, score=Pointwise(lambda s, b, h, i, j: s + table[index(i)])).scores()
    torch.testing.assert_close(found, query @ query.mT / 2 + table[index(i)][:, None])


def test_under_torch_compile_the_call_leaves_the_graph() -> None:
    query, table = torch.randn(1, 2, 6, 4), torch.rand(2, requires_grad=True)

    def call(q: Tensor) -> Tensor:
        score = Pointwise(lambda s, b, h, i, j: s - table[h] * (i - j).abs())
        return regard.attention(q * 2, q, q, score=score).sin()

    torch.compiler.reset()
    found = torch.compile(call, backend="eager")(query)
    torch.testing.assert_close(found, call(query))
    (g,), (t,) = (torch.autograd.grad(y.sum(), table) for y in (found, call(query)))
    torch.testing.assert_close(g, t)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attention: a score with a function.*Leave out fullgraph"):
        torch.compile(call, backend="eager", fullgraph=True)(query)


def test_a_table_that_became_too_short_is_refused_although_it_did_fit() -> None:
    x, tables = torch.zeros(1, 2, 6, 4), [torch.zeros(6)]
    read = Pointwise(lambda score, b, h, i, j: score + tables[0][j])
    given = Pointwise(lambda score, b, h, i, j, table: score + table[j], parameters={"table": torch.zeros(6)})
    for score in (read, given):
        regard.attention(x, x, x, score=score)
        with pytest.raises(ShapeError, match="it has 6 entries"):
            regard.attention(torch.zeros(1, 2, 7, 4), *(torch.zeros(1, 2, 7, 4) for _ in range(2)), score=score)
    tables[0] = given.table = torch.zeros(5)
    for score in (read, given):
        with pytest.raises(ShapeError, match="it has 5 entries"):
            regard.attention(x, x, x, score=score)


def test_tensors_of_a_subclass_are_known() -> None:
    class Own(Pointwise):
        def __init__(self) -> None:
            super().__init__(lambda score, b, h, i, j: score)
            self.gain = torch.nn.Parameter(torch.ones(2))

    own = Own()
    assert [x is own.gain for x in own.tensors] == [True]
    assert Pointwise(lambda score, b, h, i, j: score).tensors == ()


@pytest.mark.parametrize("name", ["token", "last_token", "c"])
def test_a_parameter_may_have_any_name_that_is_not_taken(name: str) -> None:
    score = Pointwise(lambda score, b, h, i, j, **given: score + given[name], parameters={name: torch.ones(())})
    assert torch.equal(score(torch.zeros(2, 4), torch.zeros(2, 4)), torch.ones(2, 2))
