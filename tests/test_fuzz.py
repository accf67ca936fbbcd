"""Random problems against the dense formula, a hundred of them; `make fuzz SECONDS=600` checks more."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import fuzz
from fuzz import WrongAnswerError
from random_problems import Case, draw
from regard.core import formula
from regard.core.spec import Spec


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_random_problems_agree_with_the_dense_formula_on_every_backend(first: int) -> None:
    for seed in range(first, first + 25):
        fuzz.run(seed)


def test_a_failure_is_reduced_to_what_it_needs_and_printed_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    true = formula.logits

    def wrong_if_capped(spec: Spec, *arguments: Any) -> Tensor:
        return true(spec, *arguments) * (1.0 if spec.softcap is None else 1.5)

    monkeypatch.setattr(formula, "logits", wrong_if_capped)
    mask = ("|", ("~", ("padding", 4)), ("&", ("window", 7), ("predicate", 2)))
    case = Case(rank=5, batch=2, heads=2, n=6, m=8, dtype="float64", mask=mask, bias="tensor", softcap=3.0, sink="one")
    with pytest.raises(WrongAnswerError, match="reference: output: off by") as caught:
        fuzz.check(case, "reference")
    report = str(caught.value)
    code = report[report.index("import") : report.index("# Case")]
    assert "softcap=3.0" in code
    assert not any(part in code for part in ("mask", "bias", "sink"))
    exec(code.replace("print", "str"), {})


def test_every_kind_of_part_is_drawn() -> None:
    cases = [draw(seed) for seed in range(400)]
    for name in ("rank", "dtype", "bias", "score", "scale", "softcap", "sink", "dropout", "poison", "observed"):
        assert len({getattr(case, name) for case in cases}) >= (4 if name in ("rank", "dtype") else 2)
    assert all(any(getattr(case, name) == 0 for case in cases) for name in ("batch", "heads", "n", "m", "d", "dv"))
