"""The interface of a score: a module that turns queries and keys into logits, by a product or pair by pair."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Integral, Real
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from regard.compat.torch import no_autocast
from regard.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from regard.softmax import arithmetic_dtype

__all__ = ["Prepared", "Score", "finite", "positive", "whole"]


class Prepared(NamedTuple):
    """Queries and keys after the score's parameters have been folded into them."""

    query: Tensor
    """(…, Hq, N, D′)"""
    key: Tensor
    """(…, Hk, M, D′)"""
    shared: tuple[Tensor, ...] = ()
    """What a pairwise score needs for every pair, without batch and head dimensions."""


class Score(nn.Module, ABC):
    """Logits of all pairs of queries and keys; a subclass defines `prepare`, and `pair` if it is not a dot product."""

    pairwise: ClassVar[bool] = False
    """False: the logits are prepared.query @ prepared.keyᵀ. True: they come from `pair`."""
    same_dims: ClassVar[bool] = True
    """Whether query and key must have the same dim."""

    @abstractmethod
    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        """Fold the parameters into query (…, Hq, N, D) and key (…, Hk, M, D), both float32 or float64."""

    def centre(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The point (…, Hk, 1, D) that `prepare` takes as the origin; None if the logits depend on the origin."""
        return None

    def prepare_around(self, centre: Tensor, query: Tensor, key: Tensor) -> Prepared:
        """Prepare a part of a problem whose parts share one centre."""
        return self.prepare(query, key)

    def factor(self, query: Tensor) -> float | Tensor | None:
        """The factor that q·k is multiplied by, one or one per head, if that is all the score does; else None.

        `query` gives the dim, the device and the dtype, as in `prepare`; its values are not read.
        """
        return None

    @staticmethod
    def pair(query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:
        """Give the logits (…, N, M) of prepared queries (…, N, D′) and keys (…, M, D′)."""
        return query @ key.mT

    def width(self, query_dim: int, key_dim: int) -> int:
        """The dim of prepared queries and keys."""
        return key_dim

    @property
    def cost(self) -> int:
        """How many numbers each pair takes in memory while `pair` runs."""
        return 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the logits depend on, besides queries and keys."""
        if not (self._parameters or self._buffers or self._modules):  # faster than searching the module
            return ()
        return *self.parameters(), *self.buffers()

    def beyond(self, sizes: Mapping[str, int], masked: bool) -> str | None:
        """Say why this score cannot take a problem of such sizes, or None if it can."""
        return None

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        """Say why this score cannot take such queries and keys, or None if it can."""
        if self.same_dims and query_dim != key_dim:
            return (
                f"query has dim {query_dim} and key has dim {key_dim}; this score needs them equal "
                "(Bilinear and Additive do not)"
            )
        return None

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Give all logits (…, N, M), in float32 or float64; if key has fewer heads, query heads share them."""
        self._check(query, key)
        dtype = arithmetic_dtype(query.dtype)
        headless = query.ndim < 4
        with no_autocast(query.device):
            query, key = query.to(dtype), key.to(dtype)
            if headless:
                query, key = query.unsqueeze(-3), key.unsqueeze(-3)
            logits = self._logits(self.prepare(query, key))
        return logits.squeeze(-3) if headless else logits

    def own(self, parameter: Tensor, query: Tensor) -> Tensor:
        """Give a parameter in the dtype of `query`, or raise if it is on another device."""
        if parameter.device != query.device:
            raise DeviceError(
                f"{type(self).__name__}: its parameters are on {parameter.device} and query is on {query.device}; "
                f"they must be on one device. Move the score with score.to({str(query.device)!r})."
            )
        return parameter.to(query.dtype)

    def _logits(self, prepared: Prepared) -> Tensor:
        query, key, shared = prepared
        query_heads, key_heads = query.shape[-3], key.shape[-3]
        if query_heads == key_heads:
            return self.pair(query, key, *shared)
        query = query.reshape(*query.shape[:-3], key_heads, query_heads // key_heads, *query.shape[-2:])
        return self.pair(query, key.unsqueeze(-3), *shared).flatten(-4, -3)

    def _check(self, query: Tensor, key: Tensor) -> None:
        name, got = type(self).__name__, f"Got query {tuple(query.shape)}, key {tuple(key.shape)}."
        if not query.is_floating_point() or query.dtype != key.dtype:
            raise DtypeError(
                f"{name}: query and key must share one floating dtype; got {query.dtype} and {key.dtype}. "
                "Convert them with .to(dtype)."
            )
        if query.device != key.device:
            raise DeviceError(
                f"{name}: query is on {query.device} and key is on {key.device}; they must be on one device. "
                f"Move one with .to({str(query.device)!r})."
            )
        if min(query.ndim, key.ndim) < 2 or (query.ndim < 4) != (key.ndim < 4):
            raise ShapeError(
                f"{name}: query and key must both be (…, heads, length, dim), or both (length, dim) or "
                f"(batch, length, dim). {got}"
            )
        headless = query.ndim < 4
        query_heads, key_heads = (1, 1) if headless else (query.shape[-3], key.shape[-3])
        if query_heads != key_heads and (key_heads == 0 or query_heads % key_heads):
            raise ShapeError(
                f"{name}: query has {query_heads} heads and key has {key_heads}; the first must be a multiple of the "
                f"second. {got}"
            )
        reason = self.misfit(query.shape[-1], key.shape[-1], query_heads)
        if reason is not None:
            raise ShapeError(f"{name}: {reason}. {got}")
        last = -2 if headless else -3
        leading = zip(reversed(query.shape[:last]), reversed(key.shape[:last]), strict=False)
        if any(a != b and 1 not in (a, b) for a, b in leading):
            raise ShapeError(f"{name}: the leading dimensions of query and key must broadcast. {got}")


def finite(name: str, what: str, value: float) -> float:
    """Give `value` as a float, or raise unless it is one finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name}: {what} must be a number; got {type(value).__name__}.")
    if not math.isfinite(value):
        raise ArgumentError(f"{name}: {what} must be finite; got {value}.")
    return float(value)


def positive(name: str, what: str, value: float) -> float:
    """Give `value` as a float, or raise unless it is one finite number above 0."""
    number = finite(name, what, value)
    if number <= 0:
        raise ArgumentError(f"{name}: {what} must be above 0; got {value}.")
    return number


def whole(name: str, what: str, value: int) -> int:
    """Give `value` as an int, or raise unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DtypeError(f"{name}: {what} must be an integer; got {type(value).__name__}.")
    if value < 1:
        raise ArgumentError(f"{name}: {what} must be at least 1; got {value}.")
    return int(value)
