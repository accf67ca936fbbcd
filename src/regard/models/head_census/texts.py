"""Texts for a census: files of plain text or JSON lines, folders of these, and data sets; read piece by piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...errors import ArgumentError, DtypeError, FileError, MissingPackageError

__all__ = ["Document", "Texts"]

_PIECE = 1 << 17  # characters: a longer text is cut between words
_ENDINGS = (".txt", ".md", ".jsonl", ".json")


class Document(NamedTuple):
    """A text, or a piece of a long one."""

    number: int
    name: str
    text: str
    position: int  # bytes of all files up to its end, or the number of documents


class Texts:
    """The texts of a corpus, in an order that is always the same.

    `source` is a file, a folder, a saved data set, or an iterable of strings or of mappings with a text under `field`,
    such as a data set; the texts of a data frame are its column `field`. Files are UTF-8: one text per `.txt` or `.md`,
    one per line of `.jsonl`; a folder is read in the order of its names.

    >>> [document.name for document in Texts(["one text", {"text": "another"}])]
    ['text 0', 'text 1']
    """

    def __init__(self, source: str | os.PathLike[str] | Iterable[Any], field: str = "text") -> None:
        self._field = field
        self._files: list[Path] = []
        self._others: Iterable[Any] | None = None
        if isinstance(source, str | os.PathLike):
            self._open(Path(source))
        elif isinstance(source, Mapping):
            raise ArgumentError(
                f"census: texts have several parts, {_listed(source)}. Give one of them, such as "
                f"texts[{next(iter(source), 'train')!r}]."
            )
        elif type(source).__name__ == "DataFrame":
            self._others = _column(source, field)
        elif isinstance(source, Iterable):
            self._others = source
        else:
            raise DtypeError(f"census: texts must be a path, or an iterable of strings. Got {type(source).__name__}.")

    def _open(self, path: Path) -> None:
        if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            self._others, self.about = _data_set(path), f"the data set {path.name}"
            self._root = path
            return
        if path.is_dir():
            self._files = sorted(one for one in path.rglob("*") if one.suffix in _ENDINGS and one.is_file())
            if not self._files:
                raise FileError(f"--texts: the folder {str(path)!r} has no file that ends with {', '.join(_ENDINGS)}.")
        elif path.is_file():
            self._files = [path]
        else:
            raise FileError(f"--texts: {str(path)!r} was not found. Give a file, a folder, or a saved data set.")
        self._root = path if path.is_dir() else path.parent
        self.about = path.name

    about = "texts"

    @property
    def size(self) -> int | None:
        """The number of bytes in all files, or of texts; None if nobody knows."""
        if self._others is not None:
            return len(self._others) if isinstance(self._others, Sized) else None
        return sum(path.stat().st_size for path in self._files)

    @property
    def unit(self) -> str:
        """What `size` and positions count."""
        return "texts" if self._others is not None else "bytes"

    def fingerprint(self) -> str:
        """A short name of these texts: the same for the same files with the same sizes."""
        facts = [[str(p.relative_to(self._root)), p.stat().st_size] for p in self._files]
        kind = [type(self._others).__name__, getattr(self._others, "_fingerprint", None), self.size, self._field]
        return hashlib.sha256(json.dumps([facts, kind if self._others is not None else []]).encode()).hexdigest()[:15]

    def __iter__(self) -> Iterator[Document]:
        number = 0
        for name, text, position in self._texts():
            for at, piece in enumerate(_pieces(text)):
                yield Document(number, name if at == 0 else f"{name}, part {at + 1}", piece, position)
                number += 1

    def _texts(self) -> Iterator[tuple[str, str, int]]:
        if self._others is not None:
            for at, one in enumerate(self._others):
                yield f"text {at}", self._text_of(one, f"text {at}"), at + 1
            return
        before = 0
        for path in self._files:
            name, size = str(path.relative_to(self._root)), path.stat().st_size
            if path.suffix == ".jsonl":
                yield from self._lines(path, name, before)
            elif path.suffix == ".json":
                whole = _parsed("".join(_chunks(path)), f"{str(path)!r}")
                for at, one in enumerate(whole if isinstance(whole, list) else [whole]):
                    yield f"{name}:{at + 1}", self._text_of(one, f"{str(path)!r}, entry {at + 1}"), before + size
            else:
                yield from _streamed(path, name, before)
            before += size

    def _lines(self, path: Path, name: str, before: int) -> Iterator[tuple[str, str, int]]:
        done = 0
        with _opened(path) as file:
            for number, raw in enumerate(file, 1):
                done += len(raw)
                line = _decoded(raw, path, done - len(raw))
                if line.strip():
                    place = f"{str(path)!r}, line {number:,}"
                    yield f"{name}:{number}", self._text_of(_parsed(line, place), place), before + done

    def _text_of(self, one: Any, place: str) -> str:
        text = one.get(self._field) if isinstance(one, Mapping) else one
        if isinstance(text, str):
            return text
        if isinstance(one, Mapping) and self._field not in one:
            raise ArgumentError(
                f"census: {place} has no {self._field!r}; it has {_listed(one)}. --field names the one with the text."
            )
        raise ArgumentError(f"census: {place} must be a text. Got {type(text).__name__}.")


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FileError(f"--texts: {place} is not JSON: {error}.") from error


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise FileError(f"--texts: {str(path)!r} cannot be read: {error.strerror or error}.") from error


def _decoded(raw: bytes, path: Path, before: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"--texts: {str(path)!r} is not UTF-8 text: byte {before + error.start:,} is "
            f"0x{error.object[error.start]:02x}. Save it as UTF-8."
        ) from error


def _chunks(path: Path) -> Iterator[str]:
    """A file in pieces of about a megabyte that end with a line."""
    done = 0
    with _opened(path) as file:
        while lines := file.readlines(1 << 20):
            raw = b"".join(lines)
            yield _decoded(raw, path, done)
            done += len(raw)


def _streamed(path: Path, name: str, before: int) -> Iterator[tuple[str, str, int]]:
    """A file of plain text, of any size, in pieces that end between words."""
    rest, part, done = "", 0, 0
    for chunk in _chunks(path):
        done += len(chunk.encode())
        rest += chunk
        while len(rest) > 2 * _PIECE:
            cut = _cut(rest)
            part += 1
            yield name if part == 1 else f"{name}, part {part}", rest[:cut], before + done
            rest = rest[cut:]
    for piece in _pieces(rest):
        part += 1
        yield name if part == 1 else f"{name}, part {part}", piece, before + done


def _pieces(text: str) -> Iterator[str]:
    while len(text) > 2 * _PIECE:
        cut = _cut(text)
        yield text[:cut]
        text = text[cut:]
    if text.strip():
        yield text


def _cut(text: str) -> int:
    """Where a long text is cut: after a blank line, a line or a word, the last before the limit."""
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, _PIECE // 2, _PIECE)
        if at >= 0:
            return at + len(mark)
    return _PIECE


def _data_set(path: Path) -> Iterable[Any]:
    if find_spec("datasets") is None:
        raise MissingPackageError(
            f"census: {str(path)!r} is a saved data set, and needs the package datasets: pip install datasets."
        )
    import datasets

    try:
        found: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileError(f"--texts: {str(path)!r} cannot be read as a data set: {reason}.") from error
    if not isinstance(found, Mapping):
        return cast("Iterable[Any]", found)
    if len(found) != 1:
        raise ArgumentError(
            f"--texts: {str(path)!r} has several data sets, {_listed(found)}. Give one of them, such as "
            f"{str(path / next(iter(found), 'train'))!r}."
        )
    return cast("Iterable[Any]", next(iter(found.values())))


def _column(frame: Any, field: str) -> Iterable[Any]:
    if field not in frame.columns:
        raise ArgumentError(f"census: the data frame has no column {field!r}; it has {_listed(frame.columns)}.")
    return cast("Iterable[Any]", frame[field])


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, list(names)[:5]))
