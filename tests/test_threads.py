"""Several threads at once get what one gets alone, and a watch or a Monitor sees its own thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from attention_inputs import every_backend, gradients, inputs
from nested_backward import in_a_thread_of_autograd
from regard.models import interceptor
from regard.models.monitor import Monitor

THREADS = 8


@every_backend
def test_eight_threads_at_once_get_what_one_gets_alone(backend: str) -> None:
    jobs = [inputs(1, 2, n=40 + i, m=50 + i, seed=i) for i in range(2 * THREADS)]
    together = threading.Barrier(THREADS)

    def work(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        found = regard.attention(*leaves, mask=regard.causal(), backend=backend)
        seen = regard.observe(*tensors, mask=regard.window(7))
        return [found.detach(), *gradients(found, leaves), seen.entropy, seen.received, *seen.top(3)]

    def work_together(tensors: list[Tensor]) -> list[Tensor]:
        together.wait(60)
        return work(tensors)

    alone = [work(job) for job in jobs]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work_together, jobs))
    for one, other in zip(alone, found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


class Attention(nn.Module):
    """Self-attention with two heads; `meanwhile` is called in the middle of a forward pass."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.attn = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.meanwhile()
        y = self.attn(x).unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y)
        self.meanwhile()
        return y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.attention = Attention(meanwhile)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def elsewhere(work: Callable[[], object]) -> None:
    """Run it in another thread, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


def other_calls() -> None:
    """Calls with other heads and lengths than the model's, of torch and of regard."""
    x = torch.randn(1, 3, 50, 4)
    F.scaled_dot_product_attention(x, x, x)
    regard.attention(x, x, x)
    regard.observe(x, x, x)


def test_a_watch_sees_no_call_of_another_thread() -> None:
    model, x = Model(lambda: elsewhere(other_calls)), torch.randn(1, 6, 8)
    with regard.watch(model) as seen:
        elsewhere(lambda: model(torch.randn(1, 9, 8)))
        model(x)
        elsewhere(lambda: model(torch.randn(1, 9, 8)))
    assert (seen.layers, seen.calls, seen.missed) == (["attention"], 1, {})
    assert seen["attention"].shape == (1, 2, 6, 6)


def test_threads_that_watch_one_model_each_see_their_own_run() -> None:
    model, together = Model(), threading.Barrier(THREADS)

    def work(n: int) -> tuple[list[str], int, tuple[int, ...]]:
        with regard.watch(model) as seen:
            together.wait(60)
            model(torch.randn(1, n, 8))
            together.wait(60)
        return seen.layers, seen.calls, seen["attention"].shape

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(1, THREADS + 1)))
    assert found == [(["attention"], 1, (1, 2, n, n)) for n in range(1, THREADS + 1)]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_watch_that_begins_during_another_threads_forward_does_not_disturb_it() -> None:
    inside, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert may_end.wait(60)

    model, x = Model(wait), torch.randn(1, 6, 8)
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)  # else torch takes a shortcut past the hooks of the watch
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(model, x)
        assert inside.wait(60)
        with regard.watch(model) as seen:
            may_end.set()
            running.result(60)
        assert seen.calls == 0
        assert seen.missed == {"": "it was not called inside the with block"}


def test_a_watch_sees_what_its_backward_pass_calls_in_a_thread_of_autograd() -> None:
    threads = []

    def attend() -> None:
        threads.append(threading.get_ident())
        x = torch.randn(1, 2, 5, 4)
        regard.attention(x, x, x)

    with regard.watch(nn.Identity()) as seen:
        in_a_thread_of_autograd(attend)
    [thread] = threads
    assert thread != threading.get_ident()
    assert seen.calls == 1


def test_a_monitor_logs_no_call_of_another_thread() -> None:
    x, alone, beside = torch.randn(2, 6, 8), Model(), Model()
    beside.attention.meanwhile = lambda: elsewhere(other_calls)
    with Monitor(alone, every=1) as monitor:
        alone(x)
    expected = dict(monitor.last)
    with Monitor(beside, every=1) as monitor:
        beside(x)
    assert monitor.last == expected
    assert len(expected) == 4


def test_a_monitor_counts_one_call_at_a_time_whichever_thread_makes_it() -> None:
    inner = threading.local()

    def call_again() -> None:
        """In the middle of the outermost call, another thread calls the same model."""
        if getattr(inner, "first", False):
            inner.first = False
            elsewhere(lambda: model(torch.randn(1, 30, 8)))

    logged: list[tuple[str, float, int]] = []
    model, x = Model(call_again), torch.randn(2, 6, 8)
    with Monitor(model, every=1, log=lambda *scalar: logged.append(scalar)) as monitor:
        for _ in range(2):
            inner.first = True
            model(x)
        elsewhere(lambda: model(x))
        assert monitor.stop() is None
    steps = [[value for _, value, at in logged if at == step] for step in range(3)]
    assert steps[0] == steps[1] == steps[2] != []
    assert {at for *_, at in logged} == {0, 1, 2}


def test_a_monitor_may_be_stopped_while_another_thread_calls_the_model() -> None:
    inside, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert may_end.wait(60)

    model = Model(wait)
    monitor = Monitor(model, every=1).start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(model, torch.randn(1, 6, 8))
        assert inside.wait(60)
        monitor.stop()
        may_end.set()
        running.result(60)
        assert not pool.submit(torch.overrides._get_current_function_mode_stack).result(60)
    assert monitor.last == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_last_watch_to_end_restores_the_stance_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []

    @contextmanager
    def set_stance(stance: str) -> Iterator[None]:
        stances.append(stance)
        yield
        stances.append("restored")

    monkeypatch.setattr("torch.compiler.set_stance", set_stance)
    eager = interceptor._EagerStance()
    for _ in range(2):
        eager.__enter__()
        eager.__enter__()
        eager.__exit__()
        assert stances[-1] == "force_eager"
        eager.__exit__()
    assert stances == ["force_eager", "restored"] * 2
