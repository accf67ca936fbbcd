"""Every wrong argument gets one error of regard, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

import regard
from regard import errors
from regard.errors import (
    ArgumentError,
    BackendError,
    ChangedError,
    DeviceError,
    DistributedError,
    DtypeError,
    FileError,
    MaskError,
    MissingPackageError,
    RegardError,
    ShapeError,
)

BUILTIN = {
    ShapeError: ValueError,
    ArgumentError: ValueError,
    MaskError: ValueError,
    DeviceError: ValueError,
    DistributedError: RuntimeError,
    DtypeError: TypeError,
    BackendError: RuntimeError,
    ChangedError: RuntimeError,
    MissingPackageError: RuntimeError,
    FileError: OSError,
}


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


QKV = (x(2, 4, 5, 8), x(2, 4, 7, 8), x(2, 4, 7, 6))


class Coded(Tensor):
    """A tensor whose values stand for something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrong(NamedTuple):
    error: type[RegardError]
    says: tuple[str, ...]  # parts of the message: what it got, the rule, the remedy
    tensors: tuple[Any, ...] = QKV
    arguments: dict[str, Any] = {}  # noqa: RUF012


TENSORS = {
    "query is no tensor": Wrong(DtypeError, ("query", "Tensor", "list", "convert"), ([[1.0]], *QKV[1:])),
    "key is an array": Wrong(DtypeError, ("key", "ndarray"), (QKV[0], np.zeros((2, 4, 7, 8)), QKV[2])),
    "value is missing": Wrong(DtypeError, ("value", "NoneType"), (*QKV[:2], None)),
    "one dimension": Wrong(ShapeError, ("rank", "(8,)"), (x(8), x(8), x(8))),
    "no dimension": Wrong(ShapeError, ("rank", "()"), (x(), x(), x())),
    "ranks differ": Wrong(ShapeError, ("rank", "(5, 8)", "(2, 7, 8)"), (x(5, 8), x(2, 7, 8), x(2, 7, 8))),
    "query heads no multiple": Wrong(
        ShapeError,
        ("query has 4 heads and key has 3", "multiple", "(2, 4, 5, 8)"),
        (QKV[0], x(2, 3, 7, 8), x(2, 3, 7, 8)),
    ),
    "fewer query heads": Wrong(
        ShapeError, ("query has 2 heads and key has 4", "multiple"), (x(2, 2, 5, 8), x(2, 4, 7, 8), x(2, 4, 7, 8))
    ),
    "no key heads": Wrong(ShapeError, ("4 heads", "0"), (x(2, 4, 5, 8), x(2, 0, 7, 8), x(2, 0, 7, 8))),
    "heads of key and value": Wrong(ShapeError, ("heads", "4", "2"), (*QKV[:2], x(2, 2, 7, 6))),
    "dims": Wrong(ShapeError, ("same dim", "8 and 9", "Bilinear(8, 9)"), (QKV[0], x(2, 4, 7, 9), QKV[2])),
    "lengths": Wrong(ShapeError, ("same length", "7 keys and 9 values"), (*QKV[:2], x(2, 4, 9, 6))),
    "batches": Wrong(ShapeError, ("broadcast", "(3, 4, 7, 8)"), (QKV[0], x(3, 4, 7, 8), x(3, 4, 7, 6))),
    "batches of 5-D": Wrong(ShapeError, ("broadcast",), (x(2, 3, 1, 5, 8), x(2, 4, 1, 5, 8), x(2, 4, 1, 5, 8))),
    "integers": Wrong(DtypeError, ("int64", "float"), tuple(t.long() for t in QKV)),
    "booleans": Wrong(DtypeError, ("bool", "float"), tuple(t.bool() for t in QKV)),
    "complex": Wrong(DtypeError, ("complex64",), tuple(t.to(torch.complex64) for t in QKV)),
    "mixed floats": Wrong(DtypeError, ("one dtype", "float32", "float64", ".to("), (QKV[0], QKV[1].double(), QKV[2])),
    "mixed value": Wrong(DtypeError, ("one dtype", "value bfloat16"), (*QKV[:2], QKV[2].bfloat16())),
    "key elsewhere": Wrong(DeviceError, ("one device", "key on meta", ".to("), (QKV[0], QKV[1].to("meta"), QKV[2])),
    "value elsewhere": Wrong(DeviceError, ("one device", "value on meta"), (*QKV[:2], QKV[2].to("meta"))),
}

