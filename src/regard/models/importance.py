"""importance: what each head is worth, by the loss that its ablation costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ..display import block, note, paragraph, shown, table
from ..errors import ArgumentError, DtypeError, MissingPackageError
from ..observation import Observation
from ..report import page
from ..report.files import json_safe, write_text
from ..report.labels import layer_label, layer_legend
from ..report.look import Look
from ..report.tables import as_text
from .edit import Edit
from .findings import Finding
from .interceptor import CallInterceptor
from .seen import Seen
from .watch import watch

__all__ = ["HeadImportance", "Importance", "importance"]

Loss = Callable[[nn.Module, Any], "Tensor | float"]
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class HeadImportance:
    """One head: the loss without it, what that costs, and the first-order estimate of the cost."""

    layer: str
    head: int
    loss: float  # the mean over the batches, with this head ablated
    cost: float  # how much the loss rises when it is ablated
    estimate: float  # the same, from the gradient of the loss; nan if there is none
    does: tuple[str, ...] = ()  # what the rules of `findings` say of it, in words


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    mean: bool = True,
    estimate: bool = True,
    tell: Tell | None = None,
) -> Importance:
    """Rank the heads of `model` by the loss that it costs to ablate them, one at a time.

    `loss(model, batch)` runs the model on one of the `batches` and gives a number, or a tensor with one element; losses
    are averaged over the batches. With `mean`, an ablated head writes its mean output over all batches, so that only
    what depends on the input is lost; without, it writes zeros. Each head takes one pass over all batches: the costs
    are exact. One more pass, with a backward, gives a first-order estimate for all heads at once; `estimate=False`
    leaves it out. A progress bar shows on a terminal; `tell(done, total)`, if given, is called in its place. Call
    `model.eval()` first: dropout makes losses random.

    >>> import torch, regard
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(2, 5, 8)
    >>> found = regard.models.importance(model, [x], lambda model, x: model(x, x, x)[0].square().mean())
    >>> found.heads[0].cost >= found.heads[1].cost
    True
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"importance: model must be a torch.nn.Module. Got {type(model).__name__}.")
    if not callable(loss):
        raise DtypeError(
            f"importance: loss must be a function of the model and a batch that gives a number. "
            f"Got {type(loss).__name__}."
        )
    batches = list(batches)
    if not batches:
        raise ArgumentError("importance: there is no batch; give at least one.")
    with torch.no_grad(), watch(model) as seen:
        _loss(loss, model, batches[0])
    sizes = _sizes(seen)
    means = _mean_outputs(model, batches, loss, sizes) if mean else {}
    base, slopes = _gradients(model, batches, loss, sizes, means, estimate)
    says = _findings(seen)
    heads = []
    with _counting(tell, sum(sizes.values())) as count, _exact(model) as edit, torch.no_grad():
        for layer, size in sizes.items():
            for head in range(size):
                edit.clear()
                edit.ablate(layer, head, mean=means[layer][head] if mean else False)
                without = fmean(_loss(loss, model, batch) for batch in batches)
                does = tuple(one.says for one in says.get((layer, head), ()))
                slope = slopes[layer][head] if slopes else math.nan
                heads.append(HeadImportance(layer, head, without, without - base, slope, does))
                count()
    heads.sort(key=lambda one: (math.isnan(one.cost), -one.cost))
    return Importance(heads, base, list(sizes), len(batches), mean, seen)


