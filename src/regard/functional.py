"""The public calls: each reads as one line from arguments to result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from .backends import Backend
from .backends.dispatch import Plan, choose, compare, plan, run, run_and_remember
from .backends.remembered import key_of, recall
from .backends.sdpa import fast_path
from .biases import Bias
from .compat.torch import leave_graph, likeness, not_traced
from .core.contexts import ACTIVE, active_context, refuse_in_context
from .core.options import Heads, Kind, Options, refuse_unknown
from .core.problem import Problem
from .core.validation import check_pair, pose
from .errors import ArgumentError, DtypeError, ShapeError
from .masks import Mask, causal
from .masks.arguments import textbook_mask
from .masks.index import broadcast_shapes
from .observation import WATCHERS, Observation, notify, observed, watchers
from .scores import Pointwise, Score
from .walkthrough import Steps, walk

__all__ = [
    "attention",
    "attention_with_weights",
    "divergence",
    "observe",
    "posed_as_torch",
    "scaled_dot_product_attention",
    "steps",
    "why",
]

_CAUSAL = causal(offset=0)  # torch's is_causal; one object, which remembers its blocks
_MOST_POSED = 64
_POSED: dict[object, tuple[Callable[..., bool], Problem]] = {}  # problems without their tensors, which are like these


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    **other: Never,
) -> Tensor:
    """Average `value` with weights softmax(score(query, key)) over the pairs that `mask` allows.

    Shapes: query (…, Hq, N, D), key (…, Hk, M, D), value (…, Hk, M, Dv) with Hq a multiple of Hk; (batch, N, D) and
    (N, D) have one head. The logits are score(q, k), then capped, then biased, then masked:

    - `mask`: a regard mask, or a tensor, broadcast to (…, Hq, N, M): True, or any integer but 0, means "may attend";
    - `bias`: a tensor that is added, broadcast likewise, or `regard.biases.alibi(…)`, `regard.biases.relative(…)`;
    - `score`: a module of `regard.scores`; without one, q·k times `scale` (1/√D; a number, or a tensor, one per head);
    - `softcap`: c gives c·tanh(x/c); `sink`: one more logit per head, in the denominator only;
    - `dropout`: the probability that a weight is dropped; `backend`: "auto", a name, or a backend object.

    >>> import torch, regard
    >>> regard.attention(torch.eye(2), torch.eye(2), torch.tensor([[10.0], [20.0]]), scale=100.0).tolist()
    [[10.0], [20.0]]
    """
    if other:
        refuse_unknown("attention", other)
    known = None
    usual = type(dropout) is float and not dropout and type(query) is Tensor
    if usual and not (WATCHERS or ACTIVE):
        if query.is_cuda:
            known = key_of(query, key, value, mask, scale, softcap, sink, backend, False, bias, score)
            if known is not None and (call := recall(known)) is not None:
                return call.attend(query, key, value, mask, sink, known.bias)  # type: ignore[no-any-return]
        elif backend == "auto" and scale is None and softcap is None and sink is None:  # noqa: SIM102
            if bias is None and score is None and (answer := fast_path(query, key, value, mask)) is not None:
                return answer
    options: Options = {
        "mask": mask,
        "bias": bias,
        "score": score,
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "dropout": dropout,
    }
    if (ACTIVE or type(query) is not Tensor) and (context := active_context(query)) is not None:
        return context.attention(query, key, value, **options, backend=backend)
    if _leaves_graph(score, "attention"):
        return _attention_untraced(query, key, value, options, backend)
    problem = pose(query, key, value, **options)
    if known is None:
        return _answer(problem, backend)
    refuse_in_context(problem.who)
    return run_and_remember(known, (query, key, value, mask), problem, backend)[1]  # type: ignore[no-any-return]


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    **other: Never,
) -> Observation:
    """Attend, and return the output with statistics of the weights of every row, in linear memory.

    >>> import torch, regard
    >>> x = torch.zeros(1, 4, 8)
    >>> seen = regard.observe(x, x, x, mask=regard.causal())
    >>> seen.perplexity
    tensor([[1.0000, 2.0000, 3.0000, 4.0000]])
    """
    if other:
        refuse_unknown("observe", other)
    known = None
    usual = type(dropout) is float and not dropout and type(query) is Tensor
    if usual and query.is_cuda and not (WATCHERS or ACTIVE):
        known = key_of(query, key, value, mask, scale, softcap, sink, backend, True, bias, score)
        if known is not None and (call := recall(known)) is not None:
            rows = call.attend(query, key, value, mask, sink, known.bias)
            problem = call.problem(query, key, value, mask, sink, bias, score)
            return Observation(problem, call.backend, rows, call)
    options: Options = {
        "mask": mask,
        "bias": bias,
        "score": score,
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "dropout": dropout,
    }
    if (ACTIVE or type(query) is not Tensor) and (context := active_context(query)) is not None:
        observation: Observation = context.observe(query, key, value, **options, backend=backend)
        return observation
    if _leaves_graph(score, "observe"):
        return _observe_untraced(query, key, value, options, backend)
    problem = pose(query, key, value, **options, observed=True, who="observe")
    if known is None:
        return _observe(problem, backend)
    refuse_in_context(problem.who)
    return _notified(Observation(problem, *run_and_remember(known, (query, key, value, mask), problem, backend)))


def divergence(
    a: Observation | Sequence[Tensor] | Mapping[str, Any],
    b: Observation | Sequence[Tensor] | Mapping[str, Any],
    kind: Kind = "kl",
    *,
    heads: Heads = None,
    epsilon: float | None = None,
) -> Tensor:
    """Compare the weights of two attentions over the same keys: one number per row, differentiable to both sides.

    Each side is an Observation, a pair (query, key), or a dict of `query`, `key` and any of `mask`, `bias`, `score`,
    `scale`, `softcap` and `sink`. With p the weights of a and r those of b, `kind` gives, in nats:

    - "kl": KL(p ‖ r) = Σ p·log(p/r); "reverse": KL(r ‖ p);
    - "js": ½·KL(p ‖ m) + ½·KL(r ‖ m) with m = (p + r)/2, which is symmetric and at most log 2.

    The result is (…, H, N). `heads="mean"` averages the weights of each side over its heads first: (…, N).
    `heads="pairs"` compares every head of a with every head of b: (…, Ha, Hb, N). In both, the numbers of heads may
    differ. Where the first attention of a KL has weight on a key that the second hides, the row is inf, with gradient
    0; `epsilon` replaces the second by (1 − ε)·r + ε·u, with u uniform over what one of the sides sees.

    >>> import torch, regard
    >>> q, k = torch.randn(2, 1, 4, 16, 8).unbind()
    >>> teacher = regard.observe(q, k, k, mask=regard.causal())
    >>> regard.divergence(teacher, {"query": q, "key": k, "mask": regard.causal()}).abs().max() < 1e-6
    tensor(True)
    """
    refuse_in_context("divergence")
    if torch.compiler.is_compiling():
        leave_graph("divergence leaves the graph of torch.compile. Leave out fullgraph=True.")
    first, second = _side(a, "a"), _side(b, "b")
    check_pair(first, second, kind, heads, epsilon)
    one_pass = kind != "js" and heads is None and epsilon is None  # it finds lse on its way
    lse = (None, None) if one_pass else (_known_lse(a), _known_lse(b))
    return _shaped(compare(first, second, kind, heads, epsilon, lse), first, second, heads)


def why(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | Backend = "auto",
    observe: bool = False,
    **other: Never,
) -> Plan:
    """Explain which backend a call takes, and why each other one refuses; no attention is computed.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> print(regard.why(x, x, x, softcap=30.0).backend)
    chunked
    """
    if other:
        refuse_unknown("why", other)
    options: Options = {
        "mask": mask,
        "bias": bias,
        "score": score,
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "dropout": dropout,
    }
    return plan(pose(query, key, value, **options, observed=observe, who="why"), backend)


def steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
) -> Steps:
    """Walk through the formula: scores, scaled scores, weights, output, each with its shape.

    >>> import torch, regard
    >>> x = torch.eye(2)
    >>> regard.steps(x, x, x).weights
    tensor([[0.6698, 0.3302],
            [0.3302, 0.6698]])
    """
    if isinstance(scale, Tensor):
        raise ArgumentError(f"steps: scale must be a number. Got a tensor of shape {tuple(scale.shape)}; use observe.")
    return walk(pose(query, key, value, mask=mask, scale=scale, who="steps"))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what `torch.nn.functional.scaled_dot_product_attention` does, with its signature and meaning.

    A float `attn_mask` is added to the logits, as torch adds it. Many texts have a function of this name whose mask
    selects instead: 0 hides, 1 shows. That function is `attention_with_weights`.

    >>> import torch, regard
    >>> q = torch.randn(2, 4, 6, 8)
    >>> same = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(regard.scaled_dot_product_attention(q, q, q, is_causal=True), same, atol=1e-6)
    True
    """
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if enable_gqa and isinstance(query, Tensor) and query.dim() == 3:  # torch reads (heads, length, dim) here
        return scaled_dot_product_attention(query[None], key[None], value[None], *arguments[3:])[0]
    return _answer(posed_as_torch(*arguments), "auto")


