"""Every argument of attention is checked here, once, before anything is computed."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from ..biases import Bias
from ..compat.torch import (
    any_autocast_enabled,
    autocast_enabled,
    is_batched,
    transforms_are_active,
    unwrap,
)
from ..errors import ArgumentError, DeviceError, DtypeError, MaskError, ShapeError
from ..masks import Mask, dense
from ..masks.arguments import check_readable, selecting
from ..masks.base import And
from ..masks.causal import causal_of_torch
from ..masks.index import broadcast_shapes, fits
from ..masks.padding import Keep, Padding
from ..scores import Score
from .options import Heads, Kind
from .problem import Problem

__all__ = ["check_pair", "pose"]

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def pose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    observed: bool = False,
    who: str = "attention",
    names: tuple[str, str] = ("mask", "bias"),
) -> Problem:
    """Check every argument and put the tensors into one layout; `who` is the public function, for messages."""
    query, key, value = _tensors(query, key, value, who)
    _shapes(query, key, value, score, who)
    lead = tuple(query.shape[:-2])
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        first = query.shape[0]
    else:
        query, key, value, lead = _one_batch(query, key, value, who)
        first = lead[0] if lead else 1
    batch, heads, rows, _ = query.shape
    headless = len(lead) < 2
    full = (*lead, rows, key.shape[2])
    if mask is not None:
        mask = _mask(mask, full, batch, first, heads, headless, query.device, who, names[0])
    if isinstance(bias, Tensor) and (hides := causal_of_torch(bias)) is not None:
        hides = _mask(hides, full, batch, first, heads, headless, query.device, who, names[1])
        mask, bias = hides if mask is None else mask & hides, None
    if bias is not None:
        bias = _bias(bias, full, batch, heads, headless, query.device, who, names[1])
    if mask is not None and not torch.compiler.is_compiling() and transforms_are_active():
        mask, bias = _unwrapped(mask, bias, rows, key.shape[2], batch, who)
    return Problem(
        query,
        key,
        value,
        mask,
        bias,
        None if score is None else _score(score, query, key, scale, mask is not None, who),
        _scale(scale, heads, query, who),
        None if softcap is None else _softcap(softcap, who),
        None if sink is None else _sink(sink, heads, query, who),
        0.0 if type(dropout) is float and dropout == 0.0 else _dropout(dropout, who),
        lead,
        observed,
        who,
    )


def _layout(x: Tensor) -> str:
    return "nested" if x.is_nested else str(x.layout)


def _tensors(query: Tensor, key: Tensor, value: Tensor, who: str) -> tuple[Tensor, Tensor, Tensor]:
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        named = {"query": query, "key": key, "value": value}
        name, x = next((name, x) for name, x in named.items() if not isinstance(x, Tensor))
        raise DtypeError(f"{who}: {name} must be a torch.Tensor. Got {type(x).__name__}; convert it first.")
    dense_layout = query.layout == key.layout == value.layout == torch.strided
    if not dense_layout or query.is_nested or key.is_nested or value.is_nested:
        raise DtypeError(
            f"{who}: query, key and value must be dense tensors. Got {', '.join(map(_layout, (query, key, value)))}; "
            f"pad sequences and pass mask=regard.padding(lengths), or put them one after the other and pass "
            f"mask=regard.packed(lengths)."
        )
    device = query.device
    if key.device != device or value.device != device:
        raise DeviceError(
            f"{who}: query, key and value must be on one device. Got query on {device}, key on {key.device}, "
            f"value on {value.device}; move them with .to(device)."
        )
    if any_autocast_enabled() and autocast_enabled(device):
        query, key, value = (_autocast(x, device.type) for x in (query, key, value))
    dtype = query.dtype
    if dtype not in _FLOATS:
        raise DtypeError(
            f"{who}: query, key and value must be float16, bfloat16, float32 or float64. Got query {_name(dtype)}; "
            f"convert with .float()."
        )
    if key.dtype != dtype or value.dtype != dtype:
        raise DtypeError(
            f"{who}: query, key and value must have one dtype. Got query {_name(dtype)}, key {_name(key.dtype)}, "
            f"value {_name(value.dtype)}; convert with .to(query.dtype)."
        )
    return query, key, value


def _autocast(x: Tensor, kind: str) -> Tensor:
    wanted = x.dtype.is_floating_point and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if wanted else x


def _shapes(query: Tensor, key: Tensor, value: Tensor, score: Score | None, who: str) -> None:
    q, k, v = query.shape, key.shape, value.shape
    if q == k == v and len(q) > 1:
        return
    if not len(q) == len(k) == len(v) or len(q) < 2:
        raise ShapeError(
            f"{who}: query, key and value must have the same rank, at least 2: (…, heads, length, dim), "
            f"(batch, length, dim) or (length, dim). Got {_got(query, key, value)}."
        )
    if k[-2] != v[-2]:
        raise ShapeError(
            f"{who}: key and value must have the same length. Got {k[-2]} keys and {v[-2]} values: "
            f"{_got(query, key, value)}."
        )
    if q[-1] != k[-1] and (score is None or not isinstance(score, Score) or score.same_dims):
        raise ShapeError(
            f"{who}: query and key must have the same dim. Got {q[-1]} and {k[-1]}: {_got(query, key, value)}; "
            f"for different dims use score=regard.scores.Bilinear({q[-1]}, {k[-1]})."
        )
    if len(q) < 4:
        return
    if k[-3] != v[-3]:
        raise ShapeError(
            f"{who}: key and value must have the same number of heads. Got {k[-3]} and {v[-3]}: "
            f"{_got(query, key, value)} as (…, heads, length, dim)."
        )
    if q[-3] != k[-3] and (k[-3] == 0 or q[-3] % k[-3]):
        raise ShapeError(
            f"{who}: query has {q[-3]} heads and key has {k[-3]}; the first must be a multiple of the second. "
            f"Got {_got(query, key, value)} as (…, heads, length, dim)."
        )


def _one_batch(query: Tensor, key: Tensor, value: Tensor, who: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Broadcast the leading dimensions and flatten them into one; add the head that 2-D and 3-D inputs lack."""
    rank = query.dim()
    tail = 3 if rank >= 4 else 2
    try:
        lead = broadcast_shapes(query.shape[:-tail], key.shape[:-tail], value.shape[:-tail])
    except ShapeError:
        raise ShapeError(
            f"{who}: the leading dimensions of query, key and value must broadcast. Got {_got(query, key, value)}; "
            f"three dimensions are (batch, length, dim): for heads without a batch use unsqueeze(0)."
        ) from None

    def flat(x: Tensor) -> Tensor:
        x = x.expand(lead + x.shape[-tail:])
        if rank == 2:
            return x[None, None]
        if rank == 3:
            return x.unsqueeze(1)
        return x if rank == 4 else x.reshape(math.prod(lead), *x.shape[-3:])

    heads = (query.shape[-3],) if rank >= 4 else ()
    return flat(query), flat(key), flat(value), (*lead, *heads)


