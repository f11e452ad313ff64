"""Rows written to a running server: seen at once, never lost, and in place in the versions that follow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import reference as ref
from conftest import eventually, publish_table, rows_of, serving

from embedserve.client import AdminClient, Client, ServiceError
from embedserve.loadtest.servers import ServerProcess
from embedserve.proto import admin_pb2, embedding_pb2
from embedserve.quant import Catalog, RowType, fold_upserts, make_delta

DIM = 8
KEYS = np.array([7, -3, 900, 2**62, -(2**63), 11, 12, 13], np.int64)


def rows_like(value: float, n: int = 1) -> np.ndarray:
    return np.full((n, DIM), value, np.float32)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """keyed: rows by KEYS, all i + 1. dense: 20 rows, all 1."""
    publish_table(tmp_path / "root", "keyed", np.repeat(np.arange(1, 9, dtype=np.float32)[:, None], DIM, 1), KEYS)
    publish_table(tmp_path / "root", "dense", rows_like(1, 20))
    return tmp_path / "root"


def value_of(client: Client, key: int, table: str = "keyed", **options: str) -> float:
    """What a key's row is filled with; 0 if there is none."""
    values = client.lookup(table, [key], **options).values
    assert (values == values[0, 0]).all()
    return float(values[0, 0])


def test_upserted_rows_are_read_in_every_way_a_row_is_read(root):
    with serving(root) as (_, client, admin):
        answer = admin.upsert("keyed", [900, 55, 900], np.concatenate([rows_like(1), rows_like(50), rows_like(90)]))
        assert answer.upserted_rows == 2 and answer.version == client.lookup("keyed", [7]).version
        found = client.lookup("keyed", [55, 7, 900, 56, 55])
        assert found.values[:, 0].tolist() == [50, 1, 90, 0, 50] and found.missing.tolist() == [3]
        pooled = client.lookup("keyed", [55, 7, 900, 11], pooling="sum", offsets=[0, 2])
        assert pooled.values[:, 0].tolist() == [51, 96]
        best = client.topk("keyed", vectors=rows_like(1), k=3, include_vectors="float32")
        assert best.ids.tolist() == [[900, 55, 13]] and best.scores.tolist() == [[90 * DIM, 50 * DIM, 8 * DIM]]
        assert best.vectors[:, 0].tolist() == [90, 50, 8]
        best = client.topk("keyed", query_ids=[55], k=2, exclude=[900, 55])
        assert best.ids.tolist() == [[13, 12]] and best.scores[0].tolist() == [8 * 50 * DIM, 7 * 50 * DIM]
        best = client.topk("keyed", vectors=rows_like(1), k=9, allow=[55, 900, 7, 4444])
        assert best.ids[0, : best.counts[0]].tolist() == [900, 55, 7]
        assert client.topk("keyed", vectors=rows_like(1), k=50).counts.tolist() == [9]
        described = admin.describe("keyed")
        assert described.upserted_rows == 2 and described.summary.rows == 8 + 2
        assert {t.table: t.upserted_rows for t in admin.stats().tables} == {"keyed": 2, "dense": 0}


@pytest.mark.parametrize("row_type", list(RowType))
def test_upserted_rows_are_the_bytes_that_import_would_have_made(tmp_path, row_type):
    root, rng = tmp_path / "root", np.random.default_rng(0)
    values, fresh = rng.standard_normal((2, 40, DIM)).astype(np.float32)
    publish_table(root, "t", values, row_type=row_type)
    publish_table(root, "imported", fresh, row_type=row_type)
    with serving(root) as (_, client, admin):
        admin.upsert("t", np.arange(40)[::-1], fresh[::-1])
        stored, _ = rows_of(root, "imported")
        assert np.array_equal(client.lookup("t", np.arange(40)).values, stored)
        queries = rng.standard_normal((5, DIM)).astype(np.float32)
        best = client.topk("t", vectors=queries, k=40)
        exact = ref.scores(queries, stored, "ip")
        np.testing.assert_allclose(best.scores, -np.sort(-exact, axis=1), atol=1e-4)


def test_a_version_that_fits_float16_may_cease_to(tmp_path):
    """A value past FLOAT16 over rows that are not: refused with the reason, as it is for a table that began so."""
    root = tmp_path / "root"
    publish_table(root, "t", rows_like(1, 4), row_type=RowType.FP32)
    with serving(root) as (_, client, admin):
        assert client.lookup("t", [1], output="float16").values[0, 0] == 1
        admin.upsert("t", [2], rows_like(1e6))
        with pytest.raises(ServiceError, match="past FLOAT16"):
            client.lookup("t", [1], output="float16")
        assert client.lookup("t", [2]).values[0, 0] == 1e6


