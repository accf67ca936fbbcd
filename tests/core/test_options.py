"""Arguments that do not exist: the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.errors import DtypeError, RegardError


@pytest.mark.parametrize("call", [regard.attention, regard.observe, regard.why])
@pytest.mark.parametrize(
    ("name", "instead"),
    {
        "is_causal": "Write mask=regard.causal().",
        "causal": "Write mask=regard.causal().",
        "score_mod": "Write score=regard.scores.Pointwise(f).",
        "attn_mask": 'Write mask=, where True means "may attend"; what is added to the logits is bias=.',
        "dropout_p": "Write dropout=.",
        "enable_gqa": "Leave it out: grouped heads are recognized by their number.",
        "msak": "Did you mean mask=?",
    }.items(),
)
def test_an_argument_of_torch_gets_the_one_to_write_instead(call: Callable[..., Any], name: str, instead: str) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(DtypeError) as error:
        call(x, x, x, **{name: True})
    assert str(error.value) == f"{call.__name__}: there is no argument {name}. {instead}"
    assert isinstance(error.value, TypeError)


def test_an_unheard_of_argument_gets_the_list() -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(RegardError, match=r"There are mask, bias, score, .*, observe\.$"):
        regard.why(x, x, x, zzz=1)  # type: ignore[arg-type]
