"""Functions of scores, lists of keys and divergences by our kernels on a GPU: right by float64, with fixed bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.scores import Pointwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = "cuda"
N = 700  # fills no tile
HEADS = 4
CAUSAL, LATE = regard.causal(), regard.causal(offset=-2)  # with LATE two rows see nothing
Found = list[Tensor]
SLOPES, TABLE = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.linspace(-1, 1, HEADS * (2 * N - 1)).view(HEADS, -1)


def close(found: Found, true: Found, tolerance: float) -> None:
    for place, (x, y) in enumerate(zip(found, true, strict=True)):
        assert not x.isnan().any(), place
        assert torch.equal(x.isinf(), y.isinf()), place
        x, y = torch.where(x.isinf(), 0, x).double(), torch.where(y.isinf(), 0, y)
        assert (x - y).norm() <= tolerance * y.norm().clamp_min(1e-6), (place, ((x - y).norm() / y.norm()).item())


def check(make: Callable[[Found], Found], inputs: Found, tolerance: float = 8e-3) -> None:
    """What kernels make of bfloat16 against the same in float64; three times, bit for bit."""
    first, *others = (make([x.detach().requires_grad_() for x in inputs]) for _ in range(3))
    close(first, make([x.detach().double().requires_grad_() for x in inputs]), tolerance)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def backend_for(x: Tensor) -> str:
    return "chunked" if x.dtype == torch.float64 else "triton"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def rows_and_gradients(seen: Any, inputs: Found) -> Found:
    loss = (seen.output.double() * seen.output.detach().double().sin()).sum() + seen.entropy.double().sum()
    return [seen.output.detach(), seen.entropy.detach(), *torch.autograd.grad(loss, inputs)]


def alibi(table: Tensor) -> Any:
    slopes = SLOPES.to(table.device)
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "alibi": alibi,
    "softcap": lambda table: lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "distance decay": lambda table: lambda s, b, h, i, j: s * torch.exp(-1e-2 * (i - j).abs()),
    "table": lambda table: lambda s, b, h, i, j: s + table[h, i - j + N - 1],
    "gate": lambda table: lambda s, b, h, i, j: torch.where(i - j < 99, s * torch.sigmoid(s), s / (N - i)),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_scores(name: str, dim: int) -> None:
    torch.manual_seed(0)

    def make(inputs: Found) -> Found:
        *x, table = inputs
        learnt = inputs if name == "table" else x
        score = Pointwise(FUNCTIONS[name](table))
        return rows_and_gradients(regard.observe(*x, mask=CAUSAL, score=score, backend=backend_for(x[0])), learnt)

    check(make, [random(1, HEADS, N, dim) for _ in range(3)] + [TABLE.to(DEVICE)])


LISTS = {
    "keys": (1, 1, HEADS, 1),
    "keys, ungrouped heads": (1, 1, 2, 2),
    "keys, many heads": (1, 1, 64, 1),
    "keys for 16 rows": (1, 16, HEADS, 1),
    "blocks": (64, 1, HEADS, 1),
    "blocks for 16 rows": (64, 16, HEADS, 1),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_keys(name: str, dim: int) -> None:
    size, rows, heads, key_heads = LISTS[name]
    torch.manual_seed(0)
    n = 704
    lists = torch.randint(-1, n // size, (1, key_heads, n // rows, 64 if size == 1 else 4), device=DEVICE)
    mask = regard.chosen(lists, size=size, rows=rows)

    def make(x: Found) -> Found:
        return rows_and_gradients(regard.observe(*x, mask=mask, backend=backend_for(x[0])), x)

    check(make, [random(1, h, n, dim) for h in (heads, key_heads, key_heads)])


M = 500  # keys of the lists below
Heads = tuple[int, int, int]  # batch, query heads and key heads
FOR_HOPPER: dict[str, tuple[Heads, tuple[int, int], tuple[int, ...], int, int, regard.Mask | None]] = {
    # Dims; the shape of the lists; the size of blocks, and rows that share a list; a mask beside the lists.
    "64 heads": ((1, 64, 1), (128, 128), (1, 1, 301, 256), 1, 1, None),
    "64 heads, one tile of keys": ((1, 64, 1), (64, 64), (1, 1, 301, 64), 1, 1, None),
    "two key heads, two dims": ((1, 128, 2), (64, 128), (1, 2, 301, 128), 1, 1, None),
    "two lists per key head": ((1, 128, 1), (128, 64), (1, 2, 301, 128), 1, 1, None),
    "lists for four rows, by batch item": ((2, 16, 1), (128, 128), (2, 1, 75, 192), 1, 4, None),
    "lists for 16 rows, 64 heads": ((1, 64, 1), (128, 128), (1, 1, 19, 256), 1, 16, None),
    "lists for 16 rows, 16 heads": ((1, 16, 1), (64, 64), (1, 1, 19, 192), 1, 16, None),
    "blocks of 64": ((1, 64, 1), (128, 128), (1, 1, 301, 5), 64, 1, None),
    "blocks of 128": ((1, 64, 1), (64, 128), (1, 1, 301, 3), 128, 1, None),
    "blocks of 64 for 16 rows": ((1, 64, 1), (128, 128), (1, 1, 19, 5), 64, 16, None),
    "blocks of 64 for 16 rows, two lists per key head": ((2, 32, 1), (64, 64), (1, 2, 19, 5), 64, 16, None),
    "causal": ((1, 64, 1), (128, 128), (1, 1, 301, 256), 1, 1, regard.causal(offset=100)),
    "lists for 16 rows, causal": ((1, 16, 1), (128, 128), (1, 1, 19, 256), 1, 16, regard.causal(offset=100)),
    "blocks of 64, causal": ((1, 64, 1), (128, 128), (1, 1, 301, 5), 64, 1, regard.causal(offset=100)),
    "blocks of 64 for 16 rows, window": ((2, 16, 1), (128, 128), (1, 1, 19, 5), 64, 16, regard.window(90, offset=150)),
    "blocks of 128 for 16 rows, causal": ((1, 64, 1), (64, 64), (1, 1, 19, 3), 128, 16, regard.causal(offset=100)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FOR_HOPPER)
def test_lists_that_tiles_of_64_rows_share(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.launch import on_hopper
    from regard.kernels.portable import chosen_launch

    (batch, heads, key_heads), dims, shape, size, rows, beside = FOR_HOPPER[name]
    torch.manual_seed(0)
    monkeypatch.setattr(chosen_launch, "_BUFFER", 2**24)  # several chunks of lists
    lists = torch.randint(-1, -(-M // size), shape, device=DEVICE)
    lists[:, :, 1] = -1  # rows that see nothing,
    lists[:, :, 2, 5:] = -1  # rows that see few keys,
    if size == 1:
        lists[:, :, 3:, :9] = torch.arange(9, device=DEVICE)  # and keys that nearly all rows see
    mask, n = regard.chosen(lists, size=size, rows=rows), shape[2] * rows
    mask = mask if beside is None else mask & beside
    started = note_starts(monkeypatch)

    def make(x: Found) -> Found:
        seen = regard.observe(*x, mask=mask, backend=backend_for(x[0]))
        lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
        loss = (seen.output.double() * seen.output.detach().double().sin()).sum() + lse.double().sin().sum()
        statistics = [t.detach() for t in (seen.output, seen.lse, seen.entropy, seen.max_logit)]
        return [*statistics, *torch.autograd.grad(loss, x)]

    sizes = ((heads, n, dims[0]), (key_heads, M, dims[0]), (key_heads, M, dims[1]))
    x = [random(batch, *size, dtype=dtype) for size in sizes]
    check(make, x)
    if on_hopper(x[0]):
        assert set(started) == ({"forward", "backward"} if dtype == torch.bfloat16 else {"forward"})


def note_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that Hopper's kernels of lists have run, as they run."""
    from regard.kernels.hopper import chosen_launch as chip

    started: list[str] = []

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (started.append(name), run(*args))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(chip, name, noted(name, getattr(chip, name)))
    return started


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("other", [LATE, CAUSAL, regard.window(40)], ids=["the same mask", "causal", "window"])
@pytest.mark.parametrize(("kind", "epsilon"), [("kl", None), ("kl", 0.1), ("reverse", 0.1), ("js", None)])
def test_divergences(kind: Any, epsilon: float | None, other: regard.Mask, dim: int) -> None:
    torch.manual_seed(0)

    def make(x: Found) -> Found:
        sides = [{"query": x[i], "key": x[i + 1], "mask": mask} for i, mask in ((0, LATE), (2, other))]
        found = regard.divergence(sides[0], sides[1], kind, epsilon=epsilon)
        return [found.detach(), *torch.autograd.grad(torch.where(found.isinf(), 0, found).sum(), x)]

    check(make, [random(1, HEADS, N, dim) for _ in range(4)])


@pytest.mark.parametrize(
    ("kind", "epsilon", "heads"), [("js", None, None), ("reverse", 0.1, None), ("js", None, "mean")]
)
def test_divergences_of_observations(kind: Any, epsilon: float | None, heads: Any) -> None:
    torch.manual_seed(0)

    def make(x: Found) -> Found:
        sides = [regard.observe(x[i], x[i + 1], x[i + 1], mask=mask) for i, mask in ((0, LATE), (2, CAUSAL))]
        found = regard.divergence(sides[0], sides[1], kind, heads=heads, epsilon=epsilon)
        return [found.detach(), *torch.autograd.grad(found.sum(), x)]

    check(make, [random(1, HEADS, N, 64) for _ in range(4)])