MASKS = {
    "mask shape": Wrong(MaskError, ("broadcast to (2, 4, 5, 7)", "(5, 6)"), arguments={"mask": x(5, 6).bool()}),
    "mask for another batch": Wrong(MaskError, ("broadcast", "(3, 1, 5, 7)"), arguments={"mask": x(3, 1, 5, 7).bool()}),
    "mask with a rank too many": Wrong(MaskError, ("broadcast",), arguments={"mask": x(1, 2, 4, 5, 7).bool()}),
    "additive mask": Wrong(
        MaskError,
        ("0 and 1", "an additive mask as bias=", "a selecting one as mask != 0"),
        arguments={"mask": x(5, 7).masked_fill(torch.eye(5, 7).bool(), -torch.inf)},
    ),
    "additive mask of finite numbers": Wrong(MaskError, ("bias=",), arguments={"mask": torch.randn(5, 7)}),
    "float mask with NaN": Wrong(MaskError, ("bias=",), arguments={"mask": torch.full((5, 7), torch.nan)}),
    "float mask of zeros": Wrong(MaskError, ("zeros", "bias="), arguments={"mask": x(5, 7)}),
    "a subclass with a meaning of its own": Wrong(
        DtypeError, ("mask", "Coded", "convert"), arguments={"mask": Coded(5, 7)}
    ),
    "a part of a CausalBias": Wrong(DtypeError, ("CausalBias",), arguments={"mask": causal_upper_left(5, 7)[0]}),
    "a CausalBias of another length": Wrong(
        MaskError, ("5 queries and 7 keys", "CausalBias is for 7 rows"), arguments={"mask": causal_upper_left(7, 7)}
    ),
    "a sparse mask": Wrong(DtypeError, ("sparse_coo", "to_dense"), arguments={"mask": torch.eye(5, 7).to_sparse()}),
    "complex mask": Wrong(DtypeError, ("complex64",), arguments={"mask": x(5, 7).to(torch.complex64)}),
    "mask of another type": Wrong(DtypeError, ("Mask", "list"), arguments={"mask": [[True]]}),
    "mask as a word": Wrong(DtypeError, ("Mask", "str"), arguments={"mask": "causal"}),
    "mask as the factory": Wrong(DtypeError, ("Mask", "function", "causal(…)"), arguments={"mask": regard.causal}),
    "mask as a function": Wrong(
        DtypeError, ("Mask", "function", "regard.predicate(f)"), arguments={"mask": lambda b, h, i, j: i >= j}
    ),
    "mask elsewhere": Wrong(DeviceError, ("mask on meta", ".to("), arguments={"mask": x(5, 7, device="meta").bool()}),
    "padding for another batch": Wrong(
        MaskError, ("3 batch items", "2"), arguments={"mask": regard.padding([1, 2, 3])}
    ),
    "keep of another length": Wrong(
        MaskError, ("5 queries and 7 keys",), arguments={"mask": regard.padding(x(2, 9).bool())}
    ),
    "dense of another length": Wrong(
        MaskError, ("5 queries and 7 keys",), arguments={"mask": regard.dense(x(5, 9).bool())}
    ),
    "dense for other heads": Wrong(MaskError, ("3 heads",), arguments={"mask": regard.dense(x(3, 5, 7).bool())}),
    "documents of another length": Wrong(
        MaskError, ("5 queries and 7 keys",), arguments={"mask": regard.documents([0, 1])}
    ),
    "composed misfit": Wrong(
        MaskError, ("5 queries and 7 keys",), arguments={"mask": regard.causal() & regard.padding(x(9).bool())}
    ),
}

