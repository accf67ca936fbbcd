"""What watch says of heads comes from sums that kernels left, and is what the rows say."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

import regard
from regard.backends import dispatch
from regard.compat.compiled import OperatorMode
from regard.models import findings, head_statistics, record
from regard.models.head_statistics import SurveyedCall, sum_heads

ROWS = 40  # several blocks of rows


class Attend(nn.Module):
    """A module that attends with given queries, keys and options."""

    def __init__(self, query: Tensor, key: Tensor, **options: Any) -> None:
        super().__init__()
        self.query, self.key, self.options = query, key, options

    def forward(self) -> Tensor:
        return regard.attention(self.query, self.key, self.key, **self.options)


class Model(nn.Module):
    def __init__(self, layers: dict[str, Attend]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, ids: Tensor) -> None:
        for layer in self.layers.values():
            layer()


def inputs(n: int = ROWS, m: int = ROWS, large: float = 1.0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(n)
    return large * torch.randn(2, 2, n, 8, generator=made), torch.randn(2, 1, m, 8, generator=made)


LAYERS = {
    "causal": lambda: Attend(*inputs(), mask=regard.causal()),
    "sharp, with a sink": lambda: Attend(*inputs(large=30.0), sink=torch.ones(2)),
    "padding in front": lambda: Attend(
        *inputs(), mask=regard.dense((torch.arange(ROWS) > torch.tensor([[12], [3]]))[:, None, None]) & regard.causal()
    ),
    "fewer keys": lambda: Attend(*inputs(30, 17), bias=torch.zeros(17).index_fill(0, torch.tensor([0, 3]), -torch.inf)),
}


def watched(name: str) -> regard.models.Seen:
    model, ids = Model({name: LAYERS[name]()}), torch.arange(ROWS).remainder(9).repeat(2, 1)
    with regard.watch(model) as seen, torch.no_grad():
        model(ids)
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_heads_and_findings_are_those_of_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAP_SIDE", 3)
    true = watched(name)
    monkeypatch.setattr(dispatch, "order", lambda _: dispatch.OTHERS)
    found = watched(name)
    (call,), (rows,) = found.surveys().values(), true.surveys().values()
    assert call.survey.totals is not None
    assert rows.survey.totals is None
    assert torch.equal(call.seen.visible, rows.seen.visible)
    for a, b in zip(found.heads, true.heads, strict=True):
        assert (a.layer, a.head) == (b.layer, b.head)
        assert a.numbers() == pytest.approx(b.numbers(), rel=2e-5, abs=2e-6, nan_ok=True)
    assert [(x.rule, x.text, x.heads) for x in found.findings()] == [(x.rule, x.text, x.heads) for x in true.findings()]
    (sums,), (true_sums,) = found.sums().values(), true.sums().values()
    torch.testing.assert_close(sums.most, true_sums.most, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sums.rows, true_sums.rows, atol=1e-3, rtol=1e-4, equal_nan=True)
    assert torch.equal(sums.key, true_sums.key)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_row_whose_logits_are_not_finite_shows_in_the_sums() -> None:
    q, k = inputs()
    q[1, 1, 7] = torch.nan
    seen = regard.observe(q, k, k, mask=regard.causal(), backend="triton")
    seen.entropy[1, 1, 7] = seen.max_logit[1, 1, 7] = torch.nan
    call = SurveyedCall.of(seen, 3)
    rows = replace(call, survey=call.survey._replace(totals=None, peaks=None))
    (sums,), (true,) = sum_heads([call]), sum_heads([rows])
    torch.testing.assert_close(sums.rows, true.rows, atol=1e-3, rtol=1e-4, equal_nan=True)
    torch.testing.assert_close(sums[1:3], true[1:3], atol=1e-4, rtol=1e-4, equal_nan=True)
    assert bool(sums.rows.max_logit.isnan().any())
    assert bool(sums.most.isnan().any())


VIEWS = {
    "aten::" + name
    for name in ("view", "_unsafe_view", "detach", "alias", "t", "transpose.int", "expand", "select.int")
}
VIEWS |= {"aten::" + name for name in ("slice.Tensor", "unsqueeze", "squeeze", "unbind.int", "index_fill")}


class OnDevice(OperatorMode):
    """Records the operations on given tensors and on all that follows from them: those that a GPU would run."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.known = {self._address(x) for x in tensors}
        self.kept, self.names = tensors, set[str]()

    @staticmethod
    def _address(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(self._address(x) in self.known for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            self.names |= {func.name()} - VIEWS
            self.kept += [x for x in tree_leaves(found) if isinstance(x, Tensor)]  # no address is used again
            self.known |= {self._address(x) for x in self.kept}
        return found

    def on_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies that are not on the device."""
        with _disable_current_modes():
            return [x.clone() for x in tensors]


def test_findings_run_few_kinds_of_operations_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU loads the code of each kind at its first use, which takes milliseconds."""
    monkeypatch.setattr(record, "MAP_SIDE", 3)
    monkeypatch.setattr(dispatch, "order", lambda _: dispatch.OTHERS)
    seen = watched("causal")
    (call,) = seen.surveys().values()
    problem = call.seen._problem
    surveyed = [x for x in call.survey if x is not None]
    mode = OnDevice([problem.query, problem.key, problem.value, *call.seen._rows, *surveyed])
    for module in (record, head_statistics, *(sys.modules[rule.__module__] for rule in findings.RULES)):
        if hasattr(module, "on_host"):
            monkeypatch.setattr(module, "on_host", mode.on_host)
    with mode:
        seen.heads
        single = [rule for rule in findings.RULES if rule.name not in ("duplicate", "induction")]
        seen.findings(single)
        assert mode.names == set()  # all are computed on the host
        seen.findings()
    assert 8 <= len(mode.names) <= 15, mode.names
