"""Which backend a call takes, and why: said without computing, and true."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import functional
from regard.backends import KNOWN, sdpa
from regard.backends.dispatch import Plan, choose, order
from regard.core.problem import Problem
from regard.core.validation import pose
from regard.errors import BackendError

X = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0))
LONG = torch.randn(1, 1, 600, 8)

CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # arguments, the backend taken, a word of sdpa's reason
    "plain": ({}, "sdpa", ""),
    "causal": ({"mask": regard.causal()}, "sdpa", ""),
    "window": ({"mask": regard.window(3)}, "sdpa", ""),
    "tensor": ({"mask": torch.ones(12, 12, dtype=torch.bool)}, "sdpa", ""),
    "padding": ({"mask": regard.padding([5])}, "sdpa", ""),
    "bias": ({"bias": torch.zeros(12, 12)}, "sdpa", ""),
    "bias that learns": ({"bias": torch.zeros(12, 12, requires_grad=True)}, "chunked", "gradient"),
    "mask and bias": ({"bias": torch.zeros(12, 12), "mask": regard.window(3)}, "chunked", "one of mask and bias"),
    "alibi": ({"bias": regard.biases.alibi(torch.ones(2))}, "chunked", "matrix"),
    "softcap": ({"softcap": 2.0}, "chunked", "softcap"),
    "sink": ({"sink": torch.zeros(2)}, "chunked", "sink"),
    "dropout": ({"dropout": 0.1}, "chunked", "dropout"),
    "observed": ({"observe": True}, "chunked", "statistics"),
    "cosine": ({"score": regard.scores.Cosine()}, "sdpa", ""),
    "additive": ({"score": regard.scores.Additive(8, 8, 4)}, "chunked", "no dot product"),
    "scale that learns": ({"scale": torch.ones(2, requires_grad=True)}, "sdpa", ""),
}


def asked(**arguments: Any) -> Problem:
    observed = arguments.pop("observe", False)
    return pose(X, X, X, observed=observed, **arguments)


@pytest.mark.parametrize("case", CASES)
def test_why_tells_the_backend_that_is_taken_and_the_reasons_of_the_others(case: str) -> None:
    arguments, backend, reason = CASES[case]
    plan = regard.why(X, X, X, **arguments)
    assert isinstance(plan, Plan)
    assert plan.backend == backend
    assert set(plan.refusals) == set(KNOWN)
    assert not plan.refusals[backend]
    assert any("it needs a GPU" in said or "not installed" in said for said in plan.refusals["triton"])
    assert any(reason in said for said in plan.refusals["sdpa"]) == bool(reason)


@pytest.mark.parametrize("case", CASES)
def test_the_reasons_are_those_that_choose_used(case: str) -> None:
    arguments, backend, _ = CASES[case]
    plan = regard.why(X, X, X, **arguments)
    assert choose(asked(**arguments)).name == plan.backend == backend
    for name, known in KNOWN.items():
        reasons = known.refuses(asked(**arguments))
        assert tuple(reasons) == plan.refusals[name]
        if reasons:
            with pytest.raises(BackendError) as caught:
                choose(asked(**arguments), name)
            assert all(reason in str(caught.value) for reason in reasons)
        else:
            assert choose(asked(**arguments), name) is known


@pytest.mark.parametrize("case", CASES)
def test_the_text_has_one_arrow_and_every_reason(case: str) -> None:
    arguments, backend, _ = CASES[case]
    plan = regard.why(X, X, X, **arguments)
    lines = str(plan).splitlines()
    arrows = [line for line in lines if line.startswith("→")]
    assert len(arrows) == 1
    assert arrows[0].split()[1] == backend
    for name in KNOWN:
        assert sum(line.lstrip("→ ").startswith(name) for line in lines) == 1
    for reasons in plan.refusals.values():
        assert all(any(line.endswith(reason) for line in lines) for reason in reasons)
    assert "reference" in str(plan)
    assert "not the first choice" in str(plan)


def test_where_the_one_that_was_asked_for_refuses_the_text_says_who_could() -> None:
    text = str(regard.why(X, X, X, softcap=9.0, backend="sdpa"))
    assert "→" not in text
    assert "chunked    could: " in text
    assert "first choice" not in text


class Kernels(TorchDispatchMode):
    """Notes which of torch's kernels for attention run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.__name__:
            self.ran.append(func.__name__)
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu.default"
NARROW = X[..., :6]  # as values, it leaves torch none but its matrix path
MATRIX = "torch would take its matrix path: none of its fused kernels does this, or they are switched off"