BIASES = {
    "bias shape": Wrong(ShapeError, ("broadcast to (2, 4, 5, 7)", "(7, 5)"), arguments={"bias": x(7, 5)}),
    "bias of whole numbers": Wrong(DtypeError, ("floating", "int64"), arguments={"bias": x(5, 7).long()}),
    "bias that selects": Wrong(DtypeError, ("bool", "mask="), arguments={"bias": x(5, 7).bool()}),
    "a bias with a meaning of its own": Wrong(DtypeError, ("bias", "Coded"), arguments={"bias": Coded(5, 7)}),
    "bias of another type": Wrong(DtypeError, ("bias", "float"), arguments={"bias": 1.0}),
    "bias elsewhere": Wrong(DeviceError, ("bias on meta",), arguments={"bias": x(5, 7, device="meta")}),
    "alibi for other heads": Wrong(
        ShapeError, ("3 heads", "4"), arguments={"bias": regard.biases.alibi(torch.ones(3))}
    ),
    "alibi elsewhere": Wrong(
        DeviceError, ("bias on meta",), arguments={"bias": regard.biases.alibi(x(4, device="meta"))}
    ),
    "relative for other heads": Wrong(
        ShapeError, ("3 heads",), arguments={"bias": regard.biases.relative(torch.ones(3, 5))}
    ),
}

NUMBERS = {
    "scale and score": Wrong(
        ArgumentError, ("exclude", "Cosine", "leave one out"), arguments={"scale": 1.0, "score": regard.scores.Cosine()}
    ),
    "scale shape": Wrong(ShapeError, ("(4,)", "(3,)"), arguments={"scale": torch.ones(3)}),
    "scale per item": Wrong(ShapeError, ("one per head", "(2, 4, 1, 1)"), arguments={"scale": torch.ones(2, 4, 1, 1)}),
    "scale of whole numbers": Wrong(DtypeError, ("floating", "int64"), arguments={"scale": torch.ones(4).long()}),
    "scale elsewhere": Wrong(DeviceError, ("scale on meta",), arguments={"scale": x(4, device="meta")}),
    "scale is NaN": Wrong(ArgumentError, ("finite", "nan"), arguments={"scale": float("nan")}),
    "scale is infinite": Wrong(ArgumentError, ("finite", "inf"), arguments={"scale": float("inf")}),
    "scale is a word": Wrong(ArgumentError, ("number", "'1'"), arguments={"scale": "1"}),
    "scale is a truth": Wrong(ArgumentError, ("number", "True"), arguments={"scale": True}),
    "softcap of 0": Wrong(ArgumentError, ("above 0", "0.0"), arguments={"softcap": 0.0}),
    "softcap below 0": Wrong(ArgumentError, ("above 0", "-3"), arguments={"softcap": -3}),
    "softcap is NaN": Wrong(ArgumentError, ("above 0", "nan"), arguments={"softcap": float("nan")}),
    "softcap is infinite": Wrong(ArgumentError, ("None for no cap", "inf"), arguments={"softcap": float("inf")}),
    "softcap is a word": Wrong(ArgumentError, ("number", "'a'"), arguments={"softcap": "a"}),
    "softcap is a tensor": Wrong(ArgumentError, ("number",), arguments={"softcap": torch.ones(2)}),
    "sink shape": Wrong(ShapeError, ("one value per head", "(4,)", "(5,)"), arguments={"sink": torch.ones(5)}),
    "sink with too many dimensions": Wrong(ShapeError, ("(4, 1)",), arguments={"sink": torch.ones(4, 1)}),
    "sink of whole numbers": Wrong(DtypeError, ("floating", "int64"), arguments={"sink": torch.ones(4).long()}),
    "sink is a number": Wrong(DtypeError, ("tensor", "float"), arguments={"sink": 0.5}),
    "sink elsewhere": Wrong(DeviceError, ("sink on meta",), arguments={"sink": x(4, device="meta")}),
    "dropout of 1": Wrong(ArgumentError, ("0 ≤ p < 1", "1.0"), arguments={"dropout": 1.0}),
    "dropout of 1, whole": Wrong(ArgumentError, ("0 ≤ p < 1", "1"), arguments={"dropout": 1}),
    "dropout below 0": Wrong(ArgumentError, ("0 ≤ p < 1", "-0.1"), arguments={"dropout": -0.1}),
    "dropout is NaN": Wrong(ArgumentError, ("0 ≤ p < 1", "nan"), arguments={"dropout": float("nan")}),
    "dropout is a truth": Wrong(ArgumentError, ("probability", "True"), arguments={"dropout": True}),
    "dropout is nothing": Wrong(ArgumentError, ("probability", "None"), arguments={"dropout": None}),
    "dropout is a tensor": Wrong(ArgumentError, ("probability",), arguments={"dropout": torch.tensor([0.1, 0.2])}),
}

