"""Random problems as plain data, the code that poses them, and the simpler ones around each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

__all__ = ["NAMES", "Case", "Program", "call", "draw", "simpler", "write"]

Tree = tuple[Any, ...]
"""A mask: (kind, seed), ("&", a, b), ("|", a, b), ("~", a)."""

DEVICE = ', device="cuda"' if torch.cuda.is_available() else ""
DTYPES = ("float32", "float64", "bfloat16", "float16")
LEAVES = ("everything", "causal", "window", "padding", "keep", "documents", "packed", "blocks", "prefix", "strided")
LEAVES += ("global_tokens", "dense", "predicate", "causal", "causal")
LAYOUTS = ("plain", "transposed", "heads last", "stepped", "offset", "every other row", "one number", "expanded")
SCORES = ("Scaled", "Balanced", "Temperature", "Cosine", "Bilinear", "Additive", "Gaussian")
BIASES = ("tensor", "holes", "alibi", "relative", "relative for all", "relative of one entry")
OPTIONS = ("bias", "score", "scale", "softcap", "sink", "poison")
SCALES = ("0.7", "-0.3", "0.0", "1.0", "tensor", "per head")


@dataclass(frozen=True)
class Case:
    """What is asked, as plain data; sizes of masks and biases follow from the sizes here."""

    seed: int = 0
    rank: int = 4
    batch: int = 1
    inner: int = 1
    heads: int = 1
    groups: int = 1
    n: int = 2
    m: int = 2
    d: int = 2
    dv: int = 2
    dtype: str = "float32"
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")
    mask: Tree | None = None
    bias: str | None = None
    score: str | None = None
    scale: str | None = None
    softcap: float | None = None
    sink: str | None = None
    dropout: float = 0.0
    poison: str | None = None
    observed: bool = False

    @property
    def query_heads(self) -> int:
        return self.heads * self.groups

    @property
    def key_dim(self) -> int:
        return self.d + 1 if self.score in ("Bilinear", "Additive") else self.d

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before the rows of a query."""
        return (
            (self.batch, self.inner, self.query_heads)[: self.rank - 2]
            if self.rank == 5
            else {
                2: (),
                3: (self.batch,),
                4: (self.batch, self.query_heads),
            }[self.rank]
        )

    @property
    def valid(self) -> bool:
        """Whether the sizes and parts fit each other."""
        headless = self.rank < 4
        return (
            not (headless and (self.heads, self.groups) != (1, 1))
            and (self.rank > 2 or self.batch == 1)
            and (self.rank == 5 or self.inner == 1)
            and not (self.score is not None and self.scale is not None)
            and (self.d > 0 or self.score not in ("Bilinear", "Additive"))
            and (self.query_heads > 0 or (self.score in (None, "Balanced") and self.bias in (None, "tensor", "holes")))
        )


def draw(seed: int) -> Case:
    """Draw a case; half of all cases have a mask and one more option at most: torch's kernels refuse most others."""
    for at in count():
        r = random.Random(f"{seed} {at}")
        size = r.choice((6, 12, 24, 40))
        case = Case(
            seed=r.randrange(1000),
            rank=r.choice((2, 3, 4, 4, 4, 5)),
            batch=_size(r, 3),
            inner=_size(r, 2),
            heads=_size(r, 3),
            groups=r.choice((1, 1, 2, 3)),
            n=_size(r, size),
            m=_size(r, size) if r.random() < 0.97 else r.randint(129, 300),
            d=_size(r, 9),
            dv=_size(r, 9),
            dtype=r.choice(DTYPES),
            layouts=(_some(r, LAYOUTS) or "plain", *(_some(r, (*LAYOUTS, "one item")) or "plain" for _ in "kv")),  # type: ignore[arg-type]
            mask=_tree(r, r.choice((0, 0, 1, 2, 3))) if r.random() < 0.7 else None,
            bias=_some(r, BIASES),
            score=_some(r, SCORES, 0.4),
            scale=_some(r, SCALES, 0.7),
            softcap=_some(r, (0.7, 3.0, 30.0), 0.3),
            sink=_some(r, ("per head", "one", "one of -inf", "stepped"), 0.4),
            dropout=_some(r, (0.1, 0.5), 0.25) or 0.0,
            poison=_some(r, ("nan", "inf", "-inf", "6e4"), 0.4),
            observed=r.random() < 0.5,
        )
        if r.random() < 0.5:
            case = replace(case, m=case.n)
        if r.random() < 0.5:
            case = replace(case, dv=case.d)
        if r.random() < 0.5:
            mask = ("causal", r.randrange(1000)) if r.random() < 0.4 else case.mask
            case = replace(case, **dict.fromkeys(r.sample(OPTIONS, len(OPTIONS) - 1)), mask=mask, dropout=0.0)
        if case.rank < 4:
            case = replace(case, heads=1, groups=1)
        case = replace(case, batch=case.batch if case.rank > 2 else 1, inner=case.inner if case.rank == 5 else 1)
        if case.valid:
            return case
    raise AssertionError


