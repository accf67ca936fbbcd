"""QK-Clip: limit the largest logits of each head by scaling its query and key projections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, DtypeError, ShapeError
from ..nn import MultiheadAttention
from ..scores import Balanced, Bilinear, Scaled, Temperature
from ..scores.base import whole
from ..softmax import arithmetic_dtype

__all__ = ["qk_clip_"]

_WHO = "qk_clip_"
_NAMES = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"))
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NORMS = (
    *("q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"),
    *("query_layernorm", "key_layernorm", "norm_q", "norm_k", "use_qk_norm"),
)
_LINEAR = (Scaled, Balanced, Temperature, Bilinear)  # scores that are linear in the query


class _Projections(NamedTuple):
    """The parameters that produce queries and keys; their first dimension holds the heads one after the other."""

    query: list[Tensor]
    key: list[Tensor]
    heads: int
    kv_heads: int


@torch.no_grad()
def qk_clip_(
    module: nn.Module,
    max_logits: Tensor | Sequence[float],
    threshold: float = 100.0,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Tensor:
    """Scale the query and key weights of a module in place, so that no head's largest logit is above `threshold`.

    `max_logits` holds the largest scaled logit of each head over a batch, as from `regard.Monitor` or `seen.heads`.
    Returns each head's factor γ = min(1, threshold / max_logit), by which all of its logits shrink: 1 for a head below
    the threshold, which does not change. This is QK-Clip from MuonClip (Kimi K2, 2025); call it after an optimizer
    step:

    - a head with its own key head: queries and keys are each scaled by √γ;
    - grouped heads: the shared key head is scaled by κ = √(the least γ in the group), and query head h by γ_h / κ, so
      that the logits q·k of each head become γ_h times what they were. For a head below the threshold in such a group
      that is 1 / κ: its queries grow by as much as its keys shrink.

    Biases, and the learned key of `add_bias_kv`, are scaled too. The module is `torch.nn.MultiheadAttention`,
    `regard.nn.MultiheadAttention`, or one with two `nn.Linear` called q_proj and k_proj (query and key, q_lin and
    k_lin, q and k); the numbers of heads are read from it, from its `config` and from its `head_dim`, unless given.
    Rotary positions are rotations and commute with scaling. Norms of queries and keys undo it, and are refused. Terms
    added to the logits (a bias, ALiBi) are not scaled, and with a softcap the logits shrink by less.

    >>> attend = torch.nn.MultiheadAttention(8, 2)
    >>> before = attend.in_proj_weight.detach().clone()
    >>> qk_clip_(attend, [50.0, 400.0])
    tensor([1.0000, 0.2500])
    >>> ratio = attend.in_proj_weight.detach() / before
    >>> [round(float(ratio[row, 0]), 3) for row in (0, 4, 8, 12, 16, 20)]  # heads 0 and 1 of queries, keys, values
    [1.0, 0.5, 1.0, 0.5, 1.0, 1.0]
    """
    if not isinstance(module, nn.Module):
        raise DtypeError(f"{_WHO}: the first argument must be a module that attends. Got {type(module).__name__}.")
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 < threshold < math.inf:
        raise ArgumentError(f"{_WHO}: threshold must be a finite number above 0. Got {threshold!r}.")
    _refuse_norms(module)
    found = _projections(module, heads, kv_heads)
    factor = _factors(max_logits, found.heads, float(threshold))
    shared = factor.view(found.kv_heads, -1).amin(1).sqrt()  # κ
    own = factor / shared.repeat_interleave(found.heads // found.kv_heads)
    for tensors, scale in ((found.query, own), (found.key, shared)):
        for x in tensors:
            rows = scale.to(arithmetic_dtype(x.dtype)).to(x.device).repeat_interleave(len(x) // len(scale))
            x.mul_(rows.view(-1, *[1] * (x.dim() - 1)))
    return factor.float()


def _factors(max_logits: Tensor | Sequence[float], heads: int, threshold: float) -> Tensor:
    """γ, (heads,): the factor by which the logits of each head are to shrink."""
    largest = torch.as_tensor(max_logits, dtype=torch.float64, device="cpu").detach()
    if largest.shape != (heads,):
        raise ShapeError(
            f"{_WHO}: max_logits must have one number per head, ({heads},). Got {tuple(largest.shape)}; reduce it "
            f"with .amax() over batch and rows, or give the number of heads with heads=."
        )
    if bool(largest.isnan().any() | (largest == math.inf).any()):
        raise ArgumentError(f"{_WHO}: max_logits must be numbers below infinity. Got {largest.tolist()}.")
    return torch.where(largest > threshold, threshold / largest, 1.0)


def _projections(module: nn.Module, heads: int | None, kv_heads: int | None) -> _Projections:
    if isinstance(module, nn.MultiheadAttention | MultiheadAttention):
        return _packed(module, heads, kv_heads)
    for names in _NAMES:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            return _linear(module, names, query, key, heads, kv_heads)
    raise ArgumentError(
        f"{_WHO}: it needs torch's or regard's MultiheadAttention, or a module with two nn.Linear called q_proj and "
        f"k_proj (or query and key, q_lin and k_lin, q and k). Got {type(module).__name__} with "
        f"{', '.join(name for name, _ in module.named_children()) or 'no modules inside'}."
    )


def _packed(module: Any, heads: int | None, kv_heads: int | None) -> _Projections:
    """Read a MultiheadAttention, torch's or ours: one matrix for q, k and v or one for each, and one bias."""
    score = getattr(module, "score", None)
    if score is not None and not isinstance(score, _LINEAR):
        raise ArgumentError(
            f"{_WHO}: the logits must be proportional to queries and keys. Got a module whose score is "
            f"{type(score).__name__}, which is not; limit it with its temperature instead."
        )
    count, shared = module.num_heads, getattr(module, "num_kv_heads", module.num_heads)
    for name, given, has in (("heads", heads, count), ("kv_heads", kv_heads, shared)):
        if given not in (None, has):
            raise ArgumentError(f"{_WHO}: the module has {name}={has}. Got {name}={given}; leave it out.")
    _refuse_parametrized(module)
    wide, narrow = module.embed_dim, shared * module.head_dim
    if module.in_proj_weight is not None:
        query, key = ([part] for part in module.in_proj_weight.split([wide, narrow, narrow])[:2])
    else:
        query, key = [module.q_proj_weight], [module.k_proj_weight]
    if module.in_proj_bias is not None:
        parts = module.in_proj_bias.split([wide, narrow, narrow])
        query, key = [*query, parts[0]], [*key, parts[1]]
    if module.bias_k is not None:
        key = [*key, module.bias_k.view(-1)]
    return _Projections(query, key, count, shared)


