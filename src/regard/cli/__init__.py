"""The command `regard`: it shows attention in a terminal; it formats, and computes nothing itself."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.errors import FileError, RegardError
from regard.functional import observe, why
from regard.masks import causal as causal_mask
from regard.models.difference import DifferenceTable
from regard.models.findings import RULES
from regard.models.inspection import build_atlas, build_look
from regard.models.inspection import inspect as look_at
from regard.models.loading import BUILTIN, LoadedModel, TokenizedText, load
from regard.models.seen import Seen
from regard.report.atlas import check_port, serve
from regard.report.example import SOURCE, TARGET, hashed, known
from regard.report.page import write
from regard.report.tables import HeadTable, findings
from regard.report.terminal import Alignment, facts, shown
from regard.warmup import DIMS, DTYPES, USUAL, VARIANTS, plan, warm

__all__ = ["app", "main"]

_MANY_HEADS = 64
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
    with _told():
        wanted = plan(dtype, dim, VARIANTS if everything else variant)
        with Progress(console=Console(stderr=True)) as bar:
            warmed = list(bar.track(warm(wanted, backward), total=len(wanted), description="compiling"))
    table = Table("variant", "dtype", "dim", "seconds")
    for one in warmed:
        table.add_row(one.variant, one.dtype, str(one.dim), f"{one.seconds:.1f}")
    Console().print(table)


TEXT = """The first citizen spoke of corn, and the second citizen spoke of kings. When the first citizen spoke again of
corn, the second citizen spoke again of kings: for what the first citizen said, the second citizen said again."""

Text_ = Annotated[str | None, typer.Option("--text", help="What the model reads.", show_default="a sentence of ours")]
File_ = Annotated[Path | None, typer.Option("--file", help="A file with what the model reads.", dir_okay=False)]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model: only if you know whose it is.")
]


@app.command()
def inspect(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]", help="A folder or a name of the hub.", show_default="the built-in model"),
    ] = None,
    text: Text_ = None,
    file: File_ = None,
    html: Annotated[Path | None, typer.Option(help="Write the report, one HTML file, here.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the difference of two: models, or files with texts.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Look at the attention of a whole model while it reads: each head in numbers, and what is wrong or notable.

    Models are `builtin`, `builtin-untrained`, folders, or names of the hub. With `--compare A B`, A and B are two
    models that read the same text, or two files that one model reads (`inspect MODEL --compare A B`): what is shown is
    B less A.
    """
    console, names = Console(highlight=False), list(names or [])
    with _told():
        if compare:
            if html or as_json:
                raise typer.BadParameter(
                    "it prints a table and writes no file: leave out --html and --json, or inspect the two one by one",
                    param_hint="--compare",
                )
            console.print(_compared(names, text, file, trust))
            return
        if len(names) > 1:
            raise typer.BadParameter("it takes one model; --compare takes two", param_hint="MODEL")
        for option, path in (("--html", html), ("--json", as_json)):
            _check_target(option, path)
        if html and as_json and html.absolute() == as_json.absolute():
            raise typer.BadParameter("--html has the same path; give each its own", param_hint="--json")
        loaded, reading, seen = _looked(names[0] if names else None, _read(text, file), trust)
        with _steps() as bar:
            judging = bar.add_task("judging the heads", total=len(RULES))
            found = seen.findings(tell=lambda rule: bar.advance(judging))
            look = build_look(loaded, reading, seen) if html else None
        console.print(_heads(seen))
        console.print(findings(found))
        for place, reason in seen.missed.items():
            console.print(Text(f"not seen: {shown(place) or 'the model itself'}: {shown(reason)}"))
        if as_json:
            seen.to_json(as_json)
            console.print(Text(f"wrote {shown(str(as_json))}"))
        if html and look is not None:
            write(look, html)
            console.print(Text(f"wrote {shown(str(html))}; open it in a browser"))
        if not html and not as_json:
            console.print(Text("--html report.html writes a report to look at; regard atlas, maps to zoom into."))


@app.command()
def atlas(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A folder or a name of the hub.", show_default="the built-in model"),
    ] = None,
    text: Text_ = None,
    file: File_ = None,
    port: Annotated[int, typer.Option(help="Where to serve, on this machine alone; 0 takes a free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open it in a browser.")] = True,
    trust: Trust = False,
) -> None:
    """Pan and zoom over attention maps of any length in a browser, down to single weights; Ctrl-C ends it."""
    with _told():
        check_port(port)
        with _steps() as bar:
            loaded, reading, tell = _ready(bar, name, _read(text, file), trust)
            maps = build_atlas(loaded, reading, tell)
        serving = serve(maps, port, open_browser=browser)
    typer.echo(f"{serving.url} shows {len(reading.pieces):,} tokens; Ctrl-C ends it")
    serving.wait()