SCORES = {
    "score of another type": Wrong(DtypeError, ("Score", "str"), arguments={"score": "cosine"}),
    "score as its class": Wrong(DtypeError, ("Score",), arguments={"score": regard.scores.Cosine}),
    "score as a function": Wrong(
        DtypeError, ("Score", "function", "Pointwise(f)"), arguments={"score": lambda s, b, h, i, j: s}
    ),
    "score of other dims": Wrong(ShapeError, ("8", "9"), arguments={"score": regard.scores.Bilinear(8, 9)}),
    "additive of other dims": Wrong(ShapeError, ("6", "8"), arguments={"score": regard.scores.Additive(6, 8, 3)}),
    "score for other heads": Wrong(
        ShapeError, ("3 heads", "4"), arguments={"score": regard.scores.Temperature(1.0, heads=3)}
    ),
    "score elsewhere": Wrong(
        DeviceError, ("meta", ".to("), arguments={"score": regard.scores.Bilinear(8, 8).to("meta")}
    ),
    "additive elsewhere": Wrong(
        DeviceError, ("meta",), arguments={"score": regard.scores.Additive(8, 8, 3).to("meta")}
    ),
    "cosine of different dims": Wrong(
        ShapeError, ("same dim", "Bilinear"), (QKV[0], x(2, 4, 7, 9), QKV[2]), {"score": regard.scores.Cosine()}
    ),
}

BACKENDS = {
    "unknown backend": Wrong(
        BackendError,
        ("'auto'", "'sdpa'", "'flash4'", "'triton'", "'chunked'", "'reference'", "'flash'"),
        arguments={"backend": "flash"},
    ),
    "backend of another type": Wrong(BackendError, ("backend object", "3"), arguments={"backend": 3}),
    "backend as its class": Wrong(BackendError, ("backend object",), arguments={"backend": regard.backends.Chunked}),
    "backend is nothing": Wrong(BackendError, ("'auto'", "None"), arguments={"backend": None}),
    "a backend that refuses": Wrong(
        BackendError, ("'triton' refuses", "'auto'", "regard.why"), arguments={"backend": "triton"}
    ),
    "sdpa refuses": Wrong(BackendError, ("'sdpa' refuses", "softcap"), arguments={"backend": "sdpa", "softcap": 3.0}),
    "sdpa refuses with all its reasons": Wrong(
        BackendError,
        ("softcap", "sink", "dropout"),
        arguments={"backend": "sdpa", "softcap": 3.0, "sink": torch.zeros(4), "dropout": 0.1},
    ),
}

EVERY = {**TENSORS, **MASKS, **BIASES, **NUMBERS, **SCORES, **BACKENDS}


def raised(call: Callable[[], object], wrong: Wrong, who: str) -> str:
    """The message of a call that must fail; it must leave torch's generator as it was."""
    state = torch.get_rng_state()
    with pytest.raises(RegardError) as caught:
        call()
    assert type(caught.value) is wrong.error
    assert isinstance(caught.value, BUILTIN[wrong.error])
    assert torch.equal(torch.get_rng_state(), state), "a random number was drawn before the error"
    text = str(caught.value)
    assert text.startswith(f"{who}: "), text
    for part in wrong.says:
        assert part in text, f"{part!r} is not in the message: {text}"
    return text


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.parametrize("who", ["attention", "observe"])
def test_a_wrong_argument_gets_one_error_that_says_who_and_what_and_the_remedy(who: str, case: str) -> None:
    wrong = EVERY[case]
    raised(lambda: getattr(regard, who)(*wrong.tensors, **wrong.arguments), wrong, who)


@pytest.mark.parametrize("case", {**TENSORS, **MASKS, **BIASES, **NUMBERS, **SCORES})
def test_why_checks_arguments_as_attention_does(case: str) -> None:
    wrong = EVERY[case]
    raised(lambda: regard.why(*wrong.tensors, **wrong.arguments), wrong, "why")


