"""How elementwise operations of torch become nodes of an expression: all that a traced function may do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from regard.scores.expression import BOOL, FLOAT, INT, Expression

__all__ = ["LOWERED", "At", "Lowering", "NoRuleError"]


class At(NamedTuple):
    """The place of a node, which a number is not."""

    place: int


Value: TypeAlias = "At | float | int | bool"
_OF_TRUTH_VALUES = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


class NoRuleError(Exception):
    """A form of an operation that has no rule here."""


@dataclass(frozen=True)
class Lowering:
    """Operations by the rules of torch, which casts integers to floats and booleans to integers where it needs to."""

    e: Expression

    def at(self, x: Value) -> int:
        return x.place if isinstance(x, At) else self.e.constant(x)

    def kind(self, place: int) -> str:
        return self.e.nodes[place].kind

    def floating(self, x: Value) -> int:
        return self.e.cast(self.at(x), FLOAT)

    def alike(self, *values: Value) -> tuple[str, list[int]]:
        """The common kind of numbers, no boolean, and these numbers of that kind."""
        places = [self.at(x) for x in values]
        kind = FLOAT if any(self.kind(p) == FLOAT for p in places) else INT
        return kind, [self.e.cast(p, kind) for p in places]

    def arithmetic(self, op: str, *values: Value) -> At:
        truth_values = all(self.kind(self.at(x)) == BOOL for x in values)
        if truth_values and op in _OF_TRUTH_VALUES:
            return self.logical(_OF_TRUTH_VALUES[op], *values)
        if truth_values and op in ("sub", "neg"):
            raise NoRuleError(" of truth values, which torch does not subtract; ^ and ~ take them")
        kind, places = self.alike(*values)
        return At(self.e.add(op, kind, *places))

    def real(self, op: str, *values: Value) -> At:
        """An operation whose result is floating."""
        return At(self.e.add(op, FLOAT, *map(self.floating, values)))

    def compare(self, op: str, a: Value, b: Value) -> At:
        return At(self.e.add(op, BOOL, *self.alike(a, b)[1]))

    def logical(self, op: str, *values: Value) -> At:
        return At(self.e.add(op, BOOL, *(self.e.cast(self.at(x), BOOL) for x in values)))

    def bitwise(self, op: str, *values: Value) -> At:
        kinds = {self.kind(self.at(x)) for x in values}
        if FLOAT in kinds:
            raise NoRuleError
        if kinds == {BOOL}:
            return self.logical(op, *values)
        return self.arithmetic(f"bit{op}", *values)

    def add(self, a: Value, b: Value) -> At:
        return self.arithmetic("add", a, b)

    def sub(self, a: Value, b: Value) -> At:
        return self.arithmetic("sub", a, b)

    def mul(self, a: Value, b: Value) -> At:
        return self.arithmetic("mul", a, b)

    def div(self, a: Value, b: Value) -> At:
        return self.real("div", a, b)

    def neg(self, a: Value) -> At:
        return self.arithmetic("neg", a)

    def where(self, condition: Value, a: Value, b: Value) -> At:
        places = [self.at(x) for x in (a, b)]
        kinds = {self.kind(p) for p in places}
        kind, places = (BOOL, places) if kinds == {BOOL} else self.alike(a, b)
        return At(self.e.add("where", kind, self.e.cast(self.at(condition), BOOL), *places))

    def floored(self, a: Value, b: Value) -> At:
        kind, places = self.alike(a, b)
        return At(self.e.add("floordiv", INT, *places)) if kind == INT else self.real("floor", self.div(a, b))

    def truncated(self, x: Value) -> At:
        if self.kind(self.at(x)) != FLOAT:
            return At(self.at(x))
        return self.where(self.compare("lt", x, 0), self.real("ceil", x), self.real("floor", x))

    def divided(self, a: Value, b: Value, rounding_mode: str | None = None) -> At:
        if rounding_mode is None:
            return self.div(a, b)
        if rounding_mode == "floor":
            return self.floored(a, b)
        whole = self.alike(a, b)[0] == INT
        found = self.truncated(self.div(a, b))
        return At(self.e.cast(found.place, INT)) if whole else found

    def remainder(self, a: Value, b: Value) -> At:
        kind, places = self.alike(a, b)
        if kind == INT:
            return At(self.e.add("mod", INT, *places))
        return self.sub(a, self.mul(b, self.floored(a, b)))

    def rounded(self, x: Value, op: str) -> At:
        return At(self.at(x)) if self.kind(self.at(x)) != FLOAT else self.real(op, x)

    def clamp(self, x: Value, low: Value | None = None, high: Value | None = None) -> At:
        """Of a float by a choice, whose derivative at both ends is 1, as torch has it."""
        ends = [end for end in (low, high) if end is not None]
        if self.alike(x, *ends)[0] == INT:
            x = x if low is None else self.arithmetic("maximum", x, low)
            return At(self.at(x)) if high is None else self.arithmetic("minimum", x, high)
        if low is not None:
            x = self.where(self.compare("lt", x, low), low, x)
        return self.where(self.compare("gt", x, high), high, x) if high is not None else At(self.at(x))

    def power(self, base: Value, exponent: Value) -> At:
        number = None if isinstance(exponent, At) else exponent
        number = self.e.number(exponent.place) if isinstance(exponent, At) else number
        if number is not None and float(number).is_integer() and abs(number) <= 8:
            whole = int(number)
            if self.kind(self.at(base)) != FLOAT and (whole < 0 or isinstance(number, float)):
                base = At(self.floating(base))
            found: Value = 1 if self.kind(self.at(base)) != FLOAT else 1.0
            for _ in range(abs(whole)):
                found = self.mul(found, base)
            return At(self.at(found)) if whole >= 0 else self.div(1.0, found)
        if number is not None and abs(number) == 0.5:
            root = self.real("sqrt", base)
            return root if number > 0 else self.div(1.0, root)
        if self.alike(base, exponent)[0] == INT:
            raise NoRuleError(" of whole numbers, which needs a floating base, such as 2.0 ** i")
        if self.e.number(self.at(base)) == 2:
            return self.real("exp2", exponent)
        return self.real("pow", base, exponent)

    def convert(self, x: Value, dtype: torch.dtype | None = None, **_: Any) -> At:
        place = self.at(x)
        if dtype is None:
            return At(place)
        if dtype.is_complex:
            raise NoRuleError
        return At(self.e.cast(place, FLOAT if dtype.is_floating_point else BOOL if dtype == torch.bool else INT))

    def filled(self, like: Value, number: Value, dtype: torch.dtype | None) -> At:
        """A number of this dtype, or without one, of the kind of `like`."""
        if dtype is not None:
            return self.convert(number, dtype)
        return At(self.e.cast(self.at(number), self.kind(self.at(like))))

    def sigmoid(self, x: Value) -> At:
        return self.real("sigmoid", x)

    def softplus(self, x: Value, beta: float = 1, threshold: float = 20) -> At:
        scaled = self.mul(self.floating_at(x), float(beta))
        soft = self.div(self.real("log1p", self.real("exp", scaled)), float(beta))
        return self.where(self.compare("gt", scaled, float(threshold)), self.floating_at(x), soft)

    def floating_at(self, x: Value) -> At:
        return At(self.floating(x))

    def gelu(self, x: Value, approximate: str = "none") -> At:
        if approximate == "none":
            share = self.mul(0.5, self.add(1.0, self.real("erf", self.mul(x, math.sqrt(0.5)))))
            return self.mul(x, share)
        inner = self.mul(math.sqrt(2 / math.pi), self.add(x, self.mul(0.044715, self.power(x, 3))))
        return self.mul(self.mul(0.5, x), self.add(1.0, self.real("tanh", inner)))

    def elu(self, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> At:
        low = self.mul(float(alpha), self.real("expm1", self.mul(x, float(input_scale))))
        return self.mul(float(scale), self.where(self.compare("gt", x, 0.0), x, low))

    def logaddexp(self, a: Value, b: Value) -> At:
        high = self.real("maximum", a, b)
        return self.add(high, self.real("log1p", self.real("exp", self.neg(self.arithmetic("abs", self.sub(a, b))))))

    def detached(self, x: Value) -> At:
        place = self.at(x)
        if self.kind(place) != FLOAT or self.e.number(place) is not None:  # there is no derivative to stop
            return At(place)
        return At(self.e.add("stop", FLOAT, place))


Rule = Callable[..., At]
LOWERED: dict[str, Rule] = {  # by the names of torch's operators, with the names of their arguments
    "add": lambda e, self, other, alpha=1: e.add(self, other if alpha == 1 else e.mul(other, alpha)),
    "sub": lambda e, self, other, alpha=1: e.sub(self, other if alpha == 1 else e.mul(other, alpha)),
    "rsub": lambda e, self, other, alpha=1: e.sub(other, self if alpha == 1 else e.mul(self, alpha)),
    "mul": lambda e, self, other: e.mul(self, other),
    "div": lambda e, self, other, rounding_mode=None: e.divided(self, other, rounding_mode),
    "floor_divide": lambda e, self, other: e.floored(self, other),
    "remainder": lambda e, self, other: e.remainder(self, other),
    "fmod": lambda e, self, other: e.sub(self, e.mul(other, e.divided(self, other, "trunc"))),
    "reciprocal": lambda e, self: e.div(1.0, self),
    "neg": lambda e, self: e.neg(self),
    "abs": lambda e, self: e.arithmetic("abs", self),
    "sign": lambda e, self: e.arithmetic("sign", self),
    "sgn": lambda e, self: e.arithmetic("sign", self),
    "exp": lambda e, self: e.real("exp", self),
    "exp2": lambda e, self: e.real("exp2", self),
    "expm1": lambda e, self: e.real("expm1", self),
    "log": lambda e, self: e.real("log", self),
    "log2": lambda e, self: e.real("log2", self),
    "log10": lambda e, self: e.real("log10", self),
    "log1p": lambda e, self: e.real("log1p", self),
    "sqrt": lambda e, self: e.real("sqrt", self),
    "rsqrt": lambda e, self: e.div(1.0, e.real("sqrt", self)),
    "square": lambda e, self: e.mul(self, self),
    "pow": lambda e, self, exponent: e.power(self, exponent),
    "tanh": lambda e, self: e.real("tanh", self),
    "sigmoid": lambda e, self: e.sigmoid(self),
    "sin": lambda e, self: e.real("sin", self),
    "cos": lambda e, self: e.real("cos", self),
    "erf": lambda e, self: e.real("erf", self),
    "tan": lambda e, self: e.div(e.real("sin", self), e.real("cos", self)),
    "sinh": lambda e, self: e.mul(0.5, e.sub(e.real("exp", self), e.real("exp", e.neg(self)))),
    "cosh": lambda e, self: e.mul(0.5, e.add(e.real("exp", self), e.real("exp", e.neg(self)))),
    "atan": lambda e, self: e.real("atan", self),
    "asinh": lambda e, self: e.real("asinh", self),
    "relu": lambda e, self: e.where(e.compare("gt", self, 0), self, 0),
    "leaky_relu": lambda e, self, negative_slope=0.01: e.where(
        e.compare("gt", self, 0), self, e.mul(self, float(negative_slope))
    ),
    "hardtanh": lambda e, self, min_val=-1.0, max_val=1.0: e.clamp(self, min_val, max_val),
    "elu": lambda e, self, **kwargs: e.elu(self, **kwargs),
    "softplus": lambda e, self, **kwargs: e.softplus(self, **kwargs),
    "silu": lambda e, self: e.mul(self, e.sigmoid(self)),
    "gelu": lambda e, self, **kwargs: e.gelu(self, **kwargs),
    "logaddexp": lambda e, self, other: e.logaddexp(self, other),
    "clamp": lambda e, self, min=None, max=None: e.clamp(self, min, max),
    "clamp_min": lambda e, self, min: e.clamp(self, min),
    "clamp_max": lambda e, self, max: e.clamp(self, None, max),
    "maximum": lambda e, self, other: e.arithmetic("maximum", self, other),
    "minimum": lambda e, self, other: e.arithmetic("minimum", self, other),
    "where": lambda e, condition, self, other: e.where(condition, self, other),
    "masked_fill": lambda e, self, mask, value: e.where(mask, value, self),
    "floor": lambda e, self: e.rounded(self, "floor"),
    "ceil": lambda e, self: e.rounded(self, "ceil"),
    "round": lambda e, self: e.rounded(self, "round"),
    "trunc": lambda e, self: e.truncated(self),
    **{
        name: lambda e, self, other, name=name: e.compare(name, self, other)
        for name in ("lt", "le", "eq", "ne", "gt", "ge")
    },
    **{
        f"logical_{name}": lambda e, self, other, name=name: e.logical(name, self, other)
        for name in ("and", "or", "xor")
    },
    **{
        f"bitwise_{name}": lambda e, self, other, name=name: e.bitwise(name, self, other)
        for name in ("and", "or", "xor")
    },
    **{f"__{name}__": lambda e, self, other, name=name: e.bitwise(name, self, other) for name in ("and", "or", "xor")},
    "logical_not": lambda e, self: e.logical("not", self),
    "bitwise_not": lambda e, self: e.bitwise("not", self),
    "isnan": lambda e, self: e.compare("ne", self, self),
    "isinf": lambda e, self: e.compare("eq", e.arithmetic("abs", self), math.inf),
    "lerp": lambda e, self, end, weight: e.add(self, e.mul(weight, e.sub(end, self))),
    "addcmul": lambda e, self, tensor1, tensor2, value=1: e.add(self, e.mul(value, e.mul(tensor1, tensor2))),
    "addcdiv": lambda e, self, tensor1, tensor2, value=1: e.add(self, e.mul(value, e.div(tensor1, tensor2))),
    "_to_copy": lambda e, self, dtype=None, **_: e.convert(self, dtype),
    "clone": lambda e, self, **_: At(e.at(self)),
    "alias": lambda e, self: At(e.at(self)),
    "lift_fresh": lambda e, self: At(e.at(self)),
    "detach": lambda e, self: e.detached(self),
    "zeros_like": lambda e, self, dtype=None, **_: e.filled(self, 0, dtype),
    "ones_like": lambda e, self, dtype=None, **_: e.filled(self, 1, dtype),
    "full_like": lambda e, self, fill_value, dtype=None, **_: e.filled(self, fill_value, dtype),
}
