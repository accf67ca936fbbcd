"""`regard warmup`: compile the GPU kernels ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.report.terminal import shown
from regard.warmup import DIMS, DTYPES, USUAL, VARIANTS, cache_folder, plan, warm

from .output import errors_as_messages, progress

__all__ = ["warmup"]


def warmup(
    dtype: Annotated[
        list[str], typer.Option(help=f"The dtypes to compile for: {', '.join(DTYPES)}; may be repeated.")
    ] = ["bfloat16"],  # noqa: B006
    dim: Annotated[list[int], typer.Option(help="Head dims, up to 512; may be repeated.")] = list(DIMS),  # noqa: B006
    variant: Annotated[
        list[str], typer.Option(help=f"The kinds of call to compile for: {', '.join(VARIANTS)}; may be repeated.")
    ] = list(USUAL),  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Compile every variant.")] = False,
    backward: Annotated[bool, typer.Option(help="Compile the backward pass too.")] = True,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compile at the same time.", show_default="one per core, at most 8"),
    ] = None,
) -> None:
    """Compile the GPU kernels ahead of time, so that no first call waits; they serve every mask and every length."""
    table = Table("variant", "dtype", "dim", "seconds")
    with errors_as_messages():
        wanted = plan(dtype, dim, VARIANTS if everything else variant)
        with progress() as bar:
            task = bar.add_task("compiling", total=len(wanted))
            for one in warm(wanted, backward, jobs=jobs):
                table.add_row(one.variant, one.dtype, str(one.dim), f"{one.seconds:.1f}")
                bar.update(task, advance=1, description=f"compiled {one.variant} for {one.dtype}, dim {one.dim}")
    Console().print(table)
    Console().print(
        Text(
            f"The kernels are in {shown(cache_folder())}; every process that uses this folder starts without compiling."
        )
    )
    compiled = {variant for variant, _, _ in wanted}
    if rest := [name for name in VARIANTS if name not in compiled]:
        typer.echo(f"Not compiled: {', '.join(rest)}. --variant names them one by one, and --all means all.")
