"""Versions going live, going back and being refused, in a real server under real requests."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
import reference as ref
import xxhash
from conftest import eventually, publish_table, rows_of, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc

from embedserve.client import Client, ServiceError
from embedserve.loadtest.servers import ServerProcess
from embedserve.quant import Catalog, ImportOptions, import_table, open_matrix

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ROWS, DIM = 300, 8


def constant(value: float, rows: int = ROWS) -> np.ndarray:
    return np.full((rows, DIM), value, np.float32)


def version_of(root: Path, value: float, rows: int = ROWS, table: str = "t") -> str:
    """Imports a version whose rows are all `value`; unpublished."""
    np.save(root.parent / "x.npy", constant(value, rows))
    return import_table(Catalog(root), table, open_matrix(str(root.parent / "x.npy")), ImportOptions()).version


def served_value(client: Client, table: str = "t", **options: str) -> float:
    values = client.lookup(table, [0, ROWS // 2, 7], **options).values
    assert (values == values[0, 0]).all()
    return float(values[0, 0])


def health(server: ServerProcess, name: str) -> int | None:
    with grpc.insecure_channel(server.address) as channel:
        try:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name)).status
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            return None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A table t of one version, whose rows are all 1."""
    publish_table(tmp_path / "root", "t", constant(1))
    return tmp_path / "root"


# What reaches a server, and how.


def test_twenty_reloads_under_mixed_load_fail_nothing_and_mix_nothing(tmp_path):
    """Every answer of every caller is the true rows, or the true best rows, of the version that it names."""
    root, rng = tmp_path / "root", np.random.default_rng(0)
    values = [rng.standard_normal((2000, 16)).astype(np.float32) for _ in range(21)]
    publish_table(root, "steady", values[0])
    names = [publish_table(root, "moving", values[0])]
    for each in values[1:]:
        np.save(tmp_path / "x.npy", each)
        names.append(
            import_table(Catalog(root), "moving", open_matrix(str(tmp_path / "x.npy")), ImportOptions()).version
        )
    truth = {name: rows_of(root, "moving", name)[0] for name in names}
    steady = rows_of(root, "steady")[0]
    queries = rng.standard_normal((3, 16)).astype(np.float32)
    best = {name: np.sort(ref.scores(queries, rows, "ip"))[:, :-11:-1] for name, rows in truth.items()}
    stop, problems, answered, seen = threading.Event(), [], itertools.count(), set()

    def check_lookup(result, ids, rows):
        assert np.array_equal(result.values, rows[ids]), result.version
        seen.add(result.version)
        next(answered)

    def lookups(client):
        ids = np.random.default_rng().integers(0, 2000, 400)
        result = client.lookup("moving", ids)
        check_lookup(result, ids, truth[result.version])
        check_lookup(client.lookup("steady", ids), ids, steady)

    def in_parts(client):
        ids = np.arange(1800)
        result = client.lookup("moving", ids)
        check_lookup(result, ids, truth[result.version])

    def best_rows(client):
        result = client.topk("moving", vectors=queries, k=10, include_vectors="float32")
        np.testing.assert_allclose(result.scores, best[result.version], rtol=1e-4)
        assert np.array_equal(result.vectors, truth[result.version][result.ids.reshape(-1)])
        next(answered)

    def stream(client):
        ids = np.arange(100)
        for result in client.lookup_stream("moving", (ids for _ in range(50))):
            check_lookup(result, ids, truth[result.version])

    def caller(work):
        with Client(server.address) as client:
            while not stop.is_set():
                try:
                    work(client)
                except Exception as error:  # noqa: BLE001 (whatever it is, the test fails with it)
                    problems.append(error)
                    return

    with ServerProcess(root, "--tables", "moving", "--tables", "steady") as server:
        with Client(server.address) as client:
            eventually(lambda: client.lookup("moving", [1]).version == names[0])
        threads = [threading.Thread(target=caller, args=(work,)) for work in (lookups, in_parts, best_rows, stream)]
        for thread in threads:
            thread.start()
        with Client(server.address) as client:
            for name in names[1:]:
                Catalog(root).publish("moving", name)
                eventually(lambda name=name: client.lookup("moving", [1]).version == name)
                time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems, problems
    assert next(answered) > 500 and len(seen) > 15