@dataclass(frozen=True, repr=False)
class Importance:
    """What `importance` found: `heads`, the most costly first, and the loss of the whole model, `base`."""

    heads: list[HeadImportance]
    base: float
    layers: list[str]
    batches: int
    mean: bool
    seen: Seen = field(compare=False)  # the first batch, watched

    @property
    def correlation(self) -> float:
        """Pearson's correlation of costs and estimates over the heads; nan if there is none."""
        return _correlation([(one.cost, one.estimate) for one in self.heads])

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation: that of the ranks."""
        pairs = [(one.cost, one.estimate) for one in self.heads if math.isfinite(one.cost + one.estimate)]
        columns = [_ranks(column) for column in zip(*pairs, strict=True)]
        return _correlation(list(zip(*columns, strict=True))) if pairs else math.nan

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self, most: int | None = 20) -> ImportanceTable:
        """The most costly heads as a table; `most=None` shows all. Print it, or pass it to rich."""
        shown_heads = self.heads if most is None else self.heads[:most]
        return ImportanceTable(self._summary(len(shown_heads)), list(shown_heads), self.layers)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per head, the most costly first."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError as missing:
            raise MissingPackageError("to_pandas: it needs the package pandas: pip install pandas.") from missing
        return pandas.DataFrame([asdict(one) | {"does": "; ".join(one.does)} for one in self.heads])

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write losses, costs and estimates as JSON; an undefined number becomes null."""
        found = {
            "loss": json_safe(self.base),
            "batches": self.batches,
            "ablated_to": "mean" if self.mean else "zero",
            "correlation": json_safe(self.correlation),
            "rank_correlation": json_safe(self.rank_correlation),
            "layers": self.layers,
            "heads": [{key: json_safe(value) for key, value in asdict(one).items()} for one in self.heads],
        }
        return write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n", "to_json")

    def look(self, tokens: Iterable[str] | None = None, title: str | None = None) -> Look:
        """What a report shows: the heads on the first batch, with their maps, and the cost of each as a statistic."""
        numbers = {(one.layer, one.head): one for one in self.heads}
        look = self.seen.look(tokens, title)
        layers = [
            replace(
                layer,
                heads=[
                    replace(head, statistics=_costs(numbers[layer.name, head.head]) | head.statistics)
                    for head in layer.heads
                ],
            )
            for layer in look.layers
        ]
        facts = {"loss": f"{self.base:.4f}", "ablated to": "their mean" if self.mean else "zero"}
        return replace(look, layers=layers, facts=facts | look.facts)

    def save(
        self, path: str | os.PathLike[str], *, tokens: Iterable[str] | None = None, title: str | None = None
    ) -> Path:
        """Write an interactive report in which the heads are coloured and sorted by their cost, as one HTML file."""
        return page.write(self.look(tokens, title), path)

    def _summary(self, rows: int) -> list[str]:
        ablated = "writes its mean" if self.mean else "writes zeros"
        many = f"{self.batches:,} batch" + ("" if self.batches == 1 else "es")
        lines = [f"loss {self.base:.4f} over {many}; an ablated head {ablated}"]
        if rows < len(self.heads):
            lines.append(f"the {rows} most costly of {len(self.heads):,} heads")
        if not math.isnan(self.correlation):
            lines.append(
                f"correlation of cost and estimate: {self.correlation:.2f}, of their ranks: {self.rank_correlation:.2f}"
            )
        return lines


@dataclass(frozen=True, repr=False)
class ImportanceTable:
    """Heads and their costs. `str` gives plain text; rich and notebooks print it, too."""

    lines: list[str]
    rows: list[HeadImportance]
    layers: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(Text, self.lines)
        names, cells = self._cells()
        lines = Table(box=None, pad_edge=False, header_style="bold")
        for at, name in enumerate(names):
            lines.add_column(name, justify="right" if 0 < at < len(names) - 1 else "left", no_wrap=at < len(names) - 1)
        for row in cells:
            lines.add_row(*map(Text, row))
        yield lines
        yield from (Text(line, style="dim") for line in layer_legend(self.layers))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        names, cells = self._cells()
        grid = table(names, cells, numbers=range(1, len(names) - 1))
        return block("", *map(paragraph, self.lines), grid, *map(note, layer_legend(self.layers)))

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        estimated = any(not math.isnan(one.estimate) for one in self.rows)
        names = ["layer", "head", "loss", "cost", *(["estimate"] if estimated else []), "what it does"]
        rows = []
        for one in self.rows:
            numbers = [f"{one.loss:.4f}", f"{one.cost:+.4f}", *([f"{one.estimate:+.4f}"] if estimated else [])]
            does = "; ".join(shown(_brief(text)) for text in one.does)
            rows.append([layer_label(one.layer, self.layers), str(one.head), *numbers, does])
        return names, rows


def _brief(says: str) -> str:
    """The beginning of a finding: what kind of head it is.

    >>> _brief("induction head: attends to …"), _brief("attends to the previous token in 1.00 of the rows")
    ('induction head', 'attends to the previous token')
    """
    ends = [end for end in (says.find(mark) for mark in (": ", " in ", ", ")) if end > 0]
    return says[: min(ends, default=len(says))]


def _costs(head: HeadImportance) -> dict[str, float]:
    estimate = {} if math.isnan(head.estimate) else {"estimated_cost": head.estimate}
    return {"cost_of_ablation": head.cost, **estimate}


