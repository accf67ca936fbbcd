"""Positions: how they enter queries and keys, and how they change a score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from regard.softmax import arithmetic_dtype

__all__ = ["Rotary", "Terms", "alias_period", "aliases", "alibi_slopes", "decompose", "rotary", "sinusoidal"]


class Terms(NamedTuple):
    """The four terms of (content_q + position_q)·(content_k + position_k), each (…, N, M); it is their sum."""

    content_content: Tensor
    content_position: Tensor
    position_content: Tensor
    position_position: Tensor


def sinusoidal(
    length: int,
    dim: int | None = None,
    base: float = 10000.0,
    periods: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Encode positions 0 … length − 1 as pairs (sin, cos), one pair per period: (length, dim).

    Give either `dim`, for the periods 2π·base^(2k/dim) of the Transformer paper, or the `periods` themselves, for a
    dim of 2·len(periods). The dot product of two encodings is Σ cos(2π(i − j)/period): it depends on the offset alone.

    >>> sinusoidal(3, periods=[4]).round(decimals=3) + 0.0
    tensor([[ 0.,  1.],
            [ 1.,  0.],
            [ 0., -1.]])
    """
    _integer("sinusoidal", "length", length, least=0)
    if (dim is None) == (periods is None):
        raise ArgumentError(f"sinusoidal: give dim or periods, but not both; got dim={dim}, periods={periods}.")
    if dim is not None:
        period = 2 * math.pi / _frequencies("sinusoidal", dim, base, device)
    elif periods is not None:
        numbers = [float(p) for p in periods]
        if not numbers or not all(0 < p < math.inf for p in numbers):
            raise ArgumentError(f"sinusoidal: periods must be finite numbers above 0, at least one; got {numbers}.")
        period = torch.tensor(numbers, dtype=torch.float64, device=device)
    # The remainder is exact, so integer periods repeat to the last bit.
    cycles = torch.remainder(torch.arange(length, dtype=torch.float64, device=device)[:, None], period) / period
    angle = 2 * math.pi * cycles
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(dtype or torch.get_default_dtype())


def rotary(x: Tensor, positions: Tensor | None = None, base: float = 10000.0) -> Tensor:
    """Rotate the pairs (x[…, k], x[…, k + D/2]) of queries or keys (…, N, D) by position · base^(−2k/D).

    A pair takes one number of each half, as in Llama and Hugging Face ("rotate_half"), not neighbours as in RoFormer.
    `positions` are (N,) or (batch, N), by default 0 … N − 1. The score of two rotated vectors depends on their
    offset alone.

    >>> rotary(torch.tensor([[1.0, 0.0]]), torch.tensor([math.pi / 2])).round(decimals=3) + 0.0
    tensor([[0., 1.]])
    """
    return _rotate("rotary", x, positions, base)


