"""The whole main job on real data: train, import, publish, serve, ask, load, report."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from embedserve.cli.output import console, print_table, progress_bar
from embedserve.client import Client
from embedserve.loadtest.movielens import Ratings, load_ratings, load_titles, train
from embedserve.loadtest.servers import ServerProcess
from embedserve.quant import Artifact, Catalog, ImportOptions, Manifest, Metric, import_table, open_keys, open_matrix
from embedserve.quant.quality import recall_at_k

DIM = 64
SHOWN_USERS = (15, 73, 468)
LOAD_CALLERS = 4
LOAD_IDS = 256


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    root: Annotated[Path, typer.Option(help="Where to leave the catalog.")] = Path("demo-catalog"),
    seconds: Annotated[float, typer.Option(help="How long to run the load.")] = 5.0,
) -> None:
    """Run the main job on bundled MovieLens ratings and print its figures.

    Example: `embedserve demo --root demo-catalog`
    """
    ratings = load_ratings()
    console.print(
        f"[bold]1. Train[/] {DIM}-dim factors from {len(ratings.stars):,} ratings of {len(ratings.user_ids)} users and {len(ratings.item_ids):,} films"
    )
    users, items = train(ratings, DIM)

    console.print("[bold]2. Import, quantise and publish[/]")
    catalog = Catalog(root)
    _publish(catalog, "users", users, ratings.user_ids)
    manifest = _publish(catalog, "items", items, ratings.item_ids)

    console.print("[bold]3. Serve and ask[/]")
    with ServerProcess(root) as server, Client(server.address) as client:
        console.print(f"   listening on {server.address}")
        rows = client.lookup("items", ratings.item_ids[:3])
        console.print(
            f"   lookup items {ratings.item_ids[:3].tolist()}: {np.array2string(rows.values[:, :4], precision=3, separator=', ')} …",
            highlight=False,
        )
        _recommend(client, ratings)
        console.print(
            f"[bold]4. Load[/]: {LOAD_CALLERS} callers in a closed loop, {LOAD_IDS} random ids a lookup, for {seconds:g} s"
        )
        latencies = _load(server.address, ratings.item_ids, seconds)

    recall = recall_at_k(items, Artifact(root / "items" / manifest.version).native_table(), users, Metric.IP, 10)
    stride = manifest.format.stride
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    print_table("Figures", ("", "value"), [
        ("lookups a second (QPS)", f"{len(latencies) / seconds:,.0f}"),
        ("rows a second", f"{len(latencies) * LOAD_IDS / seconds:,.0f}"),
        ("p50", f"{p50:.2f} ms"),
        ("p99", f"{p99:.2f} ms"),
        ("bytes a row", f"{stride} INT8, {4 * DIM} FP32 ({stride / (4 * DIM):.1%})"),
        ("recall@10 against FP32, all users", f"{recall:.4f}"),
    ])  # fmt: skip
    console.print(f"The catalog stays in {root}. Next:")
    for command in (
        f"embedserve tables --root {root}",
        f"embedserve serve --root {root}",
        "embedserve topk 127.0.0.1:50051 items --id 15 --query-table users",
        f"embedserve import YOUR.npy --root {root} --table mine --publish",
    ):
        console.print(f"   {command}", style="cyan", highlight=False)


def _publish(catalog: Catalog, table: str, factors: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> Manifest:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{table}.npz"
        np.savez(source, factors=factors, ids=ids)
        matrix, keys = open_matrix(f"{source}:factors"), open_keys(f"{source}:ids", len(ids))
        with progress_bar(f"import {table}", len(ids)) as progress:
            manifest = import_table(catalog, table, matrix, ImportOptions(), keys, progress)
    catalog.publish(table, manifest.version)
    console.print(
        f"   {table} {manifest.version}: {manifest.rows:,} rows, cosine to FP32 {manifest.quality.mean_cosine:.6f}"
    )
    return manifest


def _recommend(client: Client, ratings: Ratings) -> None:
    titles = load_titles()
    places = np.searchsorted(ratings.user_ids, SHOWN_USERS)
    seen = [ratings.rated_by(int(place)) for place in places]
    best = client.topk("items", query_ids=SHOWN_USERS, query_table="users", k=5, exclude_each=seen)
    for user, films, ids in zip(SHOWN_USERS, seen, best.ids, strict=True):
        console.print(
            f"   for user {user}, who rated {len(films)} films: " + "; ".join(titles[int(i)] for i in ids),
            highlight=False,
        )


def _load(address: str, ids: npt.NDArray[np.int64], seconds: float) -> npt.NDArray[np.float64]:
    """Latencies in seconds of every lookup."""
    latencies: list[list[float]] = [[] for _ in range(LOAD_CALLERS)]
    end = time.perf_counter() + seconds

    def caller(number: int) -> None:
        generator = np.random.default_rng(number)
        with Client(address) as client:
            while (begun := time.perf_counter()) < end:
                client.lookup("items", generator.choice(ids, LOAD_IDS), output="float16")
                latencies[number].append(time.perf_counter() - begun)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(LOAD_CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate([np.array(each) for each in latencies])