@pytest.mark.parametrize("table,keys,values,code,words", [
    ("nope", [1], rows_like(1), "NOT_FOUND", "no table 'nope'"),
    ("keyed", [7, 8], np.stack([rows_like(1)[0], np.array([0, 0, np.nan, *[0] * 5], "f4")]), "INVALID_ARGUMENT", "key 8, column 2: nan"),
    ("keyed", [7], rows_like(np.inf), "INVALID_ARGUMENT", "key 7, column 0: inf"),
    ("keyed", [7, 9], np.stack([rows_like(5)[0], np.array([1e8, 1, 3, *[0] * 5], "f4")]), "INVALID_ARGUMENT", "key 9: its range"),
    ("keyed", [7], np.zeros((1, DIM - 1), np.float32), "INVALID_ARGUMENT", "of dim 8"),
    ("keyed", [], np.zeros((0, DIM), np.float32), "INVALID_ARGUMENT", "none; send one a row"),
    ("dense", [3, 20], rows_like(5, 2), "INVALID_ARGUMENT", "20 is not one of the 20 positions"),
    ("dense", [-1, 3], rows_like(5, 2), "INVALID_ARGUMENT", "-1 is not one"),
    ("keyed", list(range(100, 131)), rows_like(5, 31), "RESOURCE_EXHAUSTED", "max_upserted_rows (30)"),
])  # fmt: skip
def test_an_upsert_is_taken_whole_or_not_at_all(root, table, keys, values, code, words):
    with serving(root, "--max-upserted-rows", "30") as (_, client, admin):
        with pytest.raises(ServiceError) as caught:
            admin.upsert(table, keys, values)
        assert caught.value.code.name == code and words in caught.value.message
        assert value_of(client, 7) == 1 and value_of(client, 3, "dense") == 1
        assert not list(root.glob("*/upserts/*.log"))
        admin.upsert("dense", [3], rows_like(4))
        assert value_of(client, 3, "dense") == 4


def test_keys_and_values_written_element_by_element_are_read(root):
    """Not packed, as proto2 writers and some generators send them."""
    field = [b"\x0a\x05keyed", b"\x11" + (900).to_bytes(8, "little")]
    field += [b"\x1d" + np.float32(3).tobytes()] * DIM
    plain = admin_pb2.UpsertRequest(table="keyed", keys=[900], values=[3] * DIM)
    assert admin_pb2.UpsertRequest.FromString(b"".join(field)) == plain
    with serving(root) as (server, client, _), grpc.insecure_channel(server.admin_address) as channel:
        channel.unary_unary("/embedserve.v1.AdminService/Upsert")(b"".join(field))
        assert value_of(client, 900) == 3


def test_what_is_acknowledged_is_seen_by_every_later_request_within_100_ms(root):
    with serving(root) as (server, client, admin), Client(server.address) as other:
        admin.upsert("keyed", [7], rows_like(2))
        waits = []
        for value in range(3, 40):
            begun = time.monotonic()
            admin.upsert("keyed", [7], rows_like(value))
            waits.append(time.monotonic() - begun)
            assert value_of(client, 7) == value_of(other, 7) == value
            assert client.topk("keyed", vectors=rows_like(1), k=10, allow=[7]).scores[0, 0] == value * DIM
        assert np.median(waits) < 0.1


def test_a_restart_keeps_them(root):
    with serving(root) as (_, _, admin):
        admin.upsert("keyed", [7, 55], rows_like(20, 2))
        admin.upsert("dense", [3], rows_like(30))
    with serving(root) as (_, client, admin):
        assert (value_of(client, 7), value_of(client, 55), value_of(client, 3, "dense")) == (20, 20, 30)
        admin.upsert("keyed", [7], rows_like(21))
    with serving(root) as (_, client, _):
        assert (value_of(client, 7), value_of(client, 55)) == (21, 20)