def _mask(
    mask: Mask | Tensor,
    full: tuple[int, ...],
    batch: int,
    first: int,
    heads: int,
    headless: bool,
    device: torch.device,
    who: str,
    name: str,
) -> Mask:
    n, m = full[-2:]
    if isinstance(mask, Tensor) and (causal := causal_of_torch(mask)) is not None:
        mask = causal
    if isinstance(mask, Tensor):
        _same_device(mask, device, name, who)
        mask = dense(_four(selecting(who, name, mask), full, batch, headless, name, MaskError, who))
        first = batch
    elif not isinstance(mask, Mask):
        raise DtypeError(
            f"{who}: mask must be a regard Mask or a tensor in which True means 'may attend'. "
            f"Got {type(mask).__name__}; {_call_it(mask, 'regard.masks lists the masks', 'regard.predicate')}."
        )
    mask = mask.bind(first, heads, headless)
    misfit = mask.misfit(n, m)  # before the mask moves to a GPU, where the host does not read it
    if not torch.compiler.is_compiling() and (tensors := mask.tensors):
        if any(t.device != device for t in tensors):
            mask = mask.placed(device)
        if torch.is_grad_enabled() and any(map(Tensor.is_inference, mask.tensors)):
            mask = mask.changed(Tensor.clone)  # nothing counts their changes, which a backward pass must not see
    items, mask_heads = mask.lead
    if not (fits(items, first) and fits(mask_heads, heads)):
        raise MaskError(
            f"{who}: the mask is for {items} batch items and {mask_heads} heads; the query has {first} and "
            f"{heads}. Each must be the same, or 1 in the mask. Got {mask!r}."
        )
    if misfit is not None:
        raise MaskError(f"{who}: the mask does not fit {n} queries and {m} keys: {misfit.rstrip('.')}. Got {mask!r}.")
    return mask