def posed_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """Pose a problem given by torch's arguments; one like an earlier one is not checked again."""
    plain = attn_mask is None and not dropout_p and type(query) is type(key) is type(value) is Tensor
    if not plain or torch.compiler.is_compiling() or not (scale is None or type(scale) is float):
        return _posed_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kind = bool(is_causal), scale, bool(enable_gqa), query.shape, key.shape
    known = _POSED.get(kind)
    if known is not None and known[0](query, key, value):
        return known[1].with_tensors(query, key, value)
    p = _posed_as_torch(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
    if p.query is query and p.key is key and p.value is value:
        if len(_POSED) >= _MOST_POSED:
            _POSED.clear()
        nothing: Any = None
        _POSED[kind] = likeness((query, key, value)), p._replace(query=nothing, key=nothing, value=nothing)
    return p


def _posed_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Problem:
    who = "scaled_dot_product_attention"
    if is_causal and attn_mask is not None:
        raise ArgumentError(
            f"{who}: attn_mask and is_causal exclude each other, as torch documents. Combine them in one mask."
        )
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise DtypeError(
            f"{who}: attn_mask must be a tensor, bool or floating. Got {type(attn_mask).__name__}; "
            f"a mask of regard goes to regard.attention(mask=...)."
        )
    if all(isinstance(x, Tensor) and not x.is_nested for x in (query, key, value)):
        query, key, value = _as_torch_broadcasts(query, key, value, enable_gqa, who)
    selects = attn_mask is not None and attn_mask.dtype == torch.bool
    return pose(
        query,
        key,
        value,
        mask=_CAUSAL if is_causal else attn_mask if selects else None,
        bias=None if selects else attn_mask,
        scale=scale,
        dropout=dropout_p,
        who=who,
        names=("attn_mask", "attn_mask"),
    )


def _as_torch_broadcasts(
    query: Tensor, key: Tensor, value: Tensor, grouped: bool, who: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the tensors one rank and, unless heads are grouped, one number of heads, as torch broadcasts them."""
    q, k, v = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    if q == k == v:
        return query, key, value
    try:
        if grouped and len(q) >= 2:
            lead = broadcast_shapes(q[:-1], k[:-1], v[:-1])
            return tuple(x.expand(*lead, *x.shape[-3:]) for x in (query, key, value))  # type: ignore[return-value]
        lead = broadcast_shapes(q, k, v)
    except ShapeError:
        raise ShapeError(
            f"{who}: the leading dimensions must broadcast (enable_gqa=True lets the heads differ). Got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        ) from None
    return tuple(x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))  # type: ignore[return-value]


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend and return (output, weights), the textbook's functional form; the weights are before dropout.

    In `mask`, 0 and False hide: a regard mask, or a tensor of bools, of integers, or of floats that are 0 or 1.

    >>> import torch, regard
    >>> output, weights = regard.attention_with_weights(*torch.randn(3, 2, 5, 4).unbind())
    >>> output.shape, weights.shape, torch.allclose(weights.sum(-1), torch.ones(2, 5))
    (torch.Size([2, 5, 4]), torch.Size([2, 5, 5]), True)
    """
    who = "attention_with_weights"
    dropout = dropout_p if training else 0.0
    mask = textbook_mask(who, mask)
    seen = _observe(pose(query, key, value, mask=mask, dropout=dropout, observed=True, who=who), "auto")
    return seen.output, seen.weights()


def _side(given: Observation | Sequence[Tensor] | Mapping[str, Any], name: str) -> Problem:
    """One side of a divergence as a problem; its values are never read."""
    if isinstance(given, Observation):
        return given.problem_for("divergence")
    options = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(given, tuple | list) and len(given) == 2:
        options = {"query": given[0], "key": given[1]}
    if "query" not in options or "key" not in options:
        got = (
            f"a dict of {', '.join(map(str, given)) or 'nothing'}"
            if isinstance(given, Mapping)
            else type(given).__name__
        )
        raise DtypeError(
            f"divergence: {name} must be an Observation, a pair (query, key), or a dict with query, key and options of "
            f"observe. Got {got}."
        )
    query, key = options.pop("query"), options.pop("key")
    known = [option for option in Options.__annotations__ if option != "dropout"]  # the weights are before dropout
    if unknown := next((option for option in options if option not in known), None):
        raise DtypeError(
            f"divergence: a side has no option {unknown}; it has query, key, {', '.join(known)}. Got it in {name}."
        )
    value = key[..., :0] if isinstance(key, Tensor) and key.dim() else key
    return pose(query, key, value, **options, who=f"divergence, {name}")


def _known_lse(given: Observation | Sequence[Tensor] | Mapping[str, Any]) -> Tensor | None:
    return given.lse if isinstance(given, Observation) else None


def _shaped(found: Tensor, first: Problem, second: Problem, heads: Heads) -> Tensor:
    """Give a divergence (B, …, N) the leading dimensions of the caller."""
    headless = len(first.lead) < 2
    batch = first.lead if headless else first.lead[:-1]
    middle = (
        found.shape[1:-1] if heads == "pairs" or (heads is None and not (headless and len(second.lead) < 2)) else ()
    )
    return found.reshape(*batch, *middle, found.shape[-1])


def _leaves_graph(score: Score | None, who: str) -> bool:
    if score is None or not torch.compiler.is_compiling() or not isinstance(score, Pointwise):
        return False
    leave_graph(
        f"{who}: a score with a function, Pointwise, leaves the graph of torch.compile. Leave out fullgraph=True."
    )
    return True


@not_traced
def _attention_untraced(query: Tensor, key: Tensor, value: Tensor, options: Options, backend: str | Backend) -> Tensor:
    """The call outside of the graph: torch.compile cannot trace how a function is traced."""
    return attention(query, key, value, **options, backend=backend)


@not_traced
def _observe_untraced(
    query: Tensor, key: Tensor, value: Tensor, options: Options, backend: str | Backend
) -> Observation:
    return observe(query, key, value, **options, backend=backend)


def _answer(problem: Problem, backend: str | Backend) -> Tensor:
    refuse_in_context(problem.who)
    if WATCHERS and (mine := watchers()):
        return mine[-1].answer(problem, backend)
    return run(problem, choose(problem, backend)).output


def _observe(problem: Problem, backend: str | Backend) -> Observation:
    refuse_in_context(problem.who)
    return _notified(observed(problem, backend))


def _notified(observation: Observation) -> Observation:
    notify(observation)
    return observation
