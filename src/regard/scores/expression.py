"""Elementwise expressions of a score and four indices: what a traced function is, with its derivatives.

An expression is a list of nodes, each an operation on earlier ones. Torch evaluates it on tensors that broadcast;
kernels are generated from it. Derivatives are expressions too, by forward mode: a branch that `where` does not take
adds nothing, not even a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BOOL", "FLOAT", "INDICES", "INT", "SCORE", "Expression", "Node", "entries", "look_up"]

FLOAT, INT, BOOL = "float", "int", "bool"
SCORE = "score"
INDICES = ("batch", "head", "row", "key")
_FLAT = frozenset(("floor", "ceil", "round", "sign", "float", "stop"))  # without a derivative
_WITHIN_ONE = frozenset(("tanh", "sigmoid", "erf", "sign"))  # of infinite numbers, too
_LARGE = 1e30  # of which a product with what a gradient has in float32 stays finite
_MAY_BE_INFINITE = frozenset(("load", "log", "log2", "log10", "log1p", "div", "pow"))  # operations that can give −inf


class Node(NamedTuple):
    """An operation; its arguments are places of earlier nodes."""

    op: str
    kind: str
    args: tuple[int, ...] = ()
    value: Any = None  # of a constant; of a load, the number of its table


class Expression:
    """Nodes that only grow: equal ones are one, so every place means the same for good.

    >>> e = Expression()
    >>> squared = e.add("mul", FLOAT, e.score, e.score)
    >>> e.evaluate([squared, e.derivative(squared, e.score)], {"score": torch.tensor(3.0)}, {})
    [tensor(9.), tensor(6.)]
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._places: dict[Node, int] = {}
        self._derivatives: dict[tuple[int, int], int | None] = {}
        self.generated: dict[Any, Any] = {}  # the kernels' functions for some nodes, kept here by those who make them
        self.score = self.add(SCORE, FLOAT)

    def add(self, op: str, kind: str, *args: int, value: Any = None) -> int:
        """The place of an operation."""
        simple = self._simplified(op, kind, args)
        if simple is not None:
            return simple
        node = Node(op, kind, args, value)
        key = node if op != "const" else node._replace(value=(type(value), repr(value)))  # 0.0 and −0.0 differ
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.nodes)
            self.nodes.append(node)
        return place

    def constant(self, value: float | int | bool) -> int:
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        return self.add("const", kind, value=value)

    def number(self, place: int) -> Any:
        """The value of a constant; None for any other node."""
        node = self.nodes[place]
        return node.value if node.op == "const" else None

    def cast(self, place: int, kind: str) -> int:
        node = self.nodes[place]
        if node.kind == kind:
            return place
        if node.op == "const":
            made = {FLOAT: float, BOOL: bool, INT: int}[kind]
            return self.constant(made(node.value))
        return self.add(kind, kind, place)

    def _simplified(self, op: str, kind: str, args: tuple[int, ...]) -> int | None:
        if len(args) != 2 or op not in ("add", "sub", "mul", "div"):
            return None
        a, b = (self.number(x) for x in args)
        if a is not None and b is not None and op != "div":
            value = {"add": a + b, "sub": a - b, "mul": a * b}[op]
            return self.constant(float(value) if kind == FLOAT else int(value))
        if (op == "mul" and a == 1) or (op == "add" and a == 0):
            return args[1]
        if (op in ("mul", "div") and b == 1) or (op in ("add", "sub") and b == 0):
            return args[0]
        return None

    def needed(self, places: Iterable[int]) -> list[int]:
        """The places that these depend on, themselves included, in order."""
        found: set[int] = set()
        rest = list(places)
        while rest:
            place = rest.pop()
            if place not in found:
                found.add(place)
                rest += self.nodes[place].args
        return sorted(found)

    def leaves(self, place: int) -> frozenset[str]:
        """Which of the score, the indices and "load" an expression depends on."""
        return frozenset(self.nodes[p].op for p in self.needed([place])) & {SCORE, *INDICES, "load"}

    def loads(self, place: int) -> list[int]:
        return [p for p in self.needed([place]) if self.nodes[p].op == "load"]

    def may_hide(self, place: int) -> bool:
        """Whether a value can be −inf, which hides a pair, for a finite score."""
        nodes = [self.nodes[p] for p in self.needed([place])]
        infinite = any(n.op == "const" and n.kind == FLOAT and math.isinf(n.value) for n in nodes)
        return infinite or any(n.op in _MAY_BE_INFINITE and n.kind == FLOAT for n in nodes)

    def evaluate(self, places: Sequence[int], leaves: Mapping[str, Tensor], loads: Mapping[int, Tensor]) -> list[Any]:
        """The values of some nodes: `leaves` has the score and the indices, `loads` what the loads give, by place."""
        found: dict[int, Any] = {}
        like = leaves[SCORE]
        for place in self.needed(places):
            node = self.nodes[place]
            if node.op == "load":
                found[place] = loads[place]
            elif node.op == "const":
                found[place] = node.value
            elif node.op in leaves:
                found[place] = leaves[node.op]
            else:
                found[place] = _evaluated(node, [found[x] for x in node.args], like)
        return [found[place] for place in places]

    def derivative(self, place: int, by: int) -> int:
        """The place of the derivative of a float by the score or by a load."""
        found = self._derivative(place, by)
        return self.constant(0.0) if found is None else found

    def _derivative(self, place: int, by: int) -> int | None:
        """The same; None if it is 0 everywhere."""
        if place == by:
            return self.constant(1.0)
        node = self.nodes[place]
        if node.kind != FLOAT or not node.args or node.op in _FLAT or node.op == "load":
            return None
        key = (place, by)
        if key not in self._derivatives:
            inner = [self._derivative(x, by) for x in node.args]
            self._derivatives[key] = None if all(d is None for d in inner) else self._chain(place, node, inner)
        return self._derivatives[key]

    def _chain(self, place: int, node: Node, d: list[int | None]) -> int | None:
        """The derivative of an operation from those of its arguments."""
        if node.op == "where":
            zero = self.constant(0.0)
            return self.add("where", FLOAT, node.args[0], *(zero if x is None else x for x in d[1:]))
        if node.op in ("maximum", "minimum"):
            return self._chain_of_extremum(node, d)
        if node.op in ("add", "sub"):
            a, b = d
            if b is None:
                return a
            if a is None:
                return b if node.op == "add" else self.add("neg", FLOAT, b)
            return self.add(node.op, FLOAT, a, b)
        total: int | None = None
        for inner, outer in zip(d, self._partials(place, node), strict=True):
            if inner is not None:
                term = self.add("mul", FLOAT, outer(), inner)
                total = term if total is None else self.add("add", FLOAT, total, term)
        return total

    def _chain_of_extremum(self, node: Node, d: list[int | None]) -> int:
        """As in torch: the derivative of the larger one, and the mean of both where they are equal."""
        a, b = (self.constant(0.0) if x is None else x for x in d)
        both = self._mul(self.constant(0.5), self.add("add", FLOAT, a, b))
        tied = self.add("eq", BOOL, *node.args)
        first = self.add("gt" if node.op == "maximum" else "lt", BOOL, *node.args)
        return self.add("where", FLOAT, tied, both, self.add("where", FLOAT, first, a, b))

    def _mul(self, a: int, b: int) -> int:
        return self.add("mul", FLOAT, a, b)

    def _unless_zero(self, x: int, value: int) -> int:
        """0 where x is 0, which in a derivative of a power would be multiplied by an infinite number."""
        zero = self.constant(0.0)
        return self.add("where", FLOAT, self.add("eq", BOOL, x, zero), zero, value)

    def _partials(self, place: int, node: Node) -> list[Callable[[], int]]:
        """The derivative of an operation by each argument."""
        a = node.args[0]
        one = self.constant(1.0)
        if node.op == "mul":
            return [lambda: node.args[1], lambda: a]
        if node.op == "div":
            b = node.args[1]
            inverse = self.add("div", FLOAT, one, b)
            return [lambda: inverse, lambda: self.add("neg", FLOAT, self._mul(place, inverse))]
        if node.op == "pow":
            b = node.args[1]
            return [
                lambda: self._unless_zero(b, self._mul(b, self.add("pow", FLOAT, a, self.add("sub", FLOAT, b, one)))),
                lambda: self._unless_zero(a, self._mul(place, self.add("log", FLOAT, a))),
            ]
        if node.op == "erf":
            bell = self.add("exp", FLOAT, self.add("neg", FLOAT, self._mul(a, a)))
            return [lambda: self._mul(self.constant(2 / math.sqrt(math.pi)), bell)]
        rules: dict[str, Callable[[], int]] = {
            "neg": lambda: self.constant(-1.0),
            "abs": lambda: self.add("sign", FLOAT, a),
            "exp": lambda: place,
            "log": lambda: self.add("div", FLOAT, one, a),
            "exp2": lambda: self._mul(place, self.constant(math.log(2))),
            "log2": lambda: self.add("div", FLOAT, self.constant(1 / math.log(2)), a),
            "log10": lambda: self.add("div", FLOAT, self.constant(1 / math.log(10)), a),
            "sqrt": lambda: self.add("div", FLOAT, self.constant(0.5), place),
            "tanh": lambda: self.add("sub", FLOAT, one, self._mul(place, place)),
            "sigmoid": lambda: self._mul(place, self.add("sub", FLOAT, one, place)),
            "sin": lambda: self.add("cos", FLOAT, a),
            "cos": lambda: self.add("neg", FLOAT, self.add("sin", FLOAT, a)),
            "log1p": lambda: self.add("div", FLOAT, one, self.add("add", FLOAT, one, a)),
            "expm1": lambda: self.add("add", FLOAT, place, one),
            "atan": lambda: self.add("div", FLOAT, one, self.add("add", FLOAT, one, self._mul(a, a))),
            "asinh": lambda: self.add(
                "div", FLOAT, one, self.add("sqrt", FLOAT, self.add("add", FLOAT, one, self._mul(a, a)))
            ),
        }
        return [rules[node.op]]

    def on_diagonal(self, place: int) -> bool:
        """Whether an expression depends on row and key through row − key alone."""
        kinds: dict[int, tuple[int, int] | bool] = {}  # (row's factor, key's) if it is affine in both; else whether …
        for p in self.needed([place]):
            node = self.nodes[p]
            inner = [kinds[x] for x in node.args]
            if node.op in ("row", "key"):
                kinds[p] = (1, 0) if node.op == "row" else (0, 1)
            elif not node.args:
                kinds[p] = (0, 0)
            else:
                kinds[p] = self._affine(node, inner)
        found = kinds[place]
        return found if isinstance(found, bool) else found[0] == -found[1]

    def _affine(self, node: Node, inner: list[tuple[int, int] | bool]) -> tuple[int, int] | bool:
        pairs = [x for x in inner if not isinstance(x, bool)]
        if len(pairs) == len(inner):
            if node.op in ("add", "sub"):
                sign = 1 if node.op == "add" else -1
                return pairs[0][0] + sign * pairs[1][0], pairs[0][1] + sign * pairs[1][1]
            if node.op == "neg":
                return -pairs[0][0], -pairs[0][1]
            if node.op == "float" or (node.op == "int" and pairs[0] == (0, 0)):  # int rounds towards 0
                return pairs[0]
        return all(x if isinstance(x, bool) else x[0] == -x[1] for x in inner)

    def bounds(self, place: int, sizes: Mapping[str, int]) -> tuple[float, float]:
        """The least and the greatest value over all indices and scores; ±inf where nothing is known."""
        found: dict[int, tuple[float, float]] = {}
        for p in self.needed([place]):
            node = self.nodes[p]
            if node.op in INDICES:
                found[p] = 0, sizes[node.op] - 1
            elif node.op == "const" and node.kind != BOOL and math.isfinite(node.value):
                found[p] = node.value, node.value
            else:
                found[p] = _bounded(node, [found[x] for x in node.args])
        return found[place]

    def attains_bounds(self, place: int) -> bool:
        """Whether some indices give the least and the greatest value: nothing is chosen, and each occurs once.

        >>> e = Expression()
        >>> i, j = e.add("row", INT), e.add("key", INT)
        >>> e.attains_bounds(e.add("sub", INT, i, j)), e.attains_bounds(e.add("sub", INT, i, e.add("neg", INT, i)))
        (True, False)
        """
        nodes = {p: self.nodes[p] for p in self.needed([place])}
        uses = [x for node in nodes.values() for x in node.args if nodes[x].op != "const"]
        return len(uses) == len(set(uses)) and all(node.op != "where" for node in nodes.values())

    def is_bounded(self, place: int) -> bool:
        """Whether a value is known to be within the range of float32 for every finite score.

        >>> e = Expression()
        >>> e.is_bounded(e.add("tanh", FLOAT, e.score)), e.is_bounded(e.add("exp", FLOAT, e.score))
        (True, False)
        """
        low, high = self.bounds(place, dict.fromkeys(INDICES, 2**31))
        return low > -_LARGE and high < _LARGE


