"""How long does reading a memory take, compared with the matrix product it needs?"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _harness import Row, report, side_by_side
from torch import Tensor

from regard.memory import Memory

QUERIES, DIM, TOP = 1_000, 64, 10
FEW = 50_000  # keys, for the peer that would take minutes per round with all of them
ROWS, COLUMNS = 64, 4096  # queries, or keys, in flight in the plain computations


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The product with the keys in chunks of queries, a softmax, and the product with the values."""
    return torch.cat([torch.softmax(part @ k.T * DIM**-0.5, -1) @ v for part in q.split(ROWS)])


def plain_work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same products and softmax in chunks of keys: the same work, although the sum is not the answer."""
    total = torch.zeros(len(q), v.shape[-1])
    for keys, values in zip(k.split(COLUMNS), v.split(COLUMNS), strict=True):
        total += torch.softmax(q @ keys.T * DIM**-0.5, -1) @ values
    return total


def plain_top(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([(part @ k.T).topk(TOP).indices for part in q.split(ROWS)])


def keops(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """The same read with KeOps, if it is installed and finds a compiler."""
    try:
        from pykeops.torch import LazyTensor
    except ImportError:
        return None
    queries, keys, values = LazyTensor(q[:, None] * DIM**-0.5), LazyTensor(k[None]), LazyTensor(v[None])
    return lambda: (queries | keys).sumsoftmaxweight(values, axis=1)


def faiss_top(q: Tensor, k: Tensor) -> Callable[[], Tensor] | None:
    """The strongest keys from faiss's exact index, if it is installed."""
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(DIM)
    index.add(k.numpy())
    queries = q.numpy()
    return lambda: torch.from_numpy(index.search(queries, TOP)[1])


@torch.inference_mode()
def measure(keys: int, rounds: int, folder: Path, with_keops: bool) -> list[Row]:
    """Time reads of everything and of the strongest keys, all peers in turns."""
    torch.manual_seed(0)
    q, k, v = torch.randn(QUERIES, DIM), torch.randn(keys, DIM), torch.randn(keys, DIM)
    memory = Memory(DIM, DIM)
    memory.write(k, v)
    memory.save(folder / "memory")
    disk = Memory.open(folder / "memory")
    soft: dict[str, Callable[[], Tensor] | None] = {
        "plain torch": lambda: plain_work(q, k, v),
        "plain torch, chunks of queries": lambda: plain(q, k, v),
        "Memory in memory": lambda: memory.read(q),
        "Memory on disk": lambda: disk.read(q),
        "Memory on disk, observed": lambda: disk.read(q, observe=True).output,
        **({"KeOps": keops(q, k, v)} if with_keops else {}),
    }
    strongest: dict[str, Callable[[], Tensor] | None] = {
        "plain torch": lambda: plain_top(q, k),
        "Memory in memory": lambda: memory.read(q, top=TOP),
        "Memory on disk": lambda: disk.read(q, top=TOP),
        "faiss IndexFlatIP": faiss_top(q, k),
    }
    rows: list[Row] = []
    for read, calls in (("everything", soft), (f"top {TOP}", strongest)):
        there = {name: call for name, call in calls.items() if call is not None}
        taken = side_by_side(there, rounds)
        for name in calls:
            seconds = taken.get(name)
            share = None if seconds is None else seconds / taken["plain torch"]
            rows.append({"keys": f"{keys:,}", "read": read, "by": name, "seconds": seconds, "of plain torch": share})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    rows: list[Row] = []
    for keys in (FEW, chosen.keys):
        folder = Path(tempfile.mkdtemp())
        try:
            rows += measure(keys, chosen.rounds, folder, with_keops=keys == FEW)
        finally:
            shutil.rmtree(folder)
    note = (
        f"{QUERIES:,} queries, keys and values of d {DIM}, float32; medians of {chosen.rounds} round(s) after a "
        f"warm-up, taken in turns. Plain torch: softmax(q kᵀ/√d) v for {COLUMNS:,} keys at a time, added up as if that "
        f"were the answer (the same work), or exactly, {ROWS} queries at a time; for top, the product and topk alone. "
        f"faiss gives indices; Memory also reads the values behind them. KeOps runs with {FEW:,} keys only. A dash "
        f"means not installed here. Bound: reading everything takes at most 1.3 × plain torch."
    )
    report("memory_read", "Time to read a memory, against plain torch", rows, note)


if __name__ == "__main__":
    main()
