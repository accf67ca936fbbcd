"""`regard census`: what every head of a model does over a whole corpus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from regard.display import shown
from regard.errors import DeviceError

from .model_input import RandomOption, TrustOption
from .output import check_writable, errors_as_messages, progress

if TYPE_CHECKING:
    from regard.models.head_census import Census, Texts

__all__ = ["census"]

_VERBS = ("merge", "compare")
_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}


class Reading(NamedTuple):
    """How texts are cut and batched."""

    field: str
    length: int | None
    overlap: int | None
    batch_tokens: int | None
    max_tokens: int | None
    exemplars: int


def census(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] | merge FOLDER… | compare FOLDER FOLDER",
            help="A folder, or a model name from the hub.",
            show_default="the built-in model",
        ),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="A .txt, .md, .json or .jsonl file, a folder of these, or a saved data set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; open its index.html in a browser.")] = None,
    field: Annotated[str, typer.Option(help="The name of the text in JSON lines and data sets.")] = "text",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per window.", show_default="as the model allows, up to 2048")
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that a window repeats from the one before.", show_default="an eighth"),
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per batch.", show_default="by device")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Count about so many tokens and stop.")] = None,
    exemplars: Annotated[int, typer.Option(min=1, max=64, help="Exemplars per head and behaviour.")] = 8,
    shard: Annotated[str | None, typer.Option(help="Count one of n parts: 0/4, 1/4, …; then merge them.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …", show_default="a GPU if there is one")
    ] = None,
    trust: TrustOption = False,
    random_weights: RandomOption = False,
) -> None:
    """Count what every head of a model does over a whole corpus, and write pages that open offline.

    An interrupted census goes on where it stopped when the same command is given again. `regard census merge A B --out
    C` joins the shards of one census; `regard census compare A B --out C` shows which heads differ between two.
    """
    console, names = Console(highlight=False), list(names or [])
    with errors_as_messages():
        if out is None:
            raise typer.BadParameter("it names the folder to write", param_hint="--out")
        check_writable("--out", out, folder=True)
        if names and names[0] in _VERBS:
            if texts is not None or shard is not None:
                raise typer.BadParameter(f"{names[0]} reads finished censuses; leave out --texts and --shard")
            said = (_merge if names[0] == "merge" else _compare)([Path(name) for name in names[1:]], out)
        else:
            if len(names) > 1:
                raise typer.BadParameter("it takes one model", param_hint="MODEL")
            if texts is None:
                raise typer.BadParameter("it names the texts that the model reads", param_hint="--texts")
            reading = Reading(field, length, overlap, batch_tokens, max_tokens, exemplars)
            model = names[0] if names else None
            said = _take(model, texts, out, reading, _parts(shard), device, (trust, random_weights))
        for line in said:
            console.print(Text(line), soft_wrap=True)


def _parts(shard: str | None) -> tuple[int, int] | None:
    if shard is None:
        return None
    first, _, count = shard.partition("/")
    if not first.isdecimal() or not count.isdecimal() or not 0 <= int(first) < int(count):
        raise typer.BadParameter(f"it must be i/n with 0 ≤ i < n, as in 0/4; got {shown(shard)}", param_hint="--shard")
    return int(first), int(count)


def _usable(device: str | None) -> str:
    """The device that was asked for, or a GPU if there is one."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DeviceError(f"--device: {device!r} cannot be used here: {reason}. Give cpu, or leave it out.") from error
    return device


