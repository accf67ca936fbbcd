"""What heads write: weights times the length of their values, and each head's share in the residual stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..biases import Bias
from ..compat.compiled import original_name
from ..errors import ArgumentError, DtypeError, MissingPackageError, ShapeError
from ..observation import Observation, observed
from ..report.tables import HeadTable
from .interceptor import CallInterceptor

__all__ = ["Contributions", "HeadContribution", "contributions", "value_weighted"]


@torch.no_grad()
def value_weighted(seen: Observation, projection: Tensor | None = None) -> Observation:
    """The same call with each weight multiplied by the length of its value: p·‖v‖ over its sum, row by row.

    A weight on a value near 0 moves nothing (Kobayashi et al. 2020, "Attention is Not Only a Weight"). The result is an
    Observation like any other: its map, `top`, `received` and entropy are those of ‖p·v‖, in linear memory. With
    `projection`, the weight of the output projection (dim, heads · Dv) as nn.Linear has it, lengths are those of the
    values as the head writes them into the residual stream, ‖v·W‖. What a row adds up to, Σ p·‖v‖, is
    `(weighted.lse - seen.lse).exp()`.

    >>> import torch, regard
    >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[3.0, 0.0], [0.0, 1.0]]).view(1, 1, 2, 2)
    >>> seen = regard.observe(q, q, v)
    >>> regard.models.value_weighted(seen).weights()[0, 0, 0]
    tensor([0.7500, 0.2500])
    """
    if not isinstance(seen, Observation):
        raise DtypeError(f"value_weighted: it takes an Observation, as watch gives. Got {type(seen).__name__}.")
    p = seen.problem_for("value_weighted")
    groups = p.query.shape[1] // max(1, p.key.shape[1])
    value = p.value.to(p.exact_dtype).repeat_interleave(groups, 1)  # (B, Hq, M, Dv)
    if projection is None:
        lengths = value.norm(dim=-1)
    else:
        gram = _grams(projection, value.shape[1], value.shape[-1], "value_weighted").to(value)
        lengths = torch.einsum("bhmd,hde,bhme->bhm", value, gram, value).clamp(min=0).sqrt()
    added = lengths.log()[:, :, None, :]
    bias = p.bias.dense(p.rows, p.keys)[None] if isinstance(p.bias, Bias) else p.bias
    bias = added if bias is None else bias.to(added.dtype) + added
    return observed(p._replace(bias=bias, sink=None, dropout=0.0))


@dataclass(frozen=True)
class HeadContribution:
    """What one head writes, on average over the rows."""

    layer: str
    head: int
    written: float  # the length of the vector that the head adds, ‖output · W‖
    layer_share: float  # its share in what the layer's heads add together; over the heads, these sum to 1
    stream_share: float  # its length over that of the residual stream before the layer; nan if that is not known


@contextmanager
def contributions(model: nn.Module) -> Iterator[Contributions]:
    """Measure what each head writes into the residual stream while `model` runs inside the `with` block.

    The output projection of a layer is the module that takes the heads' outputs side by side, found while the model
    runs. The residual stream is what enters the block around the attention, an item of a ModuleList or else the parent
    module. Calls of a layer are averaged.

    >>> import torch, regard
    >>> model = regard.models.builtin.load()
    >>> with torch.no_grad(), regard.models.contributions(model) as written:
    ...     _ = model(torch.arange(40)[None])
    >>> len(written.heads), abs(sum(head.layer_share for head in written.heads[:8]) - 1) < 1e-4
    (32, True)
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"contributions: model must be a torch.nn.Module. Got {type(model).__name__}.")
    recorder = _Recorder(model)
    found = Contributions([], [])
    with recorder.listening():
        yield found
    found.heads.extend(recorder.heads())
    found.layers.extend(recorder.sums)


@dataclass(frozen=True, repr=False)
class Contributions:
    """What the heads of a model write: one record per head, layer by layer, once the `with` block has ended."""

    heads: list[HeadContribution]
    layers: list[str]

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self, sort: str | None = None) -> HeadTable:
        """The heads as a table; `sort` is a column, the largest first."""
        names = [one.name for one in fields(HeadContribution)][2:]
        if sort is not None and sort not in names:
            raise ArgumentError(f"table: sort must be one of {', '.join(names)}. Got {sort!r}.")
        heads = self.heads
        if sort is not None:
            heads = sorted(heads, key=lambda one: (math.isnan(getattr(one, sort)), -getattr(one, sort)))
        rows = [(one.layer, str(one.head), {name: getattr(one, name) for name in names}) for one in heads]
        return HeadTable(rows, layers=self.layers)

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per head."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError as missing:
            raise MissingPackageError("to_pandas: it needs the package pandas: pip install pandas.") from missing
        return pandas.DataFrame([asdict(one) for one in self.heads])


