"""A census that is interrupted goes on from its last checkpoint: one file, replaced by an atomic rename."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ...errors import FileError
from ...memory.folder import Folder
from .engine import Counting
from .exemplars import ExemplarTable
from .state import Facts, LayerState, State, read_state, write_state
from .tally import LayerTally, TokenColumns

__all__ = ["Checkpoint", "restore", "state_of"]


@dataclass
class Checkpoint:
    """Where a census stores what it has counted, and how often."""

    path: Path
    every: float = 60.0  # seconds
    _last: float = field(default_factory=time.monotonic)

    def read(self, facts: Facts) -> State | None:
        """What an earlier run of the same census left, or None."""
        if not self.path.exists():
            return None
        state = read_state(self.path, "census")
        mine = (facts.title, facts.kept, list(facts.parts), facts.settings)
        theirs = (state.facts.title, state.facts.kept, list(state.facts.parts), state.facts.settings)
        if mine != theirs:
            raise FileError(
                f"census: {str(self.path)!r} is the checkpoint of another census, of {state.facts.title!r} on "
                f"{state.facts.texts or 'batches'} with other settings. Remove it, or give another folder."
            )
        return state

    def is_due(self) -> bool:
        return time.monotonic() - self._last >= self.every

    def write(self, state: State) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_state(state, Folder(self.path.parent), self.path.name)
        self._last = time.monotonic()

    def remove(self) -> None:
        """Forget it: the census is complete, and saved."""
        self.path.unlink(missing_ok=True)


def state_of(counting: Counting, facts: Facts) -> State:
    """Everything that was counted, on the host."""
    counting.flush()
    ids = counting.columns.ids
    order = np.argsort(ids, kind="stable")  # so that equal censuses are equal arrays
    layers = {name: LayerState(tally.read(order), counting.exemplars[name]) for name, tally in counting.tallies.items()}
    used = {int(one) for layer in layers.values() for one in np.unique(layer.exemplars.document)}
    names = {f"{counting.source} {number}": name for number, name in sorted(counting.names.items()) if number in used}
    names |= {key: name for key, name in counting.stored_names.items() if int(key.split()[1]) in used}
    return State(facts, layers, ids[order], counting.columns.counts[order], counting.pieces.texts(ids.tolist()), names)


def restore(counting: Counting, state: State, device: torch.device) -> None:
    """Let a census go on from a state."""
    counting.columns = TokenColumns.stored(state.tokens, state.counts)
    counting.tallies = {name: LayerTally.stored(layer.parts, device) for name, layer in state.layers.items()}
    counting.exemplars = ExemplarTable(counting.kept, {name: layer.exemplars for name, layer in state.layers.items()})
    counting.rows, counting.documents = state.facts.tokens, state.facts.documents
    counting.missed, counting.stored_names = dict(state.facts.missed), dict(state.names)
