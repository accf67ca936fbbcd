"""Kernels that are compiled in the background: once, for the same variant, without a trace in memory or in errors."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton has no wheel for this system")

import hopper_compiled  # noqa: E402
import regard  # noqa: E402
from regard.compat.triton import INTERPRETED, build_launcher, intermediate_code, warm_up  # noqa: E402
from regard.kernels import ahead  # noqa: E402
from regard.kernels.block_mask import BlockMask  # noqa: E402
from regard.kernels.span_terms import span_terms  # noqa: E402

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


def test_triton_is_prepared_once_and_compilations_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, hashed = threading.Event(), []

    def hash_files() -> None:
        hashed.append(ready.wait(10))

    monkeypatch.setattr(ahead, "_PREPARED", set())
    monkeypatch.setattr(ahead, "hash_compiler", hash_files)
    ahead.prepare(CPU)
    kernel = Kernel()
    kernel.may.set()
    with ahead.collecting(CPU) as threads:
        ahead.collect(kernel, {}, {})
    threads[0].join(0.1)
    assert kernel.compiled == []
    ready.set()
    ahead.wait_for(kernel)
    ahead.prepare(CPU)
    assert hashed == [True]
    assert kernel.compiled == [{"grid": (1,)}]


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
    (thread,) = ahead._COMPILING[id(kernel), None]
    assert not thread.daemon
    kernel.may.set()
    ahead.wait_for(kernel)
    assert not thread.is_alive()


def test_a_variant_is_new_once_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_VARIANTS", {})
    monkeypatch.setattr(ahead, "_MOST_VARIANTS", 2)
    assert [ahead.is_new(x) for x in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    assert len(ahead._VARIANTS) == 1


def test_kernels_that_are_needed_first_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LONGEST_TURN", 60)
    first, second = Kernel(), Kernel()
    second.may.set()
    for kernel in (first, second):
        with ahead.collecting(CPU) as threads:
            ahead.collect(kernel, {}, {})
    threads[0].join(0.05)
    assert second.compiled == []
    first.may.set()  # it is done early: nobody waits for a minute
    ahead.wait_for(second)
    assert len(first.compiled) == len(second.compiled) == 1
    ahead.wait_for(first)


def test_of_kernels_that_are_collected_together_the_longest_goes_first() -> None:
    short, long = Kernel(), Kernel()
    short.may.set()
    with ahead.collecting(CPU) as threads:
        ahead.collect(short, {"n": 1}, {})
        ahead.collect(long, {"n": 1, "m": 2}, {})
    threads[1].join(0.05)
    assert short.compiled == []
    long.may.set()
    ahead.wait_for(short)
    ahead.wait_for(long)
    assert len(short.compiled) == len(long.compiled) == 1


def test_of_all_kernels_that_wait_the_longest_goes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LONGEST_TURN", 60)
    first, short, long = Kernel(), Kernel(), Kernel()
    long.may.set()
    for kernel, given in ((first, {}), (short, {"n": 1}), (long, {"n": 1, "m": 2})):
        with ahead.collecting(CPU):
            ahead.collect(kernel, given, {})
    first.may.set()
    ahead.wait_for(long)
    assert short.compiled == []
    short.may.set()
    ahead.wait_for(short)
    ahead.wait_for(first)


def test_threads_change_often_while_kernels_compile() -> None:
    before, kernel = sys.getswitchinterval(), Kernel()
    for _ in range(2):
        with ahead.collecting(CPU):
            ahead.collect(kernel, {}, {})
    assert sys.getswitchinterval() < before
    kernel.may.set()
    ahead.wait_for(kernel)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_thread_that_cannot_be_started_leaves_its_kernel_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kernel, next_one = Kernel(), Kernel()
    with monkeypatch.context() as patch, ahead.collecting(CPU) as threads:
        ahead.collect(kernel, {}, {})
        patch.setattr(ahead.Thread, "start", start)
    ahead.wait_for(kernel)
    assert threads == kernel.compiled == []
    next_one.may.set()
    with ahead.collecting(CPU):
        ahead.collect(next_one, {}, {})
    ahead.wait_for(next_one)
    assert len(next_one.compiled) == 1


def the_second_is_done_before(first: Kernel, second: Kernel) -> None:
    for kernel in (first, second):
        with ahead.collecting(CPU):
            ahead.collect(kernel, {}, {})
    ahead.wait_for(second)
    assert (len(first.compiled), len(second.compiled)) == (0, 1)
    first.may.set()
    ahead.wait_for(first)


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
def test_the_next_kernel_goes_on_once_the_front_end_is_done(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of the first still run then; and an error ends its turn."""
    first, second = Kernel(error), Kernel()
    second.may.set()
    if error is not None:
        first.may.set()

    def warm_up(kernel: Any, arguments: Any, options: Any, then: Any, made: Any) -> None:
        if error is None:
            then()
        kernel.warmup(**arguments, **options)

    monkeypatch.setattr(ahead, "_LONGEST_TURN", 60)
    monkeypatch.setattr(ahead, "warm_up", warm_up)
    the_second_is_done_before(first, second)