def _unwrapped(
    mask: Mask, bias: Tensor | Bias | None, n: int, m: int, batch: int, who: str
) -> tuple[Mask | None, Tensor | Bias | None]:
    """Take a mask out of torch.func's wrappers; what vmap runs over becomes a bias, in which −inf hides alike.

    Padding becomes one number per key. Other masks over which vmap runs are laid out in full.
    """
    if not any(map(is_batched, mask.tensors)):
        return mask.changed(unwrap), bias
    if isinstance(bias, Bias):
        raise ArgumentError(f"{who}: vmap over a mask goes with a bias tensor. Got {bias!r}; use bias.dense(n, m).")
    kept: Mask | None = None
    for part in _conjuncts(mask):
        if not any(map(is_batched, part.tensors)):
            plain = part.changed(unwrap)
            kept = plain if kept is None else kept & plain
            continue
        allowed = part.keys(m, part.tensors[0].device) if isinstance(part, Padding | Keep) else part.dense(n, m)
        allowed = allowed[None, None] if allowed.dim() == 2 else allowed
        if allowed.shape[0] not in (1, batch):
            allowed = allowed.repeat_interleave(batch // allowed.shape[0], 0)
        added = torch.where(allowed, 0.0, -torch.inf)
        bias = added if bias is None else bias + added
    return kept, bias


def _conjuncts(mask: Mask) -> list[Mask]:
    """The masks that must all allow a pair."""
    return [*_conjuncts(mask.left), *_conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def _bias(
    bias: Tensor | Bias,
    full: tuple[int, ...],
    batch: int,
    heads: int,
    headless: bool,
    device: torch.device,
    who: str,
    name: str,
) -> Tensor | Bias:
    if isinstance(bias, Tensor):
        check_readable(who, name, bias)
        _same_device(bias, device, name, who)
        if not bias.dtype.is_floating_point:
            raise DtypeError(
                f"{who}: {name} must be floating: it is added to the logits. Got {_name(bias.dtype)}; "
                f"a tensor that selects is bool{'' if name == 'attn_mask' else ', and goes to mask='}."
            )
        return _four(bias, full, batch, headless, name, ShapeError, who)
    if not isinstance(bias, Bias):
        raise DtypeError(f"{who}: bias must be a tensor or a regard.biases bias. Got {type(bias).__name__}.")
    for t in bias.tensors:
        _same_device(t, device, "bias", who)
    if bias.heads not in (1, heads):
        raise ShapeError(f"{who}: bias is for {bias.heads} heads; the query has {heads}. Got {bias!r}.")
    if (misfit := bias.misfit(*full[-2:])) is not None:
        raise ShapeError(f"{who}: bias does not fit: {misfit.rstrip('.')}. Got {bias!r}.")
    return bias


def _four(
    x: Tensor,
    full: tuple[int, ...],
    batch: int,
    headless: bool,
    name: str,
    error: type[ShapeError] | type[MaskError],
    who: str,
) -> Tensor:
    """View a tensor that broadcasts to `full` as (B|1, Hq|1, N|1, M|1), without expanding N or M."""
    shape = x.shape
    if len(shape) > len(full) or any(a not in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
        raise error(
            f"{who}: {name} must broadcast to {full}, right-aligned. Got {tuple(shape)}; {_alignment(shape, full)}."
        )
    x = x.reshape((1,) * (len(full) - len(shape)) + tuple(shape))
    if headless:
        x = x.unsqueeze(-3)
    while x.dim() < 4:
        x = x.unsqueeze(0)
    if x.dim() > 4:
        lead = x.shape[:-3]
        if math.prod(lead) != 1:
            x = x.expand(*full[: len(lead)], *x.shape[-3:])
            return x.reshape(batch, *x.shape[-3:])
        x = x.reshape(1, *x.shape[-3:])
    return x


def _alignment(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """The remedy for a tensor that does not broadcast."""
    if tuple(shape) == (full[0], full[-1]) and len(full) > 2:
        return "one row of keys for each batch item is regard.padding(tensor), or tensor[:, None, None, :]"
    return "dimensions must be equal or 1"


def _score(score: Score, query: Tensor, key: Tensor, scale: float | Tensor | None, masked: bool, who: str) -> Score:
    if not isinstance(score, Score):
        raise DtypeError(
            f"{who}: score must be a regard.scores Score. Got {type(score).__name__}; "
            f"{_call_it(score, 'regard.scores lists the scores', 'regard.scores.Pointwise')}."
        )
    if scale is not None:
        raise ArgumentError(
            f"{who}: scale and score exclude each other: a score brings its own scale. "
            f"Got scale={scale!r} and {type(score).__name__}; leave one out."
        )
    if (misfit := score.misfit(query.shape[-1], key.shape[-1], query.shape[1])) is not None:
        raise ShapeError(f"{who}: the score does not fit: {misfit.rstrip('.')}.")
    for t in score.tensors:
        if t.device != query.device:
            raise DeviceError(
                f"{who}: the score must be on the query's device. Got {type(score).__name__} on {t.device}, query on "
                f"{query.device}; move it with score.to(query.device)."
            )
    sizes = dict(zip(("batch", "head", "row", "key"), (*query.shape[:3], key.shape[2]), strict=True))
    if (beyond := score.beyond(sizes, masked)) is not None:
        raise ShapeError(f"{who}: the score does not fit: {beyond}.")
    return score


def _scale(scale: float | Tensor | None, heads: int, query: Tensor, who: str) -> float | Tensor:
    if scale is None:
        return 1.0 / math.sqrt(max(query.shape[-1], 1))
    if isinstance(scale, Tensor):
        _same_device(scale, query.device, "scale", who)
        if not scale.dtype.is_floating_point:
            raise DtypeError(f"{who}: a scale tensor must be floating. Got {_name(scale.dtype)}.")
        if scale.numel() != 1 and tuple(scale.shape) != (heads,):
            raise ShapeError(
                f"{who}: a scale tensor has one value, or one per head: shape ({heads},). Got {tuple(scale.shape)}."
            )
        return scale
    if not _number(scale) or not math.isfinite(scale):
        raise ArgumentError(f"{who}: scale must be a finite number or a tensor. Got {scale!r}.")
    return float(scale)


def _softcap(softcap: float, who: str) -> float:
    if not _number(softcap) or not 0 < softcap < math.inf:
        raise ArgumentError(f"{who}: softcap must be a number above 0 (None for no cap). Got {softcap!r}.")
    return float(softcap)


def _sink(sink: Tensor, heads: int, query: Tensor, who: str) -> Tensor:
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise DtypeError(f"{who}: sink must be a floating tensor, one logit per head. Got {_kind(sink)}.")
    _same_device(sink, query.device, "sink", who)
    if tuple(sink.shape) not in ((heads,), (1,), ()):
        raise ShapeError(f"{who}: sink must have one value per head: shape ({heads},). Got {tuple(sink.shape)}.")
    return sink.expand(heads)


def _dropout(dropout: float, who: str) -> float:
    if not _number(dropout) or not 0 <= dropout < 1:
        raise ArgumentError(f"{who}: dropout must be a probability, 0 ≤ p < 1. Got {dropout!r}.")
    return float(dropout)


def _same_device(x: Tensor, device: torch.device, name: str, who: str) -> None:
    if x.device != device:
        raise DeviceError(
            f"{who}: {name} must be on the query's device. Got {name} on {x.device}, query on {device}; "
            f"move it with .to(query.device)."
        )


def _number(x: object) -> bool:
    return type(x) in (float, int) or (isinstance(x, Real | Integral) and not isinstance(x, bool))


def _call_it(x: object, otherwise: str, wrapper: str) -> str:
    """The remedy for one of our functions or classes in the place of what it makes, or for a function of the caller."""
    if not callable(x) or isinstance(x, Tensor):
        return otherwise
    if isinstance(x, type) or (getattr(x, "__module__", None) or "").startswith("regard."):
        return f"call it: {getattr(x, '__name__', '…')}(…)"
    return f"wrap a function: {wrapper}(f)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(x: object) -> str:
    return f"a {_name(x.dtype)} tensor" if isinstance(x, Tensor) else type(x).__name__


def _got(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def check_pair(a: Problem, b: Problem, kind: Kind, heads: Heads, epsilon: float | None) -> None:
    """Check that the rows of two attentions can be compared, and how."""
    who = "divergence"
    if kind not in ("kl", "reverse", "js"):
        raise ArgumentError(f'{who}: kind must be "kl", "reverse" or "js". Got {kind!r}.')
    if heads not in (None, "mean", "pairs"):
        raise ArgumentError(f'{who}: heads must be None, "mean" or "pairs". Got {heads!r}.')
    if epsilon is not None:
        if kind == "js":
            raise ArgumentError(f'{who}: kind="js" is finite for all masks and takes no epsilon. Got {epsilon!r}.')
        if not isinstance(epsilon, Real) or isinstance(epsilon, bool) or not 0 < epsilon < 1:
            raise ArgumentError(f"{who}: epsilon must be a number above 0 and below 1. Got {epsilon!r}.")
    if a.device != b.device:
        raise DeviceError(f"{who}: a and b must be on one device. Got {a.device} and {b.device}; use .to(device).")
    if (a.rows, a.keys) != (b.rows, b.keys):
        raise ShapeError(
            f"{who}: a and b must have the same rows and keys, for rows are compared key by key. Got {a.rows} rows and "
            f"{a.keys} keys in a, {b.rows} rows and {b.keys} keys in b."
        )
    batches = [p.lead[:-1] if len(p.lead) > 1 else p.lead for p in (a, b)]
    if batches[0] != batches[1]:
        raise ShapeError(
            f"{who}: a and b must have the same batch. Got {batches[0]} and {batches[1]}; expand the smaller one."
        )
    if heads is None and a.query.shape[1] != b.query.shape[1]:
        raise ShapeError(
            f'{who}: a has {a.query.shape[1]} heads and b has {b.query.shape[1]}. Write heads="mean" to compare the '
            f'means over heads, or heads="pairs" to compare each head of a with each of b.'
        )
