"""The ranks of a process group: what they check before a call, and how tensors travel between them."""

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

__all__ = ["Group", "GroupInfo", "RankInfo", "Ranks", "Receive", "Send", "Transfer", "checksum"]

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh
_MESSAGE_LENGTH = 48  # integers that each rank sends in the check before a call
_REDUCE_CHUNK = 2**22  # numbers that are gathered and summed at once
_STARTED: set[str] = set()  # NCCL groups that have communicated: the first call must be one that all ranks make


@dataclass(frozen=True)
class RankInfo:
    """What a rank tells the others before a call."""

    sizes: tuple[int, ...]
    """Numbers that may differ between ranks; every rank learns all of them."""
    facts: dict[str, str]
    """What must be the same on all ranks, by name."""


@dataclass(frozen=True)
class GroupInfo:
    """What all ranks told one another before a call."""

    sizes: tuple[tuple[int, ...], ...]
    """The sizes of every rank."""
    differs: tuple[str, ...] = ()
    """The names of the facts that differ, if they were allowed to."""


class Send(NamedTuple):
    """A tensor for another rank."""

    peer: int
    tensor: Tensor


class Receive(NamedTuple):
    """A tensor expected from another rank."""

    peer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Transfer(NamedTuple):
    """Tensors in transit."""

    ranks: Ranks
    works: list[Any]
    send_buffers: list[Tensor]  # must stay alive until they have been sent
    receive_buffers: list[Tensor]
    peers: list[int]
    device: torch.device

    def wait(self) -> list[Tensor]:
        """Wait for the received tensors, and return them in the order of the requests."""
        with self.ranks.translate_errors(self.peers):
            for work in self.works:
                work.wait()
        return [x.to(self.device) for x in self.receive_buffers]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, seen from one of them."""

    who: str
    group: dist.ProcessGroup
    rank: int
    count: int

    @classmethod
    def of(cls, who: str, group: Any = None) -> Ranks:
        """The ranks of a process group or a one-dimensional mesh; None means all processes."""
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                f"{who}: a group needs torch.distributed. Call torch.distributed.init_process_group first."
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(f"{who}: a mesh must have one dimension. Got {group}; select one as mesh['name'].")
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentError(f"{who}: this process is not in the group, and only members of the group may call.")
        if not isinstance(group, dist.ProcessGroup):
            raise DtypeError(
                f"{who}: group must be a process group of torch.distributed, or a mesh. Got {type(group).__name__}; "
                f"torch.distributed.group.WORLD means all ranks."
            )
        return cls(who, group, dist.get_rank(group), dist.get_world_size(group))

    def agree(self, prepare: Callable[[], tuple[RankInfo, T]], may_differ: Sequence[str] = ()) -> tuple[GroupInfo, T]:
        """Compare what all ranks are about to do; if they differ, or one of them refuses, every rank raises.

        `prepare` may raise: then all ranks learn why, and none waits for a rank that will not come.
        """
        refusal: RegardError | None = None
        try:
            mine, prepared = prepare()
        except RegardError as error:
            refusal = error
        if refusal is not None:
            numbers = [1]
        else:
            numbers = [0, *mine.sizes, *map(checksum, (self.who, *mine.facts.values()))]
        table = self._gather_numbers(numbers)
        if refusal is not None:
            self._gather_texts(str(refusal))
            raise refusal
        if any(row[0] for row in table):
            self._raise_refusal(self._gather_texts(""))
        first = 1 + len(mine.sizes)
        if len({row[first] for row in table}) > 1:
            self._raise_mismatch("the call", self._gather_texts(self.who))
        differs = [name for at, name in enumerate(mine.facts, first + 1) if len({row[at] for row in table}) > 1]
        wrong = [name for name in differs if name not in may_differ]
        if wrong:
            self._raise_mismatch(wrong[0], self._gather_texts(mine.facts[wrong[0]]))
        return GroupInfo(tuple(tuple(row[1:first]) for row in table), tuple(differs)), prepared

    def send_receive(self, sends: Sequence[Send], receives: Sequence[Receive], device: torch.device) -> Transfer:
        """Start sending and receiving; between two ranks, tensors arrive in the order in which they were sent."""
        near = self._transport_device(device)
        send_buffers = [send.tensor.to(near).contiguous() for send in sends]
        receive_buffers = [torch.empty(receive.shape, dtype=receive.dtype, device=near) for receive in receives]
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=send.peer)
            for send, x in zip(sends, send_buffers, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=receive.peer)
            for receive, x in zip(receives, receive_buffers, strict=True)
        ]
        with self.translate_errors():
            self._start_nccl(near)
            works = dist.batch_isend_irecv(operations) if operations else []
        peers = sorted({operation.group_peer for operation in operations})
        return Transfer(self, works, send_buffers, receive_buffers, peers, device)

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send the first sends[0] rows of x to rank 0, the next to rank 1, …; return what arrives, in rank order."""
        home = x.device
        x = x.to(self._transport_device(home)).contiguous()
        received = x.new_empty(sum(receives), *x.shape[1:])
        with self.translate_errors():
            dist.all_to_all_single(received, x, list(receives), list(sends), group=self.group)
        return received.to(home)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, which have one shape: (ranks, …)."""
        home = x.device
        x = x.to(self._transport_device(home)).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.count)]
        with self.translate_errors():
            dist.all_gather(parts, x, group=self.group)
        return torch.stack(parts).to(home)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum the tensors of all ranks in rank order, so that all get the same bits."""
        parts = x.flatten().split(max(1, _REDUCE_CHUNK // self.count))
        return torch.cat([self.all_gather(part).sum(0) for part in parts]).view(x.shape) if x.numel() else x

    @contextmanager
    def translate_errors(self, peers: Sequence[int] = ()) -> Iterator[None]:
        """Turn torch's errors about a lost rank into a DistributedError."""
        try:
            yield
        except RegardError:
            raise
        except RuntimeError as error:
            others = f"{_names(peers)}: one of them, or a rank they wait for," if peers else "the others: one"
            reason = str(error).splitlines()[0][:200]
            raise DistributedError(
                f"{self.who}: rank {self.rank} of {self.count} got no answer from {others} has exited, hangs, or did "
                f"not call. Restart all ranks. torch says: {reason}"
            ) from error

    def _gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every rank, in messages of one length, because a rank that refuses sends fewer."""
        x = torch.tensor(numbers + [0] * (_MESSAGE_LENGTH - len(numbers)), device="cpu")
        rows: list[list[int]] = self.all_gather(x).tolist()
        return rows

    def _gather_texts(self, mine: str) -> list[str]:
        texts: list[Any] = [None] * self.count
        with self.translate_errors():
            dist.all_gather_object(texts, mine, group=self.group)
        return texts

    def _raise_refusal(self, texts: list[str]) -> NoReturn:
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise DistributedError(f"{self.who}: rank {rank} refuses, so no rank continues. It says: {text}")

    def _raise_mismatch(self, name: str, texts: list[str]) -> NoReturn:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            ranks_by_text.setdefault(text, []).append(rank)
        parts = [f"{text} on {_names(ranks)}" for text, ranks in ranks_by_text.items()]
        raise DistributedError(
            f"{self.who}: all ranks must make the same call, and {name} differs: it is {'; '.join(parts)}."
        )

    def _transport_device(self, device: torch.device) -> torch.device:
        """The device from which the group can send: the CPU for gloo, the tensor's own GPU for NCCL."""
        backends = dict(entry.split(":") for entry in dist.get_backend_config(self.group).split(","))
        if backends.get(device.type, "gloo") != "gloo":
            return device
        return torch.device("cpu" if "cpu" in backends else next(iter(backends)))

    def _start_nccl(self, device: torch.device) -> None:
        if device.type != "cpu" and (name := self.group.group_name) not in _STARTED:
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            _STARTED.add(name)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def checksum(text: str) -> int:
    """The first 56 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