@pytest.mark.parametrize(
    ("switches", "value", "kernel"),
    [
        ([], X, "flash"),
        ([SDPBackend.FLASH_ATTENTION], X, "flash"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], X, "flash"),
        ([], NARROW, "matrix"),
        ([SDPBackend.MATH], X, "matrix"),
        ([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], X, "matrix"),
    ],
    ids=["as it is", "flash alone", "flash and math", "narrow values", "math alone", "math and none for a CPU"],
)
def test_why_names_the_kernel_that_torch_takes(switches: list[SDPBackend], value: torch.Tensor, kernel: str) -> None:
    with sdpa_kernel(switches) if switches else nullcontext():
        plan, told = regard.why(X, X, value), KNOWN["sdpa"].detail(pose(X, X, value))
        with Kernels() as kernels:
            torch.nn.functional.scaled_dot_product_attention(X, X, value)
    assert kernels.ran == ([FLASH] if kernel == "flash" else [])  # torch's matrix path is made of other operators
    assert told == f"torch's {kernel} kernel"
    first = str(plan).splitlines()[0]
    if kernel == "flash":
        assert plan.detail == told
        assert first == "→ sdpa       torch's flash kernel"
    else:
        assert plan.backend == "chunked"
        assert first == f"  sdpa       no: {MATRIX}"


def test_every_fused_kernel_of_torch_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        SDPBackend.FLASH_ATTENTION: "flash",
        SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
        SDPBackend.CUDNN_ATTENTION: "cuDNN",
        SDPBackend.OVERRIDEABLE: "overrideable",
    }
    for taken, name in names.items():
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, taken=taken, **__: taken.value)
        assert str(regard.why(X, X, X)).splitlines()[0] == f"→ sdpa       torch's {name} kernel"


def test_a_named_backend_that_refuses_has_no_arrow_but_reasons() -> None:
    plan = regard.why(X, X, X, softcap=2.0, backend="sdpa")
    assert plan.backend is None
    assert "→" not in str(plan)
    assert "softcap" in str(plan)


@pytest.mark.parametrize("name", ["reference", "chunked", "sdpa"])
def test_a_named_backend_that_accepts_is_taken(name: str) -> None:
    plan = regard.why(X, X, X, backend=name)
    assert plan.backend == name
    assert f"→ {name}" in str(plan)


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(BackendError) as caught:
        regard.why(X, X, X, backend="cudnn")
    for name in ("auto", *KNOWN):
        assert repr(name) in str(caught.value)


def test_a_switched_off_kernel_is_a_reason() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        plan = regard.why(X, X, X)
    assert plan.backend == "chunked"
    assert any("switched off" in reason for reason in plan.refusals["sdpa"])


def test_a_mask_of_many_pairs_is_not_laid_out_for_torch() -> None:
    assert regard.why(LONG, LONG, LONG, mask=regard.window(3)).backend == "chunked"
    assert regard.why(LONG, LONG, LONG, mask=regard.causal()).backend == "sdpa"
    assert regard.why(LONG, LONG, LONG, mask=regard.padding([500])).backend == "sdpa"


# why computes nothing


def test_why_leaves_torchs_generator_untouched() -> None:
    state = torch.get_rng_state()
    regard.why(X, X, X, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_why_asks_no_score_for_numbers() -> None:
    class Counting(regard.scores.Balanced):
        calls = 0

        def prepare(self, query: torch.Tensor, key: torch.Tensor) -> regard.scores.Prepared:
            type(self).calls += 1
            return super().prepare(query, key)

    regard.why(X, X, X, score=Counting())
    assert Counting.calls == 0


def test_why_leaves_a_temperature_that_waits_for_its_first_call_waiting() -> None:
    score = regard.scores.Temperature()
    regard.why(X, X, X, score=score)
    assert score.temperature.isnan()


def test_why_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("why computed something")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", never)
    for backend in KNOWN.values():
        monkeypatch.setattr(type(backend), "run", never)
    for arguments, _, _ in CASES.values():
        regard.why(X, X, X, **arguments)


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
def test_attention_runs_the_backend_that_why_tells(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for known in KNOWN.values():
        run = type(known).run
        monkeypatch.setattr(type(known), "run", lambda self, p, run=run: ran.append(self.name) or run(self, p))

    def fast_path(*given: object) -> torch.Tensor | None:
        answer = sdpa.fast_path(*given)  # type: ignore[arg-type]
        if answer is not None:
            ran.append("sdpa")  # the shortcut takes torch's kernel too
        return answer

    monkeypatch.setattr(functional, "fast_path", fast_path)
    for arguments, _, _ in CASES.values():
        if arguments.get("observe"):
            continue
        told = regard.why(X, X, X, backend=backend, **arguments).backend
        if told is not None:
            regard.attention(X, X, X, backend=backend, **arguments)
            assert ran.pop() == told
    assert not ran


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({}, "sdpa"),
        ({"mask": regard.causal()}, "sdpa"),
        ({"mask": regard.everything()}, "sdpa"),
        ({"bias": torch.zeros(12, 12)}, "sdpa"),
        ({"mask": regard.causal(offset=1)}, "triton"),
        ({"mask": regard.window(3)}, "triton"),
        ({"mask": regard.padding([5])}, "triton"),
        ({"observed": True}, "triton"),
    ],
    ids=["plain", "causal", "everything", "bias", "causal offset", "window", "padding", "observed"],
)
def test_on_a_gpu_the_table_says_who_is_asked_first(asked: dict[str, Any], first: str) -> None:
    there = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    known = {"mask": None, "bias": None, "observed": False, "query": there, "value": there}
    p = SimpleNamespace(rows=12, keys=12, **(known | asked))
    assert order(p).names[0] == first  # type: ignore[arg-type]
    assert first in order(p).because  # type: ignore[arg-type]
    long = SimpleNamespace(**{**vars(p), "rows": 4096, "keys": 4096})
    found = order(long)  # type: ignore[arg-type]
    assert found.names[0] == ("flash4" if first == "sdpa" else first)
    assert all(reason and "short" not in reason for reason in found.because.values())