class Rotary(nn.Module):
    """Rotary positions for vectors of a fixed dim, as `rotary`; it holds no state.

    >>> x = torch.randn(2, 8, 5, 64)
    >>> torch.equal(Rotary(64)(x, offset=3), rotary(x, torch.arange(3, 8)))
    True
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        _frequencies("Rotary", dim, base, None)
        self.dim = dim
        self.base = float(base)

    def forward(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """Rotate x (…, N, dim) by `positions`, or by offset … offset + N − 1."""
        if positions is not None and offset != 0:
            raise ArgumentError(f"Rotary: give positions or offset, but not both; got both, with offset={offset}.")
        if x.shape[-1:] != (self.dim,):
            raise ShapeError(f"Rotary: x must be (…, length, {self.dim}); got {tuple(x.shape)}.")
        if positions is None and x.ndim >= 2:
            positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
        return _rotate("Rotary", x, positions, self.base)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}"


def alibi_slopes(heads: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Give the slopes of the ALiBi paper, (heads,): 2^(−8(h+1)/heads) for a power of 2, else with more from the next.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    _integer("alibi_slopes", "heads", heads, least=1)
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]
    return torch.tensor(slopes, dtype=dtype or torch.get_default_dtype(), device=device)


def decompose(content_q: Tensor, position_q: Tensor, content_k: Tensor, position_k: Tensor) -> Terms:
    """Split the dot product of queries (…, N, D) and keys (…, M, D), each content + position, into its four terms.

    >>> terms = decompose(torch.ones(2, 4), sinusoidal(2, 4), torch.ones(3, 4), sinusoidal(3, 4))
    >>> torch.allclose(sum(terms), (1 + sinusoidal(2, 4)) @ (1 + sinusoidal(3, 4)).mT)
    True
    """
    shapes = [tuple(t.shape) for t in (content_q, position_q, content_k, position_k)]
    if any(len(shape) < 2 for shape in shapes) or len({shape[-1] for shape in shapes}) > 1:
        raise ShapeError(f"decompose: all four must be (…, length, dim) with the same dim; got {shapes}.")
    if shapes[0][-2] != shapes[1][-2] or shapes[2][-2] != shapes[3][-2]:
        raise ShapeError(
            f"decompose: content and position of query, and of key, must have the same length; got {shapes}."
        )
    return Terms(
        content_q @ content_k.mT,
        content_q @ position_k.mT,
        position_q @ content_k.mT,
        position_q @ position_k.mT,
    )


def alias_period(periods: Iterable[int]) -> int:
    """Give the smallest offset at which all integer periods repeat: their least common multiple.

    >>> alias_period([8, 12]), alias_period([8, 13])
    (24, 104)
    """
    found = list(periods)
    if not found:
        raise ArgumentError("alias_period: there must be at least one period; got none.")
    for period in found:
        _integer("alias_period", "every period", period, least=1)
    return math.lcm(*found)


def aliases(encoding: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Find the positions i < j whose encodings (length, dim) differ by at most `tolerance` in every coordinate.

    The pairs are sorted, (pairs, 2); the length × length distances are never held at once.

    >>> aliases(sinusoidal(7, periods=[2, 3])).tolist()
    [[0, 6]]
    """
    if encoding.ndim != 2:
        raise ShapeError(f"aliases: encoding must be (length, dim); got {tuple(encoding.shape)}.")
    if not encoding.is_floating_point():
        raise DtypeError(
            f"aliases: encoding must be of a floating dtype; got {encoding.dtype}. Convert it with .float()."
        )
    if not tolerance >= 0:
        raise ArgumentError(f"aliases: tolerance must not be negative; got {tolerance}.")
    points = encoding.detach().to(arithmetic_dtype(encoding.dtype))
    length = points.shape[0]
    block = max(1, (1 << 20) // max(length, 1))
    found = [torch.empty(0, 2, dtype=torch.int64, device=points.device)]
    for start in range(0, length, block):
        near = torch.cdist(points[start : start + block], points[start:], p=math.inf) <= tolerance
        found.append(near.triu(1).nonzero() + start)
    return torch.cat(found)


def _integer(name: str, what: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DtypeError(f"{name}: {what} must be an integer; got {value!r}.")
    if value < least:
        raise ArgumentError(f"{name}: {what} must be at least {least}; got {value}.")


def _frequencies(name: str, dim: int, base: float, device: torch.device | str | None) -> Tensor:
    _integer(name, "dim", dim, least=0)
    if dim % 2:
        raise ShapeError(f"{name}: dim must be even, two numbers for each frequency; got {dim}.")
    if not (base > 0 and math.isfinite(base)):
        raise ArgumentError(f"{name}: base must be a finite number above 0; got {base}.")
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / max(dim, 1)
    return torch.pow(float(base), -exponent)


def _rotate(name: str, x: Tensor, positions: Tensor | None, base: float) -> Tensor:
    _check_rotary(name, x, positions)
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    # Angles in float64: in float32 a position of 100,000 would already be wrong by hundredths of a radian.
    angle = positions.to(torch.float64)[..., None] * _frequencies(name, x.shape[-1], base, x.device)
    if positions.ndim == 2:
        angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 3), *angle.shape[1:])
    dtype = arithmetic_dtype(x.dtype)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    first, second = x.to(dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _check_rotary(name: str, x: Tensor, positions: Tensor | None) -> None:
    if not x.is_floating_point():
        raise DtypeError(f"{name}: x must be of a floating dtype; got {x.dtype}. Convert it with .float().")
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ShapeError(f"{name}: x must be (…, length, dim) with an even dim; got {tuple(x.shape)}.")
    if positions is None:
        return
    if positions.dtype.is_complex or positions.dtype == torch.bool:
        raise DtypeError(f"{name}: positions must be integers or real numbers; got {positions.dtype}.")
    if positions.device != x.device:
        raise DeviceError(
            f"{name}: positions are on {positions.device} and x is on {x.device}; they must be on one device. "
            f"Move them with positions.to({str(x.device)!r})."
        )
    fits = positions.ndim == 1 or (positions.ndim == 2 and x.ndim >= 3 and positions.shape[0] in (1, x.shape[0]))
    if not fits or positions.shape[-1] != x.shape[-2]:
        raise ShapeError(
            f"{name}: positions must be (length,) or (batch, length) of x; "
            f"got positions {tuple(positions.shape)} for x {tuple(x.shape)}."
        )
