"""Monitor: the entropy and the largest logit of every head while a model trains."""

from __future__ import annotations

import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.compiled import replace_compiled_call, runs_compiled
from ..compat.torch import in_backward
from ..display import block, table
from ..errors import DtypeError
from ..observation import Observation
from ..scores.base import whole
from .findings.sampling import flatten_batch
from .graph_interceptor import GraphInterceptor
from .loggers import reporter
from .training_interceptor import TrainingInterceptor

__all__ = ["Monitor"]


class Tally(NamedTuple):
    """The statistics of a layer's heads over its rows, each (heads,)."""

    entropy: Tensor  # the sum over rows
    rows: Tensor  # the number of rows that see a key
    max_logit: Tensor  # the largest over rows

    @classmethod
    def of(cls, seen: Observation) -> Self:
        """Tally the rows of one call; rows that see no key do not count."""
        entropy, row_max = flatten_batch(seen.entropy, 1).double(), flatten_batch(seen.max_logit, 1)
        live = row_max.isneginf().logical_not()  # NaN counts, so that it shows
        none = row_max.new_full(row_max.shape[1:2], -torch.inf)
        largest = (row_max.amax((0, 2)) if row_max.numel() else none).float()
        return cls(torch.where(live, entropy, 0.0).sum((0, 2)), live.sum((0, 2)).double(), largest)

    def plus(self, other: Tally) -> Tally:
        """Combine the rows of both."""
        largest = torch.maximum(self.max_logit, other.max_logit)
        return Tally(self.entropy + other.entropy, self.rows + other.rows, largest)


Tallies = dict[str, Tally]


class _NoHook:
    """In place of the handle of a hook, where there is none."""

    def remove(self) -> None:
        """Nothing is to be removed."""


