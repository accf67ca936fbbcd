"""The numbers of a census as arrays: merged in any order with the same result, and stored in one file."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ...errors import ArgumentError, FileError
from ...memory.folder import Folder
from .exemplars import ExemplarSet

__all__ = ["Facts", "LayerState", "State", "read_state", "write_state"]

_VERSION = 1
_EXTREMES = {"smallest": np.minimum, "largest": np.maximum}
_BY_TOKEN = ("received", "active")


@dataclass(frozen=True)
class Facts:
    """What a census was taken of."""

    title: str  # the model
    kept: int  # exemplars per head and behaviour
    parts: dict[str, int]  # each corpus and shard, "source 0/2", and how many of its batches have been counted
    texts: str = ""  # where the texts come from, in words
    documents: int = 0
    tokens: int = 0  # rows that were counted
    missed: dict[str, str] = field(default_factory=dict)  # modules whose calls were not seen, and why
    random_weights: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # what texts were cut and batched by


@dataclass
class LayerState:
    """The tallies and the exemplars of a layer."""

    parts: dict[str, np.ndarray]
    exemplars: ExemplarSet

    @property
    def heads(self) -> int:
        return int(self.parts["undefined"].shape[1])


@dataclass
class State:
    """All numbers of a census."""

    facts: Facts
    layers: dict[str, LayerState]
    tokens: np.ndarray  # int64: the ids that occurred
    counts: np.ndarray  # int64: how often
    texts: dict[int, str]  # of ids
    names: dict[str, str]  # of documents that exemplars come from, by "source document"

    def merged(self, other: State) -> State:
        """Both together; the order does not matter."""
        _check_alike(self, other)
        tokens = np.union1d(self.tokens, other.tokens)
        wide = [_widened(one, tokens) for one in (self, other)]
        names = [*self.layers, *(name for name in other.layers if name not in self.layers)]
        layers = {}
        for name in names:
            both = [one.layers[name] for one in wide if name in one.layers]
            layers[name] = both[0] if len(both) == 1 else _merged_layers(*both)
        a, b = self.facts, other.facts
        facts = replace(
            a,
            parts=dict(sorted((a.parts | b.parts).items())),
            texts=a.texts if a.texts == b.texts else "; ".join(sorted({*a.texts.split("; "), *b.texts.split("; ")})),
            documents=a.documents + b.documents,
            tokens=a.tokens + b.tokens,
            missed=dict(sorted((b.missed | a.missed).items())),
        )
        texts = {**other.texts, **self.texts}
        return State(
            facts,
            layers,
            tokens,
            wide[0].counts + wide[1].counts,
            {token: texts[token] for token in sorted(texts)},
            dict(sorted({**other.names, **self.names}.items())),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as arrays with names, for one file; the rest is JSON in bytes."""
        head = {
            "version": _VERSION,
            "facts": {one.name: getattr(self.facts, one.name) for one in fields(Facts)},
            "layers": list(self.layers),
            "texts": {str(token): text for token, text in self.texts.items()},
            "names": self.names,
        }
        found = {"json": np.frombuffer(json.dumps(head, ensure_ascii=True).encode(), dtype=np.uint8)}
        found |= {"tokens": self.tokens, "counts": self.counts}
        for at, layer in enumerate(self.layers.values()):
            found |= {f"{at}.{name}": x for name, x in layer.parts.items()}
            found |= {f"{at}.exemplars.{name}": x for name, x in layer.exemplars.parts()}
        return found

    @classmethod
    def of_arrays(cls, found: dict[str, np.ndarray]) -> State:
        """The state that `arrays` wrote."""
        head = json.loads(bytes(found["json"]).decode())
        if head["version"] != _VERSION:
            raise FileError(f"it has version {head['version']}, and this regard reads version {_VERSION}")
        facts = {**head["facts"], "random_weights": tuple(head["facts"]["random_weights"])}
        layers = {}
        for at, name in enumerate(head["layers"]):
            mine = {key.partition(".")[2]: x for key, x in found.items() if key.partition(".")[0] == str(at)}
            prefix = "exemplars."
            kept = {key.removeprefix(prefix): x for key, x in mine.items() if key.startswith(prefix)}
            layers[name] = LayerState({k: x for k, x in mine.items() if not k.startswith(prefix)}, ExemplarSet(**kept))
        texts = {int(token): text for token, text in head["texts"].items()}
        return cls(Facts(**facts), layers, found["tokens"], found["counts"], texts, head["names"])


def _widened(one: State, tokens: np.ndarray) -> State:
    """The same with a column for each of these sorted tokens."""
    at = np.searchsorted(tokens, one.tokens)
    counts = np.zeros(len(tokens), dtype=np.int64)
    counts[at] = one.counts
    layers = {}
    for name, layer in one.layers.items():
        parts = dict(layer.parts)
        for key in _BY_TOKEN:
            parts[key] = np.zeros((layer.heads, len(tokens)), dtype=np.int64)
            parts[key][:, at] = layer.parts[key]
        layers[name] = LayerState(parts, layer.exemplars)
    return replace(one, tokens=tokens, counts=counts, layers=layers)


def _merged_layers(a: LayerState, b: LayerState) -> LayerState:
    parts = {name: _EXTREMES.get(name, np.add)(x, b.parts[name]) for name, x in a.parts.items()}
    return LayerState(parts, a.exemplars.merged(b.exemplars))


def _check_alike(a: State, b: State) -> None:
    """Refuse to merge censuses of different models, or one part twice."""
    for name in a.layers:
        if name in b.layers and a.layers[name].heads != b.layers[name].heads:
            raise ArgumentError(
                f"merge: {name!r} has {a.layers[name].heads} heads in one census and {b.layers[name].heads} in the "
                f"other. Only censuses of one model can be merged."
            )
    if a.layers and b.layers and not set(a.layers) & set(b.layers):
        raise ArgumentError("merge: the two censuses share no layer. Only censuses of one model can be merged.")
    if a.facts.title != b.facts.title:
        raise ArgumentError(
            f"merge: one census is of {a.facts.title!r} and the other of {b.facts.title!r}. Only censuses of one model "
            f"can be merged; diff compares two models."
        )
    if a.facts.kept != b.facts.kept:
        raise ArgumentError(
            f"merge: one census keeps {a.facts.kept} exemplars and the other {b.facts.kept}. Take both with the same."
        )
    twice = sorted(set(a.facts.parts) & set(b.facts.parts))
    if twice:
        raise ArgumentError(f"merge: both censuses counted {twice[0]}. What is counted twice has twice the weight.")


def write_state(state: State, folder: Folder, name: str) -> None:
    """Write a state as one file, completely or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **state.arrays())  # type: ignore[arg-type]
    folder.write(name, [buffer.getbuffer()])


def read_state(path: Path, who: str) -> State:
    """Read a state that `write_state` wrote."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return State.of_arrays({name: file[name] for name in file.files})
    except FileNotFoundError as error:
        raise FileError(f"{who}: {str(path)!r} was not found. Give a folder that a census was saved to.") from error
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileError(f"{who}: {str(path)!r} is not a census, or is damaged: {reason}.") from error
