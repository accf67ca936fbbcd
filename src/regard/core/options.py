"""The options of attention, named in one place."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, NoReturn, TypeAlias, TypedDict

from torch import Tensor

from ..biases import Bias
from ..errors import DtypeError
from ..masks import Mask
from ..scores import Score

__all__ = ["BothLse", "Heads", "Kind", "Options", "refuse_unknown"]

Kind = Literal["kl", "reverse", "js"]  # of a divergence
Heads = Literal["mean", "pairs"] | None  # how a divergence pairs heads; None pairs each with the one of its number
BothLse: TypeAlias = tuple[Tensor | None, Tensor | None]  # of the sides of a divergence, in nats, where they are known


class Options(TypedDict):
    """What `attention`, `observe` and `why` take besides query, key, value and backend; `pose` checks it."""

    mask: Mask | Tensor | None
    bias: Tensor | Bias | None
    score: Score | None
    scale: float | Tensor | None
    softcap: float | None
    sink: Tensor | None
    dropout: float


_INSTEAD = {
    "is_causal": "Write mask=regard.causal().",
    "causal": "Write mask=regard.causal().",
    "score_mod": "Write score=regard.scores.Pointwise(f).",
    "block_mask": "Write mask=, a mask of regard such as regard.causal(), or regard.predicate(f).",
    "attn_mask": 'Write mask=, where True means "may attend"; what is added to the logits is bias=.',
    "dropout_p": "Write dropout=.",
    "enable_gqa": "Leave it out: grouped heads are recognized by their number.",
    "key_padding_mask": 'Write mask=regard.padding(keep=…), where True means "may attend".',
    "need_weights": "Call regard.observe(…).weights().",
    "output_attentions": "Call regard.observe(…).weights().",
}


def refuse_unknown(who: str, given: Mapping[str, object]) -> NoReturn:
    """Refuse arguments that do not exist, and say what is meant instead by those of torch and other libraries."""
    name = next(iter(given))
    known = (*Options.__annotations__, "backend", *(["observe"] if who == "why" else []))
    close = get_close_matches(name, known, n=1)
    instead = _INSTEAD.get(name) or (f"Did you mean {close[0]}=?" if close else f"There are {', '.join(known)}.")
    raise DtypeError(f"{who}: there is no argument {name}. {instead}")