def _size(r: random.Random, most: int) -> int:
    return 0 if r.random() < 0.04 else r.choice((1, r.randint(1, most), r.randint(1, most)))


def _some(r: random.Random, choices: tuple[Any, ...], share: float = 0.5) -> Any:
    return r.choice(choices) if r.random() < share else None


def _tree(r: random.Random, depth: int) -> Tree:
    if depth == 0:
        return (r.choice([*LEAVES, "tensor"]) if r.random() < 0.1 else r.choice(LEAVES), r.randrange(1000))
    op = r.choice("&&||~")
    parts = [_tree(r, r.randrange(depth)) for _ in range(1 if op == "~" else 2)]
    return (op, *(("dense", p[1]) if p[0] == "tensor" else p for p in parts))


def _mask_code(tree: Tree, case: Case) -> str:
    """The mask as code, in regard's names."""
    kind, *parts = tree
    if kind == "~":
        return f"~{_mask_code(parts[0], case)}"
    if kind in ("&", "|"):
        return f"({_mask_code(parts[0], case)} {kind} {_mask_code(parts[1], case)})"
    r, n, m, batch = random.Random(parts[0]), case.n, case.m, case.batch
    rng = f"generator=torch.Generator().manual_seed({parts[0]})"
    offset = r.choice((None, None, 0, r.randint(-4, 6), [r.randint(-4, 6) for _ in range(batch)]))
    each = r.choice(("", f"{batch}, "))
    if kind == "packed":
        cuts = sorted(r.randint(0, n) for _ in range(2))
        kind, lengths = ("packed", [cuts[0], cuts[1] - cuts[0], n - cuts[1]]) if n == m else ("everything", [])
    ids, share = r.choice((2, 3, 9)), r.choice((0.2, 0.6, 0.9))
    return {
        "everything": lambda: "regard.everything()",
        "causal": lambda: f"regard.causal(offset={offset})",
        "window": lambda: f"regard.window({_some(r, (0, 1, 5))}, {_some(r, (0, 1, 5))}, offset={offset})",
        "padding": lambda: f"regard.padding(lengths={[r.randint(0, m + 1) for _ in range(batch)]})",
        "keep": lambda: f"regard.padding(keep=torch.rand({each}{m}, {rng}) < {share})",
        "documents": lambda: (
            f"regard.documents(torch.randint({ids}, ({each}{n},), {rng})"
            + (")" if n == m and r.random() < 0.5 else f", torch.randint({ids}, ({m},), {rng}))")
        ),
        "packed": lambda: f"regard.packed({lengths})",
        "blocks": lambda: f"regard.blocks({r.choice((1, 2, 5, 50))}, offset={offset})",
        "prefix": lambda: f"regard.prefix({r.choice((0, 2, 9, [r.randint(0, 9) for _ in range(batch)]))})",
        "strided": lambda: f"regard.strided({r.choice((1, 2, 5, 50))}, offset={offset})",
        "global_tokens": lambda: f"regard.global_tokens({[r.randint(0, 9) for _ in range(r.randint(0, 3))]})",
        "dense": lambda: f"regard.dense(torch.rand({_broadcast(r, case)}, {rng}) < {share})",
        "tensor": lambda: f"(torch.rand({_broadcast(r, case, raw=True)}, {rng}) < {share}){'.cuda()' * bool(DEVICE)}",
        "predicate": lambda: f"regard.predicate(lambda b, h, i, j: (i + 2 * j + 3 * h + 5 * b) % {ids} != 0)",
    }[kind]()


