"""Ranks of a process group: what they agree on first, and how tensors go from one to another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, DistributedError, DtypeError, RegardError

__all__ = ["Agreed", "Group", "Ranks", "Told", "Travelling", "digest"]

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh
_MESSAGE = 48  # numbers that a rank says of itself before anything is exchanged
_AT_ONCE = 2**22  # numbers that are added up over the ranks together
_STARTED: set[str] = set()  # groups of NCCL that have met: their first call must be one that all of them make


@dataclass(frozen=True)
class Told:
    """What a rank says of itself before anything is exchanged."""

    sizes: tuple[int, ...]
    """Numbers that may differ from rank to rank; the others learn them."""
    facts: dict[str, str]
    """What must be the same on all ranks, by name."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks have said."""

    sizes: tuple[tuple[int, ...], ...]
    """The sizes of every rank."""
    differs: tuple[str, ...] = ()
    """The names of the facts that are not the same, where these were allowed to differ."""


class Travelling(NamedTuple):
    """Tensors on their way."""

    ranks: Ranks
    works: list[Any]
    sent: list[Tensor]  # which must live until they have left
    coming: list[Tensor]
    peers: list[int]
    device: torch.device

    def arrived(self) -> list[Tensor]:
        """Wait, and give what came in the order in which it was asked for."""
        with self.ranks.waited(self.peers):
            for work in self.works:
                work.wait()
        return [x.to(self.device) for x in self.coming]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, seen from one of them."""

    who: str
    group: dist.ProcessGroup
    rank: int
    count: int

    @classmethod
    def of(cls, who: str, group: Any = None) -> Ranks:
        """Read a process group, or a mesh of one dimension; None is all processes."""
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                f"{who}: a group needs torch.distributed. Call torch.distributed.init_process_group first."
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"{who}: a mesh must have one dimension. Got {group}; take one as mesh['name'].")
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentError(f"{who}: this process is not in the group, and only its members may call.")
        if not isinstance(group, dist.ProcessGroup):
            raise DtypeError(
                f"{who}: group must be a process group of torch.distributed, or a mesh. Got {type(group).__name__}; "
                f"all ranks are torch.distributed.group.WORLD."
            )
        return cls(who, group, dist.get_rank(group), dist.get_world_size(group))

    def agree(self, told: Callable[[], tuple[Told, T]], may_differ: Sequence[str] = ()) -> tuple[Agreed, T]:
        """Have every rank say what it is about to do; where they differ or one refuses, every rank raises.

        `told` may raise: then all ranks learn why, and nobody waits for one that will not come.
        """
        refusal: RegardError | None = None
        try:
            mine, ready = told()
        except RegardError as error:
            refusal = error
        said = [1] if refusal is not None else [0, *mine.sizes, *map(digest, (self.who, *mine.facts.values()))]
        heard = self._heard(said)
        if refusal is not None:
            self._texts(str(refusal))
            raise refusal
        if any(row[0] for row in heard):
            self._blame(self._texts(""))
        first = 1 + len(mine.sizes)
        if len({row[first] for row in heard}) > 1:
            self._explain("the call", self._texts(self.who))
        odd = [name for at, name in enumerate(mine.facts, first + 1) if len({row[at] for row in heard}) > 1]
        wrong = [name for name in odd if name not in may_differ]
        if wrong:
            self._explain(wrong[0], self._texts(mine.facts[wrong[0]]))
        return Agreed(tuple(tuple(row[1:first]) for row in heard), tuple(odd)), ready

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, tuple[int, ...], torch.dtype]],
        device: torch.device,
    ) -> Travelling:
        """Let tensors leave for other ranks, and others come; between two ranks they arrive in the order of leaving."""
        near = self._near(device)
        sent = [x.to(near).contiguous() for _, x in sends]
        coming = [torch.empty(shape, dtype=dtype, device=near) for _, shape, dtype in receives]
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=peer)
            for (peer, _), x in zip(sends, sent, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer)
            for (peer, *_), x in zip(receives, coming, strict=True)
        ]
        with self.waited():
            self._meet(near)
            works = dist.batch_isend_irecv(operations) if operations else []
        return Travelling(self, works, sent, coming, sorted({operation.group_peer for operation in operations}), device)

    def swap(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the first sends[0] rows of x to rank 0, the next to rank 1, and so on; give what came, in rank order."""
        home = x.device
        x = x.to(self._near(home)).contiguous()
        into = x.new_empty(sum(receives), *x.shape[1:])
        with self.waited():
            dist.all_to_all_single(into, x, list(receives), list(sends), group=self.group)
        return into.to(home)

    def everyones(self, x: Tensor) -> Tensor:
        """A tensor of one shape on all ranks, one after the other: (ranks, …)."""
        home = x.device
        x = x.to(self._near(home)).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.count)]
        with self.waited():
            dist.all_gather(parts, x, group=self.group)
        return torch.stack(parts).to(home)

    def total(self, x: Tensor) -> Tensor:
        """Add up what every rank has, in rank order, so that all get the same bits."""
        parts = x.flatten().split(max(1, _AT_ONCE // self.count))
        return torch.cat([self.everyones(part).sum(0) for part in parts]).view(x.shape) if x.numel() else x

    @contextmanager
    def waited(self, peers: Sequence[int] = ()) -> Iterator[None]:
        """Turn what torch says of a rank that is gone into one error."""
        try:
            yield
        except RegardError:
            raise
        except RuntimeError as error:
            others = f"{_named(peers)}: one of them, or one that they wait for," if peers else "the others: one"
            said = str(error).splitlines()[0][:200]
            raise DistributedError(
                f"{self.who}: rank {self.rank} of {self.count} got no answer from {others} has ended, hangs, or did "
                f"not call. Start all ranks again. torch says: {said}"
            ) from error

    def _heard(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, in a message of one length: one that refuses has less to say."""
        x = torch.tensor(numbers + [0] * (_MESSAGE - len(numbers)))
        rows: list[list[int]] = self.everyones(x).tolist()
        return rows

    def _texts(self, mine: str) -> list[str]:
        texts: list[Any] = [None] * self.count
        with self.waited():
            dist.all_gather_object(texts, mine, group=self.group)
        return texts

    def _blame(self, texts: list[str]) -> NoReturn:
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise DistributedError(f"{self.who}: rank {rank} refuses, and so no rank goes on. It says: {text}")

    def _explain(self, name: str, texts: list[str]) -> NoReturn:
        said: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            said.setdefault(text, []).append(rank)
        parts = [f"{text} on {_named(ranks)}" for text, ranks in said.items()]
        raise DistributedError(
            f"{self.who}: all ranks must ask in the same way, and {name} differs: it is {'; '.join(parts)}."
        )

    def _near(self, device: torch.device) -> torch.device:
        """Where the group can send a tensor from: gloo is given what is on the CPU, NCCL what is on its GPU."""
        known = dict(entry.split(":") for entry in dist.get_backend_config(self.group).split(","))
        if known.get(device.type, "gloo") != "gloo":
            return device
        return torch.device("cpu" if "cpu" in known else next(iter(known)))

    def _meet(self, device: torch.device) -> None:
        if device.type != "cpu" and (name := self.group.group_name) not in _STARTED:
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            _STARTED.add(name)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def digest(text: str) -> int:
    """Tell texts apart by a number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