@app.command()
def lab(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Which experiment.", show_default="list them")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write an illustrated page into this folder; what was saved there stays on it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Try what textbooks say of attention: experiments that run, draw and check themselves."""
    from regard.lab import run, studies
    from regard.lab.base import canvas
    from regard.lab.page import write as write_page
    from regard.lab.terminal import account, listing

    console = Console(highlight=False)
    if name is None and not everything:
        if save or as_json:
            rest = ": --json goes with one, not with --all" if as_json else ", or give --all"
            raise typer.BadParameter(f"name an experiment{rest}", param_hint="NAME")
        console.print(listing(studies()))
        return
    if everything and (name is not None or as_json):
        raise typer.BadParameter("--all runs every experiment; a name and --json go with one", param_hint="--all")
    with _told():
        _check_target("--save", save, folder=True)
        if save is not None:
            canvas()  # what pictures need is missed now, not after the work
        found = []
        with _steps() as bar:
            for one in studies() if name is None else [name]:
                task = bar.add_task(one, total=1.0)
                found.append(run(one, partial(_advance, bar, task)))
                bar.remove_task(task)
        if as_json:
            typer.echo(json.dumps(found[0].to_object(), ensure_ascii=False))
        else:
            for experiment in found:
                console.print(Rule(experiment.name, align="left"))
                console.print(account(experiment))
        if save is not None:
            page = write_page(found, save)
            typer.echo(f"wrote {shown(str(page))}; open it in a browser", err=as_json)


def _advance(bar: Progress, task: TaskID, share: float) -> None:
    bar.update(task, completed=share)


def _looked(name: str | None, text: str, trust: bool) -> tuple[LoadedModel, TokenizedText, Seen]:
    with _steps() as bar:
        loaded, reading, tell = _ready(bar, name, text, trust)
        return loaded, reading, look_at(loaded, reading, tell)


def _ready(
    bar: Progress, name: str | None, text: str, trust: bool
) -> tuple[LoadedModel, TokenizedText, Callable[[str], None]]:
    task = bar.add_task(f"loading {shown(name or BUILTIN)}", total=None)
    loaded = load(name, remote_code=trust)
    reading = loaded.tokenize(text)
    if reading.truncated:
        bar.console.print(Text(f"the last {reading.truncated:,} tokens are left out: the model has no positions for them"))
    bar.update(task, description=f"reading {len(reading.pieces):,} tokens", total=loaded.layers or None)
    return loaded, reading, lambda layer: bar.advance(task)


def _compared(names: list[str], text: str | None, file: Path | None, trust: bool) -> DifferenceTable:
    if len(names) not in (2, 3):
        raise typer.BadParameter("it compares two: models, or files with texts", param_hint="--compare")
    *model, a, b = names
    texts = [x for x in (a, b) if Path(x).is_file()]
    if len(texts) == 2:
        if text is not None or file is not None:
            raise typer.BadParameter("two files are two texts; --text and --file go with two models")
        first, second = (_looked(model[0] if model else None, _read(None, Path(x)), trust)[2] for x in (a, b))
    elif model or texts:
        other = next(x for x in (a, b) if x not in texts)
        raise typer.BadParameter(f"it compares two files, and {shown(other)!r} is none", param_hint="--compare")
    else:
        first, second = (_looked(x, _read(text, file), trust)[2] for x in (a, b))
    return first.diff(second).table(names=(a, b))


def _heads(seen: Seen) -> HeadTable:
    """Every head, or means over the layers where these would fill more than a screen or two."""
    return seen.table() if len(seen.heads) <= _MANY_HEADS else seen.table(by_layer=True)


def _read(text: str | None, file: Path | None) -> str:
    if text is not None and file is not None:
        raise typer.BadParameter("--text and --file exclude each other")
    if file is None:
        return " ".join(TEXT.split()) if text is None else text
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--file: {str(file)!r} cannot be read as UTF-8 text: {error}.") from error


def _check_target(option: str, path: Path | None, folder: bool = False) -> None:
    """Refuse before the work what could not be written after it: a file in a folder that is there, or a folder."""
    if path is None:
        return
    whole = path.absolute()
    remedy = "a folder" if folder else "the path of a file in a folder that is there and"
    try:
        if not folder and whole.exists() and not whole.is_file():
            raise OSError("it is a folder" if whole.is_dir() else "it is no plain file")
        place = next(one for one in (whole, *whole.parents) if one.exists()) if folder else whole.parent
        with TemporaryFile(dir=place):
            return
    except OSError as error:
        reason = error.strerror or str(error)
        raise FileError(
            f"{option}: {str(path)!r} cannot be written: {reason}. Give {remedy} that you may write to."
        ) from error


def _steps() -> Progress:
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _told() -> Iterator[None]:
    """Tell an error of ours in one sentence, without a trace."""
    try:
        yield
    except RegardError as error:
        typer.echo(shown(str(error)), err=True)
        raise typer.Exit(1) from None


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
