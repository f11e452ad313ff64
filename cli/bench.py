"""The bench command: one benchmark by name, or all of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from embedserve.cli.output import console
from embedserve.loadtest import report
from embedserve.loadtest.results import Figure, Result, print_figures

NAMES = ("kernels", "import", "lookup", "reload", "topk", "tiers", "load")
ALL = "all"


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(NAMES)}; or {ALL}.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")
    ] = None,
    report_directory: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Also write a page with charts there, report.html.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For tiers: a .npy of int64 keys in the order they were asked for."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it runs; figures mean little.")] = False,
) -> None:
    """Measure one thing beside its peers, in the same run.

    Example: `embedserve bench kernels --json kernels.json --report kernels`
    """
    if name not in (*NAMES, ALL):
        raise typer.BadParameter(f"{name!r}; there is: {', '.join(NAMES)}, {ALL}")
    found: dict[str, Sequence[Result]] = {}
    for each in NAMES if name == ALL else (name,):
        options: dict[str, Any] = {"trace": trace} if each == "tiers" and trace else {}
        run: Callable[..., list[Result]] = importlib.import_module(f"embedserve.loadtest.bench_{each}").run
        found[each] = run(quick, lambda line: console.print(line, style="dim", highlight=False), **options)
        print_figures(each, _figures(found[each]))
        if json_file:  # after each: all of them take long
            figures = [figure.as_dict() for results in found.values() for figure in _figures(results)]
            json_file.write_text(json.dumps(figures, indent=1) + "\n")
        if report_directory:
            page = report.write(report_directory, f"embedserve bench {name}", found)
            console.print(f"report: {page}", highlight=False)


def _figures(results: Sequence[Result]) -> list[Figure]:
    return [each for each in results if isinstance(each, Figure)]
