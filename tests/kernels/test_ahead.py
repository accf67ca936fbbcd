"""Kernels that are compiled in the background: once, for the same variant, without a trace in memory or in errors."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton has no wheel for this system")

import hopper_compiled  # noqa: E402
from regard.compat.triton import INTERPRETED  # noqa: E402
from regard.kernels import ahead  # noqa: E402

tl, hopper = triton.language, hopper_compiled.hopper
CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}


class Pair(NamedTuple):
    first: Tensor
    second: int


class Kernel:
    """A kernel that notes what it is compiled for, and waits until it may."""

    __name__ = "kernel"

    def __init__(self, error: Exception | None = None) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.may = threading.Event()
        self.error = error

    def warmup(self, **given: Any) -> None:
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        self.compiled.append(given)


def test_a_collected_launch_is_compiled_in_the_background_and_others_are_started() -> None:
    kernel, x = Kernel(), torch.zeros(3)
    assert not ahead.collect(kernel, {"x": x}, {})
    with ahead.collecting(CPU):
        elsewhere: list[bool] = []
        other = threading.Thread(target=lambda: elsewhere.append(ahead.collect(kernel, {"x": x}, {})))
        other.start()
        other.join()
        assert elsewhere == [False]  # other threads go on to start theirs
        assert ahead.collect(kernel, {"x": x, "n": 5}, {"num_warps": 4})
    assert kernel.compiled == []
    assert not ahead.collect(kernel, {"x": x}, {})
    kernel.may.set()
    ahead.wait_for(kernel)
    (given,) = kernel.compiled
    assert (given["n"], given["num_warps"], given["x"].dtype) == (5, 4, torch.float32)
    assert ahead._COMPILING == {}


def test_no_tensor_is_kept_and_alignment_is() -> None:
    kernel, x = Kernel(), torch.zeros(9)
    with ahead.collecting(CPU):
        ahead.collect(kernel, {"x": x, "pair": Pair(x[1:], 7), "tuple": (x, None)}, {})
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    kernel.may.set()
    ahead.wait_for(kernel)
    (given,) = kernel.compiled
    assert isinstance(given["pair"], Pair)
    assert (given["x"].data_ptr() % 16, given["pair"].first.data_ptr() % 16, given["pair"].second) == (0, 4, 7)
    assert given["tuple"][1] is None


def test_an_error_in_the_background_is_left_to_the_launch() -> None:
    kernel = Kernel(RuntimeError("no"))
    with ahead.collecting(CPU):
        ahead.collect(kernel, {}, {})
    kernel.may.set()
    ahead.wait_for(kernel)
    with pytest.raises(RuntimeError, match="no"):
        kernel.warmup()


def test_an_error_while_launches_are_collected_compiles_nothing_and_is_raised() -> None:
    kernel = Kernel()

    def wrong() -> None:
        with ahead.collecting(CPU):
            ahead.collect(kernel, {}, {})
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        wrong()
    assert ahead._COMPILING == {}
    assert not ahead.collect(kernel, {}, {})


def test_the_interpreter_waits_for_the_threads_at_its_end() -> None:
    kernel = Kernel()
    with ahead.collecting(CPU):
        ahead.collect(kernel, {}, {})
    (thread,) = ahead._COMPILING[id(kernel)]
    assert not thread.daemon
    kernel.may.set()
    ahead.wait_for(kernel)
    assert not thread.is_alive()


def test_a_variant_is_new_once_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_VARIANTS", {})
    monkeypatch.setattr(ahead, "_MOST_VARIANTS", 2)
    assert [ahead.is_new(x) for x in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    assert len(ahead._VARIANTS) == 1


@triton.jit
def copied(x, pair, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(pair.first + at, tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_the_launch_finds_what_was_compiled_in_the_background(
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given["repr"]))
    x, y = torch.zeros(16), torch.zeros(16, dtype=torch.float16)
    with ahead.collecting(CPU):
        assert ahead.collect(copied, {"x": x, "pair": Pair(y, 4), "n": 5, "SIZE": 16}, OPTIONS)
    ahead.wait_for(copied)
    assert len(compiled) == 1
    copied.warmup(x=x, pair=Pair(y, 4), n=5, SIZE=16, **OPTIONS, grid=(1,))
    assert len(compiled) == 1
    copied.warmup(x=x[1:], pair=Pair(y, 4), n=5, SIZE=16, **OPTIONS, grid=(1,))  # another alignment
    assert len(compiled) == 2