def _sizes(seen: Seen) -> dict[str, int]:
    """The number of heads of each layer."""
    if not seen.layers:
        reason = next(iter(seen.missed.values()), "the loss did not run the model")
        raise ArgumentError(f"importance: no attention was seen, so there are no heads to ablate: {reason}.")
    if twice := next((layer for layer in seen.layers if layer.endswith("#")), None):
        raise ArgumentError(
            f"importance: {twice.rstrip('#') or 'the model itself'!r} attends with different numbers of heads, so one "
            f"head cannot be told from another. Let each attention be a module of its own."
        )
    return {layer: seen[layer].shape[-3] for layer in seen.layers}


def _findings(seen: Seen) -> dict[tuple[str, int], list[Finding]]:
    """What the rules found, head by head."""
    found: dict[tuple[str, int], list[Finding]] = {}
    for finding in seen.findings():
        for layer, heads in finding.places:
            for head in heads:
                found.setdefault((layer, head), []).append(finding)
    return found


@contextmanager
def _exact(model: nn.Module) -> Iterator[Edit]:
    """An edit whose layers are the modules that attend, and not what is inside of them."""
    with Edit(model, exact=True) as edit:
        yield edit
        edit.clear()


def _mean_outputs(model: nn.Module, batches: Sequence[Any], loss: Loss, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The mean output of each head over all rows of all batches, (heads, Dv) per layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(layer: str, seen: Observation) -> None:
        if layer in sizes and seen.shape[-3] == sizes[layer]:
            output = seen.output.double().sum((0, 2))  # (heads, Dv)
            sums[layer] = sums[layer] + output if layer in sums else output
            counts[layer] = counts.get(layer, 0) + seen.output.shape[0] * seen.output.shape[2]

    with torch.no_grad(), CallInterceptor(model, add):
        for batch in batches:
            _loss(loss, model, batch)
    return {layer: total / counts[layer] for layer, total in sums.items()}


def _gradients(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    sizes: dict[str, int],
    means: dict[str, Tensor],
    wanted: bool,
) -> tuple[float, dict[str, list[float]]]:
    """The loss of the whole model, and how much ablation of each head raises it, to first order."""
    if not wanted:
        with torch.no_grad():
            return fmean(_loss(loss, model, batch) for batch in batches), {}
    base: list[float] = []
    total = {layer: torch.zeros(size, device="cpu") for layer, size in sizes.items()}
    for batch in batches:
        gates = {layer: torch.ones(size, requires_grad=True, device="cpu") for layer, size in sizes.items()}
        with torch.enable_grad(), _exact(model) as edit:
            for layer, gate in gates.items():
                edit.ablate(layer, factor=gate, mean=means.get(layer, False))
            found = _checked(loss(model, batch))
            base.append(_number(found))
            slopes: Sequence[Tensor | None] = ()
            if not isinstance(found, Tensor) or not found.requires_grad:
                total = {}  # there is no gradient
            elif total:
                slopes = torch.autograd.grad(found, list(gates.values()), allow_unused=True)
        for layer, slope in zip(total, slopes, strict=True):
            if slope is not None:
                total[layer] -= slope / len(batches)
    return fmean(base), {layer: slope.tolist() for layer, slope in total.items()}


def _loss(loss: Loss, model: nn.Module, batch: Any) -> float:
    return _number(_checked(loss(model, batch)))


def _number(found: Tensor | float) -> float:
    return float(found.detach() if isinstance(found, Tensor) else found)


def _checked(found: object) -> Tensor | float:
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise DtypeError(f"importance: loss must give a number, or a tensor with one element. Got {kind}.")


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation of the pairs that are finite.

    >>> _correlation([(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]), _correlation([(1.0, 2.0)])
    (1.0, nan)
    """
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if len(finite) < 2:
        return math.nan
    x, y = (torch.tensor(column, dtype=torch.float64, device="cpu") for column in zip(*finite, strict=True))
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal values share the mean of their ranks.

    >>> _ranks([3.0, 1.0, 3.0])
    [1.5, 0.0, 1.5]
    """
    ordered = sorted(values)
    first = {value: at for at, value in reversed(list(enumerate(ordered)))}
    last = {value: at for at, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 for value in values]


@contextmanager
def _counting(tell: Tell | None, total: int) -> Iterator[Callable[[], None]]:
    """Count the heads that are done, for `tell` or on a progress bar."""
    done = 0
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("ablating heads"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=tell is not None or not (console.is_terminal or console.is_jupyter),
    )
    with bar:
        task = bar.add_task("", total=total)

        def count() -> None:
            nonlocal done
            done += 1
            bar.advance(task)
            if tell is not None:
                tell(done, total)

        yield count
