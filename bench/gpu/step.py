"""How long is a training step of a small GPT, eager and compiled, beside FlexAttention and torch's own function?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _device import DEVICE, Row, at_most, attempt, each, over, report, start, verdict
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard

LAYERS, HIDDEN, HEADS, BATCH, TOKENS, WORDS = 4, 1024, 16, 8, 2048, 512
WINDOW, CAP = 1024, 30.0
STEPS, TURNS = 10, 5
MUST = 1.02  # times the time of FlexAttention, compiled
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | float]]


def ours(**options: object) -> Attend:
    return lambda q, k, v: (regard.attention(q, k, v, **options), 0.0)


def observed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    seen = regard.observe(q, k, v, mask=regard.window(WINDOW))
    return seen.output, seen.entropy.mean()


def flex(capped: bool) -> Attend:
    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j <= WINDOW)

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return CAP * torch.tanh(score / CAP)

    blocks = create_block_mask(near, None, None, TOKENS, TOKENS, device=DEVICE)
    return lambda q, k, v: (flex_attention(q, k, v, score_mod=cap if capped else None, block_mask=blocks), 0.0)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), 0.0


CASES: dict[str, tuple[Attend, Callable[[], Attend] | None]] = {
    "causal": (ours(mask=regard.causal()), lambda: torchs),
    f"window {WINDOW}": (ours(mask=regard.window(WINDOW)), lambda: flex(capped=False)),
    f"window {WINDOW} and softcap": (ours(mask=regard.window(WINDOW), softcap=CAP), lambda: flex(capped=True)),
    f"window {WINDOW}, observed": (observed, None),
    f"window {WINDOW} and dropout": (ours(mask=regard.window(WINDOW), dropout=0.1), None),
}


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        attended, extra = self.attend(*(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)))), extra


class GPT(nn.Module):
    """A GPT with random weights, and its loss."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x, penalty = self.words(ids), torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, extra = block(x)
            penalty = penalty + 0.01 * extra
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten()) + penalty


def step_of(attend: Attend, compiled: bool) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    model = GPT(attend).to(DEVICE, torch.bfloat16)
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = forward(ids)
        loss.backward()
        return loss.detach()

    return step


def in_turns(steps: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median milliseconds of a step by events around many, models in turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, TURNS):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                step()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                taken[name].append(begin.elapsed_time(end) / STEPS)
    return {name: statistics.median(found) for name, found in taken.items()}


def steps(case: str) -> dict[str, Callable[[], Tensor]]:
    mine, other = CASES[case]
    made = {"eager": step_of(mine, False), "compiled": step_of(mine, True)}
    return made if other is None else made | {"peer": step_of(other(), True)}


def once(case: str) -> None:
    """Compile all that a case needs."""
    for name, step in steps(case).items():
        attempt(f"{case}, {name}", step)


def row(case: str) -> Row:
    made = steps(case)
    losses = {name: attempt(f"{case}, {name}", step) for name, step in made.items()}
    ms = in_turns({name: step for name, step in made.items() if losses[name] is not None})
    eager, compiled, peer = (ms.get(name) for name in ("eager", "compiled", "peer"))
    apart = [float(x) for x in losses.values() if x is not None]
    against, before = over(compiled, peer), over(compiled, eager)
    checks = {"eager": at_most(before, 1.0)} | ({"peer": at_most(against, MUST)} if "peer" in made else {})
    return {
        "case": case,
        "eager": eager,
        "compiled": compiled,
        "the peer, compiled": peer,
        "compiled / eager": before,
        "compiled / peer": against,
        "losses apart": max(apart) - min(apart) if apart else None,
        "must": "≤ 1" + (f" and {MUST}" if "peer" in made else ""),
        "holds": verdict(checks),
    }


def main() -> None:
    note = (
        f"Milliseconds of a forward and a backward pass, by CUDA events around {STEPS} steps, models in turns. bf16, "
        f"{LAYERS} layers of {HIDDEN} units in {HEADS} heads, {BATCH} × {TOKENS:,} tokens. The peer is torch's "
        "function for the causal model, and FlexAttention for the others. With dropout the losses differ by chance."
    )
    report(
        "step", "A training step of a small GPT: milliseconds", each({name: partial(row, name) for name in CASES}), note
    )


if __name__ == "__main__":
    start(main, {name: partial(once, name) for name in CASES})
