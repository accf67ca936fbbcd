"""The pass of a census over one batch: the model runs once, each layer is counted, and the best rows are kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ...observation import Observation
from ..interceptor import CallInterceptor
from .candidates import BatchPlaces, Places, Wanted, best_rows, fill_keys, ranked, strongest_keys
from .device_copies import HostCopy, to_device
from .exemplars import SAMPLE_AT, ExemplarSet, ExemplarTable, context_hashes, row_hashes
from .kernel_rows import best_by_kernel, count_by_kernels, made_by_kernels
from .pieces import Pieces
from .row_values import row_values, surveyed
from .sequences import Batch, Sequences
from .tally import BatchColumns, LayerTally, TokenColumns

__all__ = ["Counting", "LayerPass"]

_SPARE = 4  # candidates per place: rows with the same context compete for one


@dataclass
class LayerPass:
    """One call of a layer in the current batch."""

    name: str
    seen: Observation
    scores: Tensor  # (behaviours, H, R)
    ranks: Tensor  # (behaviours, H, candidates)
    rows: Tensor | None  # the flat indices of those R rows in the batch, None if they are all
    by_kernels: bool  # whether our kernels run on its device


@dataclass
class Counting:
    """Everything that has been counted so far."""

    model: nn.Module
    pieces: Pieces
    kept: int  # exemplars per head and behaviour
    source: int
    tallies: dict[str, LayerTally] = field(default_factory=dict)
    exemplars: ExemplarTable = field(init=False)
    columns: TokenColumns = field(default_factory=TokenColumns)
    names: dict[int, str] = field(default_factory=dict)  # of the documents that exemplars come from
    stored_names: dict[str, str] = field(default_factory=dict)  # of an earlier run, by "source document"
    missed: dict[str, str] = field(default_factory=dict)
    rows: int = 0  # tokens that were counted
    documents: int = 0
    ran: bool = False
    _calls: list[LayerPass] = field(default_factory=list)
    _tokens: BatchColumns | None = None
    _floors: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict)  # (behaviours, H) of each layer
    _pending: _Pending | None = None
    _waiting: list[_Waiting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exemplars = ExemplarTable(self.kept)

    def add(self, batch: Batch, first_document: int) -> None:
        """Run the model on a batch and count it. Its exemplars are chosen while a GPU computes the next one."""
        device = next((x.device for x in self.model.parameters()), torch.device("cpu"))
        sequences = Sequences(batch, self.pieces, device)
        self._calls, self._tokens, self._floors = [], None, {}
        names: dict[str, int] = {}

        def see(name: str, seen: Observation) -> None:
            names[name] = names.get(name, 0) + 1
            self._count(name if names[name] == 1 else f"{name}, call {names[name]}", seen, sequences)

        # The end of inference mode begins gradients anew, so these are turned off after it.
        with torch.inference_mode(False), torch.no_grad(), CallInterceptor(self.model, see, self._miss):
            self.ran = True
            self.model(*batch.args, **batch.named)
        self._batch_columns(sequences)
        groups = [_Group(calls, _joined([call.ranks for call in calls])) for calls in _alike(self._calls)]
        ranks = HostCopy([group.ranks for group in groups])
        before, self._pending = self._pending, _Pending(batch, sequences, groups, ranks, first_document)
        if before is not None:
            self._keep_exemplars(before)

    def flush(self) -> None:
        """Choose the exemplars of the last batch."""
        if self._pending is not None:
            self._keep_exemplars(self._pending)
            self._pending = None
        self._fill()

    def _miss(self, name: str, reason: str) -> None:
        self.missed.setdefault(name, reason)

    def _batch_columns(self, sequences: Sequences) -> BatchColumns | None:
        """The columns of the batch's tokens. They are counted at the first call, when a GPU already has work to do."""
        if self._tokens is None and sequences.tokens is not None:
            rows = sequences.call_rows(*sequences.tokens.shape).rows.numpy()
            self.rows += len(rows)
            columns = self.columns.add(sequences.tokens.reshape(-1).numpy()[rows])
            self._tokens = BatchColumns(columns, rows, sequences.tokens.numel(), sequences.device)
        return self._tokens

    def _count(self, name: str, seen: Observation, sequences: Sequences) -> None:
        items, heads, n, m = seen.shape
        if not items * heads * n * m:
            self._miss(
                name, f"a call had nothing to see: its weights are {seen.shape} as (batch, heads, queries, keys)"
            )
            return
        if name in self.tallies and self.tallies[name].heads != heads:
            raise ArgumentError(
                f"census: {name!r} has {heads} heads in this call and had {self.tallies[name].heads} before. "
                f"A census needs the same heads in every batch."
            )
        survey, repeats = surveyed(seen, sequences)
        tally = self.tallies.setdefault(name, LayerTally(heads, survey.health.device))
        call = sequences.call_rows(items, n)
        tokens = self._batch_columns(sequences) if call.fits else None
        width = len(self.columns.ids)
        by_kernels = made_by_kernels(survey)
        if by_kernels:
            scores = count_by_kernels(seen, survey, repeats, call, tally, tokens, width)
            chosen, ranks = None, best_by_kernel(scores, _SPARE * self.kept, self._floor(name, scores.device))
        else:
            found = row_values(seen, survey, repeats, call)
            tally.add(found, call.buckets)
            if tokens is not None:
                tally.add_tokens(found, tokens.order, width)
            scores, chosen = found.scores, call.chosen
            ranks = best_rows(scores, _SPARE * self.kept, chosen)
        self._calls.append(LayerPass(name, seen, scores, ranks, chosen, by_kernels))

    def _floor(self, name: str, device: torch.device) -> Tensor | None:
        """The lowest scores that are kept for a layer (behaviours, H): rows of a batch that have less are left out."""
        if device not in self._floors:
            worst, places = np.maximum(self.exemplars.every.worst()[:, :SAMPLE_AT], 0.0), self.exemplars.places
            every = [worst[heads].T.astype(np.float32).reshape(-1) for heads in places.values()]
            parts = to_device(np.concatenate(every), device).split([len(x) for x in every]) if every else ()
            self._floors[device] = {one: x.view(SAMPLE_AT, -1) for one, x in zip(places, parts, strict=True)}
        return self._floors[device].get(name)

    def _keep_exemplars(self, pending: _Pending) -> None:
        """Let the best rows of a batch compete with those that are kept; what they attend to is read a batch later."""
        self._fill()
        places: dict[tuple[int, ...], tuple[BatchPlaces, _Sample]] = {}
        for group, ranks in zip(pending.groups, pending.ranks.read(), strict=True):
            items, _, n, m = group.calls[0].seen.shape
            if (items, n, m) not in places:
                found = self._places(pending, items, n, m)
                places[items, n, m] = found, self._draw(found, pending.sequences.call_rows(items, n).rows.numpy())
            where, drawn = places[items, n, m]
            new = [*self._compete(group.calls, where, ranks), *self._sample(group.calls, where, drawn)]
            self._waiting += self._ask(group.calls, where, new)
        self._note_names(pending.batch, pending.first_document)

    def _fill(self) -> None:
        """Give exemplars the keys that they attend to."""
        for one in self._waiting:
            weights, keys = one.details.read()
            fill_keys(self.exemplars.every, one.at, one.items, keys, weights, one.places)
        self._waiting = []

    def _places(self, pending: _Pending, items: int, n: int, m: int) -> BatchPlaces:
        sequences, batch = pending.sequences, pending.batch
        call = sequences.call_rows(items, n)
        tokens = sequences.tokens.numpy() if call.fits and n == m and sequences.tokens is not None else None
        documents = np.arange(items) + pending.first_document
        starts = np.zeros(items, dtype=np.int64)
        if batch.documents is not None and len(batch.documents) == items:
            documents, starts = np.array(batch.documents), np.array(batch.starts)
        contexts = None if tokens is None else context_hashes(tokens)
        return BatchPlaces(tokens, contexts, n, documents, starts, self.source)

    def _draw(self, places: BatchPlaces, rows: np.ndarray) -> _Sample:
        """The rows with the lowest hashes."""
        drawn = places.candidates(-np.ones(len(rows)), rows)
        hashes = row_hashes(self.source, drawn.document, drawn.start + drawn.row)
        few = np.argsort(hashes, kind="stable")[: self.kept]
        return _Sample(rows[few], hashes[few])

    def _heads(self, calls: list[LayerPass]) -> np.ndarray:
        return np.concatenate([self.exemplars.heads(call.name, call.seen.shape[1]) for call in calls])

    def _compete(self, calls: list[LayerPass], places: BatchPlaces, ranks: np.ndarray) -> list[_New]:
        """Merge candidates (behaviours, heads of all calls, candidates), the best first, into heaps they can change."""
        heads = self._heads(calls)
        score, row = ranked(ranks)
        worst = self.exemplars.every.worst()[heads, :SAMPLE_AT].T[..., None]
        reach = score >= np.maximum(worst, 0.0)  # those that are not there have −inf
        full = (score[..., -1:] > worst)[..., 0] & (ranks.shape[-1] < calls[0].scores.shape[-1])
        if full.any():  # one context may have all the places of a heap: then more candidates are needed
            full[full] = _distinct(places.contexts(row[full])) < self.kept
            crowded = {int(at) for at in np.repeat(np.arange(len(calls)), _head_counts(calls))[full.any(0)]}
            if crowded:
                return self._compete_apart(calls, places, ranks, crowded)
        behaviours, at = np.nonzero(reach.any(-1))
        most = int(reach.sum(-1).max(initial=0))
        chosen = behaviours, at, slice(0, most)
        return self._merge(places, (heads[at], behaviours), score[chosen], row[chosen])

    def _compete_apart(
        self, calls: list[LayerPass], places: BatchPlaces, ranks: np.ndarray, crowded: set[int]
    ) -> list[_New]:
        """The same for each call that needs more candidates, and for all others."""
        starts = np.cumsum([0, *_head_counts(calls)])
        parts = [ranks[:, starts[at] : starts[at + 1]] for at in range(len(calls))]
        found = []
        for at in sorted(crowded):
            more = best_rows(calls[at].scores, 4 * ranks.shape[-1], calls[at].rows).cpu().numpy()
            found += self._compete([calls[at]], places, more)
        rest = [at for at in range(len(calls)) if at not in crowded]
        if rest:
            found += self._compete([calls[at] for at in rest], places, np.concatenate([parts[at] for at in rest], 1))
        return found

    def _sample(self, calls: list[LayerPass], places: BatchPlaces, drawn: _Sample) -> list[_New]:
        """Keep the rows with the lowest hashes, the same for every head."""
        heads = self._heads(calls)
        better = -drawn.hashes > self.exemplars.every.worst()[heads, SAMPLE_AT, None]
        heads = heads[better.any(-1)]
        most = int(better.sum(-1).max(initial=0))
        score = np.broadcast_to(-drawn.hashes[:most], (len(heads), most))
        row = np.broadcast_to(drawn.rows[:most], score.shape)
        return self._merge(places, (heads, np.full(len(heads), SAMPLE_AT)), score, row, distinct=True)

    def _merge(
        self,
        places: BatchPlaces,
        where: tuple[np.ndarray, np.ndarray],
        score: np.ndarray,
        row: np.ndarray,
        distinct: bool = False,
    ) -> list[_New]:
        """Merge candidates (heaps, candidates) into heaps, and return the places of those that win, and their items."""
        if not len(where[0]):
            return []
        mine = self.exemplars.every
        theirs = places.candidates(score, row)
        if distinct:  # a sample may have the same context twice: it shows what is typical
            theirs.context = (-score * 2.0**53).astype(np.int64)
        held = ExemplarSet(**{name: part[where] for name, part in mine.parts()})
        chosen = held.choose(theirs)
        best = held.taken(theirs, chosen)
        for name, part in best.parts():
            getattr(mine, name)[where] = part
        heap, rank = np.nonzero(chosen >= self.kept)
        new = row[heap, chosen[heap, rank] - self.kept]
        return [((where[0][heap], where[1][heap], rank), places.item(new))]

    def _ask(self, calls: list[LayerPass], places: BatchPlaces, new: list[_New]) -> list[_Waiting]:
        """Ask for the keys of the exemplars that are new."""
        if not any(len(items) for _, items in new):
            return []
        head, behaviour, rank = (np.concatenate([at[part] for at, _ in new]) for part in range(3))
        items = np.concatenate([items for _, items in new])
        order = np.argsort(head, kind="stable")
        at, items = (head[order], behaviour[order], rank[order]), items[order]
        first = {call.name: int(self.exemplars.heads(call.name, call.seen.shape[1])[0]) for call in calls}
        calls = sorted(calls, key=lambda call: first[call.name])
        ends = np.searchsorted(at[0], [first[call.name] + call.seen.shape[1] for call in calls])
        mine = np.repeat([first[call.name] for call in calls], np.diff(ends, prepend=0))
        wanted = np.stack((at[0] - mine, items, self.exemplars.every.row[at]))
        every = Places(wanted[0], wanted[1], wanted[2], to_device(wanted, calls[0].scores.device))
        parts = [every.part(slice(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        pairs = zip(calls, parts, strict=True)
        found = strongest_keys([Wanted(call.seen, part, call.by_kernels) for call, part in pairs if len(part.rows)])
        return [_Waiting(at, items, places, HostCopy(found))]

    def _note_names(self, batch: Batch, first_document: int) -> None:
        """Keep the names of documents that exemplars come from."""
        for at, name in enumerate(batch.names):
            number = first_document + at if batch.documents is None else int(batch.documents[at])
            self.names[number] = name
        if len(self.names) > 4096:
            used = set(np.unique(self.exemplars.every.document).tolist())
            self.names = {number: name for number, name in self.names.items() if number in used}


class _Group(NamedTuple):
    """Calls of one shape, and their ranks (behaviours, heads of all calls, candidates)."""

    calls: list[LayerPass]
    ranks: Tensor


class _Pending(NamedTuple):
    """A batch that the model has read, whose exemplars are not chosen yet."""

    batch: Batch
    sequences: Sequences
    groups: list[_Group]
    ranks: HostCopy
    first_document: int


class _Sample(NamedTuple):
    """Rows of a batch that may be drawn, as flat indices, and their hashes."""

    rows: np.ndarray
    hashes: np.ndarray


_At = tuple[np.ndarray, np.ndarray, np.ndarray]  # heads in the table of exemplars, behaviours, and ranks in heaps
_New = tuple[_At, np.ndarray]  # where exemplars are new, and their batch items


class _Waiting(NamedTuple):
    """Exemplars whose weights and keys are on their way to the host."""

    at: _At
    items: np.ndarray
    places: BatchPlaces
    details: HostCopy


def _alike(calls: list[LayerPass]) -> list[list[LayerPass]]:
    """Calls that can compete together: those with the same sizes, on the same device."""
    found: dict[Hashable, list[LayerPass]] = {}
    for call in calls:
        items, _, n, m = call.seen.shape
        key = (items, n, m, call.ranks.shape[-1], call.scores.shape[-1], call.scores.device)
        found.setdefault(key, []).append(call)
    return list(found.values())


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _head_counts(calls: list[LayerPass]) -> list[int]:
    return [call.seen.shape[1] for call in calls]


def _distinct(contexts: np.ndarray) -> np.ndarray:
    """How many different contexts are in the last dimension."""
    ordered = np.sort(contexts, -1)
    count: np.ndarray = 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(-1)
    return count
