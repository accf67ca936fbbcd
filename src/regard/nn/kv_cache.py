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
from .torch_masks import as_mask, intersect

__all__ = ["KVCache"]

_INITIAL_TOKENS = 64  # the first size of a growing cache


class KVCache:
    """Hold the keys and values (B, Hk, M, D) of past tokens, so that a new token costs one row of attention.

    With `capacity`, the buffers are allocated at the first append, and more tokens are refused; without it, they double
    when they are full. `window=w` keeps only the last w tokens, in a buffer of 2w: each token then attends to itself
    and the w − 1 tokens before it, as in `regard.window(w - 1)`. A cache is for inference: it carries no gradient, and
    refuses tensors that require one. `append` returns views that are valid until the next append.

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
        self._end = 0  # of the held tokens in the buffers
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        limits = {"capacity": self.capacity, "window": self.window}
        words = [f"length={self._length}", *(f"{k}={v}" for k, v in limits.items() if v is not None)]
        return f"KVCache({', '.join(words)})"

    @property
    def length(self) -> int:
        """The number of tokens so far: the position of the next one."""
        return self._length

    @property
    def held(self) -> int:
        """The number of tokens held: all, or the last `window`."""
        return self._length if self.window is None else min(self._length, self.window)

    @property
    def nbytes(self) -> int:
        """The size of the buffers in bytes."""
        return sum(x.numel() * x.element_size() for x in self._buffers or ())

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the next `count` tokens, (count,), for rotary embeddings."""
        return torch.arange(self._length, self._length + count, device=device)

    def reach(self, count: int) -> int:
        """Return how many keys the next `append` of `count` tokens will return."""
        return self._past + count

    def mask(self, count: int) -> Mask | None:
        """Return the mask of the next `count` tokens over the keys of their `append`; None if nothing is hidden."""
        if count == 1:
            return None
        if self.window is not None and self.reach(count) > self.window:
            return window(self.window - 1)
        return causal()

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens (B, Hk, n, D), and return the keys and values that they may attend to, in order, theirs last.

        These are all tokens held; with a window, the w − 1 tokens before the first new one, and the new ones.
        """
        self._check(key, value)
        past, count = self._past, key.shape[2]
        if self.capacity is not None and self._length + count > self.capacity:
            raise ArgumentError(
                f"KVCache: it is full: it holds {self._length} of {self.capacity} tokens, and {count} more came. "
                f"Use a larger capacity, capacity=None to grow, or window= to drop old tokens; or call reset()."
            )
        pair = key.detach(), value.detach()
        if self.window is not None and past + count > 2 * self.window:
            keys, values = self._append_beyond_buffer(pair, past, self.window)
        else:
            buffers = self._reserve(pair, past)
            self._end += count
            for buffer, new in zip(buffers, pair, strict=True):
                buffer[:, :, self._end - count : self._end] = new
            keys, values = (buffer[:, :, self._end - count - past : self._end] for buffer in buffers)
        self._length += count
        return keys, values

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Append the tokens, and let each new query attend to the past and to the new tokens up to its own.

        `mask` hides more of the keys that `append` returns; the other arguments are those of `regard.attention`.

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
        combined = intersect(self.mask(key.shape[-2]), as_mask("KVCache", mask))
        self._check(key, value)
        reach = self.reach(key.shape[2])
        dummies = (x[:, :, :1].expand(-1, -1, reach, -1) for x in (key, value)) if key.shape[2] else (key, value)
        backend = arguments.pop("backend", "auto")
        choose(pose(query, *dummies, mask=combined, who="KVCache", **arguments), backend)  # refuse before appending
        keys, values = self.append(key, value)
        return attention(query, keys, values, mask=combined, backend=backend, **arguments)

    def reset(self) -> None:
        """Drop all tokens and keep the buffers."""
        self._length = self._end = 0

    @property
    def _past(self) -> int:
        """How many held tokens the next one may attend to."""
        return self._length if self.window is None else min(self._length, self.window - 1)

    def _reserve(self, pair: tuple[Tensor, Tensor], past: int) -> tuple[Tensor, Tensor]:
        """Return buffers with space for the new tokens after the `past` ones."""
        key, value = pair
        count = key.shape[2]
        if self._buffers is None or (self._length == 0 and self._mismatch(pair) is not None):
            size = self.capacity or (2 * self.window if self.window else max(count, _INITIAL_TOKENS))
            self._buffers = _allocate(key, size), _allocate(value, size)
        size = self._buffers[0].shape[2]
        if self._end + count > size:
            kept = [x[:, :, self._end - past : self._end] for x in self._buffers]
            if self.window is None:
                size = max(2 * size, past + count)
                self._buffers = _allocate(key, size), _allocate(value, size)
            else:
                kept = [x.clone() for x in kept]  # they are copied to the front of the same buffer
            for buffer, tokens in zip(self._buffers, kept, strict=True):
                buffer[:, :, :past] = tokens
            self._end = past
        return self._buffers

    def _append_beyond_buffer(self, pair: tuple[Tensor, Tensor], past: int, window: int) -> tuple[Tensor, Tensor]:
        """Return the past and more new tokens than the buffers can hold, and hold the last `window` of them."""
        if past:
            kept = [x[:, :, self._end - past : self._end] for x in self._buffers or ()]
            keys, values = (torch.cat([a, b], 2) for a, b in zip(kept, pair, strict=True))
        else:
            keys, values = pair
        last = keys[:, :, -window:], values[:, :, -window:]
        self._end = 0
        for buffer, tokens in zip(self._reserve(last, 0), last, strict=True):
            buffer[:, :, :window] = tokens
        self._end = window
        return keys, values

    def _check(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key", key), ("value", value)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
                raise DtypeError(f"KVCache: {name} must be a floating tensor. Got {kind}.")
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ShapeError(
                f"KVCache: key and value must be (batch, heads, tokens, dim), and may differ only in dim. "
                f"Got key {tuple(key.shape)}, value {tuple(value.shape)}."
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ArgumentError(
                "KVCache: it holds no graph, so the gradients of key and value would be lost. Decode under "
                "torch.no_grad() or torch.inference_mode(), or pass detached tensors."
            )
        if self._length and (error := self._mismatch((key, value))) is not None:
            raise error

    def _mismatch(self, pair: tuple[Tensor, Tensor]) -> Exception | None:
        """Return an error if new tokens do not match those held."""
        for name, held, x in zip(("key", "value"), self._buffers or (), pair, strict=False):
            if x.dtype != held.dtype:
                return DtypeError(
                    f"KVCache: it holds {name}s of {held.dtype}. Got {x.dtype}; convert with .to(), or call reset()."
                )
            if x.device != held.device:
                return DeviceError(
                    f"KVCache: it holds {name}s on {held.device}. Got {x.device}; move it with .to(), or call reset()."
                )
            if (*x.shape[:2], x.shape[3]) != (*held.shape[:2], held.shape[3]):
                shape = (*held.shape[:2], "tokens", held.shape[3])
                return ShapeError(
                    f"KVCache: it holds {name}s ({', '.join(map(str, shape))}). Got {tuple(x.shape)}; "
                    f"call reset() before another batch, or fix the shape."
                )
        return None


def _allocate(like: Tensor, size: int) -> Tensor:
    with torch.inference_mode(False):  # so that it can be written outside inference mode too
        return torch.empty(*like.shape[:2], size, like.shape[3], dtype=like.dtype, device=like.device)
