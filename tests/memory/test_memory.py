"""Memory: reads against the formula, in memory and on disk, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.memory import Memory, Reading
from regard.scores import Additive, Bilinear, Cosine, Gaussian, Scaled, Score, Temperature

SCORES: dict[str, Callable[[], Score | None]] = {
    "none": lambda: None,
    "scaled": lambda: Scaled(0.3),
    "temperature": lambda: Temperature(2.0),
    "cosine": lambda: Cosine(0.5, learnable=True),
    "gaussian": lambda: Gaussian(1.5),
    "bilinear": lambda: Bilinear(4, 4),
    "additive": lambda: Additive(4, 4, 3),
}


def rows(
    n: int = 50, key_dim: int = 4, value_dim: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    return torch.randn(n, key_dim, dtype=dtype), torch.randn(n, value_dim, dtype=dtype)


def filled(where: str, tmp_path: Path, score: Score | None = None, n: int = 50) -> tuple[Memory, Tensor, Tensor]:
    """A memory after two writes and a deletion, in memory or on disk, and the rows that are left."""
    keys, values = rows(n)
    memory = Memory(4, 3, score, dtype=torch.float64)
    memory.write(keys[: n // 2], values[: n // 2])
    if where == "disk":
        memory.save(tmp_path / "memory")
        memory = Memory.open(tmp_path / "memory", "a", score=score)
    memory.write(keys[n // 2 :], values[n // 2 :])
    memory.delete([1, n - 2])
    left = [i for i in range(n) if i not in (1, n - 2)]
    return memory, keys[left], values[left]


def plain(q: Tensor, k: Tensor, v: Tensor, score: Score | None, T: float | Tensor = 1.0) -> tuple[Tensor, ...]:
    """Output, lse, entropy and max logit by the formula."""
    S = (q @ k.mT / math.sqrt(k.shape[-1]) if score is None else score(q, k)) / T
    P = torch.softmax(S, -1)
    return P @ v, S.logsumexp(-1), -(P * P.log()).sum(-1), S.amax(-1)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", SCORES)
def test_a_read_is_the_formula_over_all_rows_that_are_left(name: str, where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    score = SCORES[name]()
    score = score if score is None else score.double()
    memory, k, v = filled(where, tmp_path, score)
    q = torch.randn(2, 5, 4, dtype=torch.float64)
    wanted = plain(q, k, v, score, 0.7)
    found = memory.read(q, temperature=0.7, observe=True)
    assert isinstance(found, Reading)
    for got, want in zip(found[:4], wanted, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(memory.read(q, temperature=0.7), wanted[0])
    torch.testing.assert_close(memory.read(q[0, 0], 0.7), wanted[0][0, 0])


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", SCORES)
def test_top_reads_only_the_strongest_rows(name: str, where: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    score = SCORES[name]()
    score = score if score is None else score.double()
    memory, k, v = filled(where, tmp_path, score)
    q = torch.randn(6, 4, dtype=torch.float64)
    S = (q @ k.mT / 2 if score is None else score(q, k)) / 1.3
    best = S.topk(5)
    weights = torch.softmax(best.values, -1)
    found = memory.read(q, 1.3, top=5, observe=True)
    ids = torch.cat([chunk.ids for chunk in memory])
    assert found.ids is not None
    assert torch.equal(found.ids, ids[best.indices])
    torch.testing.assert_close(found.weights, weights)
    torch.testing.assert_close(found.output, torch.einsum("nk,nkd->nd", weights, v[best.indices]))
    torch.testing.assert_close(found.lse, best.values.logsumexp(-1))
    torch.testing.assert_close(memory.read(q, 1.3, top=5), found.output)
    torch.testing.assert_close(memory.read(q, 1.3, top=10_000), memory.read(q, 1.3))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_low_temperature_gives_the_nearest_key_and_a_high_one_the_mean(where: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    memory, k, v = filled(where, tmp_path)
    q = torch.randn(7, 4, dtype=torch.float64)
    nearest = v[(q @ k.mT).argmax(-1)]
    away = [(memory.read(q, T) - nearest).abs().max().item() for T in (1.0, 0.1, 1e-4)]
    assert away[0] > away[1] > away[2]
    assert away[2] < 1e-9
    torch.testing.assert_close(memory.read(q, top=1), nearest)
    gaps = [(memory.read(q, T) - v.mean(0)).abs().max().item() for T in (1.0, 10.0, 1e8)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-7


def test_ties_go_to_the_row_written_first() -> None:
    memory = Memory(1, 1)
    memory.write(torch.ones(6, 1), torch.arange(6.0)[:, None], ids=[9, 3, 7, 1, 5, 2])
    found = memory.read(torch.ones(1, 1), top=3, observe=True)
    assert found.ids is not None
    assert found.ids.tolist() == [[9, 3, 7]]


@pytest.mark.parametrize("top", [None, 4])
@pytest.mark.parametrize("name", ["none", "cosine", "additive"])
def test_gradients_reach_queries_keys_values_and_the_score(name: str, top: int | None) -> None:
    torch.manual_seed(3)
    score = SCORES[name]()
    score = score if score is None else score.double()
    parts = [rows(5), rows(4), rows(3)]
    leaves = [x.requires_grad_() for part in (parts[0], parts[2]) for x in part]
    q, T = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor(0.8).double().requires_grad_()
    leaves += [q, T, *(() if score is None else score.parameters())]
    memory = Memory(4, 3, score, dtype=torch.float64)
    for part in parts:
        memory.write(*part)
    memory.delete([1, 6])
    found = memory.read(q, T, top=top, observe=True)
    left = [i for i in range(12) if i not in (1, 6)]
    k, v = (torch.cat(x)[left] for x in zip(*parts, strict=True))
    if top is None:
        wanted = plain(q, k, v, score, T)
    else:
        at = ((q @ k.mT / 2 if score is None else score(q, k)) / T).topk(top).indices
        wanted = [x[:, 0] for x in plain(q[:, None], k[at], v[at], score, T)]  # type: ignore[assignment]
    weighed = [torch.randn_like(x) for x in wanted[:3]]
    got = torch.autograd.grad(sum((a * b).sum() for a, b in zip(found[:3], weighed, strict=True)), leaves)
    want = torch.autograd.grad(sum((a * b).sum() for a, b in zip(wanted[:3], weighed, strict=True)), leaves)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", SCORES)
def test_from_disk_gradients_reach_queries_temperature_and_the_score(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    score = SCORES[name]()
    score = score if score is None else score.double()
    memory, k, v = filled("disk", tmp_path, score)
    q, T = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor(0.8).double().requires_grad_()
    leaves = [q, T, *(() if score is None else score.parameters())]
    wanted, found = plain(q, k, v, score, T.exp())[:3], memory.read(q, T.exp(), observe=True)[:3]
    weighed = [torch.randn_like(x) for x in wanted]
    got = torch.autograd.grad(sum((a * b).sum() for a, b in zip(found, weighed, strict=True)), leaves)
    want = torch.autograd.grad(sum((a * b).sum() for a, b in zip(wanted, weighed, strict=True)), leaves)
    torch.testing.assert_close(got, want)
    (alone,) = torch.autograd.grad(memory.read(q, 0.5).sum(), [q])
    (truth,) = torch.autograd.grad(plain(q, k, v, score, 0.5)[0].sum(), [q])
    torch.testing.assert_close(alone, truth)


def test_a_gradient_from_disk_uses_the_rows_that_were_read_despite_later_changes(tmp_path: Path) -> None:
    memory, k, v = filled("disk", tmp_path)
    q = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    output = memory.read(q)
    memory.delete([0, 2])
    memory.write(*rows(9))
    (got,) = torch.autograd.grad(output.square().sum(), [q])
    (want,) = torch.autograd.grad(plain(q, k, v, None)[0].square().sum(), [q])
    torch.testing.assert_close(got, want)


def test_updates_of_rows_that_require_a_gradient_are_seen_and_those_of_others_are_not() -> None:
    learned, fixed = torch.zeros(2, 1, requires_grad=True), torch.ones(2, 1)
    memory = Memory(1, 1)
    memory.write(torch.zeros(2, 1), learned)
    memory.write(torch.zeros(2, 1), fixed)
    fixed += 100
    with torch.no_grad():
        learned += 2
    memory.delete([0, 2])
    with torch.no_grad():
        learned += 1
    torch.testing.assert_close(memory.read(torch.zeros(1, 1)).detach(), torch.tensor([[2.0]]))
    memory.read(torch.zeros(1, 1)).sum().backward()
    assert learned.grad is not None
    assert learned.grad.tolist() == [[0.0], [0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype, where: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    k, v = rows(300, 8, 8, dtype)
    q = torch.randn(4, 8).to(dtype)
    memory = Memory(8, 8, dtype=dtype)
    memory.write(k, v)
    if where == "disk":
        memory.save(tmp_path / "memory")
        memory = Memory.open(tmp_path / "memory")
    found = memory.read(q, observe=True)
    want = plain(q.double(), k.double(), v.double(), None)
    assert (found.output.dtype, found.lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(found.output.double(), want[0], atol=4 * torch.finfo(dtype).eps, rtol=1e-2)
    torch.testing.assert_close(found.lse.double(), want[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy.double(), want[2], atol=1e-5, rtol=1e-5)


def test_huge_logits_do_not_overflow(tmp_path: Path) -> None:
    memory = Memory(1, 1)
    memory.write(torch.tensor([[-1e4], [0.0], [1e4], [9e3]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    memory.save(tmp_path / "memory")
    for held in (memory, Memory.open(tmp_path / "memory")):
        found = held.read(torch.tensor([[1e4], [-1e4]]), observe=True)
        assert found.output.tolist() == [[3.0], [1.0]]
        assert found.entropy.tolist() == [0.0, 0.0]


def test_ids_continue_and_may_be_given() -> None:
    memory = Memory(2, 2)
    x = torch.randn(3, 2)
    assert memory.write(x, x).tolist() == [0, 1, 2]
    assert memory.write(x[0], x[0], ids=[10]).tolist() == [10]
    assert memory.write(x, x).tolist() == [11, 12, 13]
    assert memory.write(x[:1], x[:1], ids=torch.tensor([5], dtype=torch.int32)).tolist() == [5]
    memory.delete(torch.tensor([13, 0]))
    assert memory.write(x[:1], x[:1], ids=[0]).tolist() == [0]
    assert memory.write(x[:1], x[:1]).tolist() == [14]
    assert torch.cat([ids for _, _, ids in memory]).tolist() == [1, 2, 10, 11, 12, 5, 0, 14]
    assert len(memory) == 8
    assert memory.write(x[:0], x[:0]).tolist() == []
    assert memory.read(x[:0]).shape == (0, 2)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("top", [None, 3])
def test_progress_is_reported_to_the_end(where: str, top: int | None, tmp_path: Path) -> None:
    memory, _, _ = filled(where, tmp_path)
    reported: list[tuple[int, int]] = []
    q = torch.randn(600, 4, dtype=torch.float64)
    found = memory.read(q, top=top, progress=lambda done, total: reported.append((done, total)))
    torch.testing.assert_close(found, memory.read(q, top=top))
    assert reported
    assert reported[-1][0] == reported[-1][1]


def test_a_progress_bar_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, _, _ = filled("disk", tmp_path)
    q = torch.randn(2, 4, dtype=torch.float64)
    memory.read(q)
    assert capsys.readouterr() == ("", "")
    memory.read(q, progress=True)
    shown = capsys.readouterr()
    assert "48/48" in shown.err
    assert shown.out == ""


def test_the_repr_describes_the_memory() -> None:
    assert repr(Memory(2, 3, Cosine(0.5))) == (
        "Memory(0 rows, key_dim=2, value_dim=3, Cosine(temperature=0.5, learnable=False), float32, in memory)"
    )
    assert regard.errors.FileError.__mro__[2] is OSError