def test_a_turn_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_LONGEST_TURN", 0.01)
    first, second = Kernel(), Kernel()
    second.may.set()
    the_second_is_done_before(first, second)


def test_a_variant_with_a_name_is_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_VARIANTS", {})
    kernel = Kernel()
    kernel.may.set()
    with ahead.collecting(CPU):
        assert [ahead.collect(kernel, {"n": n}, {}, "rows") for n in (1, 2)] == [True, True]  # neither is to be started
    ahead.wait_for(kernel, "rows")
    assert [given["n"] for given in kernel.compiled] == [1]


def test_a_launch_waits_for_its_own_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_VARIANTS", {})
    monkeypatch.setattr(ahead, "_LONGEST_TURN", 0.01)
    kernel, done = Kernel(), []

    def warm_up(kernel: Any, arguments: Any, options: Any, then: Any, made: Any) -> None:
        if arguments["by_keys"]:
            assert kernel.may.wait(10)
        done.append(arguments["by_keys"])

    monkeypatch.setattr(ahead, "warm_up", warm_up)
    with ahead.collecting(CPU):
        for by_keys in (True, False):
            ahead.collect(kernel, {"by_keys": by_keys}, {}, ("spans", by_keys))
    ahead.wait_for(kernel, ("spans", False))
    assert done == [False]
    kernel.may.set()
    ahead.wait_for(kernel, ("spans", True))
    assert done == [False, True]
    assert ahead._COMPILING == {}