@pytest.mark.parametrize("case", ["unknown backend", "backend of another type", "backend is nothing"])
def test_why_refuses_an_unknown_backend_too(case: str) -> None:
    wrong = EVERY[case]
    raised(lambda: regard.why(*wrong.tensors, **wrong.arguments), wrong, "why")


@pytest.mark.parametrize("case", {**TENSORS, **MASKS})
def test_steps_and_attention_with_weights_check_arguments_as_attention_does(case: str) -> None:
    wrong = EVERY[case]
    for who in ("steps",) if case == "float mask of zeros" else ("steps", "attention_with_weights"):
        raised(lambda who=who: getattr(regard, who)(*wrong.tensors, **wrong.arguments), wrong, who)


def test_steps_refuses_a_scale_that_is_no_number() -> None:
    raised(lambda: regard.steps(*QKV, scale="1"), Wrong(ArgumentError, ("scale", "'1'")), "steps")
    with pytest.raises(RegardError, match=r"^steps: "):
        regard.steps(*QKV, scale=torch.ones(4))


def test_attention_with_weights_names_itself_about_dropout() -> None:
    wrong = Wrong(ArgumentError, ("0 ≤ p < 1", "1.5"))
    raised(lambda: regard.attention_with_weights(*QKV, dropout_p=1.5), wrong, "attention_with_weights")


SDPA = {
    "query is no tensor": Wrong(DtypeError, ("query", "list"), ([[1.0]], *QKV[1:])),
    "value is missing": Wrong(DtypeError, ("value", "NoneType"), (*QKV[:2], None)),
    "one dimension": Wrong(ShapeError, ("rank", "(8,)"), (x(8), x(8), x(8))),
    "attn_mask and is_causal": Wrong(
        ArgumentError, ("attn_mask", "is_causal"), QKV, {"attn_mask": x(5, 7).bool(), "is_causal": True}
    ),
    "heads that differ": Wrong(ShapeError, ("broadcast", "enable_gqa"), (QKV[0], x(2, 2, 7, 8), x(2, 2, 7, 8))),
    "heads no multiple": Wrong(ShapeError, ("multiple",), (QKV[0], x(2, 3, 7, 8), x(2, 3, 7, 8)), {"enable_gqa": True}),
    "dims": Wrong(ShapeError, ("same dim",), (QKV[0], x(2, 4, 7, 9), QKV[2])),
    "attn_mask shape": Wrong(MaskError, ("mask", "(5, 6)"), QKV, {"attn_mask": x(5, 6).bool()}),
    "additive attn_mask shape": Wrong(ShapeError, ("mask", "(5, 6)"), QKV, {"attn_mask": x(5, 6)}),
    "attn_mask of whole numbers": Wrong(DtypeError, ("attn_mask", "int64"), QKV, {"attn_mask": x(5, 7).long()}),
    "attn_mask is no tensor": Wrong(DtypeError, ("attn_mask", "list"), QKV, {"attn_mask": [[True]]}),
    "dropout_p": Wrong(ArgumentError, ("dropout", "0 ≤ p < 1", "-1"), QKV, {"dropout_p": -1.0}),
    "scale": Wrong(ArgumentError, ("scale", "nan"), QKV, {"scale": float("nan")}),
    "mixed floats": Wrong(DtypeError, ("one dtype", "float64"), (QKV[0], QKV[1].double(), QKV[2])),
    "integers": Wrong(DtypeError, ("int64",), tuple(t.long() for t in QKV)),
}


@pytest.mark.parametrize("case", SDPA)
def test_scaled_dot_product_attention_names_its_own_arguments(case: str) -> None:
    wrong = SDPA[case]
    call = regard.scaled_dot_product_attention
    raised(lambda: call(*wrong.tensors, **wrong.arguments), wrong, "scaled_dot_product_attention")


