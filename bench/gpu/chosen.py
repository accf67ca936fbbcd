"""How much faster are lists of keys than the dense causal pass, and how fast must keys be gathered for that?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from _checks import EXACT, ROUNDED, stop_unless_close
from _device import DEVICE, Peer, Row, at_least, attempt, each, measured, over, peak, random, report, start, verdict
from _peers import torchs
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

N, KEYS, D = 65_536, 2048, 128
SIZE, ROWS = 64, 16  # keys of a block, and rows that share a list
FEW, SOME = 512, 64  # tokens, and rows of all tokens, where results are checked
TOP, ALL = 8, "all of these"
MUST = 5.0  # times the speed of the faster dense pass
HEADS = {"64 heads, 1 list": (64, 1), "16 heads, 1 list": (16, 1), "16 heads, 4 lists": (16, 4)}
SHARED = [name for name, (_, lists) in HEADS.items() if lists == 1]  # whose statistics are measured
DENSE = ("dense", "torch, dense")
Call = Callable[[], Tensor]
Times = dict[str, float | None]
COLUMNS = (
    "forward", *DENSE, "dense / forward", "with new lists", "backward", "its dense", "its torch, dense",
    "dense / backward", "MiB", "dense MiB", "GB", "TB/s", f"TB/s for {MUST:g} ×", "must", "holds",
)  # fmt: skip


class Kind(NamedTuple):
    """Whether lists have keys or blocks of keys, and how many rows share one."""

    size: int
    rows: int

    def indices(self, lists: int, n: int, keys: int) -> Tensor:
        """Random lists that are not after their rows: int32 (1, lists, n / rows, keys / size); −1 is none.

        Each entry comes from its own part of what a row may see, so that none is repeated.
        """
        count, last = keys // self.size, torch.arange(self.rows, n + 1, self.rows, device=DEVICE)
        ends = -(-last // self.size)[:, None] * torch.arange(count + 1, device=DEVICE) // count  # (n / rows, count + 1)
        begin, width = ends[:, :-1], ends.diff()
        found = torch.empty(1, lists, *width.shape, dtype=torch.int32, device=DEVICE)
        for at in range(lists):
            inside = (torch.rand(width.shape, device=DEVICE) * width).long().minimum(width - 1)  # −1 in an empty part
            found[0, at] = torch.where(width > 0, begin + inside, -1)
        return found

    def mask(self, indices: Tensor) -> regard.Mask:
        mask = regard.chosen(indices, size=self.size, rows=self.rows)
        return mask if (self.size, self.rows) == (1, 1) else mask & regard.causal()

    def read(self, indices: Tensor) -> float:
        """The bytes of keys and values that are read if each list is read once for all heads that share it."""
        return float((indices >= 0).sum()) * self.size * 2 * D * 2


KINDS = {
    "keys": Kind(1, 1),
    f"keys for {ROWS} rows": Kind(1, ROWS),
    f"blocks of {SIZE}": Kind(SIZE, 1),
    f"blocks of {SIZE} for {ROWS} rows": Kind(SIZE, ROWS),
}


def main() -> None:
    for name in KINDS:
        check(name)
    rows = [row for found in each({name: partial(table, name) for name in HEADS}) for row in found.values()]
    rows += [row for found in each({name: partial(statistics, name) for name in SHARED}) for row in found.values()]
    note = (
        f"Milliseconds of wall-clock time, medians, calls in turns. bf16, n {N:,}, heads of {D}, lists of {KEYS:,} "
        f"keys or {KEYS // SIZE} blocks of {SIZE}, not after their row; a list belongs to one key head and the query "
        "heads that share it. `dense` is our causal pass, `torch, dense` cuDNN's. `with new lists` is the forward with "
        "lists that are sorted and checked anew. MiB of a forward and a backward, above inputs and lists. GB are the "
        "keys and values that the lists name, 2 · (d + dv) bytes each, if every list is read once. TB/s is how fast "
        "the forward reads them, from L2 or memory; beside it is how fast it would have to read them to be "
        f"{MUST:g} × as fast as the faster dense pass. Statistics are compared with the same ones of our dense pass. "
        "All results were compared with float64 before they were timed. "
        f"Must: ≥ {MUST:g} × the speed of the faster dense pass."
    )
    report("chosen", f"Lists of {KEYS:,} keys among {N:,} tokens: milliseconds", rows, note)


def inputs(heads: int, kv_heads: int, n: int, grad: bool = False) -> list[Tensor]:
    return [random(1, h, n, D, grad=grad) for h in (heads, kv_heads, kv_heads)]


def check(name: str, n: int = FEW) -> None:
    """Compare outputs, statistics and gradients with the reference in float64, for few tokens."""
    kind, g = KINDS[name], random(1, 16, n, D)
    mask, given = kind.mask(kind.indices(2, n, n // 4)), inputs(16, 2, n)
    found, true = (
        values([x.to(dtype).requires_grad_() for x in given], mask, g, backend)
        for dtype, backend in ((given[0].dtype, "triton"), (torch.float64, "reference"))
    )
    exact = ("entropy", "lse", "received")
    stop_unless_close(name, {x: found.pop(x) for x in exact}, true, EXACT)
    stop_unless_close(name, found, true, ROUNDED)


def values(x: list[Tensor], mask: regard.Mask, g: Tensor, backend: str) -> dict[str, Tensor]:
    seen = regard.observe(*x, mask=mask, backend=backend)
    total = (seen.output * g.to(seen.output.dtype)).sum() + 0.1 * seen.entropy.sum()
    slopes = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(total, x), strict=True))
    rows = {"entropy": seen.entropy, "lse": seen.lse, "received": seen.received}
    return {"output": seen.output, **rows, "top": seen.top(TOP).weights, **slopes}


def check_rows(case: str, x: list[Tensor], kind: Kind, indices: Tensor) -> None:
    """Compare some rows among all tokens with the formula over all keys, in float64."""
    n = x[0].shape[2]
    rows = torch.randint(0, n, (min(SOME, n),), device=DEVICE)
    with torch.no_grad():
        seen = regard.observe(*x, mask=kind.mask(indices), backend="triton")
        lists = indices[0, :, rows // kind.rows].long()  # (lists, rows, K)
        named = torch.zeros(*lists.shape[:2], n // kind.size + 1, dtype=torch.bool, device=DEVICE)
        named = named.scatter(2, torch.where(lists < 0, n // kind.size, lists), True)[..., :-1]
        shown = named.repeat_interleave(kind.size, 2) & (torch.arange(n, device=DEVICE) <= rows[:, None])
        q, k, v = x[0][0, :, rows].double(), x[1][0].double(), x[2][0].double()
        shared = len(q) // len(k)
        output, entropy = torch.empty_like(q), torch.empty(q.shape[:2], dtype=q.dtype, device=DEVICE)
        for head in range(len(q)):
            S = q[head] @ k[head // shared].mT * D**-0.5
            P = S.masked_fill(~shown[head // shared], -torch.inf).softmax(-1)
            output[head], entropy[head] = P @ v[head // shared], torch.special.entr(P).sum(-1)
    stop_unless_close(case, {"entropy": seen.entropy[0, :, rows]}, {"entropy": entropy}, EXACT)
    stop_unless_close(case, {"output": seen.output[0, :, rows]}, {"output": output}, ROUNDED)


def calls(x: list[Tensor], masks: dict[str, regard.Mask]) -> dict[str, Call]:
    """The forward of each kind of lists, and the dense passes."""
    attend = {
        name: partial(regard.attention, *x, mask=mask, backend="triton")
        for name, mask in {"dense": regard.causal(), **masks}.items()
    }
    return attend | {"torch, dense": torchs(*x, SDPBackend.CUDNN_ATTENTION, is_causal=True, enable_gqa=True)}


def table(heads: str) -> dict[str, Row]:
    """A row for each kind of lists."""
    x, g = inputs(*HEADS[heads], N, grad=True), random(1, HEADS[heads][0], N, D)
    lists = {name: kind.indices(HEADS[heads][1], N, KEYS) for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        check_rows(f"{heads}, {name}, {SOME} rows of {N:,}", x, kind, lists[name])
    made = calls(x, {name: kind.mask(lists[name]) for name, kind in KINDS.items()})
    anew = {name: Peer(partial(forward, x, kind, lists[name])) for name, kind in KINDS.items()}
    ahead, _ = measured(
        f"{heads}, forward", {name: Peer(partial(quiet, call)) for name, call in made.items()}, once=True
    )
    new, _ = measured(f"{heads}, with new lists", anew, once=True)
    back, _ = measured(
        f"{heads}, backward", {name: slopes(heads, name, call, x, g) for name, call in made.items()}, once=True
    )
    steps = {name: Peer(lambda call=call: torch.autograd.grad(call(), x, g)) for name, call in made.items()}
    mib = peak(heads, steps)
    return {
        name: row(f"{heads}, {name}", name, ahead, new, back, mib, kind.read(lists[name]))
        for name, kind in KINDS.items()
    }


@torch.no_grad()
def quiet(call: Call) -> Tensor:
    return call()


@torch.no_grad()
def forward(x: list[Tensor], kind: Kind, indices: Tensor) -> Tensor:
    return regard.attention(*x, mask=kind.mask(indices), backend="triton")


def slopes(heads: str, name: str, call: Call, x: list[Tensor], g: Tensor) -> Peer | None:
    """The backward of a forward that ran once."""
    output = attempt(f"{heads}, {name}", call)
    return None if output is None else Peer(lambda: torch.autograd.grad(output, x, g, retain_graph=True))


def row(case: str, name: str, ahead: Times, new: Times, back: Times, mib: Times, read: float) -> Row:
    dense, its = (fastest([ms[x] for x in DENSE]) for ms in (ahead, back))
    faster = {"forward": over(dense, ahead[name]), "backward": over(its, back[name])}
    found = {
        "forward": ahead[name],
        **{x: ahead[x] for x in DENSE},
        "dense / forward": faster["forward"],
        "with new lists": new[name],
        "backward": back[name],
        **{f"its {x}": back[x] for x in DENSE},
        "dense / backward": faster["backward"],
        "MiB": mib[name],
        "dense MiB": mib["dense"],
        "GB": read / 1e9,
        "TB/s": over(read / 1e9, ahead[name]),
        f"TB/s for {MUST:g} ×": over(MUST * read / 1e9, dense),
        "must": f"≥ {MUST:g} ×",
        "holds": verdict({way: at_least(ratio, MUST) for way, ratio in faster.items()}),
    }
    return {"case": case, **{column: found[column] for column in COLUMNS}}


def fastest(ms: list[float | None]) -> float | None:
    return min((x for x in ms if x is not None), default=None)


def statistics(heads: str) -> dict[str, Row]:
    """Rows for entropy, received weights and largest weights, and for all of them."""
    x, kind = inputs(*HEADS[heads], N), KINDS["keys"]
    masks = {"lists": kind.mask(kind.indices(HEADS[heads][1], N, KEYS)), "dense": regard.causal()}
    observe = {name: partial(regard.observe, *x, mask=mask, backend="triton") for name, mask in masks.items()}
    seen = {name: call() for name, call in observe.items()}
    parts = {
        "entropy": observe,
        "received": {name: partial(received, a) for name, a in seen.items()},
        f"top({TOP})": {name: partial(a.top, TOP) for name, a in seen.items()},
    }
    ms = {}
    for part, pair in parts.items():
        peers = {name: Peer(call) for name, call in pair.items()}
        ms[part] = measured(f"{heads}, keys, {part}", peers, rounds=2, once=True).ms
    totals = [[found[name] for found in ms.values()] for name in masks]
    ours, dense = (None if None in each else sum(each) for each in totals)
    ms[ALL] = {"lists": ours, "dense": dense}
    return {part: compared(f"{heads}, keys, {part}", found, part == ALL) for part, found in ms.items()}


def received(seen: regard.Observation) -> Tensor:
    """What each key receives, computed anew."""
    vars(seen).pop("received", None)
    return seen.received


def compared(case: str, ms: Times, required: bool) -> Row:
    ratio = over(ms["dense"], ms["lists"])
    found = {"forward": ms["lists"], "dense": ms["dense"], "dense / forward": ratio}
    if required:
        found |= {"must": f"≥ {MUST:g} ×", "holds": verdict({"statistics": at_least(ratio, MUST)})}
    return {"case": case, **dict.fromkeys(COLUMNS), **found}


def once(heads: str, name: str) -> None:
    """Compile all that the lists of a kind need; kernels do not depend on how many rows there are."""
    kind, x = KINDS[name], inputs(*HEADS[heads], 2 * KEYS, grad=True)
    each_once(x, kind.mask(kind.indices(HEADS[heads][1], 2 * KEYS, KEYS)))
    check(name)


def each_once(x: list[Tensor], mask: regard.Mask) -> None:
    torch.autograd.grad(regard.attention(*x, mask=mask, backend="triton").sum(), x)
    seen = regard.observe(*x, mask=mask, backend="triton")
    received(seen), seen.top(TOP)


def dense_once(heads: str) -> None:
    each_once(inputs(*HEADS[heads], 2 * KEYS, grad=True), regard.causal())


if __name__ == "__main__":
    ahead = {f"{heads}, {name}": partial(once, heads, name) for heads in HEADS for name in KINDS}
    ahead |= {heads: partial(dense_once, heads) for heads in HEADS}
    start(main, ahead)
