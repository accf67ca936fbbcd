"""Restore corrupted digits with an autoassociative memory: modern Hopfield retrieval is iterated attention.

The memory's keys and values are the same pictures. A corrupted picture is the query; what is read becomes the next
query, and after a few reads it converges to what was stored. The digits (8 × 8 pixels) ship with scikit-learn.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from regard.memory import Memory

STORED, SHOWN, SIDE, SHADES = 100, 5, 8, " .:-=+*#%@"
TEMPERATURE = 0.03  # low enough for one of two similar pictures to win; at 1 they blur together


def digits() -> Tensor:
    """Ten of each digit, as vectors of pixels with mean 0 and length √d."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs scikit-learn: pip install 'regard[learn]'")
    pictures, labels = load_digits(return_X_y=True)
    pictures, labels = torch.from_numpy(pictures).float(), torch.from_numpy(labels)
    chosen = torch.cat([(labels == digit).nonzero()[: STORED // 10, 0] for digit in range(10)])
    x = pictures[chosen]
    x = x - x.mean(-1, keepdim=True)
    return x / x.norm(dim=-1, keepdim=True) * math.sqrt(SIDE * SIDE)


def corruptions(x: Tensor) -> dict[str, Tensor]:
    half = x.clone()
    half[:, : SIDE * SIDE // 2] = 0
    return {
        "noise as strong as the picture": x + torch.randn_like(x),
        "the upper half hidden": half,
        "four of ten pixels lost": x * (torch.rand_like(x) > 0.4),
    }


def recall(memory: Memory, query: Tensor) -> tuple[Tensor, int]:
    """Read until the result no longer changes; return it and the number of reads."""
    reads, found = 1, memory.read(query, TEMPERATURE)
    while (found - query).abs().max() > 1e-4 and reads < 50:
        reads, query, found = reads + 1, found, memory.read(found, TEMPERATURE)
    return found, reads


def right(found: Tensor, truth: Tensor) -> float:
    """The share of pictures that are closest to the one they came from."""
    return (torch.cdist(found, truth).argmin(-1) == torch.arange(len(truth))).float().mean().item()


def drawn(pictures: Tensor) -> str:
    """Draw some pictures side by side, in characters."""
    low, high = pictures.amin(-1, keepdim=True), pictures.amax(-1, keepdim=True)
    shade = ((pictures - low) / (high - low) * (len(SHADES) - 1)).round().int().view(-1, SIDE, SIDE)
    lines = (("".join(SHADES[s] * 2 for s in row) for row in shade[:, i].tolist()) for i in range(SIDE))
    return "\n".join("  ".join(line) for line in lines)


def painted(shown: list[tuple[str, Tensor]], path: Path) -> bool:
    """Save the pictures, one row per stage, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(shown), SHOWN, figsize=(SHOWN, 1.2 * len(shown)), layout="constrained")
    for row, (name, pictures) in zip(axes, shown, strict=True):
        for axis, picture in zip(row, pictures, strict=True):
            axis.imshow(picture.view(SIDE, SIDE), cmap="gray_r")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_title(name, fontsize=8, loc="left")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def main() -> int:
    torch.manual_seed(0)
    stored = digits()
    memory = Memory(SIDE * SIDE, SIDE * SIDE)
    memory.write(stored, stored)
    some = torch.arange(0, STORED, STORED // SHOWN)[:SHOWN]
    shown = [("stored", stored[some])]
    shares = []
    print(f"{memory}\n\nstored\n{drawn(stored[some])}\n")
    for name, query in corruptions(stored).items():
        found, reads = recall(memory, query)
        shares.append(right(found, stored))
        print(f"{name}\n{drawn(query[some])}\n")
        print(f"recalled in {reads} reads: {shares[-1]:.0%} of {STORED} are correct\n{drawn(found[some])}\n")
        shown += [(name, query[some]), ("recalled", found[some])]
    path = Path(tempfile.mkdtemp()) / "hopfield_memory.png"
    if painted(shown, path):
        print(f"the pictures: {path}")
    return 0 if min(shares) > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
