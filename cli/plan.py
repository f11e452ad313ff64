"""The plan command: what tables will take, before they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embedserve.cli.catalog import Root
from embedserve.cli.output import Json, console, print_json, print_table
from embedserve.quant import Catalog
from embedserve.server import load_config, plan_of


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    root: Root,
    config: Annotated[Path | None, typer.Option(help="The server's TOML file.")] = None,
    memory_pool_size: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    memory_budget: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    keep_versions: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    json: Json = False,
) -> None:
    """Say how many bytes of RAM, disk and Redis the published tables take, steady and during a reload, and whether they fit.

    Exit code 1 if they do not.

    Example: `embedserve plan --root catalog --memory-pool-size 8000000000`
    """
    flags = {
        "root": root,
        "memory_pool_size": memory_pool_size,
        "memory_budget": memory_budget,
        "keep_versions": keep_versions,
    }
    found = plan_of(load_config(config, flags), Catalog(root))
    if json:
        tables = [{**vars(table), "steady": table.steady} for table in found.tables]
        summary = {"pool": found.pool, "process": found.process, "steady": found.steady, "reloading": found.reloading}
        print_json({"tables": tables, **summary, "budget": found.budget, "fits": found.fits})
    else:
        print_table(
            str(root), ("table", "version", "rows", "held", "RAM a version", "versions", "disk", "if in Redis"),
            [(t.table, t.version, f"{t.rows:,}", t.held, _size(t.ram), t.versions, _size(t.disk), _size(t.redis)) for t in found.tables],
        )  # fmt: skip
        console.print(
            f"RAM steady {_size(found.steady)}, of it pool {_size(found.pool)} and the process itself {_size(found.process)}"
        )
        console.print(
            f"RAM while the largest table is reloaded {_size(found.reloading)}; memory_budget {_size(found.budget)}, without the process"
        )
        if not found.fits:
            console.print(
                "does not fit: keep fewer versions, hold rows in a pool (memory_pool_size), or raise memory_budget",
                style="bold red",
            )
    if not found.fits:
        raise typer.Exit(1)


def _size(n: int) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:,.0f} {unit}" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1000  # type: ignore[assignment]
    return f"{n:,.2f} GB"
