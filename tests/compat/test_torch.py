"""Every private symbol of torch that the package uses is there and means what it meant.

One test per function of `regard.compat.torch`, named after it. A release of torch that drops or changes a symbol fails
the test, whose message names the function and what needs it.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from nested_backward import in_a_thread_of_autograd
from regard.compat import torch as compat

NEEDED_FOR = {
    "any_autocast_enabled": "validation skips the checks of autocast with one call",
    "autocast_enabled": "validation casts as torch's function does, and takes tensors on the meta device",
    "cached_signature": "torch.autograd.Function inspects the signature at each call, which costs microseconds",
    "call_function": "autograd functions are applied in one typed place",
    "call_modes": "a remembered call took the kernel that these modes and switches allowed",
    "causal_bias": "a CausalBias holds no values; it is read as the mask that it stands for",
    "check_when_run": "a compiled textbook form takes a float mask, and raises when it runs if that is additive",
    "cpu_flash_attention": "the fast path on a CPU reads the lse of torch's kernel",
    "cpu_flash_attention_backward": "first gradients of the fast path come from torch's own kernel",
    "cpu_multiplies_bfloat16": "dispatch asks whether bfloat16 is fast on this processor",
    "likeness": "a call like an earlier one is checked and dispatched again",
    "cuda_allocator": "new tensors are a third of the host's time of a small call",
    "dynamo_is_loaded": "a launch must not import the compiler, which takes seconds",
    "forward_mode_is_active": "a tangent must never be lost: the fast path and the kernels step aside",
    "fused_sdpa_kernel": "sdpa refuses what torch would compute by its matrix path",
    "import_for_backward": "the first backward pass imports sympy, and kernels compile meanwhile",
    "in_backward": "a monitor tells the recomputation of a checkpoint from a new call",
    "innermost_transform_is_jvp": "tangents come in one pass only if forward mode is the innermost transform",
    "is_batched": "dropout and masks under vmap are refused or read once for all samples",
    "is_capturing": "the seed of dropout would be frozen into a CUDA graph",
    "is_capturing_cuda": "zeros for kernels are filled for many launches at once, but not in a graph",
    "is_current_device": "Triton starts kernels on the current device",
    "is_exporting": "an exported program reads no values, so hidden NaN are always zeroed",
    "is_legacy_batched": "is_grads_batched=True uses a vmap of its own, which autograd functions do not see",
    "is_readable": "a mask that is a subclass with a meaning of its own is refused by name",
    "is_recording": "torch.func.linearize would record buffers that are used again",
    "is_traced": "a traced program reads no values: it takes plain operators and one tile",
    "is_wrapped": "values are read from the tensor under the wrappers of torch.func",
    "lacks_values": "nothing is read from meta and fake tensors, and nothing made of them is cached",
    "legacy_batch": "results of a batched backward pass get their batch back",
    "legacy_unbatch": "the passes of an engine see the batch of a batched backward pass",
    "may_need_grad": "without derivatives an engine runs its forward pass alone",
    "no_autocast": "statistics and derivatives are exact inside autocast",
    "node_in_backward": "the hook of torch's own node reads the tensors that it saved",
    "not_compiled": "torch.compile must not trace a kernel launch after a graph break",
    "leave_graph": "with fullgraph=True a call that no graph can have says so in its own words",
    "not_traced": "torch.compile must call the chunked passes and not trace them",
    "operations_are_plain": "a call that is recorded, cast or transformed, or has no values, is not looked up",
    "outside_transforms": "a cached block mask must not hold wrapped tensors",
    "raw_stream": "what one stream computed is not read by another before it is there",
    "samples": "a table over which vmap runs hides a key only where it is -inf in every sample",
    "saved_tensors_are_packed": "a checkpoint lets each saved tensor be read once, and the hook would read it again",
    "shared_with_backward": "a watch sees what a backward pass repeats in a thread of autograd, and no other thread",
    "tensor_indices_in_vmap": "mask functions of Hugging Face index tensors inside vmap",
    "transforms_are_active": "the fast path steps aside inside torch.func",
    "unwrap": "values are read from the tensor under the wrappers of torch.func",
    "unwrap_largest": "under vmap, -inf in a bias hides a key only where every sample has it",
    "versions_of": "an observation, and the backward pass of a mask, raise if their inputs changed in place",
    "without_autocast": "a backward pass called inside autocast keeps its bits",
}


@contextmanager
def needs(name: str) -> Iterator[None]:
    """Turn any failure into a message that names the function of `compat.torch` and why the package needs it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever a release breaks)
        pytest.fail(
            f"regard.compat.torch.{name} no longer works with torch {torch.__version__}: {type(error).__name__}: "
            f"{error}. It is needed because {NEEDED_FOR[name]}. Mend it in src/regard/compat/torch.py."
        )