class Monitor:
    """Log the mean entropy and the largest logit of every head, every `every` training steps.

    The scalars are called `attention/<layer>/head<h>/entropy` (nats, the mean over batch and rows) and
    `…/max_logit` (scaled logits, the largest), where the layer is the dotted name of the attention module. They go
    to `log`, anything that `regard.models.loggers.reporter` accepts, and remain in `last`.

    A step is one call of the model in training mode, unless `step(n)` says which step the following calls belong to:
    with gradient accumulation, call it once per optimizer update. The calls of a step are then combined, and logged
    when the next step begins. Calls that a backward pass repeats, for activation checkpointing, do not count. Nor does
    a call of the model that begins while another thread's call is under way, or anything else that other threads do.

    A compiled model stays compiled: only its first observed step runs eagerly, and shows which module makes which call.
    In later ones the graph runs as ever, and its attention operators are observed in the same order. Pass what is
    called: the compiled module if there is one.

    With torch.distributed, the ranks of `group` are combined and its rank 0 logs; all must take the same steps.
    Observing needs no pass beyond the forward, and a step in between costs a few microseconds.

    >>> attend = torch.nn.MultiheadAttention(8, 2)
    >>> x = torch.zeros(4, 1, 8)
    >>> with Monitor(attend, every=10, log=print):
    ...     for _ in range(11):
    ...         _ = attend(x, x, x)
    attention/head0/entropy 1.386 0
    attention/head0/max_logit 0.0 0
    attention/head1/entropy 1.386 0
    attention/head1/max_logit 0.0 0
    attention/head0/entropy 1.386 10
    attention/head0/max_logit 0.0 10
    attention/head1/entropy 1.386 10
    attention/head1/max_logit 0.0 10
    """

    last: dict[str, float]
    max_logits: dict[str, Tensor]

    def __init__(
        self, model: nn.Module, every: int = 100, log: Any = None, *, group: dist.ProcessGroup | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise DtypeError(f"Monitor: model must be a torch.nn.Module. Got {type(model).__name__}.")
        self.model, self.every, self.group = model, whole("Monitor", "every", every), group
        self.last, self.max_logits = {}, {}
        self._report = reporter(log)
        self._number = self._logged = 0  # this step, and the one of `last`
        self._counts_calls = True
        self._lock = threading.Lock()
        self._thread: int | None = None  # the thread whose call is under way
        self._hook: Any = None
        self._restore: Callable[[], None] | None = None  # for a model that was compiled in place
        self._last_hook: Any = None  # the hook that runs at the end of the current call of the model
        self._interceptor: TrainingInterceptor | GraphInterceptor | None = None
        self._of_call: Tallies = {}
        self._order: list[tuple[str, int]] = []  # a compiled model's calls in their order: the module and its heads
        self._of_graph: list[Tally] = []  # the calls of a graph, in their order
        self._graph_hides = False  # whether the graph made other calls than the model
        self._of_step: Tallies | None = None  # None until the step is observed
        self._missed: dict[str, str] = {}
        self._warned = False

    def __repr__(self) -> str:
        state = "running" if self._hook is not None or self._restore is not None else "not running"
        seen = f"{len(self.last) // 2} heads at step {self._logged}" if self.last else "nothing logged yet"
        return f"Monitor({type(self.model).__name__}, every {self.every} steps, {state}, {seen})"

    def _repr_html_(self) -> str:
        rows = []
        for name, value in self.last.items():
            place, statistic = name.removeprefix("attention/").rsplit("/", 1)
            if statistic == "entropy":
                layer, _, head = place.rpartition("/")
                largest = self.last[f"{name.removesuffix('entropy')}max_logit"]
                rows.append((layer or "the model itself", head.removeprefix("head"), f"{value:.3g}", f"{largest:.3g}"))
        parts = [table(["layer", "head", "entropy", "max logit"], rows, numbers=(1, 2, 3))] if rows else []
        return block(repr(self), *parts)

    def start(self) -> Self:
        """Start to watch the model's calls."""
        if self._hook is None and self._restore is None:
            self._restore = replace_compiled_call(self.model, self._around)
        if self._hook is None and self._restore is None:
            self._hook = self.model.register_forward_pre_hook(self._before)
        return self

    def stop(self, *, flush: bool = True) -> None:
        """Stop watching, remove all hooks from the model, and log what remains to be logged.

        A call that is under way in another thread is not counted; its last hook goes when it ends.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._is_ours and self._last_hook is not None:
            self._last_hook.remove()
            self._last_hook = None
        self.close(keep=False)
        if flush:
            self.flush()
        self._of_step = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(flush=kind is None)  # after an error the other ranks may not reach the reduction

    def step(self, n: int) -> None:
        """Assign the following calls to step `n`, and log the previous step if it was observed."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise DtypeError(f"Monitor: step must be a whole number. Got {n!r}.")
        self._counts_calls = False
        if n != self._number:
            self.flush()
            self._number = n

    @property
    def due(self) -> bool:
        """Whether the current step is to be observed."""
        return self._number % self.every == 0

    def open(self) -> None:
        """Observe every attention call in the model until `close`, if the step is due.

        Only training loops that call methods of the model instead of the model need this; others need only `start`.
        """
        if self._interceptor is None and self.due and self._claim():
            self._of_call, self._of_graph = {}, []
            if not runs_compiled(self.model):
                self._interceptor = TrainingInterceptor(self.model, self._saw, self._miss)
            elif not self._order or self._graph_hides:
                self._order = []
                self._interceptor = TrainingInterceptor(self.model, self._saw_in_order, self._miss)
            else:
                self._interceptor = GraphInterceptor(lambda seen: self._of_graph.append(Tally.of(seen)))
            self._interceptor.__enter__()

    def close(self, *, keep: bool = True) -> None:
        """Stop observing, and count what was seen since `open`, unless `keep` is False."""
        if not self._is_ours:
            return
        interceptor, self._interceptor = self._interceptor, None
        if interceptor is not None:
            interceptor.__exit__(None, None, None)
        if interceptor is not None and keep:
            if isinstance(interceptor, GraphInterceptor):
                self._name_calls()
            self._of_step = self._of_step or {}
            for name, tally in self._of_call.items():
                before = self._of_step.get(name)
                self._of_step[name] = tally if before is None else before.plus(tally)
        self._of_call, self._of_graph = {}, []
        self._thread = None

    def flush(self) -> None:
        """Log what was seen of the current step now."""
        if self._of_step is None:
            return
        tallies, logs = self._reduce_over_ranks(self._of_step)
        self._of_step = None
        self._warn(tallies)
        self.max_logits = {name: tally.max_logit for name, tally in tallies.items()}
        self.last, self._logged = _scalars(tallies), self._number
        if logs:
            self._report(self.last, self._number)

    @property
    def _is_ours(self) -> bool:
        """Whether no other thread's call is under way."""
        return self._thread in (None, threading.get_ident())

    def _claim(self) -> bool:
        """Begin a call in this thread, unless one is under way in another."""
        with self._lock:
            if self._is_ours:
                self._thread = threading.get_ident()
                return True
            return False

    def _before(self, module: nn.Module, args: object) -> None:
        repeated = in_backward()
        if repeated or not module.training or not self._claim() or self._last_hook is not None:
            return
        self.open()
        handled = sys.exception()
        if self._restore is not None:  # `_around` calls `_after`; a hook would be compiled with the model
            self._last_hook = _NoHook()
            return
        # It must be the last hook, since closing removes others before it; it also runs after an error.
        self._last_hook = module.register_forward_hook(lambda *_: self._after(handled), always_call=True)

    def _after(self, handled: BaseException | None) -> None:
        if self._last_hook is None or not self._is_ours:  # the end of another thread's call
            return
        self._last_hook.remove()
        self._last_hook = None
        stopped = self._hook is None and self._restore is None
        self.close(keep=sys.exception() is handled and not stopped)
        if self._counts_calls and not stopped:
            self.flush()
            self._number += 1

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A call of a model that was compiled in place, with what hooks would do."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, handled = self._last_hook, sys.exception()
            self._before(self.model, args)
            begins = self._last_hook is not before
            try:
                return compiled(*args, **kwargs)
            finally:
                if begins:
                    self._after(handled)

        return call

    def _saw(self, name: str, seen: Observation) -> None:
        self._add(name, Tally.of(seen))

    def _saw_in_order(self, name: str, seen: Observation) -> None:
        """Learn which module makes which of the model's calls; its graph makes them in the same order."""
        self._order.append((name, seen.shape[-3]))
        self._saw(name, seen)

    def _name_calls(self) -> None:
        """Give the calls of a graph the names that the model's calls had when it ran eagerly."""
        if [heads for _, heads in self._order] == [len(tally.rows) for tally in self._of_graph]:
            for (name, _), tally in zip(self._order, self._of_graph, strict=True):
                self._add(name, tally)
            return
        self._graph_hides = True
        self._missed[""] = (
            f"its compiled graph made {len(self._of_graph)} calls that can be observed, and the model itself makes "
            f"{len(self._order)}; from now on, observed steps run eagerly"
        )

    def _add(self, name: str, tally: Tally) -> None:
        before = self._of_call.get(name)
        self._of_call[name] = tally if before is None else before.plus(tally)

    def _miss(self, name: str, reason: str) -> None:
        self._missed.setdefault(name, reason)

    def _warn(self, tallies: Tallies) -> None:
        """Warn once if something was not seen."""
        if self._warned or (tallies and not self._missed):
            return
        self._warned = True
        reasons = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in self._missed.items())
        warnings.warn(
            f"Monitor: in step {self._number} it did not see {'all attention' if tallies else 'any attention'}. "
            + (
                reasons
                or "A model that computes softmax(q @ k.T) @ v by hand makes no call to observe; "
                "regard.attention(q, k, v) in its place does."
            ),
            stacklevel=3,
        )

    def _reduce_over_ranks(self, tallies: Tallies) -> tuple[Tallies, bool]:
        """Combine the ranks if there are several, and say whether this one logs."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1):
            return tallies, True
        if not _agree(tallies, self.group):
            warnings.warn(
                "Monitor: the ranks attend in different layers, so each logs only what it saw itself. "
                "Pass group= with the ranks that hold the same model.",
                stacklevel=3,
            )
            return tallies, True
        return _reduced(tallies, self.group), dist.get_rank(self.group) == 0


def _scalars(tallies: Tallies) -> dict[str, float]:
    """Name every scalar; heads in which no row saw a key have none."""
    scalars = {}
    for layer, tally in tallies.items():
        columns = zip(*(column.tolist() for column in tally), strict=True)
        for head, (entropy, rows, max_logit) in enumerate(columns):
            if rows:
                name = "/".join(part for part in ("attention", layer, f"head{head}") if part)
                scalars[f"{name}/entropy"] = entropy / rows
                scalars[f"{name}/max_logit"] = max_logit
    return scalars


def _agree(tallies: Tallies, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks have the same layers and heads."""
    checksum = zlib.crc32(repr([(name, len(tally.rows)) for name, tally in tallies.items()]).encode())
    both = torch.tensor([checksum, -checksum], device=_device(tallies, group))
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both.tolist() == [checksum, -checksum]


def _reduced(tallies: Tallies, group: dist.ProcessGroup | None) -> Tallies:
    """Add up the rows of all ranks, and take the largest logit of any."""
    if not tallies:
        return tallies
    device, sizes = _device(tallies, group), [len(tally.rows) for tally in tallies.values()]
    sums = torch.stack(
        [torch.cat([getattr(tally, name).to(device) for tally in tallies.values()]) for name in ("entropy", "rows")]
    )
    most = torch.cat([tally.max_logit.to(device) for tally in tallies.values()]).nan_to_num(
        torch.inf, torch.inf, -torch.inf
    )
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)  # NaN became inf above, since a maximum may lose it
    parts = zip(tallies, sums[0].split(sizes), sums[1].split(sizes), most.split(sizes), strict=True)
    return {name: Tally(entropy, rows, max_logit) for name, entropy, rows, max_logit in parts}


def _device(tallies: Tallies, group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group can reduce."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return next((tally.rows.device for tally in tallies.values()), torch.device("cpu"))