def _linear(
    module: nn.Module, names: tuple[str, str], query: nn.Linear, key: nn.Linear, heads: int | None, kv_heads: int | None
) -> _Projections:
    """Read a module with one Linear for queries and one for keys."""
    for projection in (query, key):
        _refuse_parametrized(projection)
    if query.weight is key.weight:
        raise ArgumentError(f"{_WHO}: {names[0]} and {names[1]} must have separate weights. Got one for both.")
    given = [None if n is None else whole(_WHO, what, n) for what, n in (("heads", heads), ("kv_heads", kv_heads))]
    dim = _first_number(module, ("head_dim",))
    count = given[0] or _first_number(module, _HEADS) or (dim and query.out_features // dim)
    if not count:
        raise ArgumentError(
            f"{_WHO}: {type(module).__name__} does not say how many heads it has (num_heads, head_dim or a config). "
            f"Give heads= (and kv_heads= if there are fewer key heads)."
        )
    each = dim if dim and heads is None else query.out_features // count
    shared = given[1] or max(1, key.out_features // max(1, each))
    if query.out_features != count * each or key.out_features != shared * each or count % shared:
        raise ShapeError(
            f"{_WHO}: {names[0]} must have rows for {count} heads and {names[1]} for {shared}, a divisor of it, all of "
            f"dim {each}. Got {query.out_features} and {key.out_features} rows; give heads= and kv_heads= if the "
            f"numbers of heads are different."
        )
    query_tensors, key_tensors = (
        [x for x in (projection.weight, projection.bias) if x is not None] for projection in (query, key)
    )
    return _Projections(query_tensors, key_tensors, count, shared)


def _first_number(module: nn.Module, names: Sequence[str]) -> int:
    """The first positive integer that the module, or else its config, has under one of the names; 0 if none."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(holder, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return 0


def _refuse_norms(module: nn.Module) -> None:
    for name in _norms(module):
        raise ArgumentError(
            f"{_WHO}: {type(module).__name__} normalises its queries and keys after the projection ({name}), so "
            f"scaling the weights changes no logit. The norm already bounds the logits; scale its gain if they are "
            f"too large."
        )


def _norms(module: nn.Module) -> Iterator[str]:
    for name in _NORMS:
        found = getattr(module, name, None)
        if found is True or (isinstance(found, nn.Module) and not isinstance(found, nn.Identity)):
            yield name


def _refuse_parametrized(module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        raise ArgumentError(
            f"{_WHO}: the weights of {type(module).__name__} are computed by a parametrization, and cannot be scaled "
            f"in place. Remove it with torch.nn.utils.parametrize.remove_parametrizations first."
        )
