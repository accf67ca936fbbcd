"""Functions of the scores that are a cap or a bias are known as such."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.biases import Alibi, Relative
from regard.kernels import known_form as module
from regard.kernels.known_form import Size, known_form
from regard.scores import Pointwise

HEADS, N, M = 3, 5, 9
SIZE = Size(HEADS, N, M, torch.device("cpu"))
SLOPES, TABLE, NEAR = torch.tensor([0.1, 0.2, -0.3]), torch.randn(HEADS, 9), torch.randn(7)
Function = Callable[..., Tensor]
BIASES: dict[str, tuple[Function, type]] = {
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), Alibi),
    "alibi, the other way": (lambda s, b, h, i, j: torch.abs(j - i) * SLOPES[h] + s, Alibi),
    "one slope": (lambda s, b, h, i, j: s - 0.5 * (i - j).abs(), Relative),
    "relative table": (lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-4, 4) + 4], Relative),
    "a table for all heads": (lambda s, b, h, i, j: s + NEAR[(j - i).clamp(-3, 3) + 3], Relative),
    "taken away": (lambda s, b, h, i, j: s - (i - j).float().square() * 0.1, Relative),
    "a table shorter than the distances": (lambda s, b, h, i, j: s + NEAR[i - j], Relative),
}
OTHERS: dict[str, Function] = {
    "by row": lambda s, b, h, i, j: s + i,
    "by batch": lambda s, b, h, i, j: s + b * (i - j),
    "a product": lambda s, b, h, i, j: s * torch.exp(-0.1 * (i - j).abs()),
    "the score twice": lambda s, b, h, i, j: s + s.sin(),
    "taken from something": lambda s, b, h, i, j: (i - j) - s,
    "another cap within": lambda s, b, h, i, j: 5.0 * torch.tanh(s / 4.0),
    "rounded towards 0": lambda s, b, h, i, j: s + ((i - 0.5).long() - j),
    "a negative cap": lambda s, b, h, i, j: -5.0 * torch.tanh(s / -5.0),
}


@pytest.mark.parametrize("name", BIASES)
def test_what_is_added_by_distance_is_a_bias(name: str) -> None:
    f, kind = BIASES[name]
    form = known_form(Pointwise(f), SIZE)
    assert form is not None
    assert type(form.bias) is kind
    q, k = torch.randn(1, HEADS, N, 4), torch.randn(1, HEADS, M, 4)
    torch.testing.assert_close(
        regard.scores.Scaled()(q, k) + form.bias.dense(N, M), Pointwise(f)(q, k), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    "f", [lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0), lambda s, b, h, i, j: (s * 0.25).tanh() * 4.0]
)
def test_a_cap_is_a_cap(f: Function) -> None:
    form = known_form(Pointwise(f), SIZE)
    assert form is not None
    assert form.bias is None
    x = torch.tensor([3.0])
    torch.testing.assert_close(form.softcap * torch.tanh(x / form.softcap), f(x, 0, 0, 0, 0))


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_not_known(name: str) -> None:
    assert known_form(Pointwise(OTHERS[name]), SIZE) is None


def test_a_form_is_found_again_only_if_something_has_changed() -> None:
    table = torch.randn(17)
    score = Pointwise(lambda s, b, h, i, j: s + table[i - j + 8])
    form = known_form(score, SIZE)
    assert form is not None
    assert known_form(score, SIZE) is form
    table.add_(1.0)
    changed = known_form(score, SIZE)
    assert changed is not None
    torch.testing.assert_close(changed.bias.tensors[0], form.bias.tensors[0] + 1)
    assert known_form(score, SIZE._replace(rows=7)) is not changed
    table.requires_grad_()
    assert known_form(score, SIZE) is None


def test_what_inference_mode_found_may_be_saved_for_a_backward_pass() -> None:
    with torch.inference_mode():
        slopes = SLOPES.clone()
    score, sloped = (Pointwise(BIASES[name][0]) for name in ("relative table", "alibi, the other way"))
    with torch.inference_mode():
        for one in (score, sloped):
            known_form(one, SIZE)
    given = Pointwise(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    for one in (score, sloped, given):
        form = known_form(one, SIZE)
        assert form is not None
        assert form.bias is not None
        assert not form.bias.tensors[0].is_inference()


def test_a_captured_graph_reads_the_tables_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Pointwise(BIASES["relative table"][0])
    kept = known_form(score, SIZE)
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    assert known_form(score, SIZE) is not kept
    monkeypatch.undo()
    assert known_form(score, SIZE) is kept