def _bounded(node: Node, inner: list[tuple[float, float]]) -> tuple[float, float]:
    unknown = (-math.inf, math.inf)
    if node.op in _WITHIN_ONE:
        return -1, 1
    if node.op == "where":
        inner = inner[1:]
        return min(low for low, _ in inner), max(high for _, high in inner)
    if not inner or any(math.isinf(end) for pair in inner for end in pair):
        return unknown
    if node.op in ("sin", "cos"):
        return -1, 1
    base = _base_of(node, inner)
    if base > 0:
        low, high = sorted(math.exp(min(end * math.log(base), 100.0)) for end in inner[-1])
        return (low, high) if high < _LARGE else unknown
    if node.op in ("float", "stop"):
        return inner[0]
    if node.op == "neg":
        return -inner[0][1], -inner[0][0]
    if node.op == "abs":
        low, high = inner[0]
        return max(low, -high, 0), max(-low, high)
    if len(inner) != 2:
        return unknown
    (a, b), (c, d) = inner
    ends = {
        "add": (a + c, b + d),
        "sub": (a - d, b - c),
        "maximum": (max(a, c), max(b, d)),
        "minimum": (min(a, c), min(b, d)),
    }
    if node.op == "mul":
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if node.op == "div" and c == d != 0:
        return min(a / c, b / c), max(a / c, b / c)
    if node.kind == INT and node.op == "mod" and c == d > 0:
        return (a, b) if 0 <= a <= b < c else (0, c - 1)
    if node.kind == INT and node.op == "floordiv" and c == d > 0:
        return a // c, b // c
    return ends.get(node.op, unknown)


