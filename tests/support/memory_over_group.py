"""Cases for three processes: each runs on every rank, and compares with one memory of all rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard
from regard.errors import ArgumentError, DistributedError
from regard.memory import Memory, Reading, streaming
from regard.scores import Additive, Bilinear, Cosine, Gaussian, Score, Temperature
from world import Case

RANKS = 3
ROWS = (17, 0, 30)  # one rank has no rows
QUERIES = (5, 4, 0)  # one rank has no queries
SCORES: dict[str, Callable[[], Score | None]] = {
    "none": lambda: None,
    "temperature": lambda: Temperature(2.0),
    "cosine": lambda: Cosine(0.5, learnable=True),
    "gaussian": lambda: Gaussian(1.5),
    "bilinear": lambda: Bilinear(4, 4),
    "additive": lambda: Additive(4, 4, 3),
}
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def world() -> Any:
    return dist.group.WORLD


def raised(function: Callable[[], object], kind: type[Exception]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


class Setting:
    """The rows and queries of all ranks, equal on every rank, and the part of one rank."""

    def __init__(self, rank: int, score: Score | None = None, dtype: torch.dtype = torch.float64) -> None:
        self.rank, self.score = rank, score if score is None else score.to(dtype)
        self.keys, self.values = ([torch.randn(rows, dim, dtype=dtype) for rows in ROWS] for dim in (4, 3))
        self.queries = [torch.randn(count, 4, dtype=dtype) for count in QUERIES]
        self.dtype = dtype

    def need_gradients(self, rows: bool = True) -> None:
        for x in (*self.queries, *((*self.keys, *self.values) if rows else ())):
            x.requires_grad_()

    def own(self) -> Memory:
        memory = Memory(4, 3, self.score, dtype=self.dtype)
        memory.write(self.keys[self.rank], self.values[self.rank])
        return memory

    def all(self) -> Memory:
        memory = Memory(4, 3, self.score, dtype=self.dtype)
        memory.write(torch.cat(self.keys), torch.cat(self.values))
        return memory

    def mine(self, every: Tensor) -> Tensor:
        return every.split(QUERIES)[self.rank]


def same(found: Reading, wanted: Reading, at: Setting, **tolerance: float) -> None:
    for name, got, want in zip(Reading._fields[:4], found[:4], wanted[:4], strict=True):
        torch.testing.assert_close(got, at.mine(want), msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def gradients(loss: Tensor, at: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, at, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(at, found, strict=True)]


def loss_of(found: Reading, weight: Tensor) -> Tensor:
    """A loss that depends on every differentiable field."""
    loss = (
        (found.output * weight[:, :3]).sum() + (found.lse * weight[:, 3]).sum() + (found.entropy * weight[:, 4]).sum()
    )
    if found.weights is not None:
        loss = loss + (found.weights * weight[:, 5 : 5 + found.weights.shape[-1]]).sum()
    return loss


def score_case(name: str, top: int | None) -> Case:
    def held(rank: int, folder: Path) -> None:
        at = Setting(rank, SCORES[name]())
        at.need_gradients()
        T = torch.tensor(0.7, dtype=at.dtype, requires_grad=True)
        parameters = [T, *(at.score.parameters() if at.score is not None else ())]
        wanted = at.all().read(torch.cat(at.queries), T, top=top, observe=True)
        found = at.own().read(at.queries[rank], T, top=top, observe=True, group=world())
        same(found, wanted, at)
        if top is not None:
            torch.testing.assert_close(found.weights, at.mine(wanted.weights))
            ids, starts = at.mine(wanted.ids), torch.tensor([0, ROWS[0], ROWS[0] + ROWS[1]])
            assert torch.equal(found.ids + starts[found.ranks], ids)
        weight = torch.randn(sum(QUERIES), 5 + (top or 0), dtype=at.dtype)
        truth = gradients(loss_of(wanted, weight), [at.queries[rank], at.keys[rank], at.values[rank], *parameters])
        got = gradients(
            loss_of(found, at.mine(weight)), [at.queries[rank], at.keys[rank], at.values[rank], *parameters]
        )
        for one, other in zip(got, truth, strict=True):
            torch.testing.assert_close(one, other)

    return held


for _name in SCORES:
    CASES[f"all_rows_by_{_name}"] = score_case(_name, None)
    CASES[f"the_strongest_rows_by_{_name}"] = score_case(_name, 6)


@case
def stores_of_each_rank_on_disk(rank: int, folder: Path) -> None:
    at = Setting(rank, Cosine(0.5, learnable=True))
    at.need_gradients(rows=False)
    at.own().save(folder / str(rank))
    memory = Memory.open(folder / str(rank), score=at.score)
    assert at.score is not None
    for top in (None, 9):
        wanted = at.all().read(torch.cat(at.queries), 0.7, top=top, observe=True)
        found = memory.read(at.queries[rank], 0.7, top=top, observe=True, group=world())
        same(found, wanted, at)
        weight = torch.randn(sum(QUERIES), 5 + (top or 0), dtype=at.dtype)
        leaves = [at.queries[rank], *at.score.parameters()]
        truth = gradients(loss_of(wanted, weight), leaves)
        for one, other in zip(gradients(loss_of(found, at.mine(weight)), leaves), truth, strict=True):
            torch.testing.assert_close(one, other)


@case
def parts_of_one_folder(rank: int, folder: Path) -> None:
    at = Setting(rank)
    if rank == 0:
        at.all().save(folder / "all")
        with Memory.open(folder / "all", "a") as writer:
            writer.write(torch.randn(20, 4, dtype=at.dtype), torch.randn(20, 3, dtype=at.dtype))
            writer.delete(list(range(3, 25)))
    dist.barrier()
    memory, whole = Memory.open(folder / "all", part=(rank, RANKS)), Memory.open(folder / "all")
    counts: list[Any] = [None] * RANKS
    dist.all_gather_object(counts, len(memory))
    assert sum(counts) == len(whole) == 45
    assert len(memory) == sum(len(chunk.ids) for chunk in memory)
    for top in (None, 50):
        wanted = whole.read(torch.cat(at.queries), 0.5, top=top, observe=True)
        found = memory.read(at.queries[rank], 0.5, top=top, observe=True, group=world())
        same(found, wanted, at)
        if top is not None:
            assert torch.equal(found.ids, at.mine(wanted.ids))  # the ids of one folder are the same on all ranks
    if rank == 2:
        with Memory.open(folder / "all", "a") as writer:
            writer.write(torch.zeros(7, 4, dtype=at.dtype), torch.ones(7, 3, dtype=at.dtype))
    dist.barrier()
    found = memory.read(at.queries[rank], 0.5, observe=True, group=world())
    same(found, whole.read(torch.cat(at.queries), 0.5, observe=True), at)  # all ranks see the changes of a writer


@case
def a_part_that_is_not_the_ranks_own(rank: int, folder: Path) -> None:
    at = Setting(rank)
    if rank == 0:
        at.all().save(folder / "all")
    dist.barrier()
    memory = Memory.open(folder / "all", part=((rank + 1) % RANKS, RANKS))
    text = raised(lambda: memory.read(at.queries[rank], group=world()), ArgumentError)
    assert f"part={(rank, RANKS)}" in text


@case
def queries_with_leading_dimensions(rank: int, folder: Path) -> None:
    at = Setting(rank)
    queries = torch.randn(2, 3, 4, dtype=at.dtype)
    own, every = at.own(), at.all()
    torch.testing.assert_close(own.read(queries, group=world()), every.read(queries))
    torch.testing.assert_close(own.read(queries[0, 0], group=world()), every.read(queries[0, 0]))
    found = own.read(queries, top=2, observe=True, group=world())
    assert [tuple(x.shape) for x in found] == [(2, 3, 3), (2, 3), (2, 3), (2, 3), (2, 3, 2), (2, 3, 2), (2, 3, 2)]


@case
def the_same_queries_on_all_ranks_are_computed_once(rank: int, folder: Path) -> None:
    at = Setting(rank)
    queries, seen = torch.randn(8, 4, dtype=at.dtype), []
    plain = streaming.read
    streaming.read = lambda snapshot, batch, *rest: (seen.append(len(batch.queries)), plain(snapshot, batch, *rest))[1]  # type: ignore[assignment]
    try:
        found = at.own().read(queries, group=world())
        other = at.own().read(queries + rank, group=world())
    finally:
        streaming.read = plain
    assert seen == ([] if not ROWS[rank] else [8, 8 * RANKS])
    torch.testing.assert_close(found, at.all().read(queries))
    torch.testing.assert_close(other, at.all().read(queries + rank))
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, found)
    assert all(torch.equal(one, found) for one in every)


@case
def the_same_queries_with_gradients_are_each_ranks_own(rank: int, folder: Path) -> None:
    at = Setting(rank)
    queries = torch.ones(2, 4, dtype=at.dtype, requires_grad=True)
    at.own().read(queries, group=world()).mul(rank + 1).sum().backward()
    mine = queries.grad
    queries.grad = None
    at.all().read(queries).mul(rank + 1).sum().backward()
    torch.testing.assert_close(mine, queries.grad)


@case
def the_same_queries_train_the_temperature(rank: int, folder: Path) -> None:
    at = Setting(rank)
    queries, T = torch.ones(2, 4, dtype=at.dtype), torch.tensor(0.5, dtype=at.dtype, requires_grad=True)
    at.own().read(queries, T, group=world()).mul(rank + 1).sum().backward()
    mine, T.grad = T.grad, None
    at.all().read(queries, T).mul(1 + 2 + 3).sum().backward()
    torch.testing.assert_close(mine, T.grad)


@case
def ties_go_to_the_lower_rank(rank: int, folder: Path) -> None:
    memory = Memory(2, 1)
    memory.write(torch.ones(3, 2), torch.full((3, 1), float(rank)))
    found = memory.read(torch.ones(1, 2), top=5, observe=True, group=world())
    assert found.ranks.tolist() == [[0, 0, 0, 1, 1]]
    assert found.ids.tolist() == [[0, 1, 2, 0, 1]]
    assert len(memory.read(torch.ones(1, 2), top=100, observe=True, group=world()).ids[0]) == 9


@case
def the_same_bits_again(rank: int, folder: Path) -> None:
    at = Setting(rank, Bilinear(4, 4))
    assert at.score is not None
    at.need_gradients()
    leaves = [at.queries[rank], at.keys[rank], at.values[rank], *at.score.parameters()]
    runs = []
    for _ in range(3):
        found = at.own().read(at.queries[rank], observe=True, group=world())
        runs.append([*found[:4], *gradients(loss_of(found, torch.ones(QUERIES[rank], 5)), leaves)])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


@case
def logits_of_thousands(rank: int, folder: Path) -> None:
    at = Setting(rank, dtype=torch.float32)
    at.keys = [x * 1000 for x in at.keys]
    wide = Setting(rank)
    wide.keys, wide.values, wide.queries = ([x.double() for x in part] for part in (at.keys, at.values, at.queries))
    wanted = wide.all().read(torch.cat(wide.queries), observe=True)
    found = at.own().read(at.queries[rank], observe=True, group=world())
    for got, want in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(got.double(), at.mine(want), atol=2e-3, rtol=1e-5)


@case
def half_precision(rank: int, folder: Path) -> None:
    at = Setting(rank, dtype=torch.bfloat16)
    found = at.own().read(at.queries[rank], observe=True, group=world())
    assert found.output.dtype == torch.bfloat16
    assert found.lse.dtype == torch.float32
    same(found, at.all().read(torch.cat(at.queries), observe=True), at, atol=2e-2, rtol=2e-2)


@case
def arguments_that_differ_are_named_on_every_rank(rank: int, folder: Path) -> None:
    odd = rank == 1
    memory = Memory(4, 3, dtype=torch.float64)
    memory.write(torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64))
    q = torch.ones(1, 4, dtype=torch.float64)
    single = Memory(4, 3)
    single.write(torch.ones(2, 4), torch.ones(2, 3))
    wide = Memory(4, 2, dtype=torch.float64)
    scored = Memory(4, 3, Gaussian(1.0 if odd else 2.0), dtype=torch.float64)
    calls: dict[str, Callable[[], object]] = {
        "temperature": lambda: memory.read(q, 0.5 if odd else 1.0, group=world()),
        "top": lambda: memory.read(q, top=1 if odd else None, group=world()),
        "observe": lambda: memory.read(q, observe=odd, group=world()),
        "the dtype": lambda: single.read(q.float(), group=world()) if odd else memory.read(q, group=world()),
        "value_dim": lambda: (wide if odd else memory).read(q, group=world()),
        "the score": lambda: scored.read(q, group=world()),
    }
    for name, call in calls.items():
        text = raised(call, DistributedError)
        assert f"{name} differs" in text, text
        assert "rank 1" in text, text
        assert "ranks 0, 2" in text, text
    assert "0.5 on rank 1" in raised(calls["temperature"], DistributedError)


@case
def the_error_of_one_rank_reaches_the_others(rank: int, folder: Path) -> None:
    at = Setting(rank)
    memory, q = at.own(), torch.ones(1, 4, dtype=at.dtype)
    wrong = q[:, :3] if rank == 1 else q
    kind: type[Exception] = regard.errors.ShapeError if rank == 1 else DistributedError
    text = raised(lambda: memory.read(wrong, group=world()), kind)
    assert "key_dim" in text, text
    assert rank == 1 or "rank 1 refuses" in text, text
    if rank == 2:
        memory.close()
    text = raised(lambda: memory.read(q, group=world()), ArgumentError if rank == 2 else DistributedError)
    assert "closed" in text, text
    empty = Memory(4, 3)
    assert "all 3 ranks are empty" in raised(lambda: empty.read(torch.ones(1, 4), group=world()), ArgumentError)


@case
def gradients_switched_off_on_one_rank(rank: int, folder: Path) -> None:
    at = Setting(rank)
    q = torch.ones(1, 4, dtype=at.dtype, requires_grad=True)
    with torch.set_grad_enabled(rank != 2):
        assert "off on rank 2" in raised(lambda: at.own().read(q, group=world()), DistributedError)
        found = at.own().read(q.detach(), group=world())
    torch.testing.assert_close(found, at.all().read(q.detach()))


@case
def a_gradient_that_only_one_rank_wants(rank: int, folder: Path) -> None:
    at = Setting(rank)
    q = torch.ones(2, 4, dtype=at.dtype, requires_grad=rank == 1)
    at.own().read(q, group=world()).sum().backward()
    if rank == 1:
        mine, q.grad = q.grad, None
        at.all().read(q).sum().backward()
        torch.testing.assert_close(mine, q.grad)
    else:
        assert q.grad is None


@case
def second_derivatives_are_refused(rank: int, folder: Path) -> None:
    at = Setting(rank)
    q = torch.ones(1, 4, dtype=at.dtype, requires_grad=True)
    found = at.own().read(q, group=world())
    text = raised(lambda: torch.autograd.grad(found.sum(), q, create_graph=True), DistributedError)
    assert "no second derivatives" in text, text
    assert "torch.func" in raised(
        lambda: torch.func.grad(lambda x: at.own().read(x, group=world()).sum())(q.detach()), ArgumentError
    )


@case
def a_group_of_some_ranks_and_a_mesh(rank: int, folder: Path) -> None:
    at = Setting(rank)
    some: Any = dist.new_group([2, 0])
    q = torch.ones(1, 4, dtype=at.dtype)
    if rank == 1:
        raised(lambda: at.own().read(q, group=some), regard.errors.RegardError)
    else:
        torch.testing.assert_close(at.own().read(q, group=some), at.all().read(q))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("rows",))
    torch.testing.assert_close(at.own().read(q, group=mesh["rows"]), at.all().read(q))


@case
def bytes_that_a_rank_sends(rank: int, folder: Path) -> None:
    at = Setting(rank)
    sent: list[int] = []
    plain = dist.all_to_all_single

    def counted(into: Tensor, x: Tensor, receives: list[int], sends: list[int], **rest: Any) -> Any:
        sent.append((sum(sends) - sends[rank]) * x[:1].numel() * x.element_size() if len(x) else 0)
        return plain(into, x, receives, sends, **rest)

    dist.all_to_all_single = counted
    try:
        at.own().read(at.queries[rank], group=world())
        of_all, sent[:] = sum(sent), []
        at.own().read(at.queries[rank], top=6, group=world())
    finally:
        dist.all_to_all_single = plain
    mine, others = QUERIES[rank], sum(QUERIES) - QUERIES[rank]
    query_bytes = 8 * (RANKS - 1) * mine * 4
    assert of_all == query_bytes + 8 * others * (3 + 3)
    assert sum(sent) == query_bytes + 8 * others * (3 + 3 + 3 * 6) + 8 * (RANKS - 1) * mine


@case
def a_rank_that_dies_before_the_backward_pass(rank: int, folder: Path) -> None:
    at = Setting(rank)
    at.need_gradients()
    found = at.own().read(at.queries[rank], group=world())
    if rank == 2:
        os._exit(1)
    assert "Memory.read" in raised(found.sum().backward, DistributedError)
    assert "Memory.read" in raised(lambda: at.own().read(at.queries[rank], group=world()), DistributedError)


@case
def a_rank_that_does_not_call(rank: int, folder: Path) -> None:
    at = Setting(rank)
    if rank == 2:
        time.sleep(8)
        return
    text = raised(lambda: at.own().read(at.queries[rank], group=world()), DistributedError)
    assert "got no answer" in text
