"""MultiheadAttention: a drop-in for torch's module, with any score, mask and number of key heads."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..core.contexts import ACTIVE, token_positions
from ..errors import ArgumentError, DeviceError, DtypeError, MaskError, ShapeError
from ..masks import Mask, causal
from ..masks.arguments import textbook_mask
from ..positions import Rotary
from ..scores import Score
from ..scores.base import whole
from .arguments import optional_score, probability
from .attend import attend
from .kv_cache import KVCache
from .torch_masks import MaskSizes, as_mask, combine_masks, intersect

__all__ = ["MultiheadAttention"]

_WHO = "MultiheadAttention"


class MultiheadAttention(nn.Module):
    """Multi-head attention with the arguments, parameters and results of `torch.nn.MultiheadAttention`.

    A `state_dict` loads in both directions. Beyond torch's module it has:

    - `num_kv_heads`: fewer heads of keys and values, each shared by num_heads / num_kv_heads heads of queries. The rows
      of `in_proj_weight`, (embed_dim + 2·num_kv_heads·head_dim, embed_dim), are then those of q, k and v in this order,
      as are those of `in_proj_bias`; with `kdim` or `vdim`, `k_proj_weight` is (num_kv_heads·head_dim, kdim).
    - `score`: any of `regard.scores` in place of the scaled dot product.
    - `rotary`: True, a base, or a module called like `regard.positions.Rotary`, which rotates queries and keys.

    Differences: the weights returned are those before dropout (torch returns those after it); a row that may attend to
    nothing gives heads of zeros, never NaN; and with `need_weights=False` memory is linear in the sequence.

    >>> import torch
    >>> theirs, ours = torch.nn.MultiheadAttention(16, 4), MultiheadAttention(16, 4)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(5, 2, 16)
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours(x, x, x), theirs(x, x, x)))
    True
    """

    # Torch's encoder checks this before it bypasses `forward` with its fast path, which supports neither scores nor
    # grouped heads, and gives NaN for rows that attend to nothing.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        score: Score | None = None,
        rotary: bool | float | nn.Module = False,
    ) -> None:
        super().__init__()
        self.embed_dim = whole(_WHO, "embed_dim", embed_dim)
        self.num_heads = whole(_WHO, "num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else whole(_WHO, "num_kv_heads", num_kv_heads)
        self.kdim = self.embed_dim if kdim is None else whole(_WHO, "kdim", kdim)
        self.vdim = self.embed_dim if vdim is None else whole(_WHO, "vdim", vdim)
        for name, divided, by in (("embed_dim", embed_dim, num_heads), ("num_heads", num_heads, self.num_kv_heads)):
            if divided % by:
                of = "num_heads" if name == "embed_dim" else "num_kv_heads"
                raise ArgumentError(f"{_WHO}: {name} must be a multiple of {of}. Got {divided} and {by}.")
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout = probability(_WHO, dropout)
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self._create_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})
        self.score = optional_score(_WHO, score)
        self.rotary = _rotary(rotary, self.head_dim)
        self.reset_parameters()

    def _create_parameters(self, bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
        """Create the parameters with torch's names and in its order, so that one seed gives the same values."""
        _, key_size, value_size = sizes = self._projection_sizes
        packed = self.kdim == self.vdim == self.embed_dim
        input_dims = (self.embed_dim, self.kdim, self.vdim)
        self.register_parameter("in_proj_weight", _parameter(sum(sizes), self.embed_dim, when=packed, **factory))
        for name, rows, columns in zip("qkv", sizes, input_dims, strict=True):
            self.register_parameter(f"{name}_proj_weight", _parameter(rows, columns, when=not packed, **factory))
        self.register_parameter("in_proj_bias", _parameter(sum(sizes), when=bias, **factory))
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        self.register_parameter("bias_k", _parameter(1, 1, key_size, when=add_bias_kv, **factory))
        self.register_parameter("bias_v", _parameter(1, 1, value_size, when=add_bias_kv, **factory))

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for token in (self.bias_k, self.bias_v):
            if token is not None:
                nn.init.xavier_normal_(token)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights), or (output, None) without `need_weights`.

        Inputs are (L, N, E), (N, L, E) with `batch_first`, or (L, E) without a batch. In torch's masks, True hides and
        floats are added: `attn_mask` (L, S) or (N·heads, L, S), `key_padding_mask` (N, S) or (S,). In `mask`, a regard
        mask or a tensor that broadcasts to (N, heads, L, S), True means "may attend". All given masks apply together.

        `is_causal` lets row i attend to the keys up to i. With an `attn_mask` it is torch's hint that this mask is the
        causal one, and replaces it where torch does so: without weights and without padding.

        With a `cache`, the tokens are appended to it and attend to its contents causally; S in the masks is then
        `cache.reach(L)`. Rotary positions continue from `cache.length`.

        Inside `regard.distributed.over` the inputs are this rank's part of the sequence; `mask`, `is_causal` and rotary
        positions refer to the whole sequence, and there are no weights.
        """
        if isinstance(query, Tensor) and query.is_nested:
            if key_padding_mask is not None or cache is not None or not self.batch_first or not query is key is value:
                raise self._nested_refusal()
            return self._forward_nested(query, need_weights, attn_mask, average_attn_weights, is_causal, mask=mask)
        self._check(query, key, value, cache)
        q, k, v = self._project(query, key, value)
        if ACTIVE:
            self._refuse_when_sharded(
                attn_mask=attn_mask, key_padding_mask=key_padding_mask, cache=cache, weights=need_weights
            )
            heads = self._attend_sharded(q, k, v, query is key, is_causal, mask)
            return self.out_proj(self._merge_heads(heads, query.dim() == 3)), None
        if self.rotary is not None:
            start = 0 if cache is None else cache.length
            q, k = self.rotary(q, offset=start), self.rotary(k, offset=start)
        rows, keys = q.shape[2], k.shape[2] if cache is None else cache.reach(k.shape[2])
        causal_mask = None if cache is None else cache.mask(rows)
        if cache is None and is_causal and (attn_mask is None or (key_padding_mask is None and not need_weights)):
            causal_mask, attn_mask = causal(offset=0), None
        sizes = MaskSizes(q.shape[0], self.num_heads, rows, keys, query.dim() == 3, q.device)
        masks = combine_masks(_WHO, sizes, attn_mask, key_padding_mask, causal_mask, mask)
        if cache is not None:
            if masks.mask is not None and (misfit := masks.mask.misfit(rows, keys)) is not None:
                raise MaskError(f"{_WHO}: the mask does not fit {rows} new tokens over {keys} keys: {misfit}")
            k, v = cache.append(k, v)
        k, v, extra = self._with_extra_keys(k, v)
        heads, weights = self._attend(q, k, v, need_weights, **masks.with_visible_keys(extra)._asdict())
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights[0]
        return self.out_proj(self._merge_heads(heads, query.dim() == 3)), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        return attend(_WHO, q, k, v, return_weights=need_weights, score=self.score, dropout=dropout, **options)

    def _attend_sharded(
        self, q: Tensor, k: Tensor, v: Tensor, self_attention: bool, is_causal: bool, mask: Mask | Tensor | None
    ) -> Tensor:
        """Attend with this rank's part of a sequence, inside `regard.distributed.over`."""
        if self.rotary is not None:
            at = token_positions(q.shape[2], q.device)
            q, k = self.rotary(q, at), self.rotary(k, at if self_attention else token_positions(k.shape[2], k.device))
        mask = textbook_mask(_WHO, mask)
        if is_causal and isinstance(mask, Tensor):
            raise ArgumentError(
                f"{_WHO}: inside regard.distributed.over, is_causal needs a regard mask, which refers to the whole "
                f"sequence. Got a tensor; leave is_causal out and hide the later keys in the tensor too."
            )
        if not isinstance(mask, Tensor):
            mask = intersect(causal(offset=0) if is_causal else None, as_mask(_WHO, mask))
        output, _ = self._attend(q, k, v, False, mask=mask)
        return output

    def _refuse_when_sharded(self, weights: bool, **given: object) -> None:
        """Refuse options that need the whole sequence on one rank, inside `regard.distributed.over`."""
        names = [name for name, x in given.items() if x is not None]
        names += ["need_weights=True"] * weights
        names += ["add_bias_kv"] * (self.bias_k is not None) + ["add_zero_attn"] * self.add_zero_attn
        if names:
            raise ArgumentError(
                f"{_WHO}: inside regard.distributed.over a rank has a part of the sequence, and {names[0]} needs all "
                f"of it. Pass need_weights=False, and a regard mask such as mask=regard.padding(lengths)."
            )

    @property
    def _projection_sizes(self) -> list[int]:
        """The sizes of query, key and value per token, over all heads."""
        kv_size = self.num_kv_heads * self.head_dim
        return [self.embed_dim, kv_size, kv_size]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries (N, heads, L, D), and keys and values (N, num_kv_heads, S, D)."""
        sizes, bias = self._projection_sizes, self.in_proj_bias
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = torch.split(F.linear(query, self.in_proj_weight, bias), sizes, -1)
        else:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is not None:
                weights = torch.split(self.in_proj_weight, sizes)
            biases = (None, None, None) if bias is None else torch.split(bias, sizes)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (self._split_heads(x, count) for x, count in zip((q, k, v), heads, strict=True))
        return q, k, v

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        """View (N, L, E), (L, N, E) or (L, E) as (N, heads, L, D)."""
        x = x.view(*x.shape[:-1], heads, self.head_dim)
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, x: Tensor, batched: bool) -> Tensor:
        """Merge (N, heads, L, D) into the caller's layout: (N, L, E), (L, N, E) or (L, E)."""
        if not batched:
            return x[0].transpose(0, 1).flatten(-2)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learnt key and value, then zeros, for every row to attend to; also return their number."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, token.view(1, -1, 1, self.head_dim).expand(len(x), -1, -1, -1).to(x.dtype)], 2)
                for x, token in ((k, self.bias_k), (v, self.bias_v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, extra

    def _nested_refusal(self) -> ArgumentError:
        return ArgumentError(
            f"{_WHO}: a nested tensor must be query, key and value at once, with batch_first=True, and with neither "
            f"key_padding_mask nor cache. Otherwise pad it with .to_padded_tensor(0.0), and pass a mask."
        )

    def _forward_nested(self, x: Tensor, *flags: Any, mask: Mask | Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence of a nested tensor, which torch's encoder makes from a padded batch."""
        parts = list(x.unbind())
        padded = pad_sequence(parts, batch_first=True)
        lengths = torch.tensor([len(part) for part in parts], device=x.device)
        hidden = torch.arange(padded.shape[1], device=x.device) >= lengths[:, None]
        output, weights = self.forward(padded, padded, padded, hidden, *flags, mask=mask)
        rows = [row[: len(part)] for row, part in zip(output, parts, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=x.layout), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache | None) -> None:
        for x in (query, key, value):
            if not isinstance(x, Tensor):
                raise DtypeError(f"{_WHO}: query, key and value must be tensors. Got {type(x).__name__}.")
        got = f"Got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ShapeError(f"{_WHO}: query, key and value must all be 3-D, or all 2-D without a batch. {got}.")
        dims = (self.embed_dim, self.kdim, self.vdim)
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != dims:
            raise ShapeError(f"{_WHO}: the last dims of query, key and value must be {dims}. {got}.")
        at = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[at] != key.shape[at]):
            layout = "(N, L, E)" if self.batch_first else "(L, N, E)"
            raise ShapeError(
                f"{_WHO}: key and value must have one length, and all three one batch, as {layout} with "
                f"batch_first={self.batch_first}. {got}."
            )
        parameter = self.out_proj.weight
        for x in (query, key, value):
            if x.device != parameter.device:
                raise DeviceError(
                    f"{_WHO}: its parameters are on {parameter.device}. Got an input on {x.device}; move it with .to()."
                )
            if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
                raise DtypeError(
                    f"{_WHO}: its parameters are {parameter.dtype}. Got an input of {x.dtype}; convert it with .to()."
                )
        if cache is not None and query.shape[:-1] != key.shape[:-1]:
            raise ShapeError(f"{_WHO}: with a cache, query and key are the same new tokens. {got}.")

    def extra_repr(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"{self.embed_dim}, {self.num_heads}{shared}, dropout={self.dropout:g}, batch_first={self.batch_first}"


def _parameter(*shape: int, when: bool, **kind: Any) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, **kind)) if when else None


def _rotary(given: bool | float | nn.Module, head_dim: int) -> nn.Module | None:
    if isinstance(given, bool):
        return Rotary(head_dim) if given else None
    if isinstance(given, Real):
        return Rotary(head_dim, float(given))
    if not isinstance(given, nn.Module):
        raise DtypeError(
            f"{_WHO}: rotary must be True, a base, or a module called like regard.positions.Rotary. "
            f"Got {type(given).__name__}."
        )
    if isinstance(given, Rotary) and given.dim != head_dim:
        raise ShapeError(f"{_WHO}: rotary must be for heads of dim {head_dim}. Got one for {given.dim}.")
    return given
