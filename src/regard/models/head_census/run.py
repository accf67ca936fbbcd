"""census: run a model over a corpus and count what its heads do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, DtypeError, RegardError
from .census import Census
from .checkpoint import Checkpoint, restore, state_of
from .corpus import Corpus
from .engine import Counting
from .pieces import Pieces
from .sequences import Batch, read_batch
from .state import Facts, State

__all__ = ["census", "take"]

Tell = Callable[[int, int], object]
Groups = Iterator[tuple[list[Batch], int]]


def census(
    model: nn.Module,
    batches: Iterable[object] | Corpus,
    *,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None,
    special: Collection[int] = (),
    exemplars: int = 8,
    title: str | None = None,
    shard: tuple[int, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 60.0,
    tell: Tell | None = None,
) -> Census:
    """Count what every head of `model` does over all `batches`, in constant memory.

    A batch is whatever the model takes: a tensor of token ids, a tuple of arguments, or a mapping of named ones such as
    a tokenizer gives; where it has an `attention_mask`, padding is left out. `pieces` gives the texts of token ids,
    `special` are the ids of special tokens. `exemplars` are kept per head and behaviour.

    `shard=(i, n)` counts each n-th batch from the i-th on; the merged shards are what one run gives, bit for bit. In a
    process group of torch.distributed each rank takes its shard, and all get the whole census. With `checkpoint`, a
    path, what was counted is stored `every` so many seconds, and an interrupted census goes on from there. `tell`, if
    given, is called with the tokens counted and the position in the corpus.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True).eval()
    >>> found = regard.models.census(model, [torch.zeros(2, 8, 16), torch.zeros(1, 4, 16)])
    >>> found.heads[0].entropy.count, round(found.heads[0].relative_entropy.mean, 4)
    (20, 1.0)
    """
    _check(model, exemplars)
    corpus = batches if isinstance(batches, Corpus) else None
    if corpus is None and (isinstance(batches, str | Tensor | dict) or not isinstance(batches, Iterable)):
        raise DtypeError(
            f"census: batches must be an iterable of what the model takes, such as a list or a DataLoader. Got "
            f"{type(batches).__name__}."
        )
    mine, world = _shard(shard)
    counting = Counting(
        model,
        corpus.codec.pieces if corpus is not None else Pieces(pieces, special),
        exemplars,
        0 if corpus is None else corpus.source,
    )
    facts = Facts(
        title or type(model).__name__,
        exemplars,
        {f"{counting.source:x} {mine[0]}/{mine[1]}": 0},
        "" if corpus is None else corpus.texts.about,
        settings={} if corpus is None else dict(corpus.settings),
    )
    groups = corpus.groups(mine) if corpus is not None else _plain_groups(batches, mine)  # type: ignore[arg-type]
    place = None if checkpoint is None else Checkpoint(Path(checkpoint), every)
    state = take(counting, facts, groups, place, tell)
    return Census(_joined(state) if world else state)


def take(counting: Counting, facts: Facts, groups: Groups, place: Checkpoint | None, tell: Tell | None) -> State:
    """Count groups of batches, from the last checkpoint on."""
    (part,) = facts.parts
    done, stored = 0, None if place is None else place.read(facts)
    if stored is not None:
        device = next((x.device for x in counting.model.parameters()), torch.device("cpu"))
        restore(counting, stored, device)
        done = stored.facts.parts[part]
    seen: int = 0
    training = counting.model.training
    counting.model.eval()
    try:
        for at, (batches, position) in enumerate(groups):
            first = seen
            seen += sum(_items(batch) for batch in batches)
            if at >= done:
                _add(counting, batches, first)
                done = at + 1
                if place is not None and place.is_due():
                    place.write(state_of(counting, _facts(counting, facts, done)))
            if tell is not None:
                tell(counting.rows, position)
    finally:
        counting.model.train(training)
    state = state_of(counting, _facts(counting, facts, done))
    _check_result(state, counting)
    if place is not None:
        place.write(state)
    return state


def _add(counting: Counting, batches: list[Batch], first: int) -> None:
    for batch in batches:
        if batch.skipped:
            first += _items(batch)
            continue
        try:
            counting.add(batch, first)
        except RegardError:
            raise
        except torch.OutOfMemoryError as error:
            raise ArgumentError(
                "census: there is not enough memory for a batch. Make batches smaller: --batch-tokens, or shorter "
                "windows by --length."
            ) from error
        first += _items(batch)
        counting.documents += _items(batch) if batch.starts is None else sum(start == 0 for start in batch.starts)


def _facts(counting: Counting, facts: Facts, done: int) -> Facts:
    (part,) = facts.parts
    return replace(
        facts, parts={part: done}, documents=counting.documents, tokens=counting.rows, missed=dict(counting.missed)
    )


def _items(batch: Batch) -> int:
    tensors = (batch.tokens, *batch.args, *batch.named.values())
    return next((len(x) for x in tensors if isinstance(x, Tensor) and x.dim()), 1)


def _plain_groups(batches: Iterable[object], shard: tuple[int, int]) -> Groups:
    """One group per batch; batches of other shards are read, so that documents keep their numbers, and not run."""
    for at, given in enumerate(batches):
        batch = read_batch(given)
        if at % shard[1] == shard[0]:
            yield [batch], at + 1
        else:
            yield [replace(batch, skipped=True)], at + 1


def _check(model: object, exemplars: int) -> None:
    if not isinstance(model, nn.Module):
        raise DtypeError(f"census: model must be a torch.nn.Module. Got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise DtypeError("census: model is TorchScript, whose calls cannot be observed. Give the module it came from.")
    if not isinstance(exemplars, int) or isinstance(exemplars, bool) or not 1 <= exemplars <= 64:
        raise ArgumentError(f"census: exemplars must be a whole number from 1 to 64. Got {exemplars!r}.")


def _shard(shard: tuple[int, int] | None) -> tuple[tuple[int, int], bool]:
    """The shard to take, and whether it is that of a rank whose process group joins them."""
    if shard is not None:
        good = isinstance(shard, tuple) and len(shard) == 2 and all(type(x) is int for x in shard)
        if not good or not 0 <= shard[0] < shard[1]:
            raise ArgumentError(f"census: shard must be (i, n) with 0 ≤ i < n. Got {shard!r}.")
        return shard, False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        return (torch.distributed.get_rank(), size), size > 1
    return (0, 1), False


def _joined(mine: State) -> State:
    """The states of all ranks, merged."""
    found: list[State | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    states = [state for state in found if state is not None and state.layers]
    return next(itertools.islice(itertools.accumulate(states, State.merged), len(states) - 1, None))


def _check_result(state: State, counting: Counting) -> None:
    """Refuse a census of nothing, with the reason."""
    shard = next(iter(state.facts.parts)).rpartition("/")[2]
    if not state.layers and counting.ran:
        why = next(iter(counting.missed.values()), "it made no attention call that can be observed")
        raise ArgumentError(f"census: no attention was seen in {state.facts.title!r}: {why}.")
    if not state.layers and shard == "1":
        raise ArgumentError("census: the texts are empty. Give texts with at least two tokens.")
    several = sum(int(layer.parts["position_count"][1].sum()) for layer in state.layers.values())
    broken = sum(int(layer.parts["undefined"][1].sum()) for layer in state.layers.values())
    if state.layers and not several + broken and shard == "1":
        raise ArgumentError(
            "census: no row sees more than one key, so there is nothing to choose between. Give texts with at least "
            "two tokens."
        )


def load(folder: str | os.PathLike[str]) -> Census:
    """Read a census that `Census.save` wrote."""
    return Census.load(folder)


census.load = load  # type: ignore[attr-defined]
