"""Copies to a GPU are queued: a stream that did not queue them waits for them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import regard
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


def test_documents_that_move_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = regard.causal() & regard.documents([0, 0, 1])
    moved = mask._moved(torch.device("cpu"))
    monkeypatch.setattr(
        sys.modules["regard.masks.documents"], "_never_falls", lambda ids: pytest.fail("the ids are read")
    )
    assert moved.right.is_sorted()  # type: ignore[attr-defined]