def test_reload_answers_once_every_later_request_sees_the_new_version(root):
    first = Catalog(root).current("t")
    with serving(root, "--no-watch") as (server, client, admin):
        second = publish_table(root, "t", constant(2))
        time.sleep(0.3)
        assert served_value(client) == 1
        (taken,) = admin.reload("t")
        assert (taken.table, taken.version, taken.previous, taken.changed) == ("t", second, first, True)
        with Client(server.address) as another:
            assert served_value(client) == served_value(another) == 2
        assert served_value(client, version=first) == 1
        (again,) = admin.reload()
        assert (again.version, again.changed) == (second, False)
        third = publish_table(root, "t", constant(3))
        admin.reload("t")
        assert served_value(client, version=second) == 2
        with pytest.raises(ServiceError, match=f"there is: {second}, {third}") as caught:
            client.lookup("t", [1], version=first)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        admin.reload("t", first)  # any version that the catalog has
        assert served_value(client) == 1
        with pytest.raises(ServiceError, match="has no version 'nope'"):
            admin.reload("t", "nope")
        with pytest.raises(ServiceError, match="no table 'nope'"):
            admin.reload("nope")
        with pytest.raises(ServiceError, match="no table name"):
            admin.reload("../t")
        assert served_value(client) == 1 and [t.table for t in admin.tables()] == ["t"]