def _broadcast(r: random.Random, case: Case, raw: bool = False) -> tuple[int, ...]:
    """A shape that broadcasts to that of the weights, or for a mask object to (batch, heads, n, m)."""
    full = (*case.lead, case.n, case.m)
    if not raw and case.rank == 5:
        full = (case.batch, case.query_heads, case.n, case.m)
    full = tuple(x if r.random() < 0.7 else 1 for x in full)
    return full[r.choice((0, 0, max(0, len(full) - 2), max(0, len(full) - 3))) :]


def _view(layout: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """The shape of the tensor in memory, and how the argument is viewed in it."""
    *lead, rows, dim = shape
    if layout == "transposed":
        return (*lead, dim, rows), ".mT"
    if layout == "heads last" and len(lead) > 1:
        return (*lead[:-1], rows, lead[-1], dim), ".transpose(-3, -2)"
    if layout == "stepped":
        return (*lead, rows, 2 * dim), "[..., ::2]"
    if layout == "offset":
        return (*lead, rows, dim + 3), "[..., 3:]"
    if layout == "every other row":
        return (*lead, 2 * rows, dim), "[..., ::2, :]"
    if layout == "one number":
        return (*lead, rows, 1), f".expand({', '.join(map(str, shape))})"
    if layout == "expanded":
        return (*(1 for _ in lead), rows, dim), f".expand({', '.join(map(str, shape))})"
    if layout == "one item" and lead:
        return (1, *lead[1:], rows, dim), ""
    return shape, ""


NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Program:
    """A case as code, in the parts between which the formula looks at the tensors."""

    made: str
    views: dict[str, str]
    arguments: dict[str, str]
    leaves: str


def write(case: Case) -> Program:
    heads, dtype, r = case.query_heads, f"dtype=torch.{case.dtype}{DEVICE}", random.Random(case.seed)
    wide = dtype if case.dtype == "float64" else r.choice((dtype, f"dtype=torch.float32{DEVICE}"))
    dims = {"query": (case.n, case.d), "key": (case.m, case.key_dim), "value": (case.m, case.dv)}
    lines, views, arguments, leaves = [f"torch.manual_seed({case.seed})"], {}, {}, list(NAMES)
    for name, layout in zip(NAMES, case.layouts, strict=True):
        lead = case.lead if name == "query" or case.rank < 4 else (*case.lead[:-1], case.heads)
        base, views[name] = _view(layout, (*lead, *dims[name]))
        lines.append(f"{name} = torch.randn({base}, {dtype})")
    if case.mask is not None:
        arguments["mask"] = _mask_code(case.mask, case)
    if case.bias in ("tensor", "holes"):
        shape = _broadcast(r, case, raw=True)
        holes = f".masked_fill(torch.rand({shape}{DEVICE}) < 0.4, -torch.inf)" if case.bias == "holes" else ""
        lines.append(f"bias = torch.randn({shape}, {wide}){holes}")
        arguments["bias"] = "bias"
    elif case.bias is not None:
        reach = 1 if case.bias == "relative of one entry" else r.choice((3, 7, 31))
        shape = (heads,) if case.bias == "alibi" else (reach,) if case.bias == "relative for all" else (heads, reach)
        lines.append(f"bias = torch.rand({shape}, {wide})")
        offset = r.choice((None, None, 0, 3))
        arguments["bias"] = f"regard.biases.{'alibi' if case.bias == 'alibi' else 'relative'}(bias, offset={offset})"
    if case.score is not None:
        fitted = {
            "Scaled": f"torch.nn.Parameter(torch.linspace(-0.5, 0.7, {heads}))",
            "Balanced": "",
            "Temperature": f"init=2.0, heads={heads}",
            "Cosine": "0.3, learnable=True",
            "Bilinear": f"{case.d}, {case.key_dim}, heads={r.choice((None, heads))}",
            "Additive": f"{case.d}, {case.key_dim}, 5",
            "Gaussian": "1.5, learnable=True",
        }[case.score]
        double = ".double()" * (case.dtype == "float64") + ".cuda()" * bool(DEVICE)
        lines.append(f"score = regard.scores.{case.score}({fitted}){double}")
        arguments["score"] = "score"
    if case.scale in ("tensor", "per head"):
        lines.append(f"scale = torch.randn({(heads,) if case.scale == 'per head' else ()}, {wide})")
    if case.scale is not None:
        arguments["scale"] = "scale" if case.scale in ("tensor", "per head") else case.scale
    if case.softcap is not None:
        arguments["softcap"] = f"{case.softcap}"
    if case.sink is not None:
        stepped = "[::2]" * (case.sink == "stepped")
        lines.append(f"sink = torch.randn({1 if case.sink == 'one' else 2 * heads if stepped else heads}, {wide})")
        if case.sink == "one of -inf":
            lines.append("sink[:1] = -torch.inf")
        arguments["sink"] = f"sink{stepped}"
    if case.dropout:
        arguments["dropout"] = f"{case.dropout}"
    leaves += [name for name in ("bias", "scale", "sink") if any(line.startswith(f"{name} =") for line in lines)]
    leaves += ["*score.parameters()"] * (case.score is not None)
    return Program("\n".join(lines), views, arguments, f"leaves = [x.requires_grad_() for x in ({', '.join(leaves)})]")


def call(case: Case, program: Program, backend: str) -> str:
    tensors = ", ".join(name + program.views[name] for name in NAMES)
    options = "".join(f", {name}={text}" for name, text in program.arguments.items())
    name = "observe" if case.observed else "attention"
    return f"torch.manual_seed(0)\nfound = regard.{name}({tensors}{options}, backend={backend})"


def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, those with the least first."""
    plain = Case()
    for name in ("mask", "bias", "score", "scale", "softcap", "sink", "dropout", "poison", "observed", "layouts"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.mask is not None:
        yield from (replace(case, mask=tree) for tree in _simpler_trees(case.mask))
    yield from (replace(case, rank=rank, inner=1) for rank in (2, 3, 4) if rank < case.rank)
    for name in ("batch", "inner", "heads", "groups", "n", "m", "d", "dv", "seed"):
        size = getattr(case, name)
        yield from (replace(case, **{name: new}) for new in sorted({1, size // 2, size - 1}) if 1 <= new < size)
    for name, choices in (("dtype", DTYPES), ("bias", BIASES), ("score", SCORES), ("scale", SCALES)):
        at = getattr(case, name)
        yield from (replace(case, **{name: new}) for new in choices[: 0 if at is None else choices.index(at)])
    for at, layout in enumerate(case.layouts):
        if layout != "plain":
            yield replace(case, layouts=(*case.layouts[:at], "plain", *case.layouts[at + 1 :]))  # type: ignore[arg-type]


def _simpler_trees(tree: Tree) -> Iterator[Tree]:
    kind, *parts = tree
    if kind not in ("&", "|", "~"):
        yield from ((kind, seed) for seed in range(min(parts[0], 8)))
        return
    yield from parts
    for at, part in enumerate(parts):
        yield from ((kind, *parts[:at], new, *parts[at + 1 :]) for new in _simpler_trees(part))
