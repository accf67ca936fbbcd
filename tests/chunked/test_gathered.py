"""Rows with lists of keys: gathered keys give what the matrix gives, with every derivative, at the lists' cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from gathered_cases import MASKS, B, D, H, K, M, N, drawn, lists
from regard import biases, scores
from regard.chunked import gathered
from regard.core.gathered import lists_of
from regard.core.spec import Spec
from regard.masks import Mask
from regard.masks.chosen import Chosen

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout and sink": {"dropout": 0.3, "sink": drawn(H)},
    "softcap and alibi": {"softcap": 2.0, "bias": biases.alibi(drawn(H).abs())},
    "a bias": {"bias": drawn(B, H, N, M)},
    "a bias by key": {"bias": drawn(1, 1, 1, M)},
    "a table": {"bias": biases.relative(drawn(5))},
    "a score": {"score": scores.Gaussian(1.0)},
}
CASES = [("beside masks", each) for each in OPTIONS] + [(name, "plain") for name in MASKS if name != "beside masks"]
CASES += [("by key head", "softcap and alibi"), ("by query head", "a bias"), ("blocks", "dropout and sink")]


TABLE = drawn(2, H, N)
OPTIONS["a function of the score"] = {
    "score": scores.Pointwise(
        lambda s, b, h, i, j, table: torch.where((i + j) % 7 == 3, -torch.inf, s.sin() + table[b, h, i] * (j - i) / 9),
        parameters={"table": nn.Parameter(TABLE.clone())},
    )
}
CASES += [(name, "a function of the score") for name in ("beside masks", "by key head", "by query head", "blocks")]


def results(mask: Mask, backend: Any, options: dict[str, Any]) -> list[Tensor]:
    """Output, lse and entropy, their gradients, and those of the gradients."""
    x = [drawn(B, h, n, D).requires_grad_() for h, n in ((H, N), (K, M), (K, M))]
    options, more = dict(options), list[Tensor]()
    if isinstance(options.get("bias"), Tensor):
        options["bias"] = options["bias"].clone().requires_grad_()
        more.append(options["bias"])
    elif "bias" in options:
        table = options["bias"].tensors[0].clone().requires_grad_()
        options["bias"] = type(options["bias"])(table)
        more.append(table)
    if isinstance(options.get("score"), scores.Pointwise):
        more += options["score"].parameters()
    torch.manual_seed(5)
    seen = regard.observe(*x, mask=mask, backend=backend, **options)
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    loss = (seen.output * drawn(*seen.output.shape)).sum() + lse.sin().sum() + seen.entropy.square().sum()
    first = torch.autograd.grad(loss, (*x, *more), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (*x, *more))
    return [seen.output, lse, seen.entropy, seen.received, seen.visible, *first, *second]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_gathered_keys_give_what_the_matrix_gives(name: str, option: str) -> None:
    mask = MASKS[name]
    assert lists_of(Spec(N, M, mask.bind(B, H))) is not None
    written = regard.dense(mask.bind(B, H).dense(N, M))
    small = regard.backends.Chunked(chunk_size=8)  # several parts
    ours, wanted = (results(m, b, OPTIONS[option]) for m, b in ((mask, small), (written, "reference")))
    for found, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_tangents_and_batches_of_samples_work_too() -> None:
    mask = MASKS["beside masks"]
    written = regard.dense(mask.bind(B, H).dense(N, M))
    query, key, value = drawn(B, H, N, D), drawn(B, K, M, D), drawn(B, K, M, D)

    def made(mask: Mask, backend: str) -> list[Tensor]:
        def attend(query: Tensor) -> Tensor:
            return regard.attention(query, key, value, mask=mask, backend=backend)

        tangents = torch.func.jvp(attend, (query,), (query.cos(),))
        several = torch.stack((query, query.sin()))
        return [*tangents, torch.vmap(torch.func.grad(lambda q: attend(q).square().sum()))(several)]

    for found, expected in zip(made(mask, "chunked"), made(written, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_work_is_that_of_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = 0
    taken = gathered._part

    def counted(x: Any, at: Any) -> Any:
        nonlocal pairs
        pairs += at.keys.shape[-1] * at.count * at.height
        return taken(x, at)

    monkeypatch.setattr(gathered, "_part", counted)
    monkeypatch.setattr(Chosen, "allows", None)  # no pair is asked for
    n = 1000
    x = torch.randn(1, 1, n, 4)
    regard.observe(
        x, x, x, mask=regard.chosen(lists(n, 5, below=n)) & regard.causal(), backend="chunked"
    ).received.sum()
    assert pairs == 2 * n * 5  # the forward pass, and one for what keys receive


def test_a_nan_stays_with_the_rows_that_see_it() -> None:
    entries = torch.tensor([[0, 1], [2, -1], [3, 3], [1, 2]])
    query, key, value = torch.randn(3, 1, 1, 4, 8).unbind()
    query, key, value = (torch.nn.Parameter(t.clone()) for t in (query, key, value))
    key.data[0, 0, 3] = torch.nan
    value.data[0, 0, 0] = torch.inf
    output = regard.attention(query, key, value, mask=regard.chosen(entries), backend="chunked")
    assert output.isfinite().all(-1)[0, 0].tolist() == [False, True, False, True]
    output[:, :, 1].sum().backward()
    assert query.grad is not None
    assert query.grad[0, 0, 1].isfinite().all()


def test_gradients_have_the_same_bits_every_time() -> None:
    mask = regard.chosen(lists(200, 20, below=300))
    query, key, value = torch.randn(1, 2, 200, 8), torch.randn(1, 1, 300, 8), torch.randn(1, 1, 300, 8)
    key.requires_grad_()
    found = [
        torch.autograd.grad(regard.attention(query, key, value, mask=mask, backend="chunked").square().sum(), key)[0]
        for _ in range(3)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