def small(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_every_function_has_a_test_and_a_reason() -> None:
    tests = {name.removeprefix("test_") for name, thing in globals().items() if inspect.isfunction(thing)}
    missing = [name for name in compat.__all__ if name not in tests]
    assert not missing, f"write a test_<name> here for {missing}"
    assert sorted(NEEDED_FOR) == sorted(compat.__all__), "say in NEEDED_FOR why each function is needed"
    functions = {name for name, thing in inspect.getmembers(compat, inspect.isfunction)}
    own = {name for name in functions if getattr(compat, name).__module__ == compat.__name__}
    assert {name for name in own if not name.startswith("_")} == set(compat.__all__)


def test_a_dropped_symbol_gives_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    with pytest.raises(pytest.fail.Exception, match=r"any_autocast_enabled no longer works with torch .* is needed"):
        test_any_autocast_enabled()


def test_any_autocast_enabled() -> None:
    with needs("any_autocast_enabled"):
        assert compat.any_autocast_enabled() is False
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compat.any_autocast_enabled() is True


def test_autocast_enabled() -> None:
    with needs("autocast_enabled"):
        cpu, meta = torch.device("cpu"), torch.device("meta")
        assert not compat.autocast_enabled(cpu)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compat.autocast_enabled(cpu)
            assert not compat.autocast_enabled(meta)


def test_no_autocast() -> None:
    with needs("no_autocast"):
        x = small(3, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for device in (None, x.device):
                with compat.no_autocast(device):
                    assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16


def test_without_autocast() -> None:
    with needs("without_autocast"):
        x = small(3, 3)
        product = compat.without_autocast(lambda: x @ x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product().dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16


def test_dynamo_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with needs("dynamo_is_loaded"):
        importlib.import_module("torch._dynamo")
        assert compat.dynamo_is_loaded()
        monkeypatch.delitem(sys.modules, "torch._dynamo")
        assert not compat.dynamo_is_loaded()


def test_not_compiled() -> None:
    with needs("not_compiled"):
        assert torch.compile(inside(compat.not_compiled), backend="eager")(small(3)) == [False]


def test_leave_graph() -> None:
    def call(x: Tensor) -> Tensor:
        compat.leave_graph("it cannot stay")
        return x + 1

    with needs("leave_graph"):
        assert torch.equal(torch.compile(call, backend="eager")(small(3)), small(3) + 1)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="it cannot stay"):
            torch.compile(call, backend="eager", fullgraph=True)(small(3))


def test_not_traced() -> None:
    with needs("not_traced"):
        assert torch.compile(inside(compat.not_traced), backend="eager")(small(3)) == [False]


def inside(wrap):  # type: ignore[no-untyped-def]
    """A function that says whether what it calls, wrapped, is compiled."""
    wrapped = wrap(lambda: [torch.compiler.is_compiling()])

    def call(x: Tensor) -> list[bool]:
        x.sin()
        found: list[bool] = wrapped()
        return found

    return call


def test_is_exporting() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(compat.is_exporting())
            return x + 1

    with needs("is_exporting"):
        asked: list[bool] = []
        assert compat.is_exporting() is False
        torch.export.export(Asks(), (small(3),), strict=False)
        assert asked == [True]
        assert compat.is_exporting() is False


def test_check_when_run() -> None:
    with needs("check_when_run"):
        compat.check_when_run(small(2).isfinite().all(), "not finite")
        checked = torch.compile(
            lambda x: (compat.check_when_run((x > 0).all(), "below"), x + 1)[1], backend="aot_eager"
        )
        assert checked(torch.ones(2)).sum() == 4
        with pytest.raises(RuntimeError, match="below"):
            checked(-torch.ones(2))


def test_is_traced() -> None:
    asked: list[bool] = []

    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(compat.is_traced())
            return x + 1

    with needs("is_traced"):
        assert compat.is_traced() is False
        make_fx(Asks())(small(2))
        torch.export.export(Asks(), (small(2),))
        assert asked
        assert all(asked)
        assert compat.is_traced() is False


def test_lacks_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with needs("lacks_values"):
        x = small(2)
        assert not compat.lacks_values(x)
        assert compat.lacks_values(x, x.to("meta"))
        with FakeTensorMode() as mode:
            assert compat.lacks_values()
            fake = mode.from_tensor(x)
        assert compat.lacks_values(fake)
        inside: list[bool] = []
        torch.vmap(lambda one: (inside.append(compat.lacks_values(one)), one)[1])(fake)
        assert inside == [True]
        assert not compat.lacks_values()


def test_is_recording() -> None:
    def f(x: Tensor) -> Tensor:
        asked.append(compat.is_recording())
        return x.sin()

    with needs("is_recording"):
        asked: list[bool] = []
        f(small(3))
        make_fx(f)(small(3))
        assert asked == [False, True]


def test_import_for_backward() -> None:
    """A fresh process, in which the backward pass that is given a gradient then imports nothing."""
    code = (
        "import sys, torch\n"
        "from regard.compat.torch import import_for_backward\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "y, g = x * 2, torch.ones(2)\n"
        "import_for_backward()\n"
        "before = set(sys.modules)\n"
        "y.backward(g)\n"
        "print(*set(sys.modules) - before)\n"
    )
    with needs("import_for_backward"):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split() == []


def test_is_capturing() -> None:
    with needs("is_capturing"):
        assert compat.is_capturing() is False


def test_is_capturing_cuda() -> None:
    if not torch.cuda.is_available():
        return  # the symbol is in builds with CUDA alone, and there alone it is asked
    with needs("is_capturing_cuda"):
        assert compat.is_capturing_cuda() is False


def test_is_current_device() -> None:
    if not torch.cuda.is_available():
        return
    with needs("is_current_device"):
        assert compat.is_current_device(torch.device("cuda", torch.cuda.current_device())) is True


def test_raw_stream() -> None:
    if not torch.cuda.is_available():
        return
    with needs("raw_stream"):
        assert compat.raw_stream(torch.device("cuda", 0)) == torch.cuda.current_stream(0).cuda_stream


def test_operations_are_plain() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    special = (FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), forward_ad.dual_level())
    with needs("operations_are_plain"):
        assert compat.operations_are_plain() is True
        for context in special:
            with context:
                assert compat.operations_are_plain() is False
        found: list[bool] = []
        torch.func.grad(lambda x: (found.append(compat.operations_are_plain()), x)[1])(torch.tensor(1.0))
        assert found == [False]


def test_saved_tensors_are_packed() -> None:
    with needs("saved_tensors_are_packed"):
        assert compat.saved_tensors_are_packed() is False
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert compat.saved_tensors_are_packed() is True


def test_call_modes() -> None:
    with needs("call_modes"):
        before, ours = compat.call_modes(True), compat.call_modes(False)
        assert (compat.call_modes(True), compat.call_modes(False)) == (before, ours)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert compat.call_modes(True) != before
            assert compat.call_modes(False) == ours
        with torch.no_grad():
            assert compat.call_modes(False) != ours
        with forward_ad.dual_level():
            assert compat.call_modes(False) is None
        torch.use_deterministic_algorithms(True)
        try:
            assert compat.call_modes(False) not in (ours, None)
        finally:
            torch.use_deterministic_algorithms(False)


def test_likeness() -> None:
    with needs("likeness"):
        x = torch.zeros(2, 3)
        alike = compat.likeness([x])
        assert alike(torch.ones(2, 3))
        for other in (
            x.double(),
            torch.zeros(3, 2).T,
            torch.zeros(2, 4),
            torch.zeros(2, 3, requires_grad=True),
            x.to("meta"),
        ):
            assert not alike(other)
        with torch.inference_mode():
            assert not alike(torch.zeros(2, 3))


def test_cuda_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: that torch has the function, and that its twin for a CPU takes these arguments."""
    with needs("cuda_allocator"):
        guards = torch._C._dynamo.guards
        monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
        made = compat.cuda_allocator(torch.Size((2, 3)), torch.float16)
        assert (made().shape, made().stride(), made().dtype) == ((2, 3), (3, 1), torch.float16)
        one, other = made(), made()
        assert one.data_ptr() != other.data_ptr()


def test_node_in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert y.grad_fn is not None
    node, found = y.grad_fn, []
    y.grad_fn.register_hook(lambda *_: found.append(compat.node_in_backward()))
    y.sum().backward()
    with needs("node_in_backward"):
        assert found == [node]


def test_in_backward() -> None:
    with needs("in_backward"):
        asked: list[bool] = []
        x = small(3).requires_grad_()
        x.register_hook(lambda g: asked.append(compat.in_backward()))
        asked.append(compat.in_backward())
        x.sum().backward()
        assert asked == [False, True]


def test_shared_with_backward() -> None:
    found: list[tuple[int, object]] = []

    def look() -> None:
        found.append((threading.get_ident(), compat.shared_with_backward("test", list)))

    with needs("shared_with_backward"):
        mine = compat.shared_with_backward("test", list)
        assert compat.shared_with_backward("test", list) is mine
        in_a_thread_of_autograd(look)
        [(thread, theirs)] = found
        assert thread != threading.get_ident()
        assert theirs is mine
        others: list[object] = []
        other = threading.Thread(target=lambda: others.append(compat.shared_with_backward("test", list)))
        other.start()
        other.join()
        assert others[0] is not mine


def test_forward_mode_is_active() -> None:
    def f(x: Tensor) -> Tensor:
        asked.append(compat.forward_mode_is_active())
        return x.sin()

    with needs("forward_mode_is_active"):
        asked: list[bool] = []
        f(small(3))
        torch.func.jvp(f, (small(3),), (small(3),))
        torch.func.grad(lambda x: f(x).sum())(small(3))
        with forward_ad.dual_level():
            f(small(3))
        assert asked == [False, True, False, True]


def test_transforms_are_active() -> None:
    def f(x: Tensor) -> Tensor:
        asked.append(compat.transforms_are_active())
        return x.sin()

    with needs("transforms_are_active"):
        asked: list[bool] = []
        f(small(3))
        torch.vmap(f)(small(3))
        torch.func.grad(lambda x: f(x).sum())(small(3))
        with forward_ad.dual_level():
            f(small(3))
        assert asked == [False, True, True, False]


def test_innermost_transform_is_jvp() -> None:
    def f(x: Tensor) -> Tensor:
        asked.append(compat.innermost_transform_is_jvp())
        return x.sin()

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]

    with needs("innermost_transform_is_jvp"):
        asked: list[bool] = []
        f(small(3))
        tangent(small(3))
        torch.vmap(tangent)(small(3))
        torch.func.jvp(torch.vmap(f), (small(3),), (small(3),))
        assert asked == [True, True, True, False]


def test_outside_transforms() -> None:
    with needs("outside_transforms"):
        asked: list[bool] = []

        def f(x: Tensor) -> Tensor:
            asked.append(compat.is_wrapped(small(2) * 2))
            with compat.outside_transforms():
                asked.append(compat.is_wrapped(small(2) * 2))
            return x * 2

        torch.func.grad(lambda x: f(x).sum())(small(3))
        assert asked == [True, False]


def test_is_wrapped() -> None:
    with needs("is_wrapped"):
        asked: list[bool] = [compat.is_wrapped(small(3))]
        torch.vmap(lambda x: (asked.append(compat.is_wrapped(x)), x)[1])(small(3))
        torch.func.grad(lambda x: (asked.append(compat.is_wrapped(x)), x.sum())[1])(small(3))
        assert asked == [False, True, True]


def test_unwrap() -> None:
    with needs("unwrap"):
        x, seen = small(3, 2), []
        torch.vmap(torch.func.grad(lambda t: (seen.append(compat.unwrap(t)), t.sum())[1]))(x)
        assert torch.equal(seen[0], x)
        assert compat.unwrap(x) is x


def test_unwrap_largest() -> None:
    with needs("unwrap_largest"):
        x, seen = small(3, 2), []
        torch.vmap(torch.func.grad(lambda t: (seen.append(compat.unwrap_largest(t)), t.sum())[1]))(x)
        assert torch.equal(seen[0], x.amax(0))
        torch.vmap(lambda t: (seen.append(compat.unwrap_largest(t)), t)[1], in_dims=1)(x)
        assert torch.equal(seen[1], x.amax(1))


def test_samples() -> None:
    with needs("samples"):
        x, y, seen = small(3, 2, 4), small(5, 4), []
        look = torch.func.grad(lambda s, t: (seen.append(compat.samples(s, t)), s.sum() + t.sum())[1])
        torch.vmap(torch.vmap(look, in_dims=(1, None)), in_dims=(None, 0))(x, y)  # (3, 4) for each of 2, within 5
        assert len(seen[0]) == 10
        assert all(torch.equal(s, x[:, at % 2]) for at, (s, _) in enumerate(seen[0]))
        assert all(torch.equal(t, y[at // 2]) for at, (_, t) in enumerate(seen[0]))
        assert compat.samples(x)[0][0].data_ptr() == x.data_ptr()


def test_is_batched() -> None:
    with needs("is_batched"):
        asked: list[bool] = [compat.is_batched(small(3))]
        torch.func.grad(lambda x: (asked.append(compat.is_batched(x)), x.sum())[1])(small(3))
        torch.vmap(torch.func.grad(lambda x: (asked.append(compat.is_batched(x)), x.sum())[1]))(small(3, 2))
        assert asked == [False, False, True]


class Doubled(torch.autograd.Function):
    """2 x, whose backward pass shows its cotangent to `seen`."""

    seen: list[Tensor]

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        Doubled.seen.append(compat.legacy_unbatch(g) if compat.is_legacy_batched(g) else g)
        if not compat.is_legacy_batched(g):
            return 2 * g
        return compat.legacy_batch(2 * compat.legacy_unbatch(g), 0)


def batched_backward(g: Tensor) -> tuple[Tensor, Tensor]:
    """What the backward pass sees of batched cotangents, and what it gives."""
    Doubled.seen = []
    x = torch.zeros(2, requires_grad=True)
    (found,) = torch.autograd.grad(Doubled.apply(x), x, g, is_grads_batched=True)
    return Doubled.seen[0], found


def test_is_legacy_batched() -> None:
    with needs("is_legacy_batched"):
        assert not compat.is_legacy_batched(small(3))
        assert batched_backward(small(3, 2))[0].shape == (3, 2)


def test_legacy_unbatch() -> None:
    with needs("legacy_unbatch"):
        assert torch.equal(batched_backward(small(3, 2))[0], small(3, 2))


def test_legacy_batch() -> None:
    with needs("legacy_batch"):
        assert torch.equal(batched_backward(small(3, 2))[1], 2 * small(3, 2))


def test_tensor_indices_in_vmap() -> None:
    with needs("tensor_indices_in_vmap"):
        table = small(5)
        with compat.tensor_indices_in_vmap():
            found = torch.vmap(lambda i: table[i])(torch.tensor([3, 1]))
        assert torch.equal(found, table[[3, 1]])


def test_may_need_grad() -> None:
    with needs("may_need_grad"):
        x, leaf = small(3), small(3).requires_grad_()
        assert compat.may_need_grad(x, None, leaf)
        assert not compat.may_need_grad(x, None)
        with torch.no_grad():
            assert not compat.may_need_grad(leaf)
            with forward_ad.dual_level():
                assert compat.may_need_grad(x)
        asked: list[bool] = []
        torch.vmap(lambda t: (asked.append(compat.may_need_grad(x)), t)[1])(x)
        assert asked == [True]


def test_versions_of() -> None:
    with needs("versions_of"):
        x, y = small(3), small(3)
        before = compat.versions_of([x, y])
        x.add_(1)
        after = compat.versions_of([x, y])
        assert after[0] > before[0] >= 0
        assert after[1] == before[1]
        with torch.inference_mode():
            assert compat.versions_of([x, x + 1]) == [after[0], -1]


def test_cached_signature() -> None:
    with needs("cached_signature"):
        assert compat.cached_signature(Doubled) is Doubled
        assert Doubled.forward.__signature__ == inspect.signature(Doubled.forward)  # type: ignore[attr-defined]
        Doubled.seen = []
        x = small(3).requires_grad_()
        assert torch.equal(torch.autograd.grad(Doubled.apply(x).sum(), x)[0], torch.full((3,), 2.0))


def test_call_function() -> None:
    with needs("call_function"):
        assert torch.equal(compat.call_function(Doubled, small(3)), 2 * small(3))


def test_fused_sdpa_kernel() -> None:
    with needs("fused_sdpa_kernel"):
        x = small(1, 2, 5, 8)
        assert compat.fused_sdpa_kernel(x, x, x, None, False, 0.5, False) != 0
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert compat.fused_sdpa_kernel(x, x, x, None, False, 0.5, False) == 0


def test_cpu_flash_attention() -> None:
    with needs("cpu_flash_attention"):
        q, k, v = small(3, 1, 2, 5, 8).unbind()
        for causal in (False, True):
            output, lse = compat.cpu_flash_attention(q, k, v, None, causal, 0.5)
            S = q @ k.mT * 0.5
            S = S.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf) if causal else S
            torch.testing.assert_close(output, S.softmax(-1) @ v)
            torch.testing.assert_close(lse, S.logsumexp(-1))


def test_cpu_flash_attention_backward() -> None:
    with needs("cpu_flash_attention_backward"):
        q, k, v = (x.requires_grad_() for x in small(3, 1, 2, 5, 8).unbind())
        g = small(1, 2, 5, 8)
        expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, scale=0.5), (q, k, v), g)
        with torch.no_grad():
            saved = (q, k, v, *compat.cpu_flash_attention(q, k, v, None, False, 0.5))
            found = compat.cpu_flash_attention_backward(g, saved, None, False, 0.5)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_cpu_multiplies_bfloat16() -> None:
    with needs("cpu_multiplies_bfloat16"):
        assert compat.cpu_multiplies_bfloat16() in (False, True)


def test_causal_bias() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    with needs("causal_bias"):
        assert compat.causal_bias(causal_upper_left(3, 5)) == (3, 5, False)
        assert compat.causal_bias(causal_lower_right(3, 5)) == (3, 5, True)
        assert compat.causal_bias(causal_upper_left(3, 5)[0]) is None  # a part of one says nothing
        assert compat.causal_bias(small(3, 5)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_is_readable() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.masked import masked_tensor
    from torch.nn.attention.bias import causal_upper_left

    class Named(Tensor):
        pass

    class Coded(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    x = small(2, 3)
    with needs("is_readable"):
        assert compat.is_readable(x)
        assert compat.is_readable(torch.nn.Parameter(x))
        assert compat.is_readable(x.as_subclass(Named))
        with FakeTensorMode() as mode:
            assert compat.is_readable(mode.from_tensor(x))
        seen = []
        torch.func.functionalize(lambda y: seen.append((compat.is_readable(y), type(y))) or y)(x)
        torch.vmap(torch.func.grad(lambda y: seen.append((compat.is_readable(y), type(y))) or y.sum()))(x)
        assert all(readable for readable, _ in seen), seen
        assert issubclass(FunctionalTensor, Tensor)
        for opaque in (x.as_subclass(Coded), masked_tensor(x, x > 0), causal_upper_left(2, 3)):
            assert not compat.is_readable(opaque)
