"""The importance of heads: exact costs, the first-order estimate, and what the ranking says of the built-in model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError, DtypeError, MissingPackageError
from regard.models import builtin, importance
from regard.models.importance import Importance

HEADS, DIM = 3, 12


class Small(nn.Module):
    """One layer of attention; `gates` and `means` say what full matrices do to its heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gates, self.means = torch.ones(HEADS), torch.zeros(HEADS, DIM // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mean = self.means[:, None]
        y = F.scaled_dot_product_attention(q, k, v)
        y = mean + self.gates[:, None, None] * (y - mean)
        return self.out(y.transpose(1, 2).flatten(2))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1.0).square().mean()


@pytest.mark.parametrize("mean", [False, True])
def test_costs_are_those_of_ablated_matrices_and_estimates_those_of_the_gradient(mean: bool) -> None:
    model, batches = Small(), [torch.randn(2, 5, DIM), torch.randn(1, 7, DIM)]
    told: list[tuple[int, int]] = []
    found = importance(model, batches, squared, mean=mean, tell=lambda done, total: told.append((done, total)))
    if mean:
        outputs = [F.scaled_dot_product_attention(*split(model, x)).transpose(1, 2).flatten(0, 1) for x in batches]
        model.means = torch.cat(outputs).mean(0).detach()
    base = float(sum(squared(model, x) for x in batches).detach() / 2)
    assert found.base == pytest.approx(base, abs=1e-6)
    gates = torch.ones(HEADS, requires_grad=True)
    model.gates = gates
    (slope,) = torch.autograd.grad(sum(squared(model, x) for x in batches) / 2, gates)
    for head in found.heads:
        model.gates = torch.ones(HEADS).index_fill(0, torch.tensor(head.head), 0.0)
        without = float(sum(squared(model, x) for x in batches).detach() / 2)
        assert head.loss == pytest.approx(without, abs=1e-5)
        assert head.cost == pytest.approx(without - base, abs=1e-5)
        assert head.estimate == pytest.approx(-float(slope[head.head]), abs=1e-5)
    assert sorted(told) == told == [(1, 3), (2, 3), (3, 3)]
    costs = [head.cost for head in found.heads]
    assert costs == sorted(costs, reverse=True)
    both = torch.tensor([[head.cost for head in found.heads], [head.estimate for head in found.heads]])
    assert found.correlation == pytest.approx(float(torch.corrcoef(both.double())[0, 1]), abs=1e-6)


def split(model: Small, x: Tensor) -> Tensor:
    return model.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)


@pytest.fixture(scope="module")
def ranked() -> Importance:
    """The heads of the built-in model on random tokens that come twice: only copying predicts the second half."""
    ids = torch.randint(256, 1024, (2, 40), generator=torch.Generator().manual_seed(0))

    def second_half(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, 40:-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 41:].flatten())

    return importance(builtin.load(), [torch.cat([ids, ids], 1)], second_half)


def test_the_built_in_model_needs_its_previous_token_and_induction_heads_to_copy(ranked: Importance) -> None:
    first = ranked.heads[0]
    assert first.cost > 1.0
    assert first.layer == "blocks.2.attention"
    assert "previous token" in first.does[0]
    kinds = [" ".join(head.does) for head in ranked.heads]
    assert sum("induction head" in kind for kind in kinds[1:4]) == 3
    assert all(kinds[:4])
    copying = [at for at, kind in enumerate(kinds) if "induction" in kind or "previous token" in kind]
    others = [at for at in range(len(kinds)) if at not in copying]
    assert sum(copying) / len(copying) < sum(others) / len(others) / 2
    assert ranked.rank_correlation > 0.5


def test_a_ranking_is_a_table_a_page_and_json(ranked: Importance, tmp_path: Path) -> None:
    text = str(ranked.table(4))
    assert "the 4 most costly of 32 heads" in text
    assert text.count("induction head") == 3
    assert "<td" in ranked._repr_html_()
    page = ranked.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "cost_of_ablation" in page
    assert "estimated_cost" in page
    written = json.loads(ranked.to_json(tmp_path / "costs.json").read_text(encoding="utf-8"))
    assert written["heads"][0]["cost"] == ranked.heads[0].cost
    assert [head["layer"] for head in written["heads"]] == [head.layer for head in ranked.heads]


def test_to_pandas_needs_pandas_and_says_so(ranked: Importance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        ranked.to_pandas()


def test_a_loss_without_a_gradient_gives_costs_alone_and_wrong_input_is_refused() -> None:
    model, x = Small(), torch.randn(1, 5, DIM)
    found = importance(model, [x], lambda model, x: float(squared(model, x).detach()))
    assert all(math.isnan(head.estimate) for head in found.heads)
    assert math.isnan(found.correlation)
    assert "estimate" not in str(found)
    with pytest.raises(ArgumentError, match="there is no batch"):
        importance(model, [], squared)
    with pytest.raises(DtypeError, match="Got a tensor of shape"):
        importance(model, [x], lambda model, x: model(x))
    with pytest.raises(DtypeError, match="loss must be a function"):
        importance(model, [x], 3.0)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no attention"), pytest.raises(ArgumentError, match="no heads to ablate"):
        importance(nn.Linear(DIM, DIM), [x], squared)
    assert torch.equal(model(x), model(x))
