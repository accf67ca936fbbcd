"""Any function of one score and its four indices, on top of another score."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DtypeError
from regard.scores.base import Prepared, Score
from regard.scores.elementwise import Pairs, apply
from regard.scores.scaled import Scaled
from regard.scores.tracing import Bound, Traced, trace

__all__ = ["Pointwise"]

_UNKNOWN = object()
_MOST_FITS = 256


class _Known(NamedTuple):
    """What is known of a function as long as it captures the same objects."""

    state: tuple[Any, ...]  # what it captures, and the shapes and dtypes of its parameters
    traced: dict[torch.dtype, Traced]  # by the dtype of scores
    fits: set[tuple[Any, ...]]  # sizes of problems, and whether they have a mask: no index is beyond its table there


class Pointwise(Score):
    """Change each score by a function of it: f(score, batch, head, i, j), as the `score_mod` of FlexAttention.

    `f` is written for single numbers, in elementwise torch operations; `batch`, `head`, row `i` and key `j` are whole
    numbers. It may read captured tensors by index, `table[head, i - j]`, which get gradients. So do `parameters`: `f`
    takes them by name after its five arguments, and they belong to this module. `base` gives the scores that it
    changes, q·k/√D if it is None. The cap, the bias and the mask of a call come after it. A score of −inf hides a pair.

    >>> import torch
    >>> decayed = Pointwise(lambda score, batch, head, i, j: score - 0.5 * (i - j).abs())
    >>> decayed(torch.zeros(3, 4), torch.zeros(3, 4))
    tensor([[ 0.0000, -0.5000, -1.0000],
            [-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """

    pairwise = True
    _known: _Known | None = None
    known_form: object = None  # what `regard.kernels.known_form` found last

    def __init__(
        self, f: Callable[..., Tensor], base: Score | None = None, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        if not callable(f):
            raise DtypeError(f"Pointwise: f must be a function f(score, batch, head, i, j). Got {type(f).__name__}.")
        if base is not None and not isinstance(base, Score):
            raise DtypeError(f"Pointwise: base must be a regard.scores Score, or None. Got {type(base).__name__}.")
        if isinstance(base, Pointwise):
            raise ArgumentError(
                "Pointwise: base is a Pointwise itself. Call one function in the other: f(g(score, …), …)."
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise DtypeError(
                f"Pointwise: parameters must be a dict, of tensors by name. Got {type(parameters).__name__}."
            )
        self.base = Scaled() if base is None else base
        self.same_dims = self.base.same_dims  # type: ignore[misc]
        self.f = f
        self.names = tuple({} if parameters is None else parameters)
        for name, x in ({} if parameters is None else parameters).items():
            self._register(name, x)
        _check_signature(f, self.names)

    def _register(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(f"Pointwise: the parameter {name} must be a tensor. Got {type(x).__name__}.")
        if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
            raise ArgumentError(f"Pointwise: {name!r} cannot be the name of a parameter here. Choose another name.")
        if isinstance(x, nn.Parameter):
            self.register_parameter(name, x)
        else:
            self.register_buffer(name, x)

    @property
    def given(self) -> dict[str, Tensor]:
        """The parameters that `f` takes, by name."""
        return {name: getattr(self, name) for name in self.names}

    def traced(self, dtype: torch.dtype) -> Traced:
        """What `f` does with scores of this dtype; traced again only if it captures another object than before."""
        given = self.given
        now = (_state(self.f), tuple((x.shape, x.dtype) for x in given.values()))
        if self._known is None or self._known.state != now or now[0] is _UNKNOWN:
            self._known = _Known(now, {}, set())
        known = self._known.traced
        if dtype not in known:
            known[dtype] = trace(self.f, given, dtype)
        return known[dtype]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        captured = self.traced(torch.float32).captured
        holds = self._parameters or self._buffers or len(self._modules) > 1 or self.base.tensors
        own = super().tensors if holds else ()  # searching an empty module takes as long as everything else here
        return *own, *(x for x in captured if isinstance(x, Tensor))

    def misfit(self, query_dim: int, key_dim: int, heads: int) -> str | None:
        return self.base.misfit(query_dim, key_dim, heads)

    def beyond(self, sizes: Mapping[str, int], masked: bool) -> str | None:
        """Say which index is beyond its table for such a problem, or None if none certainly is."""
        traced = self.traced(torch.float32)
        fits = set() if self._known is None else self._known.fits
        if (asked := (*sizes.values(), masked)) in fits:
            return None
        e = traced.expression
        with torch.no_grad():
            shapes = self.read(torch.float32)[0].shapes
        for place in e.loads(traced.value):
            node = e.nodes[place]
            for at, index in enumerate(node.args):
                size = shapes[node.value][at]
                low, high = e.bounds(index, sizes)
                certain = e.attains_bounds(index) and (not masked or len(e.leaves(index)) <= 1)
                if certain and (low < -size or size <= high) and abs(low) + abs(high) < float("inf"):
                    return (
                        f"f reads dimension {at} of a tensor of shape {tuple(shapes[node.value])} at {low} to {high}; "
                        f"it has {size} entries"
                    )
        if not traced.steps and len(fits) < _MOST_FITS:  # what steps make may have another shape next time
            fits.add(asked)
        return None

    def centre(self, query: Tensor, key: Tensor) -> Tensor | None:
        return self.base.centre(query, key)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return self._with_tables(self.base.prepare(query, key))

    def prepare_around(self, centre: Tensor, query: Tensor, key: Tensor) -> Prepared:
        return self._with_tables(self.base.prepare_around(centre, query, key))

    def _with_tables(self, prepared: Prepared) -> Prepared:
        if torch.compiler.is_compiling():  # which traces `f` itself
            return prepared
        dtype = prepared.query.dtype
        return prepared._replace(shared=(*prepared.shared, *self.read(dtype)[1]))

    def read(self, dtype: torch.dtype) -> tuple[Bound, tuple[Tensor, ...]]:
        """What `f` does, and the tables that have derivatives, as they are now."""
        return self.traced(dtype).read(self.given, dtype)

    def pair(self, query: Tensor, key: Tensor, *shared: Tensor) -> Tensor:  # type: ignore[override]
        return self._logits(Prepared(query, key, shared))

    def width(self, query_dim: int, key_dim: int) -> int:
        return self.base.width(query_dim, key_dim)

    @property
    def cost(self) -> int:
        return self.base.cost

    def _logits(self, prepared: Prepared) -> Tensor:
        compiling = torch.compiler.is_compiling()
        bound = None if compiling else self.read(prepared.query.dtype)[0]
        count = len(prepared.shared) - (0 if bound is None else bound.differentiable)
        scores = self.base._logits(prepared._replace(shared=prepared.shared[:count]))  # (…, H, N, M)
        flat = scores.reshape(math.prod(scores.shape[:-3]), *scores.shape[-3:])
        batch, head, row, key = (torch.arange(size, device=scores.device) for size in flat.shape)
        pairs = Pairs(batch[:, None, None, None], head[:, None, None], row[:, None], key)
        if bound is None:
            return self.f(flat, *pairs, **self.given).expand(flat.shape).reshape(scores.shape)
        return apply(bound, pairs, prepared.shared[count:], flat, None).reshape(scores.shape)

    def extra_repr(self) -> str:
        return f"f={getattr(self.f, '__name__', type(self.f).__name__)}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "known_form": None}


def _check_signature(f: Callable[..., Any], names: tuple[str, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    try:
        inspect.signature(f).bind(0, 0, 0, 0, 0, **dict.fromkeys(names))
    except ValueError:  # some built-in functions have no signature
        return
    except TypeError:
        wanted = ", ".join(("score", "batch", "head", "i", "j", *names))
        raise ArgumentError(
            f"Pointwise: f must take f({wanted}), and may ignore any of them; got f{inspect.signature(f)}."
        ) from None


def _state(f: Any) -> Any:
    """What decides how a function is traced, as far as Python shows it; `_UNKNOWN` if it may depend on more."""
    found = _parts(f, 6)
    return _UNKNOWN if found is None else found


def _parts(x: Any, depth: int) -> tuple[Any, ...] | None:
    if x is None or isinstance(x, bool | int | float | str | torch.dtype | torch.device):
        return (type(x), repr(x))
    if isinstance(x, Tensor):
        return ("tensor", id(x), x.shape, x.dtype)
    if isinstance(x, ModuleType | type | BuiltinFunctionType | CodeType) or _is_of_torch(x):
        return ("object", id(x))
    if not depth:
        return None
    inside: list[Any]
    if isinstance(x, FunctionType):
        inside = [*(cell.cell_contents for cell in x.__closure__ or ()), *(x.__defaults__ or ())]
        inside += (x.__kwdefaults__ or {}).values()
        inside += [x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__]
        head: Any = x.__code__
    elif isinstance(x, partial):
        inside, head = [x.func, *x.args, *x.keywords.values()], tuple(x.keywords)
    elif isinstance(x, list | tuple):
        inside, head = list(x), len(x)
    else:
        return None
    parts = [_parts(y, depth - 1) for y in inside]
    return (
        None if any(p is None for p in parts) else (type(x), id(head) if isinstance(head, CodeType) else head, *parts)
    )


def _is_of_torch(x: Any) -> bool:
    """Whether a function is one of torch's own, which does not change."""
    return callable(x) and (getattr(x, "__module__", None) or "").partition(".")[0] in ("torch", "math")


def _names(code: CodeType) -> list[str]:
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    return [*code.co_names, *inner]