def test_reloads_asked_for_at_once_follow_one_another(root):
    with serving(root, "--no-watch") as (_, client, admin):
        names = [version_of(root, value) for value in (2, 3, 4, 5)]
        outcomes = []
        threads = [threading.Thread(target=lambda n=n: outcomes.extend(admin.reload("t", n))) for n in names * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        changes = [outcome for outcome in outcomes if outcome.changed]
        assert len(outcomes) == 8 and {c.version for c in changes} == set(names)
        assert {c.previous for c in changes} <= {*names, Catalog(root).current("t")}
        assert served_value(client) in (2, 3, 4, 5)


def test_sighup_reloads_every_table(root):
    with serving(root, "--no-watch") as (server, client, _):
        publish_table(root, "t", constant(2))
        os.kill(server.pid, signal.SIGHUP)
        eventually(lambda: served_value(client) == 2)


def test_a_stream_switches_between_messages(root):
    with serving(root, "--no-watch") as (_, client, admin):
        seen = []

        def batches():
            yield [1, 2]
            eventually(lambda: len(seen) == 1)
            publish_table(root, "t", constant(2))
            admin.reload("t")
            yield [1, 2]

        for result in client.lookup_stream("t", batches()):
            assert (result.values == result.values[0, 0]).all()
            seen.append(float(result.values[0, 0]))
        assert seen == [1, 2]


def test_a_new_table_is_taken_up_and_a_table_can_be_unloaded(root):
    with serving(root) as (server, client, admin):
        assert health(server, "u") is None
        publish_table(root, "u", constant(5))
        eventually(lambda: health(server, "u") == SERVING)
        assert served_value(client, "u") == 5 and {t.table for t in admin.tables()} == {"t", "u"}
        admin.unload("u")
        assert health(server, "u") == NOT_SERVING
        for call in (lambda: client.lookup("u", [1]), lambda: admin.unload("u"), lambda: admin.rollback("u")):
            with pytest.raises(ServiceError, match="no table 'u'; there is: t") as caught:
                call()
            assert caught.value.code is grpc.StatusCode.NOT_FOUND
        time.sleep(1.2)  # the watcher leaves it so
        assert {t.table for t in admin.tables()} == {"t"}
        admin.reload("u")
        assert served_value(client, "u") == 5 and health(server, "u") == SERVING


def test_rollback_goes_to_any_version_that_is_open_and_lasts_until_the_next_publish(root):
    first = Catalog(root).current("t")
    with serving(root, "--keep-versions", "3") as (server, client, admin):
        with pytest.raises(ServiceError, match="no other version open") as caught:
            admin.rollback("t")
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        second = publish_table(root, "t", constant(2))
        eventually(lambda: served_value(client) == 2)
        third = publish_table(root, "t", constant(3))
        eventually(lambda: served_value(client) == 3)
        taken = admin.rollback("t")
        assert (taken.version, taken.previous) == (second, third) and served_value(client) == 2
        assert admin.rollback("t", first).version == first and served_value(client) == 1
        assert health(server, "t") == SERVING and health(server, "t:current") == NOT_SERVING
        with pytest.raises(ServiceError, match=f"there is: {first}, {second}, {third}"):
            admin.rollback("t", "nope")
        time.sleep(1.2)  # the watcher leaves it so
        assert served_value(client) == 1
        (stats,) = admin.stats().tables
        assert (stats.taken, stats.rolled_back, stats.refused) == (4, 2, 0)
        publish_table(root, "t", constant(4))
        eventually(lambda: served_value(client) == 4)
        assert health(server, "t:current") == SERVING
        Catalog(root).publish("t", second)  # a fleet goes back like this
        eventually(lambda: served_value(client) == 2)


# What must not be served.


def rewritten(path: Path, change) -> None:
    """Changes a version's rows file, and its hashes with it."""
    data = bytearray((path / "rows.safetensors").read_bytes())
    change(data)
    (path / "rows.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    hashes = {"sha256": hashlib.sha256(data).hexdigest(), "xxh3": xxhash.xxh3_64(bytes(data)).hexdigest()}
    manifest["files"]["rows.safetensors"].update(hashes)
    (path / "manifest.json").write_text(json.dumps(manifest))


def half_of_it(path: Path) -> None:
    os.truncate(path / "rows.safetensors", (path / "rows.safetensors").stat().st_size // 2)


def one_bit(path: Path) -> None:
    data = bytearray((path / "rows.safetensors").read_bytes())
    data[-100] ^= 4
    (path / "rows.safetensors").write_bytes(data)


DAMAGES = {
    "truncated": (half_of_it, "bytes, but the manifest says", "DATA_LOSS"),
    "bit flipped": (one_bit, "not those that were written", "DATA_LOSS"),
    "rows missing": (lambda path: (path / "rows.safetensors").unlink(), "missing, though the manifest lists it", "DATA_LOSS"),
    "manifest garbage": (lambda path: (path / "manifest.json").write_bytes(b"\x00{"), "manifest.json", "DATA_LOSS"),
    "gone": (shutil.rmtree, "has no version", "NOT_FOUND"),
    "a file in its place": (lambda path: (shutil.rmtree(path), path.write_text("")), "has no version", "NOT_FOUND"),
    "CURRENT garbage": (lambda path: (path.parent / "CURRENT").write_bytes(b"\xff../.."), "not a version's name", "DATA_LOSS"),
    "CURRENT empty": (lambda path: (path.parent / "CURRENT").write_bytes(b""), "not a version's name", "DATA_LOSS"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_is_refused_and_the_last_good_one_goes_on(root, tmp_path, damage):
    """The server says so in its answer, health, log, DescribeTable and stats, and takes the next good one by itself."""
    change, words, code = DAMAGES[damage]
    good, log = Catalog(root).current("t"), tmp_path / "log"
    with serving(root, "--no-watch", log=log) as (server, client, admin):
        bad = version_of(root, 2)
        (root / "t" / "CURRENT").write_text(bad + "\n")
        change(root / "t" / bad)
        with pytest.raises(ServiceError) as caught:
            admin.reload("t")
        assert caught.value.code.name == code and words in caught.value.message
        assert served_value(client) == 1 and client.topk("t", query_ids=[1], k=3).version == good
        assert health(server, "t") == SERVING and health(server, "t:current") == NOT_SERVING
        refused = admin.describe("t").refused
        assert words in refused.reason and refused.time.startswith("20")
        assert admin.stats().tables[0].refused == 1 and "version is not taken" in log.read_text()
    publish_table(root, "other", constant(1))
    with serving(root, log=log) as (server, client, admin):  # as after a crash: the newest good one, and why
        assert served_value(client, "other") == 1 and health(server, "t:current") == NOT_SERVING
        if damage.startswith("CURRENT"):  # nobody can tell what was published
            assert health(server, "t") == NOT_SERVING
            with pytest.raises(ServiceError, match=f"not served: .*{words}"):
                admin.describe("t")
        else:
            assert served_value(client) == 1 and health(server, "t") == SERVING
            assert words in admin.describe("t").refused.reason
        publish_table(root, "t", constant(3))
        eventually(lambda: health(server, "t:current") == SERVING)
        assert served_value(client) == 3 and not admin.describe("t").HasField("refused")


def test_a_version_that_is_mended_is_taken_by_itself(root):
    with serving(root) as (_, client, admin):
        name = version_of(root, 2)
        path = root / "t" / name / "rows.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        (root / "t" / "CURRENT").write_text(name + "\n")
        eventually(lambda: admin.describe("t").refused.version == name)
        path.write_bytes(whole)
        eventually(lambda: served_value(client) == 2)


def test_a_version_whose_keys_lead_to_other_rows_fails_the_health_query(tmp_path):
    root, keys = tmp_path / "root", np.arange(ROWS) * 7
    publish_table(root, "t", constant(1), keys)
    with serving(root, "--no-watch") as (_, client, admin):
        bad = publish_table(root, "t", constant(2), keys)

        def swap_keys(data: bytearray) -> None:
            start = bytes(data).index(keys.astype("<i8").tobytes())
            data[start : start + 16] = data[start + 8 : start + 16] + data[start : start + 8]

        rewritten(root / "t" / bad, swap_keys)
        with pytest.raises(ServiceError, match="health query: key 7 is found at row 1") as caught:
            admin.reload("t")
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert (client.lookup("t", keys[:9]).values == 1).all()


GATES = {
    "min_cosine": (("--min-cosine", "0.99999"), dict(bits=4), r"mean cosine to its source is 0\.99\d+, and min_cosine 0\.99999"),
    "min_recall": (("--min-recall", "0.97"), dict(bits=4), r"recall@10 is 0\.\d+, and min_recall 0\.97"),
    "changes": (("--max-changed-fraction", "0.1"), dict(changed=0.2), r"20\.0% of its rows differ from .*, and max_changed_fraction 0\.1"),
    "rows": (("--max-row-loss", "0.1"), dict(rows=0.8), r"1,600 rows are 20\.0% fewer than the 2,000 .*, and max_row_loss 0\.1"),
    "rows by default": ((), dict(rows=0.49), r"980 rows are 51\.0% fewer"),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_the_accuracy_gate_refuses_with_the_figure(tmp_path, name):
    flags, change, words = GATES[name]
    root, values = tmp_path / "root", np.random.default_rng(0).standard_normal((2000, 24)).astype(np.float32)
    good = publish_table(root, "t", values)
    with serving(root, "--no-watch", *flags) as (_, client, admin):
        from embedserve.quant import RowType

        worse = values[: int(2000 * change.get("rows", 1))].copy()
        worse[: int(2000 * change.get("changed", 0))] += 1
        publish_table(root, "t", worse, row_type=RowType.of_bits(change.get("bits", 8)))
        with pytest.raises(ServiceError, match=words) as caught:
            admin.reload("t")
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert client.lookup("t", [1]).version == good
        publish_table(root, "t", values)  # unchanged values pass every gate
        assert admin.reload("t")[0].changed


def test_a_reload_that_does_not_fit_the_budget_is_refused_beforehand(root):
    size = Catalog(root).open("t").manifest.total_bytes
    with serving(root, "--no-watch", "--memory-budget", str(int(2.5 * size)), "--keep-versions", "3") as served:
        _, client, admin = served
        for value in (2, 3, 4):  # older ones make room
            publish_table(root, "t", constant(value))
            admin.reload("t")
            assert served_value(client) == value
        publish_table(root, "t", constant(5, 3 * ROWS))
        with pytest.raises(
            ServiceError, match=r"needs [\d,]+ bytes beside the [\d,]+ .* memory_budget is [\d,]+"
        ) as caught:
            admin.reload("t")
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and served_value(client) == 4


# What happens to the catalog meanwhile.


def test_a_version_deleted_while_served_goes_on_being_served(root):
    with serving(root, "--no-watch") as (_, client, admin):
        shutil.rmtree(root / "t" / Catalog(root).current("t"))
        assert served_value(client) == 1 and client.topk("t", query_ids=[1], k=2).counts[0] == 2
        publish_table(root, "t", constant(2))
        admin.reload("t")
        assert served_value(client) == 2 and admin.rollback("t") and served_value(client) == 1


def test_the_clock_may_go_backwards(root):
    """A version named by a clock that was ahead: later ones are still later."""
    with serving(root) as (_, client, _):
        ahead = root / "t" / "20991231T235959Z"
        shutil.copytree(root / "t" / Catalog(root).current("t"), ahead)
        manifest = json.loads((ahead / "manifest.json").read_text())
        (ahead / "manifest.json").write_text(json.dumps({**manifest, "version": ahead.name}))
        name = publish_table(root, "t", constant(2))
        assert name == "21000101T000000Z"
        eventually(lambda: served_value(client) == 2)


def test_publishers_at_once_leave_one_of_their_versions(root):
    with serving(root) as (_, client, admin):
        names = [version_of(root, value) for value in range(2, 10)]
        threads = [threading.Thread(target=Catalog(root).publish, args=("t", name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        current = Catalog(root).current("t")
        assert current in names
        eventually(lambda: admin.describe("t").summary.version == current)
        assert served_value(client) == names.index(current) + 2


def test_a_server_killed_in_a_reload_comes_back_with_what_is_current(tmp_path):
    root = tmp_path / "root"
    publish_table(root, "t", np.ones((200_000, DIM), np.float32))
    with serving(root, "--no-watch", "--reload-bandwidth", str(1 << 20)) as (server, _, admin):
        new = publish_table(root, "t", np.full((200_000, DIM), 2, np.float32))

        def reload() -> None:
            with pytest.raises(ServiceError):
                admin.reload("t")

        reloading = threading.Thread(target=reload)
        reloading.start()
        eventually(lambda: admin.describe("t").loading.startswith(new))
        server.process.kill()
        server.process.wait()
        reloading.join()
    with serving(root) as (_, client, _):
        assert client.lookup("t", [1]).version == new and served_value(client) == 2


@pytest.mark.parametrize("flags", [(), ("--huge-pages",)])
def test_memory_of_versions_that_left_is_given_back(tmp_path, flags):
    root = tmp_path / "root"
    rows = 400_000
    names = [publish_table(root, "t", np.full((rows, 32), 1, np.float32))]
    with serving(root, "--no-watch", "--keep-versions", "1", *flags) as (server, client, admin):

        def mapped(name: str) -> bool:
            return name in Path(f"/proc/{server.pid}/maps").read_text()

        assert mapped(names[0])
        after = []
        for value in range(2, 6):
            names.append(publish_table(root, "t", np.full((rows, 32), value, np.float32)))
            held = threading.Thread(target=lambda: [client.lookup("t", np.arange(999)) for _ in range(50)])
            held.start()
            admin.reload("t")
            held.join()
            eventually(lambda: not mapped(names[-2]))
            assert mapped(names[-1])
            status = Path(f"/proc/{server.pid}/status").read_text()
            after.append(int(status.split("VmRSS:")[1].split()[0]) << 10)
        assert after[-1] - after[0] < 4 << 20, after


def test_replicas_spread_their_reloads(root):
    """Each waits for its own random time within `reload_jitter`; one that has none is there at once."""
    with ExitStack() as stack:
        clients = [stack.enter_context(serving(root, "--reload-jitter", "4"))[1] for _ in range(3)]
        at_once = stack.enter_context(serving(root))[1]
        publish_table(root, "t", constant(2))
        begun, waits = time.monotonic(), {}
        while len(waits) < 4 and time.monotonic() < begun + 30:
            for client in (*clients, at_once):
                if client not in waits and served_value(client) == 2:
                    waits[client] = time.monotonic() - begun
    assert len(waits) == 4
    assert max(waits[client] for client in clients) - waits[at_once] > 0.1
