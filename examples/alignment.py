"""Which source word does each word of a translation attend to? The classic picture of attention.

The word vectors are made by hand and nothing is trained: this is an illustration of how to read the weights, not
evidence that attention aligns languages. Adjective and noun swap places, and the entropy shows where the alignment is
uncertain. `regard lab alignment` learns an alignment from translated words.
"""

from __future__ import annotations

import sys

from regard.nn import ScaledDotProductAttention
from regard.report.example import SOURCE, TARGET, known

EXPECTED = {
    "le": "the",
    "chat": "cat",
    "noir": "black",
    "veut": "wants",
    "souvent": "often",
    "lait": "milk",
    "froid": "cold",
}


def main() -> int:
    source, target = known(SOURCE), known(TARGET)
    _, weights = ScaledDotProductAttention()(target, source, source)
    entropy = -(weights * weights.log()).sum(-1)
    print(" " * 9 + "".join(f"{word:>7}" for word in SOURCE) + "   effective words")
    for word, row, h in zip(TARGET, weights, entropy, strict=True):
        print(f"{word:>9}" + "".join(f"{weight:7.2f}" for weight in row.tolist()) + f"   {h.exp().item():.1f}")
    found = {word: SOURCE[j] for word, j in zip(TARGET, weights.argmax(-1).tolist(), strict=True)}
    sure = all(found[word] == wanted for word, wanted in EXPECTED.items())
    unsure = TARGET[int(entropy.argmax())]
    print(
        f"by these vectors each word attends to its translation: {sure}; the least certain is {unsure!r}, without one"
    )
    return 0 if sure and unsure == "du" else 1


if __name__ == "__main__":
    sys.exit(main())
