"""The command `regard`: it shows attention in a terminal; it formats, and computes nothing itself."""

from __future__ import annotations

import json
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.errors import RegardError
from regard.functional import observe, why
from regard.masks import causal as causal_mask
from regard.report.example import SOURCE, TARGET, hashed, known
from regard.report.terminal import Alignment, facts
from regard.warmup import DIMS, DTYPES, USUAL, VARIANTS, plan, warm

__all__ = ["app", "main"]

_PACKAGES = ("regard", "torch", "triton", "numpy")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command line."""
    app(prog_name="regard")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"regard {_version('regard')}")
        raise typer.Exit


@app.callback()
def _regard(
    asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Exact attention that you can see through."""


@app.command()
def show(
    query: Annotated[
        str | None, typer.Option(help="The words that look, separated by spaces.", show_default="the built-in example")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The words that are looked at.", show_default="the words of --query")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits: below 1 sharpens the attention, above 1 spreads it.")
    ] = 1.0,
    causal: Annotated[bool, typer.Option("--causal", help="Let no word look past its own place.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show who attends whom: words, their weights as bars, entropy and effective keys.

    Without options it aligns a French sentence with the English one it translates. Words of your own are embedded by
    the letters they share, so that similar words attend to each other.
    """
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
    if as_json:
        typer.echo(json.dumps({"temperature": temperature, "causal": causal, **_as_object(alignment)}))
        return
    Console(highlight=False).print(alignment)


@app.command()
def info() -> None:
    """Show versions, devices, and each backend's state: which one a plain call takes, and why not the others."""
    console = Console(highlight=False)
    console.print(facts({"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}))
    console.print(Rule("devices", align="left"))
    console.print(facts(_devices()))
    example = torch.zeros(1, 8, 1024, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    for verb, observing in (("attention", False), ("observe", True)):
        console.print(Rule(f"{verb} of (1, 8, 1024, 64), {example.dtype}, {example.device.type}", align="left"))
        table = str(why(example, example, example, observe=observing))
        console.print(Text(table if console.encoding.startswith("utf") else table.encode("ascii", "replace").decode()))


@app.command()
def warmup(
    dtype: Annotated[list[str], typer.Option(help=f"What to compile for: {', '.join(DTYPES)}; may be repeated.")] = [  # noqa: B006
        "bfloat16"
    ],
    dim: Annotated[list[int], typer.Option(help="Head dims, up to 256; may be repeated.")] = list(DIMS),  # noqa: B006
    variant: Annotated[
        list[str], typer.Option(help=f"What is asked of attention: {', '.join(VARIANTS)}; may be repeated.")
    ] = list(USUAL),  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Every variant.")] = False,
    backward: Annotated[bool, typer.Option(help="Compile the backward pass too.")] = True,
) -> None:
    """Compile the GPU kernels ahead, so that no first call waits; no mask and no length needs one of its own."""
    try:
        wanted = plan(dtype, dim, VARIANTS if everything else variant)
        with Progress(console=Console(stderr=True)) as bar:
            warmed = list(bar.track(warm(wanted, backward), total=len(wanted), description="compiling"))
    except RegardError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    table = Table("variant", "dtype", "dim", "seconds")
    for one in warmed:
        table.add_row(one.variant, one.dtype, str(one.dim), f"{one.seconds:.1f}")
    Console().print(table)


def _embedded(query: str | None, key: str | None) -> tuple[list[str], list[str], Tensor, Tensor]:
    if query is None and key is None:
        return list(TARGET), list(SOURCE), known(TARGET), known(SOURCE)
    if query is None:
        raise typer.BadParameter("words to look at need words that look: give --query too", param_hint="--key")
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"capability {gpu.major}.{gpu.minor}"
        devices[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}"
    if torch.backends.mps.is_available():
        devices["mps"] = "available"
    return devices
