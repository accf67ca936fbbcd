"""Copies to a GPU are queued: a stream that did not queue them waits for them."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import regard
from regard.masks import transfer
from regard.masks.transfer import Arrival, copy_to


def test_what_stays_on_the_cpu_is_not_copied() -> None:
    x = torch.arange(3)
    assert copy_to(x, torch.device("cpu")) is x
    assert Arrival.of([x]) == Arrival()
    assert Arrival.of([]) == Arrival()


@pytest.mark.parametrize("current", [1, 2])
def test_another_stream_waits_and_keeps_the_copies_alive(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    stream = SimpleNamespace(cuda_stream=current, wait_event=told.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, used: told.append(used))
    Arrival(1, "copied").wait([torch.zeros(1)])  # type: ignore[arg-type]
    assert told == ([] if current == 1 else ["copied", stream])


def test_equal_numbers_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_COPIES", {})
    monkeypatch.setattr(transfer, "_is_queued", lambda x, device: True)
    monkeypatch.setattr(transfer, "copy_to", lambda x, device: x.clone())
    device = torch.device("cpu")
    first = transfer.copy_by_value(torch.tensor([3, 5]), device)
    assert transfer.copy_by_value(torch.tensor([3, 5]), device) is first
    for other in (torch.tensor([5, 3]), torch.tensor([[3, 5]]), torch.tensor([3, 5], dtype=torch.int32)):
        found = transfer.copy_by_value(other, device)
        assert found is not first
        assert torch.equal(found, other)
    first[0] = 4  # which no other mask may see
    assert transfer.copy_by_value(torch.tensor([3, 5]), device).tolist() == [3, 5]
    for n in range(2 * transfer._MOST_COPIES):
        transfer.copy_by_value(torch.tensor([n]), device)
    assert len(transfer._COPIES) == transfer._MOST_COPIES


def test_ids_on_a_gpu_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    module = sys.modules["regard.masks.documents"]
    inner = module._never_falls
    monkeypatch.setattr(module, "_never_falls", lambda ids: (read.append(ids), inner(ids))[1])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    ids = torch.tensor([0, 0, 1])
    assert [regard.documents(ids).is_sorted() for _ in range(3)] == [True] * 3  # type: ignore[attr-defined]
    assert len(read) == 1
    ids[0] = 2
    assert [regard.documents(ids).is_sorted() for _ in range(2)] == [False] * 2  # type: ignore[attr-defined]
    assert len(read) == 2
    read.clear()
    del ids
    gc.collect()
    assert not [known for known in module._READ.values() if known.ids() is None]


@pytest.mark.parametrize("changes", ["collectives", "a captured graph"])
def test_ids_that_may_change_uncounted_are_read_each_time(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["regard.masks.documents"]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    if changes == "collectives":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    else:
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    ids = torch.tensor([0, 0, 1])
    assert regard.documents(ids).is_sorted()  # type: ignore[attr-defined]
    ids.data[0] = 2
    assert not regard.documents(ids).is_sorted()  # type: ignore[attr-defined]


def test_a_copy_made_within_a_transform_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_COPIES", {})
    monkeypatch.setattr(transfer, "_is_queued", lambda x, device: True)
    monkeypatch.setattr(transfer, "copy_to", lambda x, device: x.clone())
    monkeypatch.setattr(transfer, "is_wrapped", lambda x: True)
    assert transfer.copy_by_value(torch.tensor([3, 5]), torch.device("cpu")).tolist() == [3, 5]
    assert not transfer._COPIES


def test_documents_that_move_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = regard.causal() & regard.documents([0, 0, 1])
    moved = mask._moved(torch.device("cpu"))
    monkeypatch.setattr(
        sys.modules["regard.masks.documents"], "_never_falls", lambda ids: pytest.fail("the ids are read")
    )
    assert moved.right.is_sorted()  # type: ignore[attr-defined]


def test_a_mask_that_the_user_moves_has_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_COPIES", {})
    monkeypatch.setattr(transfer, "_is_queued", lambda x, device: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    one, two = (regard.packed([3, 5]) for _ in range(2))
    device = torch.device("cpu")
    assert one.placed(device).tensors[0] is two.placed(device).tensors[0]
    assert one.to(device).tensors[0] is not two.to(device).tensors[0]
    assert one.to(device).tensors[0] is not one.placed(device).tensors[0]
