"""Shard files: rows in safetensors format, written once and memory-mapped a few rows at a time."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import FileError
from .checked_file import CheckedFile
from .chunk import Chunk
from .folder import Folder
from .index import DTYPES, Index, Shard

__all__ = ["ShardFile", "write_shard"]

_MAX_HEADER_BYTES = 1 << 20  # far more than our headers need
_SIZES = {"I64": 8, "F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def write_shard(folder: Folder, number: int, rows: Chunk, dtype: str) -> Shard:
    """Write rows as one safetensors file, atomically and durably; ids that run on without a gap are not stored."""
    lowest, highest = int(rows.ids.min()), int(rows.ids.max())
    listed = not torch.equal(rows.ids.cpu(), torch.arange(lowest, lowest + len(rows.ids)))
    parts: dict[str, tuple[str, Tensor]] = {"ids": ("I64", rows.ids)} if listed else {}  # widest first, for alignment
    parts |= {"keys": (dtype, rows.keys), "values": (dtype, rows.values)}
    header: dict[str, Any] = {"__metadata__": {"format": "regard.Memory"}}
    end = 0
    for name, (kind, x) in parts.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text, *(_bytes(x) for _, x in parts.values())]
    crc32 = 0
    for piece in pieces:
        crc32 = zlib.crc32(piece, crc32)
    shard = Shard(f"rows-{number:06d}.safetensors", len(rows.ids), lowest, highest, listed, crc32)
    folder.write(shard.name, pieces)
    return shard


def _bytes(x: Tensor) -> memoryview:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().data.cast("B")


@dataclass(frozen=True)
class ShardFile:
    """A shard on disk, and the offset of each tensor in it."""

    file: CheckedFile
    shard: Shard
    offsets: dict[str, int]
    dtype: torch.dtype
    dims: dict[str, int]
    verify: bool
    """Whether the checksum is compared when the file is first mapped."""

    @classmethod
    def open(cls, folder: Folder, shard: Shard, index: Index, who: str, verify: bool) -> ShardFile:
        """Check that a shard exists, is complete, and matches the index."""
        path = folder.path / shard.name
        expected: dict[str, tuple[str, list[int]]] = {
            "keys": (index.dtype, [shard.rows, index.key_dim]),
            "values": (index.dtype, [shard.rows, index.value_dim]),
        }
        if shard.listed:
            expected["ids"] = ("I64", [shard.rows])
        try:
            file = CheckedFile(folder, shard.name, shard.crc32)
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(8 + length)[8:]) if length <= _MAX_HEADER_BYTES else None
            offsets = _offsets(header, expected, 8 + length, file.identity.size)
        except FileNotFoundError:
            raise FileError(f"{who}: {path} is missing. Restore the folder from a copy.") from None
        except OSError as error:
            raise FileError(f"{who}: {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(
                f"{who}: {path} is truncated, or not the shard that the index names: {error}. "
                f"Restore the folder from a copy."
            ) from None
        dims = {"keys": index.key_dim, "values": index.value_dim}
        return cls(file, shard, offsets, DTYPES[index.dtype], dims, verify)

    def holds(self, shard: Shard, folder: Folder) -> bool:
        """Whether this is the file of `shard`, which may have other deletions, and is unchanged in `folder`."""
        return replace(shard, deleted=self.shard.deleted) == self.shard and self.file.is_in(folder)

    def map(self, name: str, start: int, stop: int) -> Tensor:
        """Map rows [start, stop) of `name`: pages are read on first use and unmapped with the tensor."""
        if name == "ids" and not self.shard.listed:
            return torch.arange(self.shard.lowest + start, self.shard.lowest + stop)
        if self.verify:
            self.file.verify_once()
        dtype, dims = (torch.int64, ()) if name == "ids" else (self.dtype, (self.dims[name],))
        width = dtype.itemsize * (dims[0] if dims else 1)
        view, offset = self.file.map(self.offsets[name] + start * width, (stop - start) * width)
        count = (stop - start) * (dims[0] if dims else 1)
        return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(stop - start, *dims)

    def take(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of `name`; only their pages are read."""
        if name == "ids" and not self.shard.listed:
            return rows + self.shard.lowest
        return self.map(name, 0, self.shard.rows).index_select(0, rows)

    def live(self, start: int, stop: int) -> Tensor | None:
        """Index the rows [start, stop) that are not deleted, relative to start; None if no row is."""
        ranges = [(max(a, start), min(b, stop)) for a, b in self.shard.deleted if a < stop and b > start]
        if not ranges:
            return None
        live = torch.ones(stop - start, dtype=torch.bool)
        for a, b in ranges:
            live[a - start : b - start] = False
        return live.nonzero().squeeze(-1)


def _offsets(header: Any, expected: dict[str, tuple[str, list[int]]], base: int, size: int) -> dict[str, int]:
    """Compute the offset of each tensor, or raise a ValueError that says what is wrong."""
    if not isinstance(header, dict):
        raise ValueError("it has no header")
    if set(header) - {"__metadata__"} != set(expected):
        raise ValueError(f"it holds {sorted(set(header) - {'__metadata__'})}")
    offsets, last = {}, 0
    for name, (kind, shape) in expected.items():
        entry = header[name]
        start, end = entry["data_offsets"]
        count = _SIZES[kind]
        for dim in shape:
            count *= dim
        if (entry["dtype"], entry["shape"]) != (kind, shape) or end - start != count or start < 0:
            raise ValueError(f"its {name} are {entry['dtype']} {entry['shape']}, not {kind} {shape}")
        offsets[name], last = base + start, max(last, base + end)
    if size != last:
        raise ValueError(f"it has {size} bytes instead of {last}")
    return offsets
