"""What a backend is: a name, reasons to refuse, a run; and late passes that it need not write itself."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import regard
from regard.backends import KNOWN, Backend
from regard.core.problem import Problem
from regard.core.rows import Rows
from regard.errors import BackendError

X = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0))


class Mine(Backend):
    name: ClassVar[str] = "mine"
    about: ClassVar[str] = "a backend of a user"

    def refuses(self, p: Problem) -> list[str]:
        return ["it likes no sinks"] if p.sink is not None else []

    def run(self, p: Problem) -> Rows:
        return Rows(p.shaped(torch.full((*p.query.shape[:3], p.value.shape[-1]), 7.0)), None, None, None)


def test_a_backend_object_of_a_user_runs_and_is_shown() -> None:
    assert (regard.attention(X, X, X, backend=Mine()) == 7).all()
    text = str(regard.why(X, X, X, backend=Mine()))
    assert "→ mine" in text
    assert text.count("→") == 1


def test_a_backend_object_that_refuses_raises_and_why_shows_its_reasons() -> None:
    with pytest.raises(BackendError, match="'mine' refuses: it likes no sinks"):
        regard.attention(X, X, X, sink=torch.zeros(2), backend=Mine())
    assert "it likes no sinks" in str(regard.why(X, X, X, sink=torch.zeros(2), backend=Mine()))


def test_every_known_backend_has_a_name_and_says_what_it_is() -> None:
    assert list(KNOWN) == ["sdpa", "flash4", "triton", "chunked", "reference"]
    for name, backend in KNOWN.items():
        assert backend.name == name
        assert backend.about
        assert repr(backend).startswith("regard.backends.")


class Borrowed(Mine):
    """A backend whose run is that of `reference`, and whose late passes are inherited."""

    def run(self, p: Problem) -> Rows:
        return KNOWN["reference"].run(p)


def test_a_backend_inherits_the_late_passes_of_an_observation() -> None:
    x = torch.randn(2, 3, 9, 4, dtype=torch.float64)
    seen = regard.observe(x, x, x, mask=regard.causal(), backend=Borrowed())
    P = seen.weights()
    torch.testing.assert_close(seen.received, P.sum(-2))
    torch.testing.assert_close(seen.gradient_health, (P * (1 - P)).sum(-1))
    torch.testing.assert_close(seen.map(1, 1)[..., 0, 0], P.mean((-2, -1)))
    torch.testing.assert_close(seen.top(2)[0], P.topk(2).values * (P.topk(2).values > 0))
    assert torch.equal(seen.visible, torch.arange(1, 10).expand(2, 3, 9))
