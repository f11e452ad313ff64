"""Commands on indexes: index build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from embedserve.cli.catalog import Root
from embedserve.cli.output import Json, console, print_json, progress_bar
from embedserve.cli.query import read_vectors
from embedserve.index.build import BuildOptions, Outcome, build_index
from embedserve.loadtest import report
from embedserve.loadtest.results import Chart, Figure
from embedserve.quant import Artifact, Catalog, Output
from embedserve.quant.errors import ConfigError

QUERY_ROWS = 400


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode="markdown", help="Indexes, by which TopK of large tables is quick."
    )
    group.command()(build)
    group.callback()(lambda: None)  # so that there may be one command
    app.add_typer(group, name="index")


def build(
    table: Annotated[str, typer.Argument(metavar="TABLE")],
    root: Root,
    version: Annotated[str, typer.Option(help="Which one; the newest if not given.")] = "",
    recall: Annotated[float, typer.Option(min=0, max=1, help="Share of the exact top k that is to be found.")] = 0.99,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=1000, help="The k of that.")] = 10,
    memory: Annotated[
        float,
        typer.Option(
            min=0, help="Most memory of the index, over that of the rows as FP32; 3 tries the largest kinds too."
        ),
    ] = 0.125,
    spec: Annotated[str, typer.Option(help="A FAISS index factory string, in place of trying several.")] = "",
    queries: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npy", help="Queries [Q, dim] such as will be asked; else rows with noise added."),
    ] = None,
    query_table: Annotated[str, typer.Option(help="Rows of this table's published version are the queries.")] = "",
    publish: Annotated[bool, typer.Option("--publish", help="Make the version with the index current.")] = False,
    report_directory: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Also write a page there, report.html: what each kind reached."),
    ] = None,
    json: Json = False,
) -> None:
    """Build the index that answers TopK quickest at a recall, in a new version of the same rows.

    Tables for which the exact search is as quick are left as they are. Tune by queries like those to come:
    `--query-table users` where users ask for items.

    Example: `embedserve index build items --root catalog --recall 0.99 --query-table users --publish`
    """
    if queries and query_table:
        raise typer.BadParameter("give either --queries or --query-table")
    catalog = Catalog(root)
    versions = catalog.versions(table)
    version = version or (versions[-1] if versions else "")
    asked, origin = None, "rows with noise added"
    if queries:
        asked, origin = np.atleast_2d(read_vectors(queries)), queries.name
    elif query_table:
        asked, origin = _rows(catalog.open(query_table)), f"rows of {query_table}"
    options = BuildOptions(recall, k, memory, spec, asked, origin)
    rows = catalog.open(table, version).manifest.rows
    try:
        with progress_bar(f"index {table}", rows) as progress:
            outcome = build_index(catalog, table, version, options, _quiet if json else _say, progress)
    except ImportError:
        raise ConfigError("FAISS is not installed; pip install 'embedserve[cpu]'") from None
    made = outcome.manifest
    if report_directory:
        _picture(report_directory, outcome, table, options)
    if publish:
        catalog.publish(table, made.version if made else version)
    if json:
        print_json(made.model_dump(mode="json", by_alias=True) if made else {"index": None})
    else:
        _report(outcome, table, publish, root)


def _report(outcome: Outcome, table: str, published: bool, root: Path) -> None:
    made = outcome.manifest
    if made is None or made.index is None:
        console.print(
            f"{table}: the exact search is as quick; no index is needed" + ("; published" if published else "")
        )
        return
    index = made.index
    size = made.files["index.faiss"].bytes
    console.print(
        f"{table} {made.version}: {index.spec}, recall@{index.k} {index.recall:.4f} on {index.queries}, "
        f"{index.us_a_query:,.0f} us a query (exact {index.exact_us_a_query:,.0f}), {size / made.rows:.1f} bytes a row "
        f"({size / (4 * made.dim * made.rows):.1%} of FP32)",
        highlight=False,
    )
    console.print(
        "published" if published else f"not published; next: embedserve publish --root {root} --table {table}"
    )


def _picture(directory: Path, outcome: Outcome, table: str, options: BuildOptions) -> None:
    """Recall and queries a second of every search tried that no other of its kind beats in both, and the exact search."""
    exact = 1e6 / outcome.exact_us_a_query if outcome.exact_us_a_query else 0.0
    lines: dict[str, list[tuple[float, float]]] = {}
    for trial in outcome.trials:
        line: list[tuple[float, float]] = []
        for recall, us in sorted(trial.looks, reverse=True):
            if not line or 1e6 / us > line[-1][1]:
                line.append((recall, 1e6 / us))
        lines[trial.family.spec] = line[::-1]
    name = f"recall@{options.k}"
    chart = Chart(f"Queries a second at {name}", name, "one thread", lines)
    figures = [
        Figure(
            f"{trial.family.spec}: {name} {trial.recall:.4f}",
            1e6 / trial.us_a_query,
            "queries/s",
            "exact search",
            exact,
        )
        for trial in outcome.trials
        if trial.us_a_query
    ]
    page = report.write(
        directory, f"embedserve index build {table}", {f"at least {options.recall:g} wanted": [chart, *figures]}
    )
    console.print(f"report: {page}", highlight=False)


def _say(line: str) -> None:
    console.print(line, style="dim", highlight=False)


def _quiet(line: str) -> None:
    pass


def _rows(artifact: Artifact) -> np.ndarray:
    """Some of its rows, decoded."""
    manifest = artifact.manifest
    places = np.unique(np.random.default_rng(3).integers(0, manifest.rows, QUERY_ROWS))
    keys = places if artifact.keys is None else artifact.keys[places]
    out = np.empty((len(places), manifest.dim), np.float32)
    artifact.native_table().gather(np.ascontiguousarray(keys), Output.FLOAT32, None, out)
    return out
