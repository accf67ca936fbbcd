"""KVCache: the keys and values of the past, for decoding token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.dispatch import choose
from ..core.contexts import refuse_in_context
from ..core.validation import pose
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..functional import attention
from ..masks import Mask, causal, window
from ..scores.base import whole
from .torch_masks import both, ours

__all__ = ["KVCache"]

_FIRST = 64  # tokens that a growing cache makes room for at first


class KVCache:
    """Hold the keys and values (B, Hk, M, D) of what came before, so that a new token costs one row.

    `capacity` tokens are allocated at the first append and more are refused; without it the memory doubles when it is
    full. `window=w` keeps the last w tokens only, in a buffer of 2w: each token then sees itself and the w − 1 before
    it, which is `regard.window(w - 1)`. A cache is for inference: it carries no gradient, and refuses tensors that ask
    for one. The tensors that `append` gives are views, good until the next append.

    >>> import torch
    >>> cache = KVCache()
    >>> for token in torch.randn(3, 1, 2, 1, 8):
    ...     keys, values = cache.append(token, token)
    >>> keys.shape, cache
    (torch.Size([1, 2, 3, 8]), KVCache(length=3))
    """

    def __init__(self, capacity: int | None = None, *, window: int | None = None) -> None:
        if capacity is not None and window is not None:
            raise ArgumentError(
                f"KVCache: capacity and window exclude each other: a window never fills up. Got capacity={capacity} "
                f"and window={window}; leave one out."
            )
        self.capacity = None if capacity is None else whole("KVCache", "capacity", capacity)
        self.window = None if window is None else whole("KVCache", "window", window)
        self._length = 0
        self._end = 0  # where in the buffers the last token ends
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        limits = {"capacity": self.capacity, "window": self.window}
        words = [f"length={self._length}", *(f"{k}={v}" for k, v in limits.items() if v is not None)]
        return f"KVCache({', '.join(words)})"

    @property
    def length(self) -> int:
        """How many tokens it has seen in all: the position of the next one."""
        return self._length

    @property
    def held(self) -> int:
        """How many tokens it holds: all, or the last `window`."""
        return self._length if self.window is None else min(self._length, self.window)

    @property
    def nbytes(self) -> int:
        """How much memory the buffers take."""
        return sum(x.numel() * x.element_size() for x in self._buffers or ())

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Give the positions of the next `count` tokens, (count,): what rotary positions turn them by."""
        return torch.arange(self._length, self._length + count, device=device)

    def reach(self, count: int) -> int:
        """Say how many keys the next `append` of `count` tokens will give."""
        return self._past + count

    def mask(self, count: int) -> Mask | None:
        """Give the mask of the next `count` tokens over the keys of their `append`; None if all see all."""
        if count == 1:
            return None
        if self.window is not None and self.reach(count) > self.window:
            return window(self.window - 1)
        return causal()

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens (B, Hk, n, D) and give the keys and values that they may attend, in order, theirs at the end.

        These are all that is held; with a window, the w − 1 tokens before the first new one, and the new ones.
        """
        self._check(key, value)
        past, count = self._past, key.shape[2]
        if self.capacity is not None and self._length + count > self.capacity:
            raise ArgumentError(
                f"KVCache: it is full: {self._length} of {self.capacity} tokens are held and {count} more came. "
                f"Make it with a larger capacity, with capacity=None to grow, or with window= to forget; or reset()."
            )
        pair = key.detach(), value.detach()
        if self.window is not None and past + count > 2 * self.window:
            keys, values = self._pass_by(pair, past, self.window)
        else:
            buffers = self._room(pair, past)
            self._end += count
            for buffer, new in zip(buffers, pair, strict=True):
                buffer[:, :, self._end - count : self._end] = new
            keys, values = (buffer[:, :, self._end - count - past : self._end] for buffer in buffers)
        self._length += count
        return keys, values

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Append the tokens, and let each new query attend the past and the new tokens up to its own.

        `mask` hides more, over the keys that `append` gives; the other arguments are those of `regard.attention`.

        >>> import torch, regard
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        >>> cache = KVCache()
        >>> parts = [cache.attend(q[:, :, i:j], k[:, :, i:j], v[:, :, i:j]) for i, j in ((0, 3), (3, 5), (5, 6))]
        >>> torch.allclose(torch.cat(parts, 2), regard.attention(q, k, v, mask=regard.causal()), atol=1e-6)
        True
        """
        refuse_in_context("KVCache.attend")
        if query.shape[-2:-1] != key.shape[-2:-1]:
            raise ShapeError(
                f"KVCache: attend takes one query for each new token. Got query {tuple(query.shape)} and key "
                f"{tuple(key.shape)} as (batch, heads, tokens, dim)."
            )
        seen = both(self.mask(key.shape[-2]), ours("KVCache", mask))
        self._check(key, value)
        reach = self.reach(key.shape[2])
        held = (x[:, :, :1].expand(-1, -1, reach, -1) for x in (key, value)) if key.shape[2] else (key, value)
        backend = arguments.pop("backend", "auto")
        choose(pose(query, *held, mask=seen, who="KVCache", **arguments), backend)  # refuse before holding
        keys, values = self.append(key, value)
        return attention(query, keys, values, mask=seen, backend=backend, **arguments)

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        self._length = self._end = 0

    @property
    def _past(self) -> int:
        """How many held tokens the next one may attend."""
        return self._length if self.window is None else min(self._length, self.window - 1)

    def _room(self, pair: tuple[Tensor, Tensor], past: int) -> tuple[Tensor, Tensor]:
        """Give buffers that have room for the new tokens behind the `past` ones."""
        count = pair[0].shape[2]
        if self._buffers is None or (self._length == 0 and self._differs(pair) is not None):
            size = self.capacity or (2 * self.window if self.window else max(count, _FIRST))
            self._buffers = _empty(pair[0], size), _empty(pair[1], size)
        old = self._buffers
        size = old[0].shape[2]
        if self._end + count > size:
            behind = [x[:, :, self._end - past : self._end] for x in old]
            if self.window is None:
                size = max(2 * size, past + count)
                self._buffers = _empty(pair[0], size), _empty(pair[1], size)
            else:
                behind = [x.clone() for x in behind]  # it goes to the front of the buffer that it lies in
            for buffer, kept in zip(self._buffers, behind, strict=True):
                buffer[:, :, :past] = kept
            self._end = past
        return self._buffers

    def _pass_by(self, pair: tuple[Tensor, Tensor], past: int, window: int) -> tuple[Tensor, Tensor]:
        """Give the past with more new tokens than the buffers take, and hold the last ones."""
        if past:
            behind = [x[:, :, self._end - past : self._end] for x in self._buffers or ()]
            keys, values = (torch.cat([a, b], 2) for a, b in zip(behind, pair, strict=True))
        else:
            keys, values = pair
        last = keys[:, :, -window:], values[:, :, -window:]
        self._end = 0
        for buffer, kept in zip(self._room(last, 0), last, strict=True):
            buffer[:, :, :window] = kept
        self._end = window
        return keys, values

    def _check(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key", key), ("value", value)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise DtypeError(f"KVCache: {name} must be a floating tensor. Got {kind}.")
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ShapeError(
                f"KVCache: key and value must be (batch, heads, tokens, dim), alike but for dim. "
                f"Got key {tuple(key.shape)}, value {tuple(value.shape)}."
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ArgumentError(
                "KVCache: it holds no graph, so the gradients of key and value would be lost. Decode under "
                "torch.no_grad() or torch.inference_mode(), or give it detached tensors."
            )
        if self._length and (error := self._differs((key, value))) is not None:
            raise error

    def _differs(self, pair: tuple[Tensor, Tensor]) -> Exception | None:
        """Give the error of tokens that do not go with what is held."""
        for name, held, x in zip(("key", "value"), self._buffers or (), pair, strict=False):
            if x.dtype != held.dtype:
                return DtypeError(
                    f"KVCache: it holds {name}s of {held.dtype}. Got {x.dtype}; convert with .to(dtype), or reset()."
                )
            if x.device != held.device:
                return DeviceError(
                    f"KVCache: it holds {name}s on {held.device}. Got {x.device}; move with .to(device), or reset()."
                )
            if (*x.shape[:2], x.shape[3]) != (*held.shape[:2], held.shape[3]):
                wanted = (*held.shape[:2], "tokens", held.shape[3])
                return ShapeError(
                    f"KVCache: it holds {name}s ({', '.join(map(str, wanted))}). Got {tuple(x.shape)}; "
                    f"reset() before another batch, or mend the shape."
                )
        return None


def _empty(like: Tensor, size: int) -> Tensor:
    with torch.inference_mode(False):  # so that it can be filled outside of inference mode too
        return torch.empty(*like.shape[:2], size, like.shape[3], dtype=like.dtype, device=like.device)
