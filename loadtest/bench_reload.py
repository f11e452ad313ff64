"""Versions of a large table come and go every few seconds under a steady load on it and on another table.

Each answer of the load is compared with the true rows of the version that it names. Latencies are told
apart by when a request was due: long before a publish; from the moment that CURRENT changed until half a
second after the version was visible (the old one is freed then); in the second and a half that follows.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedserve.client import AdminClient, Client
from embedserve.index import Filter, Layer, exact_topk
from embedserve.loadtest.checked_load import OK, Ask, CheckedLoad, Truth
from embedserve.loadtest.results import Figure
from embedserve.loadtest.servers import ServerProcess
from embedserve.proto import embedding_pb2
from embedserve.quant import Catalog, ImportOptions, Output, import_table, make_delta, open_matrix

DIM, VERSIONS, K = 64, 3, 10
IDS, CANDIDATES, QUESTIONS = 256, 500, 24
STEADY_S, FREED_S, AFTER_S = 2.0, 0.5, 1.5
UPSERT_LIMIT_MS, DELTA_LIMIT_PERCENT, VISIBLE_LIMIT_S = 100.0, 8.0, 1.0

# A publisher checks every byte; it leaves the processor to those who serve.
_PUBLISH = """
import os, sys, time
from pathlib import Path
from embedserve.quant import Catalog
os.nice(19)
Catalog(Path(sys.argv[1])).publish("moving", sys.argv[2])
print(time.monotonic())
"""


@dataclass(frozen=True)
class _Reload:
    """Moments on the monotonic clock."""

    asked: float
    current: float
    visible: float


def run(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """All of it in one run; see the module."""
    rows, reloads, rate = (50_000, 3, 100.0) if quick else (15_000_000, 20, 240.0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "catalog"
        catalog = Catalog(root)
        say(f"making {VERSIONS} versions of {rows:,} rows x {DIM}, {rows * (DIM + 4) / 1e9:.2f} GB each")
        names = [_make(catalog, "moving", rows, seed, Path(folder)) for seed in range(VERSIONS)]
        catalog.publish("moving", names[0])
        catalog.publish("other", _make(catalog, "other", 20_000, 99, Path(folder)))
        asks = _questions(catalog, "moving", names, small=False) + _questions(catalog, "other", [""], small=True)
        asks = [ask for pair in zip(asks[: len(asks) // 2], asks[len(asks) // 2 :], strict=True) for ask in pair]
        log = Path(folder) / "log"
        with ServerProcess(root, log=log) as server, Client(server.address) as client:
            say(f"{reloads} reloads under {rate:g} requests/s, half of them to a table that stays")
            with CheckedLoad(server.address, asks, rate) as load:
                time.sleep(1)
                versions = itertools.islice(itertools.cycle([*names[1:], names[0]]), reloads)
                taken = [_reload(root, client, version) for version in versions]
            figures = _load_figures(load, asks, taken, reloads)
            size = catalog.open("moving").manifest.total_bytes
            figures.append(
                Figure("publish to visible, median", statistics.median(t.visible - t.current for t in taken), "s",
                       f"limit for {size / 1e9:.2f} GB", VISIBLE_LIMIT_S, True)
            )  # fmt: skip
            figures.append(
                Figure("publish to visible, slowest", max(t.visible - t.current for t in taken), "s", "limit", VISIBLE_LIMIT_S, True)
            )  # fmt: skip
            figures.append(_memory(server.pid, size))
            with CheckedLoad(server.address, [ask for ask in asks if ask.method == "TopK"], rate / 4):
                figures += _upserts(server, client, 20 if quick else 200)
        figures.append(_delta(Path(folder), 20_000 if quick else 1_000_000))
    return figures


def _make(catalog: Catalog, table: str, rows: int, seed: int, folder: Path) -> str:
    source = folder / "source.npy"
    block = np.random.default_rng(seed).standard_normal((100_000, DIM), np.float32)
    with open(source, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, DIM)})
        for first in range(0, rows, len(block)):
            file.write(block[: rows - first].tobytes())
    version = import_table(catalog, table, open_matrix(str(source)), ImportOptions()).version
    source.unlink()
    return version


def _questions(catalog: Catalog, table: str, versions: list[str], small: bool) -> list[Ask]:
    """Two Lookups to each TopK: of the whole table where it is small, among candidates where it is large."""
    opened = [catalog.open(table, version) for version in versions]
    rng, rows, asks = np.random.default_rng(len(versions)), opened[0].manifest.rows, []
    for number in range(QUESTIONS):
        if number % 3:
            ids = rng.integers(0, rows, IDS)
            request = embedding_pb2.LookupRequest(table=table, ids=ids).SerializeToString()
            truth: dict[str, Truth] = {}
            for artifact in opened:
                values = np.empty((IDS, DIM), np.float32)
                artifact.native_table().gather(ids, Output.FLOAT32, None, values)
                truth[artifact.manifest.version] = (values.tobytes(),)
            asks.append(Ask(table, "Lookup", request, truth))
        else:
            query = rng.standard_normal((1, DIM), np.float32)
            allow = None if small else np.unique(rng.integers(0, rows, CANDIDATES))
            request = embedding_pb2.TopKRequest(table=table, vectors=query[0], k=K, allow=allow).SerializeToString()
            none = np.empty(0, np.int64)
            truth = {}
            for artifact in opened:
                layers, metric = (Layer(artifact.native_table(), None),), artifact.manifest.metric
                positions, scores, _ = exact_topk(layers, metric, query, K, Filter([none], allow))
                truth[artifact.manifest.version] = (positions.astype("<i8").tobytes(), scores.tobytes())
            asks.append(Ask(table, "TopK", request, truth))
    return asks


def _reload(root: Path, client: Client, version: str) -> _Reload:
    """Publishes after a quiet while, and watches until the version answers."""
    time.sleep(STEADY_S)
    asked = time.monotonic()
    publisher = subprocess.Popen(
        [sys.executable, "-c", _PUBLISH, str(root), version], stdout=subprocess.PIPE, text=True
    )
    while client.lookup("moving", [0]).version != version:
        time.sleep(0.005)
        if time.monotonic() - asked > 120 or (publisher.poll() or 0) != 0:
            raise RuntimeError(f"version {version} did not come to be served")
    visible = time.monotonic()
    current = float(publisher.communicate()[0])
    time.sleep(FREED_S + AFTER_S)
    return _Reload(asked, min(current, visible), visible)


def _load_figures(load: CheckedLoad, asks: list[Ask], taken: list[_Reload], reloads: int) -> list[Figure]:
    records = load.records
    right = int(np.count_nonzero(records["outcome"] == OK))
    figures = [Figure(f"true answers in {reloads} reloads", right, "requests", "sent", len(records))]
    windows = {
        "steady": [(t.asked - STEADY_S, t.asked) for t in taken],
        "during": [(t.current, t.visible + FREED_S) for t in taken],
        "after": [(t.visible + FREED_S, t.visible + FREED_S + AFTER_S) for t in taken],
    }
    for table, label in (("moving", "table reloaded"), ("other", "other table")):
        of_table = np.isin(records["ask"], [i for i, ask in enumerate(asks) if ask.table == table])
        p99 = {name: _p99_ms(records[of_table], spans) for name, spans in windows.items()}
        figures += [
            Figure(f"p99 {name}, {label}", p99[name], "ms", "steady", p99["steady"], True)
            for name in ("during", "after")
        ]
    return figures


def _p99_ms(records: npt.NDArray[np.void], spans: list[tuple[float, float]]) -> float:
    due = records["due_s"]
    inside = np.zeros(len(records), np.bool_)
    for begin, end in spans:
        inside |= (due >= begin) & (due < end)
    return float(np.percentile(records["latency_s"][inside], 99)) * 1e3 if inside.any() else float("nan")


def _memory(pid: int, version_bytes: int) -> Figure:
    """Three versions are mapped while one comes and one goes."""
    status = Path(f"/proc/{pid}/status").read_text()
    peak_mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return Figure("peak memory", peak_mb, "MB", "3 versions", 3 * version_bytes / (1 << 20), True)


def _upserts(server: ServerProcess, client: Client, rounds: int) -> list[Figure]:
    """From sending 100 rows until a Lookup shows them, under load."""
    rng, waits = np.random.default_rng(5), []
    with AdminClient(server.admin_address) as admin:
        for _ in range(rounds):
            keys, values = (
                rng.choice(20_000, 100, replace=False),
                rng.standard_normal((100, DIM), np.float32),
            )
            begun = time.perf_counter()
            admin.upsert("other", keys, values)
            seen = client.lookup("other", keys).values
            waits.append((time.perf_counter() - begun) * 1e3)
            if not np.allclose(seen, values, atol=0.05):
                raise RuntimeError("an upsert was acknowledged and is not visible")
    return [
        Figure("upsert of 100 rows to visible, median", statistics.median(waits), "ms", "limit", UPSERT_LIMIT_MS, True),
        Figure(
            "upsert of 100 rows to visible, p99", float(np.percentile(waits, 99)), "ms", "limit", UPSERT_LIMIT_MS, True
        ),
    ]


def _delta(folder: Path, rows: int) -> Figure:
    """The size of what is sent when one row in twenty has changed."""
    catalog, rng = Catalog(folder / "deltas"), np.random.default_rng(7)
    values = rng.standard_normal((rows, DIM), np.float32)
    names = []
    for _ in range(2):
        np.save(folder / "x.npy", values)
        names.append(import_table(catalog, "t", open_matrix(str(folder / "x.npy")), ImportOptions()).version)
        values[rng.choice(rows, rows // 20, replace=False)] += 0.1
    old, new = (catalog.open("t", name) for name in names)
    make_delta(old, new, folder / "delta")
    sent = sum(file.stat().st_size for file in (folder / "delta").iterdir())
    share = 100 * sent / new.manifest.total_bytes
    return Figure("delta, 5 % of rows changed", share, "% of full", "limit", DELTA_LIMIT_PERCENT, True)