WON: dict[str, Any] = {
    "dim": 128, "of_values": 0, "rows": 4096, "items": 4, "dtype": torch.bfloat16, "chip": (9, 0), "grad": False,
    "heads": 16, "stride": 1, "compiling": False, "mask": None, "bias": None, "dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "won"),
    [
        ({}, True),
        ({"mask": regard.causal()}, True),
        ({"dim": 64, "rows": 16384, "items": 1, "heads": 32, "mask": regard.causal()}, True),
        ({"dim": 64, "heads": 32}, True),
        ({"dim": 64, "heads": 32, "mask": regard.causal()}, True),
        ({"dim": 256, "heads": 8, "mask": regard.causal()}, True),
        ({"dim": 192}, False),
        ({"items": 1, "rows": 8192}, True),
        ({"dim": 64}, False),
        ({"rows": 4095, "items": 8}, False),
        ({"items": 3}, False),
        ({"dim": 96, "items": 8}, False),
        ({"dim": 512, "heads": 4, "rows": 8192, "mask": regard.causal()}, True),
        ({"dim": 512, "heads": 4, "rows": 8192, "mask": regard.causal(), "grad": True}, True),
        ({"dim": 512, "heads": 4, "rows": 8192}, False),
        ({"dim": 192, "of_values": 128, "rows": 8192, "mask": regard.causal(), "grad": True}, True),
        ({"dim": 576, "of_values": 512, "rows": 8192, "mask": regard.causal()}, True),
        ({"dim": 576, "of_values": 512, "rows": 8192, "mask": regard.causal(), "grad": True}, False),
        ({"of_values": 64}, False),
        ({"stride": 0}, False),
        ({"dtype": torch.float32}, False),
        ({"bias": torch.zeros(1)}, False),
        ({"dropout": 0.1}, False),
        ({"chip": (10, 0)}, False),
        ({"compiling": True}, False),
        ({"grad": True}, True),
        ({"grad": True, "dim": 256, "heads": 8, "mask": regard.causal()}, True),
    ],
    ids=lambda x: ", ".join(x) or "long" if isinstance(x, dict) else None,
)
def test_a_long_plain_call_takes_the_hopper_kernels_where_they_won(
    asked: dict[str, Any], won: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = SimpleNamespace(**(WON | asked))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: x.chip)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: x.compiling)
    shapes = [(x.items, x.heads, x.rows, dim) for dim in (x.dim, x.dim, x.of_values or x.dim)]
    there = [
        SimpleNamespace(is_cuda=True, shape=shape, dtype=x.dtype, device=None, stride=lambda: (x.stride, 1, 1, 1))
        for shape in shapes
    ]
    given = dict(zip(("query", "key", "value"), there, strict=True))
    tensors = (torch.zeros(1, requires_grad=x.grad),)
    p: Any = SimpleNamespace(
        **given, tensors=tensors, rows=x.rows, keys=x.rows, mask=x.mask, bias=x.bias, dropout=x.dropout, observed=False
    )
    assert (order(p).names.index("triton") < order(p).names.index("sdpa")) == won
    assert "triton" in order(p).because or not won
    with torch.no_grad():
        names = order(p).names
    assert (names.index("triton") < names.index("sdpa")) == (won or x.grad)
    if won:  # with FlashAttention-4 installed, ours is still the first
        assert names[0] == "triton"
