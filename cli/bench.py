"""The bench command: one benchmark by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from embedserve.cli.output import console
from embedserve.loadtest.results import Figure, print_figures

NAMES = ("kernels", "import", "lookup", "reload", "topk", "tiers")


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(NAMES)}.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For tiers: a .npy of int64 keys, in the order they were asked for."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs; figures mean little.")] = False,
) -> None:
    """Measure one thing beside its peers, in the same run.

    Example: `embedserve bench kernels --json kernels.json`
    """
    figures: list[Figure]
    if name == "kernels":
        from embedserve.loadtest.bench_kernels import run
    elif name == "import":
        from embedserve.loadtest.bench_import import run
    elif name == "lookup":
        from embedserve.loadtest.bench_lookup import run
    elif name == "reload":
        from embedserve.loadtest.bench_reload import run
    elif name == "topk":
        from embedserve.loadtest.bench_topk import run
    elif name == "tiers":
        from functools import partial

        from embedserve.loadtest.bench_tiers import run as run_tiers

        run = partial(run_tiers, trace=trace)
    else:
        raise typer.BadParameter(f"{name!r}; there is: {', '.join(NAMES)}")
    figures = run(quick, lambda line: console.print(line, style="dim", highlight=False))
    print_figures(name, figures)
    if json_file:
        json_file.write_text(json.dumps([figure.as_dict() for figure in figures], indent=1) + "\n")
