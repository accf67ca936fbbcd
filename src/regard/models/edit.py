"""edit: change what single heads of a model do while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from numbers import Integral, Real
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..compat.compiled import original_name
from ..core.problem import Problem
from ..errors import ArgumentError, DtypeError
from ..masks import Mask
from ..observation import Change, Index, Observation, answered
from .interceptor import CallListener
from .interventions import Ablation, Cut, Intervention, Pattern, Scaling
from .listener import Original, observer, suspended, unobserved

__all__ = ["Edit", "edit"]

Heads = int | Sequence[int] | Tensor | None
Some = TypeVar("Some", bound=Intervention)


def edit(model: nn.Module) -> AbstractContextManager[Edit]:
    """Change what heads of `model` do inside the `with` block: ablate them, cut paths, scale weights, set patterns.

    It hears the same calls as `watch`, and the two nest in either order: `watch` then sees the edited heads. Heads
    without an edit compute what they always do. Memory stays linear in the length, and the result is differentiable,
    also in factors that are tensors. Only calls of the thread that entered the block are edited. Inside the block,
    compiled code runs eagerly. Run a backward pass inside the block if the model recomputes activations.

    >>> import torch, regard
    >>> model = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    >>> x = torch.randn(1, 5, 8)
    >>> with torch.no_grad(), regard.edit(model) as edit:
    ...     _ = edit.ablate(0)
    ...     model(x, x, x)[0].abs().max()
    tensor(0.)
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise DtypeError(f"edit: model must be a torch.nn.Module. Got {given}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise DtypeError("edit: model is TorchScript, whose calls cannot be changed. Edit the module it comes from.")
    return Edit(model)


class Edit(AbstractContextManager["Edit"]):
    """The edits of a model: what `with regard.edit(model) as edit:` gives.

    `layer` is the name of the module that attends, as in `seen.layers`, the name of a module around it, or its place in
    the order in which the layers attend first. `heads` is one head, several, or None for all of the layer. `queries`
    and `keys` are rows and columns of the call: a number, a slice, a range, a list or a tensor; None means all.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False) -> None:
        self._model = model
        self._names = [original_name(name) for name, _ in model.named_modules()]
        self._listener = _EditListener(model, exact)
        self._entered = False

    def __repr__(self) -> str:
        count = len(self.interventions)
        return f"Edit({type(self._model).__name__}, {count} intervention{'' if count == 1 else 's'})"

    def __enter__(self) -> Edit:
        if self._entered:
            raise ArgumentError("edit: it can be entered only once. Call regard.edit(model) again.")
        self._entered = True
        self._listener.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.__exit__(kind, error, at)
        idle = [one for one in self.interventions if one not in self._listener.applied]
        if kind is None and idle and self._listener.ran:
            heard = ", ".join(map(repr, self.layers)) or (
                "none; a model that computes softmax(q @ k.T) @ v by hand can call regard.attention(q, k, v) instead"
            )
            raise ArgumentError(
                f"edit.{idle[0].verb}: the model ran, but no attention call was heard in the layer {idle[0].layer!r}, "
                f"so nothing was changed there. Heard: {heard}."
            )

    @property
    def interventions(self) -> list[Intervention]:
        """What is changed, in the order of the calls."""
        return list(self._listener.interventions)

    @property
    def layers(self) -> list[str]:
        """The names of the modules that attended inside the block, in the order of their first calls."""
        return list(self._listener.layers)

    def ablate(
        self, layer: str | int, heads: Heads = None, *, mean: Tensor | bool = False, factor: float | Tensor = 0.0
    ) -> Intervention:
        """Replace the output of heads, before the output projection, by zeros, or by their mean.

        `mean=True` takes the mean over the batch and the rows of each call; a tensor gives the mean itself, one vector
        per ablated head (heads, Dv), or one for all (Dv,). With `factor`, a number or a tensor with one per head, the
        output becomes mean + factor · (output − mean): 0 ablates, 1 changes nothing, and its derivative at 1 is the
        first-order estimate of what ablation does.
        """
        if not isinstance(mean, Tensor | bool):
            raise DtypeError(f"edit.ablate: mean must be True, False or a tensor. Got {type(mean).__name__}.")
        _check_factor("ablate", factor, least=None)
        return self._add(Ablation(*self._place("ablate", layer, heads), mean, factor))

    def cut(self, layer: str | int, heads: Heads = None, *, queries: Index = None, keys: Index = None) -> Intervention:
        """Close the paths from `keys` to `queries`: their weight is 0, and the rows are normalised over what is left.

        A row that sees nothing any more gives zeros.
        """
        return self._add(Cut(*self._place("cut", layer, heads), queries, keys))

    def scale(
        self,
        layer: str | int,
        heads: Heads = None,
        *,
        factor: float | Tensor,
        keys: Index = None,
        queries: Index = None,
    ) -> Intervention:
        """Multiply weights by `factor` before each row is normalised: the logits of these pairs rise by log(factor).

        The rows still sum to one: with p the weights before, key j gets fⱼ·pⱼ / Σ f·p. A factor of 0 is `cut`, and 1
        changes nothing. `factor` is a number, or a tensor that broadcasts to (heads, keys), through which gradients
        flow; where it requires a gradient, it must be above 0. To scale what a head writes without normalising, use
        `ablate` with a factor.
        """
        _check_factor("scale", factor, least=0.0)
        if isinstance(factor, Tensor) and factor.requires_grad and bool((factor.detach() == 0).any()):
            raise ArgumentError(
                "edit.scale: a factor of 0 has no derivative: it adds log(0) to the logits. Detach the factor, or give "
                "a small one such as 1e-6."
            )
        place = self._place("scale", layer, heads)
        if not isinstance(factor, Tensor) and factor == 0:
            return self._add(Cut(*place, queries, keys))
        return self._add(Scaling(*place, queries, keys, factor))

    def pattern(self, layer: str | int, heads: Heads = None, *, mask: Mask | Tensor) -> Intervention:
        """Let heads see only the pairs that `mask` allows, of those that they see anyway.

        It is a mask of regard, or a bool tensor in which True means "may attend".
        """
        if not isinstance(mask, Mask | Tensor):
            raise DtypeError(f"edit.pattern: mask must be a regard mask or a tensor. Got {type(mask).__name__}.")
        return self._add(Pattern(*self._place("pattern", layer, heads), mask))

    def remove(self, intervention: Intervention) -> None:
        """Take back one intervention, as `ablate`, `cut`, `scale` or `pattern` gave it."""
        if intervention not in self._listener.interventions:
            raise ArgumentError(f"edit.remove: there is no such intervention. Got {intervention!r}.")
        self._listener.interventions.remove(intervention)

    def clear(self) -> None:
        """Take back all interventions."""
        self._listener.interventions.clear()

    def _add(self, intervention: Some) -> Some:
        self._listener.interventions.append(intervention)
        return intervention

    def _place(self, verb: str, layer: str | int, heads: Heads) -> tuple[str | int, tuple[int, ...] | None]:
        if isinstance(layer, bool) or not isinstance(layer, str | int) or (isinstance(layer, int) and layer < 0):
            raise ArgumentError(
                f"edit.{verb}: layer must be a module's name, or its place among the layers, from 0. Got {layer!r}."
            )
        if isinstance(layer, str) and layer not in self._names:
            close = get_close_matches(layer, self._names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "regard.watch(model) lists them in seen.layers."
            raise ArgumentError(f"edit.{verb}: the model has no module {layer!r}; {hint}")
        return layer, _heads(verb, heads)


class _EditListener(CallListener):
    """Hears the calls of a model and changes those of the edited layers; it observes nothing."""

    def __init__(self, model: nn.Module, exact: bool) -> None:
        super().__init__(model)
        self._exact = exact  # whether a layer's name means that module alone, and not what is inside of it
        self.interventions: list[Intervention] = []
        self.applied: set[Intervention] = set()
        self.layers: dict[str, None] = {}
        self.ran = False

    def __enter__(self) -> _EditListener:
        super().__enter__()
        self._exit.callback(self._model.register_forward_pre_hook(self._run).remove)
        return self

    def _run(self, *_: Any) -> None:
        self.ran = self.ran or self.is_active_here

    def _here(self) -> list[Intervention]:
        """The interventions in the module that is running."""
        name = self.name
        self.layers.setdefault(name)
        names = {name, list(self.layers).index(name)}
        if not self._exact:
            parts = name.split(".")
            names |= {".".join(parts[:count]) for count in range(1, len(parts))}
        return [one for one in self.interventions if one.layer in names]

    @property
    def changes_here(self) -> bool:
        return bool(self._here())

    def change(self, p: Problem) -> Change:
        finish: tuple[Any, ...] = ()
        for one in self._here():
            change = one.change(p)
            p, finish = change.problem, finish + change.finish
            self.applied.add(one)
        return Change(p, finish)

    def answer(self, p: Problem, backend: str | Backend) -> Tensor:
        answering = observer()
        if answering is not None:
            return answering.answer(p, backend)
        with suspended():
            return answered(p, backend)

    def respond(self, p: Problem, original: Original, *, beside: bool = False) -> Tensor:
        with suspended():
            return unobserved(p, original)

    def show(self, seen: Observation) -> None:
        """It changes calls, and keeps none."""

    def miss(self, reason: str) -> None:
        """Refuse to run a call unchanged that should be changed."""
        if here := self._here():
            raise ArgumentError(
                f"edit.{here[0].verb}: a call of the layer {self.name!r} cannot be edited: {reason.rstrip('.')}. Leave "
                f"this layer out."
            )


def _heads(verb: str, heads: Heads) -> tuple[int, ...] | None:
    if heads is None:
        return None
    given = heads.tolist() if isinstance(heads, Tensor) else heads
    listed = [given] if isinstance(given, Integral) else list(given) if isinstance(given, Sequence | range) else None
    if listed is None or not listed or not all(isinstance(x, Integral) and not isinstance(x, bool) for x in listed):
        raise ArgumentError(f"edit.{verb}: heads must be a whole number or several, or None for all. Got {heads!r}.")
    return tuple(dict.fromkeys(map(int, listed)))


def _check_factor(verb: str, factor: object, least: float | None) -> None:
    if isinstance(factor, Tensor):
        if not factor.dtype.is_floating_point:
            raise DtypeError(f"edit.{verb}: a factor tensor must be floating. Got {factor.dtype}.")
        low = least is not None and factor.numel() and bool((factor.detach() < least).any())
    elif isinstance(factor, Real) and not isinstance(factor, bool):
        low = factor != factor or (least is not None and factor < least)
    else:
        raise DtypeError(f"edit.{verb}: factor must be a number or a tensor. Got {type(factor).__name__}.")
    if low:
        raise ArgumentError(
            f"edit.{verb}: a factor must be a number{'' if least is None else ', at least 0'}. Got {factor!r}."
        )
