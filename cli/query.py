"""Commands that ask a server: lookup, topk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
import typer

from embedserve.cli.output import Json, console, print_json, print_table
from embedserve.client import TLS, Client, OutputName
from embedserve.quant.errors import SourceError

Server = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server listens.")]
TableName = Annotated[str, typer.Argument(metavar="TABLE")]
Token = Annotated[str | None, typer.Option(help="Bearer token.", envvar="EMBEDSERVE_TOKEN", show_envvar=False)]
RootCertificates = Annotated[Path | None, typer.Option("--tls-ca", help="PEM roots to trust; turns TLS on.")]


def register(app: typer.Typer) -> None:
    settings = {"ignore_unknown_options": True}  # so that negative ids are ids
    app.command(context_settings=settings)(lookup)
    app.command()(topk)


def _client(server: str, token: str | None, ca: Path | None) -> Client:
    return Client(server, token=token, tls=TLS(ca.read_bytes()) if ca else None)


def lookup(
    server: Server,
    table: TableName,
    ids: Annotated[list[int], typer.Argument(metavar="ID...")],
    output: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    version: Annotated[str, typer.Option(help="Pin a version.")] = "",
    token: Token = None,
    tls_ca: RootCertificates = None,
    json: Json = False,
) -> None:
    """Print the vectors of ids.

    Example: `embedserve lookup 127.0.0.1:50051 items 1 2 3`
    """
    with _client(server, token, tls_ca) as client:
        result = client.lookup(table, ids, output=cast(OutputName, output), version=version)
    if json:
        answer: dict[str, Any] = {"version": result.version, "missing": result.missing.tolist(), "tiers": result.tiers}
        print_json({**answer, "values": result.values.tolist()})
        return
    missing = set(result.missing.tolist())
    for place, (key, values) in enumerate(zip(ids, result.values, strict=True)):
        shown = "no such id" if place in missing else np.array2string(values, precision=4, threshold=8)
        console.print(f"{key}: {shown}", highlight=False)
    console.print(f"version {result.version}, {result.values.shape[1]} values a row", style="dim")


def topk(
    server: Server,
    table: TableName,
    id: Annotated[list[int] | None, typer.Option(help="Ids whose rows are the queries.")] = None,
    vector: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Query vectors [Q, dim] or [dim].")] = None,
    query_table: Annotated[str, typer.Option(help="Table of --id; the searched one if not given.")] = "",
    k: Annotated[int, typer.Option("-k", help="Results a query.")] = 10,
    exclude: Annotated[list[int] | None, typer.Option(help="Ids to leave out.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Score every row even where there is an index.")] = False,
    token: Token = None,
    tls_ca: RootCertificates = None,
    json: Json = False,
) -> None:
    """Print the k best rows for vectors or ids.

    Example: `embedserve topk 127.0.0.1:50051 items --id 7 --query-table users -k 10`
    """
    if (id is None) == (vector is None):
        raise typer.BadParameter("give either --id or --vector")
    vectors = read_vectors(vector) if vector is not None else None
    with _client(server, token, tls_ca) as client:
        result = client.topk(
            table, vectors=vectors, query_ids=id, query_table=query_table, k=k, exclude=exclude or (), exact=exact
        )
    best = [
        [{"id": int(i), "score": float(s)} for i, s in zip(ids[:n], scores[:n], strict=True)]
        for ids, scores, n in zip(result.ids, result.scores, result.counts, strict=True)
    ]
    missing = result.missing_queries.tolist()
    if json:
        print_json({"version": result.version, "exact": result.exact, "missing_queries": missing, "results": best})
        return
    for place, rows in enumerate(best):
        name = f"id {id[place]}" if id else f"vector {place}"
        title = f"{name}: no such id" if place in missing else name
        print_table(title, ("id", "score"), [(row["id"], f"{row['score']:.4f}") for row in rows])


def read_vectors(path: Path) -> npt.NDArray[np.float32]:
    try:
        return np.asarray(np.load(path, allow_pickle=False), np.float32)
    except (ValueError, EOFError) as error:
        raise SourceError(f"{path}: not a .npy array of floats: {error}") from None