def test_what_a_backward_pass_imports_is_imported_while_a_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, imported = Kernel(), []

    def warm_up(kernel: Any, arguments: Any, options: Any, then: Any, made: Any) -> None:
        if not arguments["cached"]:
            then()
            kernel.warmup()

    monkeypatch.setattr(ahead, "warm_up", warm_up)
    monkeypatch.setattr(ahead, "import_for_backward", lambda: imported.append(threading.current_thread()))
    for cached in (True, False):
        with ahead.collecting(CPU):
            ahead.collect(kernel, {"cached": cached}, {})
        ahead.import_meanwhile()
        assert imported == ([] if cached else [threading.current_thread()])  # there is no time to use if all is there
    kernel.may.set()
    ahead.wait_for(kernel)
    assert not ahead._FRONT_ENDS.are_over()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_lists_of_a_mask_that_are_only_collected_are_computed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(ahead, "_VARIANTS", {})
    monkeypatch.setattr(ahead, "_compile", lambda launch, device, turn: ahead._FRONT_ENDS.leave(turn))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, **given: started.append(given["n"]))
    terms = span_terms(regard.window(3), 40, 40)
    assert terms is not None
    mask = BlockMask(40, 40, lead=(terms.items, 1), terms=terms, device=CPU)
    with ahead.collecting(CPU) as threads:
        expected, order = mask.by_rows(16, 16), mask.key_order(16, 16)
        assert mask.by_keys(16, 16).seen is not None
    assert (len(threads), started) == (2, [])  # by rows and by keys
    assert order is not None
    found = mask.by_rows(16, 16)
    assert started == [40]
    assert [x is None for x in found] == [x is None for x in expected]
    assert mask.by_rows(16, 16) is found


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


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_it_is_told_when_the_front_end_is_done_with_a_kernel(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernel is compiled, and not at all for one that is there."""
    told: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: told.append("compiled"))
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    given = {"x": torch.zeros(16), "pair": Pair(torch.zeros(16), 4), "n": 6, "SIZE": 32}
    for _ in range(2):
        kernel = warm_up(copied, given, OPTIONS, then=lambda: told.append("front end"))
    assert told == ["front end", "compiled"]
    assert "make_ir" not in vars(kernel.src)
    copied.warmup(**{**given, "SIZE": 64}, **OPTIONS, grid=(1,))  # nobody is told
    assert told == ["front end", "compiled", "compiled"]


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_code_that_was_made_ahead_is_what_triton_makes(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    source, told = triton.compiler.ASTSource, []
    given = {"x": torch.zeros(16), "pair": Pair(torch.zeros(16), 4), "n": 7, "SIZE": 16}
    expected = copied.warmup(**given, **OPTIONS, grid=(1,)).asm["ttir"]
    made = intermediate_code(copied, given, OPTIONS, on_hopper(monkeypatch))
    assert made is not None
    real = source.make_ir
    monkeypatch.setattr(source, "make_ir", lambda self, *x: told.append("again") or real(self, *x))
    copied.device_caches[0][0].clear()
    kernel = warm_up(copied, given, OPTIONS, lambda: told.append("front end"), made)
    assert told == ["front end"]
    assert kernel.asm["ttir"] == expected
    warm_up(copied, {**given, "SIZE": 8}, OPTIONS, lambda: told.append("another"), made)
    assert told == ["front end", "again", "another"]  # it does not fit
    assert intermediate_code(copied, {**given, "SIZE": 3}, OPTIONS, on_hopper(monkeypatch)) is None  # the launch raises
    assert intermediate_code(copied, given, OPTIONS, CPU) is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_the_front_end_does_not_wait_until_triton_has_hashed_its_files(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, hashed, compiled, made = on_hopper(monkeypatch), threading.Event(), [], threading.Event()
    real = intermediate_code

    def noted(*given: Any) -> Any:
        found = real(*given)
        made.set()
        return found

    monkeypatch.setattr(ahead, "_PREPARED", set())
    monkeypatch.setattr(ahead, "hash_compiler", lambda: hashed.wait(10))
    monkeypatch.setattr(ahead, "start_driver", lambda: None)
    monkeypatch.setattr(ahead, "intermediate_code", noted)
    monkeypatch.setattr(ahead, "_on", lambda device: nullcontext())
    monkeypatch.setattr(ahead, "_build_launcher", lambda launch, device: None)
    monkeypatch.setattr(ahead, "load", lambda kernel: compiled.append(kernel))
    given = {"x": torch.zeros(16), "pair": Pair(torch.zeros(16), 4), "n": 7, "SIZE": 128}
    with ahead.collecting(device):
        ahead.collect(copied, given, OPTIONS)
    assert made.wait(30)
    assert compiled == []
    hashed.set()
    ahead.wait_for(copied)
    assert len(compiled) == 1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_launcher_that_is_built_ahead_is_the_one_that_triton_builds(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    built: list[str] = []
    monkeypatch.setattr(driver, "compile_module_from_src", lambda src, **given: built.append(src), raising=False)
    monkeypatch.setattr(driver, "library_dirs", list, raising=False)
    given = {"x": torch.zeros(16), "pair": Pair(torch.zeros(16), 4), "n": 5, "SIZE": 16}
    needed = build_launcher(copied, given, OPTIONS)
    assert needed == bool(built)
    if not needed:
        pytest.skip("this Triton builds no launchers")
    kernel = copied.warmup(**given, **OPTIONS, grid=(1,))
    assert built == [driver.make_launcher({}, kernel.src.signature, None)]


@pytest.mark.parametrize(
    ("narrow", "dim", "expected"),
    [(False, 128, ["forward", "backward"]), (True, 64, ["forward", "backward"]), (True, 128, ["backward", "forward"])],
)
def test_the_pass_with_more_code_is_collected_first(
    narrow: bool, dim: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.kernels import launch
    from regard.kernels.engine import TritonEngine

    collected: list[str] = []
    query = SimpleNamespace(is_cuda=True, device=CPU, shape=(1, 1, 8, dim))
    args = SimpleNamespace(query=query, block_mask=SimpleNamespace(narrow=narrow), variant=(object(),))
    args.new_rows = lambda observed: SimpleNamespace(output=torch.zeros(1))
    engine = SimpleNamespace(
        kernel_args=lambda x: args, observed=False, _vjp=lambda *given: collected.append("backward")
    )
    monkeypatch.setattr(ahead, "prepare", lambda device: None)
    monkeypatch.setattr(launch, "forward", lambda *given: collected.append("forward"))
    monkeypatch.setattr("regard.kernels.engine.INTERPRETED", False)
    x = SimpleNamespace(query=query, vector=None)
    for _ in range(2):  # the second call has nothing left to collect
        assert TritonEngine._compile(engine, x, (True,) * 8) is args
    assert collected == expected
