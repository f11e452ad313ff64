"""Commands that change what a server serves: reload, rollback, unload, upsert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from embedserve.cli.output import console, progress_bar
from embedserve.cli.query import RootCertificates, Token
from embedserve.client import TLS, AdminClient
from embedserve.quant import key_chunks, open_keys, open_matrix, to_float32

AdminServer = Annotated[str, typer.Argument(metavar="HOST:ADMIN_PORT", help="Where the server's AdminService listens.")]
TableName = Annotated[str, typer.Argument(metavar="TABLE")]


def register(app: typer.Typer) -> None:
    app.command()(reload)
    app.command()(rollback)
    app.command()(unload)
    app.command()(upsert)
    app.command()(warm)


def admin_client(server: str, token: str | None, ca: Path | None) -> AdminClient:
    return AdminClient(server, token=token, tls=TLS(ca.read_bytes()) if ca else None)


def reload(
    server: AdminServer,
    table: Annotated[str, typer.Option(help="Only this table; all if not given.")] = "",
    version: Annotated[str, typer.Option(help="This version of --table; the published one if not given.")] = "",
    token: Token = None,
    tls_ca: RootCertificates = None,
) -> None:
    """Have a server take up what is published, and wait until every request sees it.

    Servers that watch their catalog (the default) do so by themselves.

    Example: `embedserve reload 127.0.0.1:50052 --table items`
    """
    with admin_client(server, token, tls_ca) as admin:
        for taken in admin.reload(table, version):
            before = f", {taken.previous or 'nothing'} before" if taken.changed else ", as before"
            console.print(f"{taken.table}: serves {taken.version}{before}", highlight=False)


def rollback(
    server: AdminServer,
    table: TableName,
    version: Annotated[str, typer.Option(help="An open version; the one served before if not given.")] = "",
    token: Token = None,
    tls_ca: RootCertificates = None,
) -> None:
    """Have one server go back to a version that it still keeps, until the next reload or publish.

    To take a whole fleet back, publish the older version: `embedserve publish --version`.

    Example: `embedserve rollback 127.0.0.1:50052 items`
    """
    with admin_client(server, token, tls_ca) as admin:
        taken = admin.rollback(table, version)
    console.print(f"{taken.table}: serves {taken.version}, {taken.previous} before", highlight=False)


def unload(server: AdminServer, table: TableName, token: Token = None, tls_ca: RootCertificates = None) -> None:
    """Have a server stop serving a table and free its memory; reload takes it up again.

    Example: `embedserve unload 127.0.0.1:50052 items`
    """
    with admin_client(server, token, tls_ca) as admin:
        admin.unload(table)
    console.print(f"{table}: not served any more", highlight=False)


def upsert(
    server: AdminServer,
    table: TableName,
    keys: Annotated[str, typer.Argument(metavar="KEYS", help="PATH or PATH:ARRAY of int64 keys, one a row.")],
    values: Annotated[str, typer.Argument(metavar="VALUES", help="PATH or PATH:ARRAY of their rows [n, dim].")],
    token: Token = None,
    tls_ca: RootCertificates = None,
) -> None:
    """Write rows over the version that is served: durable, and visible at once.

    They stay over later versions until these are made with them in place, by `embedserve fold` or import.

    Example: `embedserve upsert 127.0.0.1:50052 items new-ids.npy new-items.npy`
    """
    matrix = open_matrix(values)
    all_keys = np.concatenate([chunk for _, chunk in key_chunks(open_keys(keys, matrix.shape[0]))])
    with admin_client(server, token, tls_ca) as admin, progress_bar(f"upsert {table}", len(all_keys)) as progress:
        for first, rows in matrix.chunks():
            done = first + len(rows)
            answer = admin.upsert(table, all_keys[first:done], to_float32(matrix, rows))
            progress(done)
    console.print(
        f"{table}: {done:,} rows written; {answer.upserted_rows:,} lie over {answer.version}", highlight=False
    )


def warm(
    server: AdminServer,
    table: TableName,
    keys: Annotated[str, typer.Argument(metavar="KEYS", help="PATH or PATH:ARRAY of int64 keys.")],
    token: Token = None,
    tls_ca: RootCertificates = None,
) -> None:
    """Have a server load rows into its pool before they are asked for.

    A server does so by itself at a start and at a reload, with what was asked for before.

    Example: `embedserve warm 127.0.0.1:50052 items hot-ids.npy`
    """
    stored = open_keys(keys)
    done = loaded = 0
    with admin_client(server, token, tls_ca) as admin, progress_bar(f"warm {table}", stored.shape[0]) as progress:
        for _, chunk in key_chunks(stored):
            loaded += admin.warm(table, chunk)
            done += len(chunk)
            progress(done)
    console.print(f"{table}: {loaded:,} of {done:,} keys loaded", highlight=False)
