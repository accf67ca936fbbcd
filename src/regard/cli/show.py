"""`regard show`: an illustration of attention between words, with vectors made by hand or from letters."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from regard.report.terminal import Alignment

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["show"]

_BY_HAND = "made by hand for this illustration, so the alignment is put in; `regard lab alignment` learns one"
_BY_LETTERS = "made from the letters of each word; nothing is trained"


def show(
    query: Annotated[
        str | None, typer.Option(help="The words that attend, separated by spaces.", show_default="a built-in example")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The words that they attend to.", show_default="the words of --query")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits: below 1 sharpens the attention, above 1 spreads it.")
    ] = 1.0,
    causal: Annotated[bool, typer.Option("--causal", help="Let no word attend past its own position.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show which words attend to which: weights as bars, entropy and effective keys.

    Without options it is an illustration: a French sentence and its English translation, with word vectors made by hand
    so that words of the same meaning match. Your own words are embedded by the letters they share, so similar words
    attend to each other. For an alignment that attention learns by itself, see `regard lab alignment`.
    """
    from regard.functional import observe
    from regard.masks import causal as causal_mask

    if not 0.0 < temperature < math.inf:
        raise typer.BadParameter(f"it must be above 0 and finite; got {temperature}", param_hint="--temperature")
    queries, keys, q, k = _embedded(query, key)
    seen = observe(q, k, k, mask=causal_mask() if causal else None, scale=1.0 / (temperature * math.sqrt(q.shape[-1])))
    alignment = Alignment(
        queries=queries,
        keys=keys,
        weights=seen.weights().tolist(),
        strongest=seen.top(1)[1][:, 0].tolist(),
        entropy=seen.entropy.tolist(),
        perplexity=seen.perplexity.tolist(),
    )
    vectors = _BY_HAND if query is None else _BY_LETTERS
    if as_json:
        typer.echo(
            json.dumps({"vectors": vectors, "temperature": temperature, "causal": causal, **_as_object(alignment)})
        )
        return
    console = Console(highlight=False)
    console.print(alignment)
    console.print(Text(f"vectors: {vectors}", style="dim"))


def _embedded(query: str | None, key: str | None) -> tuple[list[str], list[str], Tensor, Tensor]:
    from regard.report.example import SOURCE, TARGET, hashed, known

    if query is None and key is None:
        return list(TARGET), list(SOURCE), known(TARGET), known(SOURCE)
    if query is None:
        raise typer.BadParameter("keys need queries: give --query too", param_hint="--key")
    queries = query.split()
    keys = queries if key is None else key.split()
    for hint, words in (("--query", queries), ("--key", keys)):
        if not words:
            raise typer.BadParameter("it needs at least one word", param_hint=hint)
    return queries, keys, hashed(queries), hashed(keys)


def _as_object(alignment: Alignment) -> dict[str, object]:
    return {
        "query": alignment.queries,
        "key": alignment.keys,
        "weights": alignment.weights,
        "strongest": [alignment.keys[best] if best >= 0 else None for best in alignment.strongest],
        "entropy": alignment.entropy,
        "perplexity": alignment.perplexity,
    }
