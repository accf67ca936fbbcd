"""Jobs that go wrong: which error is raised, and when."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard
from regard import distributed as d


def error_of(call: Any) -> str:
    """The error that a call raises, with its class; empty if it raises none."""
    try:
        call()
    except regard.errors.RegardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shifted(by: Any, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j + (by if isinstance(by, int) else by[0])


def mismatches() -> dict[str, str]:
    """The errors if one rank's call differs from the others."""
    odd = dist.get_rank() == 1
    q = torch.randn(2, 4, 5, 8)
    sink, bias = torch.zeros(4), torch.zeros(5, 15)

    def call(*tensors: Tensor, **given: Any) -> str:
        return error_of(lambda: d.attention(*(tensors or (q, q, q)), **given))

    wide = torch.randn(2, 4, 5, 6)
    few = torch.randn(1, 4, 5, 8)
    errors = {
        "dtype": call(*([q.double()] * 3 if odd else [q] * 3)),
        "dim of values": call(q, q, wide if odd else q),
        "batch": call(*([few] * 3 if odd else [q] * 3)),
        "mask": call(mask=regard.window(3) if odd else regard.causal()),
        "mask's contents": call(mask=regard.padding([15, 9 - odd])),
        "predicate": call(mask=regard.predicate((lambda b, h, i, j: i >= j) if odd else (lambda b, h, i, j: i <= j))),
        "what a predicate captures": call(mask=regard.predicate(partial(shifted, odd))),
        "what cannot be read": call(mask=regard.predicate(partial(shifted, memoryview(bytes([odd]))))),
        "no mask": call(mask=None if odd else regard.causal()),
        "kind of mask": call(mask=torch.ones(5, 15, dtype=torch.bool) if odd else regard.causal()),
        "scale": call(scale=0.5 + odd),
        "scale's numbers": call(scale=torch.tensor(0.5 + odd)),
        "softcap": call(softcap=30.0 + odd),
        "sink": call(sink=None if odd else sink),
        "sink's numbers": call(sink=sink + odd),
        "bias": call(bias=bias[None] if odd else bias),
        "alibi": call(bias=regard.biases.alibi(torch.ones(4) + odd)),
        "dropout": call(dropout=0.1 * odd),
        "score": call(score=regard.scores.Cosine(0.5) if odd else regard.scores.Balanced()),
        "score's numbers": call(score=regard.scores.Temperature(2.0 + odd)),
        "layout": call(layout="zigzag" if odd else "contiguous"),
        "strategy": call(strategy="ring" if odd else "heads"),
        "backend": call(backend="chunked" if odd else "auto"),
        "requires_grad": call(q.clone().requires_grad_(odd), q, q),
        "call": error_of(lambda: (d.observe if odd else d.attention)(q, q, q)),
    }
    errors["nothing"] = call() or call(mask=regard.predicate(partial(shifted, memoryview(bytes([1])))))
    return errors


def refusals() -> dict[str, str]:
    """The errors if one rank's call is invalid, and if all are."""
    odd = dist.get_rank() == 1
    count = dist.get_world_size()
    q = torch.randn(2, 4, 6, 8)

    def call(*tensors: Tensor, **given: Any) -> str:
        return error_of(lambda: d.attention(*(tensors or (q, q, q)), **given))

    once = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(d.attention(once, q, q, strategy="ring").square().sum(), once, create_graph=True)
    return {
        "one rank's dropout": call(dropout=2.0 if odd else 0.5),
        "one rank's mask": call(mask=torch.ones(5, 6 * count) > 0 if odd else torch.ones(6, 6 * count) > 0),
        "one rank's keys": call(bias=torch.zeros(6, 7 if odd else 6 * count)),
        "everyone's mask": call(mask=regard.padding(torch.ones(2, 7) > 0)),
        "everyone's layout": call(layout="spiral"),
        "everyone's strategy": call(strategy="star"),
        "everyone's backend": call(backend="abacus"),
        "a backend that cannot": call(backend="sdpa", strategy="ring"),
        "heads": call(q[:, :1], q[:, :1], q[:, :1], strategy="heads"),
        "zigzag": call(*(torch.randn(1, 1, 6 + odd, 8) for _ in range(3)), layout="zigzag"),
        "second derivative": error_of(lambda: first.sum().backward()),
        "forward mode": error_of(lambda: torch.func.jvp(lambda x: d.attention(x, q, q), (q,), (q,))),
        "group and mesh": call(group=dist.group.WORLD, mesh=init_device_mesh("cpu", (count,))),
        "mesh": call(mesh=init_device_mesh("cpu", (1, count))),
        "nothing": call(),
    }


def late_refusals() -> dict[str, str]:
    """The errors if ranks ask an observation for different things, or for what is not available."""
    odd = dist.get_rank() == 1
    q = torch.randn(2, 4, 6, 8)
    seen = d.observe(q, q, q, mask=regard.causal())
    errors = {
        "different members": error_of(lambda: seen.top(2) if odd else seen.map(2, 2)),
        "different numbers": error_of(lambda: seen.top(2 + odd)),
        "too many cells": error_of(lambda: seen.map(1000, 2)),
        "weights": error_of(lambda: seen.weights()),
    }
    if odd:
        q.add_(1.0)
    errors["changed"] = error_of(lambda: seen.received)
    return errors


def _impatient(timeout: float) -> Any:
    """A group of all ranks with this timeout, after all of them have arrived."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.barrier()
    return group


def dies(how: str, timeout: float) -> tuple[str, float]:
    """Rank 1 exits or hangs in the middle of a call, forward or backward; the errors of the others, and when."""
    from regard.chunked.engine import ChunkedEngine

    q = torch.randn(2, 3, 32, 8, requires_grad=True)
    name = "vjp" if "backward" in how else "forward"
    strategy = "heads" if "heads" in how else "ring"
    real, calls = getattr(ChunkedEngine, name), []
    last = 1 if strategy == "heads" else 2

    def failing(self: Any, *args: Any) -> Any:
        calls.append(0)
        if dist.get_rank() == 1 and len(calls) == last:
            if "killed" in how:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return real(self, *args)

    group = _impatient(timeout)
    setattr(ChunkedEngine, name, failing)
    start = time.monotonic()
    error = error_of(lambda: d.attention(q, q, q, group=group, strategy=strategy, backend="chunked").sum().backward())
    took = time.monotonic() - start
    setattr(ChunkedEngine, name, real)
    return error, took


def absent(timeout: float) -> tuple[str, float]:
    """Rank 1 does not call at all."""
    group = _impatient(timeout)
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(1000)
    q = torch.randn(2, 2, 32, 8)
    return error_of(lambda: d.attention(q, q, q, group=group)), time.monotonic() - start