def _take(
    name: str | None,
    path: Path,
    out: Path,
    reading: Reading,
    shard: tuple[int, int] | None,
    device: str | None,
    allowed: tuple[bool, bool],
) -> list[str]:
    import torch

    from regard.models import census as take_census
    from regard.models.head_census import Corpus, Texts, codec_of
    from regard.models.head_census.folder import check_free
    from regard.models.loading import BUILTIN, load

    check_free(out, "--out")
    texts = Texts(path, reading.field)
    rank = _join_group()
    device = _usable(device)
    with progress() as bar:
        task = bar.add_task(f"loading {shown(name or BUILTIN)}", total=None)
        loaded = load(name, remote_code=allowed[0], random_weights=allowed[1], device=device)
        loaded.check_reads("census")
        bar.remove_task(task)
        codec = codec_of(loaded)
        length = codec.length if reading.length is None else reading.length
        overlap = length // 8 if reading.overlap is None else reading.overlap
        size = reading.batch_tokens or _BATCH_TOKENS.get(torch.device(device).type, 16384)
        corpus = Corpus(texts, codec, length, overlap, max(size, length), reading.max_tokens)
        part = "" if shard is None else f"-{shard[0]}-of-{shard[1]}"
        checkpoint = out.with_name(f".{out.name}{part}{rank or ''}.census")
        found = take_census(
            loaded.model,
            corpus,
            exemplars=reading.exemplars,
            title=loaded.title,
            shard=shard,
            checkpoint=checkpoint,
            tell=_counting(bar, texts),
        )
        if rank:
            checkpoint.unlink(missing_ok=True)
            return []
        bar.add_task("writing pages", total=None)
        found.save(out)
        checkpoint.unlink(missing_ok=True)
    return _said(found, out)


def _join_group() -> int:
    """Join the process group of torchrun, if it started this process, and return the rank."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _counting(bar: Progress, texts: Texts) -> Callable[[int, int], None]:
    """Show tokens, rate and time left; to be called with the tokens counted and the position in the texts."""
    task = bar.add_task("counting", total=texts.size)
    start: list[tuple[float, int, int]] = []

    def tell(tokens: int, position: int) -> None:
        now = time.monotonic()
        if not start:
            start.append((now, tokens, position))
        began, before, first = start[0]
        rate = (tokens - before) / (now - began) if now > began else 0.0
        left = ""
        if texts.size and position > first and now > began:
            seconds = (texts.size - position) * (now - began) / (position - first)
            left = f", {int(seconds // 60)}:{int(seconds % 60):02} left"
        speed = f", {rate:,.0f} per second" if rate else ""
        bar.update(task, completed=position, description=f"counting: {tokens:,} tokens{speed}{left}")

    return tell


def _said(found: Census, out: Path) -> list[str]:
    """What to print about a census: its groups, and what must be known about it."""
    from regard.models.head_census.view import remarks

    lines = [f"{shown(found.title)}: {len(found.heads):,} heads over {found.tokens:,} tokens"]
    for group in found.groups():
        sure = "" if group.words == "alone" else f", {group.words} ({group.sure:.2f})"
        lines.append(f"  {len(group.places):>4} {'head' if len(group.places) == 1 else 'heads'}: {group.name}{sure}")
    lines += [shown(one) for one in remarks(found)]
    return [*lines, f"wrote {shown(str(out))}; open {shown(str(out / 'index.html'))} in a browser"]


def _merge(folders: list[Path], out: Path) -> list[str]:
    from functools import reduce

    from regard.models import Census

    if len(folders) < 2:
        raise typer.BadParameter("it joins two or more folders", param_hint="merge")
    found = reduce(Census.merge, (Census.load(folder) for folder in folders))
    found.save(out)
    return _said(found, out)


def _compare(folders: list[Path], out: Path) -> list[str]:
    from regard.models import Census
    from regard.models.head_census.folder import save_comparison

    if len(folders) != 2:
        raise typer.BadParameter("it compares two folders", param_hint="compare")
    first, second = (Census.load(folder) for folder in folders)
    found = first.diff(second)
    save_comparison(found, out)
    lines = [f"{shown(found.titles[1])} against {shown(found.titles[0])}: the heads that moved most"]
    for one in found.heads[:10]:
        change = f"{one.changes[one.most]:+.3g}"
        lines.append(f"  L{found.layers.index(one.layer)} H{one.head}: {one.distance:.3f}, {one.most} {change}")
    return [*lines, f"wrote {shown(str(out))}; open {shown(str(out / 'index.html'))} in a browser"]