def test_killed_at_any_moment_nothing_acknowledged_is_lost(root):
    """Several writers, a kill at a random moment, again and again over the same log."""
    acknowledged = dict.fromkeys(range(5), 0)
    rng = np.random.default_rng(0)
    for _ in range(6):
        with serving(root) as (server, client, admin):
            for writer, count in acknowledged.items():
                for part in range(3):
                    found = value_of(client, 1000 * writer + part)
                    # What was sent when the server died may or may not have come to be.
                    assert found in (count, count + 1), (writer, part)
            acknowledged = {writer: int(value_of(client, 1000 * writer)) for writer in acknowledged}

            def write(writer, admin=admin, acknowledged=acknowledged):
                while True:
                    value = acknowledged[writer] + 1
                    try:
                        admin.upsert("keyed", 1000 * writer + np.arange(3), rows_like(value, 3))
                    except ServiceError:
                        return
                    acknowledged[writer] = value

            threads = [threading.Thread(target=write, args=(writer,)) for writer in acknowledged]
            for thread in threads:
                thread.start()
            time.sleep(float(rng.uniform(0.05, 0.5)))
            os.kill(server.pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
    assert min(acknowledged.values()) > 6


def test_they_lie_over_versions_made_without_them_and_go_into_those_made_with_them(root):
    with serving(root) as (_, client, admin):
        first = client.lookup("keyed", [7]).version
        admin.upsert("keyed", [7, 55], rows_like(20, 2))
        # An import that holds key 7 replaces its upsert and takes in that of key 55.
        second = publish_table(root, "keyed", rows_like(5, 8), KEYS)
        eventually(lambda: client.lookup("keyed", [7]).version == second)
        assert (value_of(client, 7), value_of(client, 55), value_of(client, 11)) == (5, 20, 5)
        assert admin.describe("keyed").upserted_rows == 0
        # One made before it, elsewhere or back then, has them over it as it had.
        admin.rollback("keyed")
        assert client.lookup("keyed", [7]).version == first
        assert (value_of(client, 7), value_of(client, 55), value_of(client, 11)) == (20, 20, 6)
        admin.upsert("keyed", [11], rows_like(70))
        admin.reload("keyed")
        assert (value_of(client, 7), value_of(client, 55), value_of(client, 11)) == (5, 20, 70)


def test_folding_under_load_shows_every_caller_the_same_rows(root):
    with serving(root) as (server, _, admin):
        admin.upsert("keyed", [7, 55], rows_like(20, 2))
        stop, problems, versions = threading.Event(), [], set()

        def ask():
            with Client(server.address) as mine:
                while not stop.is_set():
                    found = mine.lookup("keyed", [7, 55, 11, 56])
                    versions.add(found.version)
                    if found.values[:, 0].tolist() != [20, 20, 6, 0] or found.missing.tolist() != [3]:
                        problems.append(found)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            admin.upsert("keyed", [7], rows_like(20))  # a new word for the log, the same row
            folded = Catalog(root).publish("keyed", fold_upserts(Catalog(root), "keyed").version)
            eventually(lambda folded=folded: admin.describe("keyed").summary.version == folded)
            assert admin.describe("keyed").upserted_rows == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert not problems and len(versions) >= 3


def test_servers_on_one_catalog_see_what_any_of_them_was_sent(root):
    with serving(root) as (_, one, admin), serving(root) as (_, two, other_admin):
        admin.upsert("keyed", [55], rows_like(20))
        eventually(lambda: value_of(two, 55) == 20, 5)
        other_admin.upsert("keyed", [55], rows_like(21))
        assert value_of(two, 55) == 21
        eventually(lambda: value_of(one, 55) == 21, 5)


def test_writers_on_several_servers_lose_nothing(root):
    with serving(root) as (_, one, admin), serving(root) as (_, two, other_admin):

        def write(to, first):
            for i in range(40):
                to.upsert("keyed", [first + i], rows_like(first + i))

        threads = [threading.Thread(target=write, args=each) for each in ((admin, 1000), (other_admin, 2000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        keys = np.concatenate([np.arange(1000, 1040), np.arange(2000, 2040)])
        for client in (one, two):
            eventually(lambda client=client: not len(client.lookup("keyed", keys).missing), 5)
            np.testing.assert_allclose(client.lookup("keyed", keys).values[:, 0], keys, rtol=1e-3)


def test_a_damaged_log_serves_what_stands_before_the_damage_and_takes_no_more(root, tmp_path):
    with serving(root) as (_, _, admin):
        for value in (20, 30, 40):
            admin.upsert("keyed", [55], rows_like(value))
    (segment,) = root.glob("keyed/upserts/*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    log = tmp_path / "server.log"
    with serving(root, log=log) as (_, client, admin):
        assert value_of(client, 55) == 20 and value_of(client, 7) == 1
        with pytest.raises(ServiceError, match="damaged at byte") as caught:
            admin.upsert("keyed", [7], rows_like(9))
        assert caught.value.code.name == "DATA_LOSS" and value_of(client, 7) == 1
        admin.upsert("dense", [1], rows_like(9))  # another table's log is another log
    assert "upserts are damaged" in log.read_text()


def test_a_full_disk_refuses_them_and_takes_them_when_there_is_room(root):
    """The limit on a file's size stands for the disk; the server inherits it."""
    big = np.arange(10**6, 10**6 + 5000)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)); "
        "sys.argv[:1] = []; import runpy; runpy.run_module('embedserve.cli.run', run_name='__main__', alter_sys=True)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "serve",
        "--root",
        str(root),
        "--port",
        "0",
        "--admin-port",
        "0",
        "--metrics-port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        _, address, _, admin_address, *_ = process.stdout.readline().split()
        with Client(address) as client, AdminClient(admin_address) as admin:
            admin.upsert("keyed", [55], rows_like(20))
            with pytest.raises(ServiceError, match="cannot write") as caught:
                admin.upsert("keyed", big, rows_like(1, len(big)))
            assert caught.value.code.name == "RESOURCE_EXHAUSTED"
            assert value_of(client, 55) == 20 and len(client.lookup("keyed", big).missing) == len(big)
            admin.upsert("keyed", [55], rows_like(21))  # what fits is taken
            assert value_of(client, 55) == 21
    finally:
        process.terminate()
        process.communicate(timeout=30)
    with serving(root) as (_, client, _):
        assert value_of(client, 55) == 21


def test_a_version_of_another_dim_leaves_them_out_aloud(root, tmp_path):
    log = tmp_path / "server.log"
    with serving(root, log=log) as (_, client, admin):
        admin.upsert("dense", [3], rows_like(4))
        new = publish_table(root, "dense", np.ones((20, DIM + 1), np.float32))
        eventually(lambda: client.lookup("dense", [3]).version == new)
        assert value_of(client, 3, "dense") == 1
        with pytest.raises(ServiceError, match="of dim 9"):
            admin.upsert("dense", [3], rows_like(4))
    with serving(root, log=log) as (_, client, _):
        assert value_of(client, 3, "dense") == 1


# Deltas, in a server.


def test_a_server_takes_up_a_version_that_came_as_a_delta(root, tmp_path):
    """Its folder copied into the catalog and named in CURRENT, as a deploy script would: the server makes the rows."""
    elsewhere = tmp_path / "elsewhere"
    values = np.random.default_rng(0).standard_normal((300, DIM)).astype(np.float32)
    old = publish_table(elsewhere, "t", values)
    values[::20] += 1
    new = publish_table(elsewhere, "t", values)
    catalog = Catalog(elsewhere)
    made = tmp_path / "deltas" / new
    make_delta(catalog.open("t", old), catalog.open("t", new), made)
    subprocess.run(["mkdir", "-p", root / "t"], check=True)
    subprocess.run(["cp", "-r", elsewhere / "t" / old, root / "t"], check=True)
    (root / "t" / "CURRENT").write_text(old + "\n")
    with serving(root) as (_, client, admin):
        assert client.lookup("t", [0]).version == old
        subprocess.run(["cp", "-r", made, root / "t"], check=True)
        (root / "t" / ".CURRENT").write_text(new + "\n")
        os.replace(root / "t" / ".CURRENT", root / "t" / "CURRENT")
        eventually(lambda: client.lookup("t", [0]).version == new)
        assert np.array_equal(client.lookup("t", np.arange(300)).values, rows_of(elsewhere, "t", new)[0])
        # A delta of a version that this catalog lacks is refused with the reason, and the table goes on.
        values[1] += 1
        third = publish_table(elsewhere, "t", values)
        values[1] += 1
        fourth = publish_table(elsewhere, "t", values)
        make_delta(catalog.open("t", third), catalog.open("t", fourth), root / "t" / fourth)
        (root / "t" / "CURRENT").write_text(fourth + "\n")
        eventually(lambda: admin.describe("t").refused.version == fourth)
        assert f"changes version {third}, which cannot be read" in admin.describe("t").refused.reason
        assert client.lookup("t", [0]).version == new
        # The full version takes the broken link's place.
        subprocess.run(["cp", "-r", elsewhere / "t" / third, root / "t"], check=True)
        eventually(lambda: client.lookup("t", [0]).version == fourth)
    with ServerProcess(root) as server, Client(server.address) as client:
        assert client.lookup("t", [0]).version == fourth


# The client, when what it pinned is gone.


def test_a_lookup_in_parts_begins_again_when_its_version_leaves(root):
    """More ids than a response holds go in parts, all of one version; the server keeps but one here."""
    publish_table(root, "wide", np.full((3000, 512), 1, np.float32))
    with serving(root, "--keep-versions", "1") as (_, client, admin):
        stop, problems = threading.Event(), []

        def ask():
            while not stop.is_set():
                values = client.lookup("wide", np.arange(3000)).values
                if (values != values[0, 0]).any():
                    problems.append(values)

        thread = threading.Thread(target=ask)
        thread.start()
        for value in (2, 3, 4):
            publish_table(root, "wide", np.full((3000, 512), value, np.float32))
            eventually(lambda value=value: client.lookup("wide", [0]).values[0, 0] == value)
            time.sleep(0.3)
        stop.set()
        thread.join()
        assert not problems and admin.describe("wide").versions == [admin.describe("wide").summary.version]
        pinned = embedding_pb2.LookupRequest(table="wide", ids=[0], version="20200101T000000Z")
        with pytest.raises(ServiceError, match="no version '20200101T000000Z' open"):
            client.lookup("wide", [0], version=pinned.version)