MEMBERS = {
    "top of 0": (ArgumentError, "top", lambda seen: seen.top(0), "0"),
    "top of a fraction": (ArgumentError, "top", lambda seen: seen.top(1.5), "1.5"),
    "top of a truth": (ArgumentError, "top", lambda seen: seen.top(True), "True"),
    "no height": (ArgumentError, "map", lambda seen: seen.map(0, 3), "height"),
    "too high": (ArgumentError, "map", lambda seen: seen.map(6, 3), "1 to 5"),
    "too wide": (ArgumentError, "map", lambda seen: seen.map(5, 8), "1 to 7"),
    "height is a fraction": (ArgumentError, "map", lambda seen: seen.map(2.0, 2), "2.0"),
    "rows of fractions": (DtypeError, "weights", lambda seen: seen.weights(rows=torch.tensor([0.5])), "rows"),
    "rows in two dimensions": (
        ShapeError,
        "weights",
        lambda seen: seen.weights(rows=torch.zeros(1, 1).long()),
        "(1, 1)",
    ),
    "rows beyond": (ArgumentError, "weights", lambda seen: seen.weights(rows=[0, 5]), "5"),
    "rows before": (ArgumentError, "weights", lambda seen: seen.weights(rows=[-6]), "-6"),
    "cols beyond": (ArgumentError, "weights", lambda seen: seen.weights(cols=[7]), "cols"),
    "rows as words": (DtypeError, "weights", lambda seen: seen.weights(rows=["a"]), "rows"),
    "a list of fractions": (DtypeError, "weights", lambda seen: seen.weights(rows=[0.5]), "rows"),
    "a truth for too few rows": (RegardError, "weights", lambda seen: seen.weights(rows=torch.tensor([True])), "rows"),
    "scores of fractions": (DtypeError, "scores", lambda seen: seen.scores(rows=torch.tensor([0.5])), "rows"),
    "scores beyond": (ArgumentError, "scores", lambda seen: seen.scores(cols=[9]), "9"),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_a_member_of_an_observation_says_what_it_cannot_show(case: str) -> None:
    error, who, ask, said = MEMBERS[case]
    seen = regard.observe(*QKV)
    with pytest.raises(error) as caught:
        ask(seen)
    assert isinstance(caught.value, RegardError)
    assert str(caught.value).startswith(f"{who}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "512", None])
def test_a_chunk_is_a_whole_number_of_rows(size: object) -> None:
    with pytest.raises(ArgumentError, match=r"^Chunked: chunk_size") as caught:
        regard.backends.Chunked(chunk_size=size)  # type: ignore[arg-type]
    assert repr(size) in str(caught.value)


def test_every_error_is_a_regard_error_and_the_builtin_that_fits() -> None:
    family = {getattr(errors, name) for name in errors.__all__} - {RegardError}
    assert family == set(BUILTIN)
    for error, builtin in BUILTIN.items():
        assert issubclass(error, RegardError)
        assert issubclass(error, builtin)


def test_an_error_is_raised_before_a_predicate_is_called() -> None:
    asked = []
    mask = regard.predicate(lambda b, h, i, j: asked.append(1) or j >= 0)
    with pytest.raises(ArgumentError):
        regard.attention(*QKV, mask=mask, dropout=2.0)
    with pytest.raises(BackendError):
        regard.attention(*QKV, mask=mask, backend="nonsense")
    assert not asked


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_that_are_not_dense_are_refused(place: int) -> None:
    for other in (QKV[place].to_sparse(), torch.nested.nested_tensor(list(QKV[place]))):
        tensors = [*QKV[:place], other, *QKV[place + 1 :]]
        with pytest.raises(RegardError, match=r"^attention: "):
            regard.attention(*tensors)


def test_a_call_that_fails_leaves_no_gradient_and_no_change() -> None:
    tensors = [t.clone().requires_grad_() for t in QKV]
    with pytest.raises(ShapeError):
        regard.attention(*tensors, sink=torch.ones(3))
    assert all(t.grad is None and t._version == 0 for t in tensors)


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.int64(1), np.float64(0.25)])
def test_numbers_of_python_and_numpy_are_numbers(number: Any) -> None:
    found = regard.attention(*QKV, scale=number, softcap=number)
    assert found.shape == (2, 4, 5, 6)
    assert regard.attention(*QKV, dropout=np.float32(0.5)).shape == found.shape
