"""The top command: a server's figures in the terminal, every second."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from embedserve.cli.output import console
from embedserve.cli.query import RootCertificates, Token
from embedserve.cli.steer import AdminServer, admin_client
from embedserve.client import ServiceError
from embedserve.proto import admin_pb2


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    server: AdminServer,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    token: Token = None,
    tls_ca: RootCertificates = None,
) -> None:
    """Watch a server: calls and latencies, tables and versions, tiers. Ctrl-C ends it.

    Example: `embedserve top 127.0.0.1:50052`
    """
    with admin_client(server, token, tls_ca) as admin:
        if once:
            console.print(view(server, admin.stats()))
            return
        with Live(view(server, admin.stats()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                try:
                    live.update(view(server, admin.stats()), refresh=True)
                except ServiceError as error:
                    live.update(Text(f"{server}: {error}", style="bold red"), refresh=True)


def view(server: str, stats: admin_pb2.GetStatsResponse) -> Group:
    """One look: three tables."""
    pool = f", pool {stats.pool_bytes / 1e6:,.0f} MB" if stats.pool_bytes else ""
    head = Text(
        f"{server}   up {stats.uptime_s / 60:,.1f} min, {stats.frontend}, {stats.kernels}, {stats.in_progress} in progress{pool}", style="dim"
    )  # fmt: skip
    parts: list[Table | Text] = [head, _methods(stats), _tables(stats)]
    tiers = _tiers(stats)
    return Group(*parts, *([tiers] if tiers.row_count else []))


def _grid(*columns: str) -> Table:
    grid = Table(pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return grid


def _methods(stats: admin_pb2.GetStatsResponse) -> Table:
    grid = _grid("method", "QPS 10 s", "1 min", "p50 ms", "p90", "p99", "p99.9", "calls", "failed")
    for method in stats.methods:
        ten, minute, _ = method.windows
        grid.add_row(
            method.method, f"{ten.qps:,.1f}", f"{minute.qps:,.1f}", f"{ten.p50_ms:.2f}", f"{ten.p90_ms:.2f}", f"{ten.p99_ms:.2f}",
            f"{ten.p999_ms:.2f}", f"{method.handled:,}", _bad(method.failed),
        )  # fmt: skip
    return grid


def _tables(stats: admin_pb2.GetStatsResponse) -> Table:
    grid = _grid("table", "version", "rows", "memory MB", "upserted", "taken", "refused", "state")
    for table in stats.tables:
        state = (
            f"taking up {table.loading}"
            if table.loading
            else "as published"
            if table.as_published
            else "[red]not as published[/]"
        )
        grid.add_row(
            table.table, table.version, f"{table.rows:,}", f"{table.memory_bytes / 1e6:,.1f}", f"{table.upserted_rows:,}",
            f"{table.taken:,}", _bad(table.refused), state,
        )  # fmt: skip
    return grid


def _tiers(stats: admin_pb2.GetStatsResponse) -> Table:
    grid = _grid("table", "tier", "rows", "hits", "share", "evicted", "unavailable", "ms a fetch", "state")
    for table in stats.tables:
        asked = sum(tier.hits for tier in table.tiers)
        for tier in table.tiers:
            a_fetch = f"{1e3 * tier.fetch_s / tier.fetches:.2f}" if tier.fetches else ""
            share = f"{tier.hits / asked:.1%}" if asked else ""
            state = f"[red]{tier.state}[/]" if tier.state not in ("", "closed") else tier.state
            grid.add_row(
                table.table, tier.tier, f"{tier.rows:,}", f"{tier.hits:,}", share, f"{tier.evictions:,}", _bad(tier.unavailable), a_fetch, state
            )  # fmt: skip
    return grid


def _bad(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "0"
