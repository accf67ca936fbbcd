"""Random problems on every backend against the dense formula: `make fuzz SECONDS=600`, or some seeds in the tests.

A case is written as Python code, and that code is what runs. A failure prints it, after `shrink` has taken out all that
the failure does not need.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from dense_formula import Biases, Dense, Masks, attend, logits
from random_problems import NAMES, Case, Program, call, draw, simpler, write
from regard.compat.triton import INTERPRETED
from regard.core.dropout import draw_seed, keep

__all__ = ["BACKENDS", "WrongAnswerError", "check", "failure", "program", "run", "shrink"]

CUDA = torch.cuda.is_available()
OWN = {"reference": '"reference"', "chunked": '"chunked"', "by 7": "regard.backends.Chunked(chunk_size=7)"}
BACKENDS = {"auto": '"auto"', **OWN, "sdpa": '"sdpa"'}
KERNELS = {"triton": '"triton"'} if CUDA or INTERPRETED else {}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}


class WrongAnswerError(AssertionError):
    """A result that is wrong, or an error that should not be, with the code that shows it."""


def program(case: Case, backend: str) -> str:
    """The case as code that can be pasted."""
    written = write(case)
    head = "import torch, regard\n\n"
    gradients = (
        f"print(torch.autograd.grad(found{'.output' if case.observed else ''}.sum(), leaves, allow_unused=True))"
    )
    parts = (written.made, _expected(case).poison, written.leaves, call(case, written, (BACKENDS | KERNELS)[backend]))
    return head + "\n".join(filter(None, parts)) + f"\nprint(found)\n{gradients}\n"


class _Truth:
    """The formula for a case: its tensors as the code makes them, and then in float64 before anything is poisoned."""

    def __init__(self, case: Case, written: Program) -> None:
        self.case, self.names = case, {"torch": torch, "regard": regard}
        exec(written.made, self.names)
        self.leaves = {
            name: self.names[name].double().cpu().clone().requires_grad_()
            for name in (*NAMES, "bias", "scale", "sink")
            if name in self.names
        }
        if case.score is not None:
            own = self.names["score"].named_parameters()
            self.leaves |= {f"score.{name}": x.detach().double().cpu().clone().requires_grad_() for name, x in own}
        masks = Masks(case.batch, case.query_heads, case.n, case.m, headless=case.rank < 4)
        plain = {"torch": torch, "regard": masks}
        allowed = masks.everything()
        if case.mask is not None:
            allowed = eval(written.arguments["mask"], plain).cpu()
            if case.mask[0] == "tensor":
                allowed = self._five(allowed)
            elif allowed.dim() > 2:
                allowed = allowed.reshape((1,) * (4 - allowed.dim()) + allowed.shape)[:, None]
        self.added = torch.zeros(1, 1, 1, 1, 1, dtype=torch.float64)
        if case.bias in ("tensor", "holes"):
            self.added = self._five(self.leaves["bias"])
        elif case.bias is not None:
            text = written.arguments["bias"]
            self.added = eval(text, {"regard": SimpleNamespace(biases=Biases(case.n, case.m))}, self.leaves)
        full = (case.batch, case.inner, case.query_heads, case.n, case.m)
        self.allowed = (allowed & (self.added.detach() > -torch.inf)).expand(full)
        self.written = written
        self.poison = "" if case.poison is None else self._poison(case.poison)

    def _five(self, x: Tensor) -> Tensor:
        """View a tensor that broadcasts to the weights as (B0, B1, H, N, M)."""
        x = x.reshape((1,) * (self.case.rank - x.dim()) + tuple(x.shape))
        return x.reshape(*x.shape[:-3], 1, *x.shape[-3:]) if self.case.rank == 4 else self._padded(x)

    def _padded(self, x: Tensor) -> Tensor:
        return x if x.dim() == 5 else x[:, None, None] if x.dim() == 3 else x[None, None, None]

    def _input(self, name: str) -> Tensor:
        """Query, key or value, (B0, B1, H, N, D)."""
        x: Tensor = eval(name + self.written.views[name], {}, self.leaves)
        x = x[:, None] if x.dim() == 4 else self._padded(x)
        return x if name == "query" else x.repeat_interleave(self.case.groups, 2)

    def _poison(self, number: str) -> str:
        """Put a number where no pair looks: rows without a key, keys without a row."""
        c, lines = self.case, []
        unseen = {"query": ~self.allowed.any(-1), "key": ~self.allowed.unflatten(2, (c.heads, c.groups)).any(-2).any(3)}
        unseen["value"] = unseen["key"]
        for name, layout in zip(NAMES, c.layouts, strict=True):
            free = unseen[name]  # (B0, B1, heads, rows)
            if not free.numel():
                continue
            if layout == "expanded":
                free = free.all(0, True).all(1, True).all(2, True)
            elif layout == "one item":
                free = free.all(0, True)
            axes = {2: (3,), 3: (0, 3), 4: (0, 2, 3), 5: (0, 1, 2, 3)}[c.rank]
            spots = free.nonzero()[:, list(axes)].tolist()
            if not (c.dv if name == "value" else c.d if name == "query" else c.key_dim):
                continue
            for spot in random.Random(c.seed).sample(spots, min(2, len(spots))):
                at = ", ".join(map(str, [*spot, 0]))
                lines.append(f'{name}{self.written.views[name]}[{at}] = float("{number}")')
        return "\n".join(lines)

    def compute(self) -> Dense:
        c, leaves = self.case, self.leaves
        query, key, value = map(self._input, NAMES)
        scale = torch.tensor(max(c.d, 1) ** -0.5, dtype=torch.float64)
        if c.scale is not None:
            scale = leaves["scale"] if "scale" in leaves else torch.tensor(float(c.scale), dtype=torch.float64)
        own = {name.removeprefix("score."): x for name, x in leaves.items() if name.startswith("score.")}
        S = logits(c.score, own, query, key, scale)
        S = S if c.softcap is None else c.softcap * (S / c.softcap).tanh()
        S = S + self.added
        kept = None
        if c.dropout:
            torch.manual_seed(0)
            index = map(torch.arange, (c.batch * c.inner, c.query_heads, c.n, c.m))
            kept = keep(c.dropout, draw_seed("fuzz"), *index).double().reshape(self.allowed.shape) / (1 - c.dropout)
        sink = None if c.sink is None else eval(self.written.arguments["sink"], {}, leaves).expand(c.query_heads)
        found = attend(S, value, self.allowed, sink, kept)
        return Dense(*(self._shaped(x, at) for x, at in zip(found, (2, 1, 1, 1, 2), strict=True)))

    def _shaped(self, x: Tensor, tail: int) -> Tensor:
        return x.reshape(*self.case.lead, *x.shape[len(x.shape) - tail :])


def _loss(found: Dense, observed: bool) -> Tensor:
    """A number that all results with a derivative have a part in, with cotangents that every dtype can hold."""
    output = found.output.double().cpu()
    total = (output * torch.linspace(-1, 1, output.numel()).bfloat16().double().view(output.shape)).sum()
    if not observed:
        return total
    lse, entropy = found.lse.double().cpu(), found.entropy.double().cpu()
    return total + torch.where(lse > -torch.inf, lse, 0.0).sin().sum() + entropy.square().sum()


class _Expected(NamedTuple):
    """What every backend must answer."""

    results: Dense
    gradients: dict[str, Tensor | None]
    poison: str


@lru_cache(maxsize=1)
def _expected(case: Case) -> _Expected:
    truth = _Truth(case, write(case))
    results = truth.compute()
    gradients = torch.autograd.grad(_loss(results, case.observed), list(truth.leaves.values()), allow_unused=True)
    found = Dense(*(x.detach() for x in results))
    return _Expected(found, dict(zip(truth.leaves, gradients, strict=True)), truth.poison)


def failure(case: Case, backend: str) -> str | None:
    """Say what is wrong with the answer of a backend, or None if it is right or refused."""
    written, (true, true_grads, poison) = write(case), _expected(case)
    names: dict[str, Any] = {"torch": torch, "regard": regard}
    try:
        for part in (written.made, poison, written.leaves, call(case, written, (BACKENDS | KERNELS)[backend])):
            exec(part, names)
        answer = names["found"]
        if case.observed:
            found = Dense(answer.output, answer.lse, answer.entropy, answer.max_logit, answer.weights())
        else:
            found = true._replace(output=answer)
        grads = torch.autograd.grad(_loss(found, case.observed), names["leaves"], allow_unused=True)
    except regard.errors.BackendError as error:
        return f"{error}" if backend in OWN or backend == "auto" else None
    except Exception as error:  # noqa: BLE001 any error is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{error}".splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''} ({place.filename}:{place.lineno})"
    if str(found.output.dtype) != f"torch.{case.dtype}":
        return f"the output is {found.output.dtype}"
    results = [(name, getattr(found, name), getattr(true, name)) for name in Dense._fields]
    results += [(f"gradient of {name}", g, t) for g, (name, t) in zip(grads, true_grads.items(), strict=True)]
    for name, x, t in results:
        if (wrong := _compare(x, t, case.dtype)) is not None:
            return f"{name}: {wrong}"
    return None


def _compare(x: Tensor | None, true: Tensor | None, dtype: str) -> str | None:
    if x is None or true is None:
        x, true = (torch.zeros(()) if t is None else t.detach().cpu() for t in (x, true))
        return None if not x.count_nonzero() and not true.count_nonzero() else "one of two gradients is missing"
    if x.shape != true.shape:
        return f"the shape is {tuple(x.shape)}, and not {tuple(true.shape)}"
    x, true = x.detach().double().cpu(), true.detach()
    if not x.numel():
        return None
    error = float(torch.where(x == true, 0.0, (x - true).abs()).max())
    bound = TOLERANCE[dtype] * max(1.0, float(true.nan_to_num(0, 0, 0).abs().max()))
    return None if error <= bound else f"off by {error:.2e}, more than {bound:.2e}"


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 20.0) -> Case:
    """Take out of a case that fails all that it can fail without."""
    end = time.monotonic() + seconds
    found: Case | None = case
    while found is not None:
        case = found
        found = next((c for c in simpler(case) if c.valid and time.monotonic() < end and fails(c)), None)
    return case


def check(case: Case, backend: str) -> None:
    """Raise a `WrongAnswerError` with the smallest case that still fails, as code."""
    if (wrong := failure(case, backend)) is None:
        return
    small = shrink(case, lambda c: failure(c, backend) is not None)
    wrong = failure(small, backend) or wrong
    raise WrongAnswerError(f"{backend}: {wrong}\n\n{program(small, backend)}\n# {small}\n")


def run(seed: int, kernels: bool = False) -> int:
    """Check the case of a seed on every backend; give how many answered."""
    case = draw(seed)
    backends = OWN if case.observed else BACKENDS
    for backend in (*backends, *(KERNELS if kernels else ())):
        check(case, backend)
    return len(backends)


def main(seconds: float, seed: int) -> int:
    """Check random cases for so many seconds; print each failure, and every ten seconds how far it is."""
    begin = said = time.monotonic()
    failures, cases, answers = 0, 0, 0
    while (now := time.monotonic()) - begin < seconds:
        if now - said >= 10:
            print(f"{now - begin:6.0f} s  {cases} cases  {answers} answers  {failures} failures", flush=True)
            said = now
        try:
            answers += run(seed + cases, kernels=CUDA or cases % 16 == 0)
        except WrongAnswerError as wrong:
            failures += 1
            print(f"seed {seed + cases}: {wrong}", flush=True)
        cases += 1
    print(f"{cases} cases from seed {seed}, {answers} answers, {failures} failures in {time.monotonic() - begin:.0f} s")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())))