def _base_of(node: Node, inner: list[tuple[float, float]]) -> float:
    """The constant whose power an operation is; 0 if it is none."""
    if node.op == "pow":
        low, high = inner[0]
        return low if low == high else 0.0
    return {"exp": math.e, "exp2": 2.0}.get(node.op, 0.0)


_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "log": torch.log,
    "sqrt": torch.sqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos,
    "erf": torch.erf, "log1p": torch.log1p, "expm1": torch.expm1, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "maximum": torch.maximum, "minimum": torch.minimum, "lt": torch.lt, "le": torch.le,
    "eq": torch.eq, "ne": torch.ne, "gt": torch.gt, "ge": torch.ge, "and": torch.logical_and, "or": torch.logical_or,
    "xor": torch.logical_xor, "not": torch.logical_not, "bitand": torch.bitwise_and, "bitor": torch.bitwise_or,
    "atan": torch.atan, "asinh": torch.asinh, "exp2": torch.exp2, "log2": torch.log2, "log10": torch.log10,
    "pow": torch.pow,
    "bitxor": torch.bitwise_xor, "bitnot": torch.bitwise_not, "where": torch.where,
}  # fmt: skip


def _evaluated(node: Node, args: list[Any], like: Tensor) -> Tensor:
    if node.op == "stop":
        held: Tensor = args[0].detach()
        return held
    if node.op in (FLOAT, INT, BOOL):
        kind = {FLOAT: like.dtype, INT: torch.int64, BOOL: torch.bool}[node.op]
        return (
            args[0].to(kind) if isinstance(args[0], Tensor) else torch.tensor(args[0], dtype=kind, device=like.device)
        )
    tensors = node.op in ("where", "maximum", "minimum") or not any(isinstance(x, Tensor) for x in args)
    if tensors:  # which no number may stand for
        args = [x if isinstance(x, Tensor) else _tensor(x, like) for x in args]
    return _TORCH[node.op](*args)


def _tensor(x: float | int | bool, like: Tensor) -> Tensor:
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else like.dtype
    return torch.full((), x, dtype=dtype, device=like.device)


def entries(shape: Sequence[int], indices: Sequence[Any], device: torch.device) -> Tensor:
    """Which entries of a flattened table indices mean: counted from the end if negative, the nearest if beyond."""
    at = torch.zeros((), dtype=torch.int64, device=device)
    for index, size in zip(indices, shape, strict=True):
        index = index if isinstance(index, Tensor) else torch.full((), index, device=device)
        at = at * size + torch.where(index < 0, index + size, index).clamp(0, max(size - 1, 0))
    return at


def look_up(table: Tensor, indices: Sequence[Any]) -> Tensor:
    """table[indices] by the rules of torch; an index beyond the table takes its nearest entry.

    The gradient of the table is summed in a fixed order: torch adds up an index on a GPU in order, and on a CPU a
    selection from one dimension.
    """
    if not indices:
        return table
    at = entries(table.shape, indices, table.device)
    flat = table.reshape(-1)
    if not table.is_floating_point() or table.device.type != "cpu":
        return flat[at]
    return flat.index_select(0, at.reshape(-1)).reshape(at.shape)