class _Pending(NamedTuple):
    """A call whose output projection has not run yet."""

    layer: str
    output: Tensor  # (B, H, N, Dv)
    stream: Tensor | None


class _Recorder:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {original_name(name): module for name, module in model.named_modules()}
        self._pending: _Pending | None = None
        self._streams: dict[str, Tensor] = {}  # what entered each block last
        self.sums: dict[str, list[Tensor]] = {}  # of each layer: one (3, heads) per call

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if name and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):  # that of GPT-2
                    stack.callback(module.register_forward_pre_hook(self._project).remove)
            for name in {self._block_of(name) for name in self._modules if name}:
                hook = self._modules[name].register_forward_pre_hook(self._enter(name), with_kwargs=True)
                stack.callback(hook.remove)
            stack.enter_context(CallInterceptor(self._model, self._attended))
            yield

    def _block_of(self, layer: str) -> str:
        """The block around a layer: the nearest item of a ModuleList, or else the parent."""
        parts = layer.split(".")
        for size in range(len(parts) - 1, 0, -1):
            if isinstance(self._modules.get(".".join(parts[: size - 1])), nn.ModuleList | nn.Sequential):
                return ".".join(parts[:size])
        return ".".join(parts[:-1])

    def _enter(self, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            some = [x for x in (*args, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            if some:
                self._streams[name] = some[0].detach()

        return note

    def _attended(self, layer: str, seen: Observation) -> None:
        pending = _Pending(layer, seen.output.detach(), self._streams.get(self._block_of(layer)))
        module = self._modules.get(layer)
        self._pending = pending
        if isinstance(module, nn.MultiheadAttention):  # torch's function applies the projection itself
            self._pending = None
            self._add(pending, module.out_proj.weight)

    @torch.no_grad()
    def _project(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take a module for the output projection if its input is the heads' outputs side by side."""
        pending, x = self._pending, args[0] if args else None
        if pending is None or not isinstance(x, Tensor):
            return
        batch, heads, rows, dim = pending.output.shape
        flat = pending.output.transpose(1, 2).reshape(batch, rows, heads * dim)
        if x.numel() == flat.numel() and torch.equal(x.reshape(flat.shape), flat.to(x.dtype)):
            self._pending = None
            weight = module.weight
            transposed = not isinstance(module, nn.Linear)  # in GPT-2's Conv1D
            self._add(pending, weight.T if transposed else weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def _add(self, call: _Pending, weight: Tensor) -> None:
        output = call.output.double()
        batch, heads, rows, dim = output.shape
        gram = _grams(weight, heads, dim, "contributions").double().to(output.device)
        length = torch.einsum("bhnd,hde,bhne->bhn", output, gram, output).clamp(min=0).sqrt()
        flat = output.transpose(1, 2).flatten(2)  # (B, N, H · Dv)
        whole = weight.detach().double().to(output.device)
        total = flat @ whole.T  # what all heads add together
        along = ((total @ whole) * flat).unflatten(-1, (heads, dim)).sum((0, 1, 3))  # ⟨c_h, Σ c⟩
        stream = call.stream
        if stream is not None and stream.shape == (rows, batch, len(whole)) and batch != rows:
            stream = stream.transpose(0, 1)
        ratio = torch.full((heads,), torch.nan, dtype=torch.float64, device="cpu")
        if stream is not None and stream.shape == total.shape:
            ratio = (length / stream.double().norm(dim=-1)[:, None]).mean((0, 2)).cpu()
        numbers = torch.stack([length.mean((0, 2)).cpu(), (along / total.square().sum()).cpu(), ratio])
        self.sums.setdefault(call.layer, []).append(numbers)

    def heads(self) -> Iterator[HeadContribution]:
        for layer, calls in self.sums.items():
            for head, numbers in enumerate(torch.stack(calls).mean(0).T.tolist()):
                yield HeadContribution(layer, head, *numbers)


def _grams(weight: Tensor, heads: int, dim: int, who: str) -> Tensor:
    """Wᵀ·W of each head's part of a projection (E, heads · dim): (heads, dim, dim)."""
    if weight.dim() != 2 or weight.shape[1] != heads * dim:
        raise ShapeError(
            f"{who}: the output projection must be (dim, heads · Dv), here (…, {heads * dim}). "
            f"Got {tuple(weight.shape)}."
        )
    parts = weight.detach().unflatten(1, (heads, dim))  # (E, heads, dim)
    return torch.einsum("ehd,ehf->hdf", parts, parts)
