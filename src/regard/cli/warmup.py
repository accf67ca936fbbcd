"""`regard warmup`: compile the GPU kernels ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from regard.warmup import DIMS, DTYPES, USUAL, VARIANTS, plan, warm

from .output import errors_as_messages

__all__ = ["warmup"]


def warmup(
    dtype: Annotated[
        list[str], typer.Option(help=f"The dtypes to compile for: {', '.join(DTYPES)}; may be repeated.")
    ] = ["bfloat16"],  # noqa: B006
    dim: Annotated[list[int], typer.Option(help="Head dims, up to 256; may be repeated.")] = list(DIMS),  # noqa: B006
    variant: Annotated[
        list[str], typer.Option(help=f"The kinds of call to compile for: {', '.join(VARIANTS)}; may be repeated.")
    ] = list(USUAL),  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Compile every variant.")] = False,
    backward: Annotated[bool, typer.Option(help="Compile the backward pass too.")] = True,
) -> None:
    """Compile the GPU kernels ahead of time, so that no first call waits; they serve every mask and every length."""
    with errors_as_messages():
        wanted = plan(dtype, dim, VARIANTS if everything else variant)
        with Progress(console=Console(stderr=True)) as bar:
            warmed = list(bar.track(warm(wanted, backward), total=len(wanted), description="compiling"))
    table = Table("variant", "dtype", "dim", "seconds")
    for one in warmed:
        table.add_row(one.variant, one.dtype, str(one.dim), f"{one.seconds:.1f}")
    Console().print(table)
