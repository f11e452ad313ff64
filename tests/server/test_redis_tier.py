"""Tables served from Redis: the rows that were published, or an explicit mark, whatever becomes of Redis."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
from conftest import eventually, publish_table, serving

from embedserve.client import Client, ServiceError
from embedserve.loadtest.redis_server import RedisCluster, RedisServer
from embedserve.loadtest.servers import ServerProcess
from embedserve.quant import Artifact, Catalog, RedisCatalog, RedisConnection, RowType
from embedserve.quant.errors import ArtifactError, ConfigError, EmbedserveError, FailedPrecondition, Unavailable
from embedserve.quant.redis_catalog import _page

N, DIM = 3000, 12
FP32 = {"row_type": RowType.FP32}


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def keys() -> np.ndarray:
    keys = np.random.default_rng(1).choice(np.arange(-N, 9 * N), N, replace=False).astype(np.int64)
    keys[:2] = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return keys


@pytest.fixture(scope="module")
def root(tmp_path_factory, values, keys) -> Path:
    root = tmp_path_factory.mktemp("redis") / "root"
    publish_table(root, "dense", values)
    publish_table(root, "keyed", values, keys, **FP32)
    publish_table(root, "next", -values, keys, **FP32)
    return root


def artifact(root: Path, table: str) -> Artifact:
    return Catalog(root).open(table)


def into(server: RedisServer | RedisCluster, timeout_s: float = 5, prefix: str = "embedserve") -> RedisCatalog:
    return RedisCatalog(RedisConnection(server.url, timeout_s), prefix)


@contextmanager
def from_redis(url: str, tmp_path: Path, *flags: str):
    """A server without a catalog, and its clients."""
    command = ("--redis", url, "--memory-pool-size", str(1 << 20), "--redis-timeout-ms", "100", *flags)
    with serving(None, *command, log=tmp_path / "log") as opened:
        yield opened


@pytest.fixture(scope="module")
def store(root):
    with RedisServer() as server:
        catalog = into(server)
        for table in ("dense", "keyed"):
            catalog.publish(artifact(root, table))
        redis.Redis(port=server.port).save()
        yield server


@pytest.fixture
def fresh(root):
    """A Redis for a test to damage."""
    with RedisServer() as server:
        into(server).publish(artifact(root, "keyed"))
        yield server


def test_rows_are_those_that_were_published(store, root, tmp_path, values, keys):
    rng = np.random.default_rng(2)
    whole = {}
    with serving(root) as (_, client, _):
        whole = {t: client.lookup(t, ids).values for t, ids in (("dense", np.arange(N)), ("keyed", keys))}
    with from_redis(store.url, tmp_path) as (_, client, admin):
        assert [t.table for t in admin.tables()] == ["dense", "keyed"]
        for table, own in (("dense", np.arange(N)), ("keyed", keys)):
            for _ in range(20):
                places = rng.integers(0, N, 300)
                ids = own[places].copy()
                ids[::50] = 10**15 + np.arange(len(ids[::50]))
                found = client.lookup(table, ids)
                expected = whole[table][places]
                expected[::50] = 0
                assert np.array_equal(found.values, expected) and not found.degraded
                assert list(found.missing) == list(range(0, 300, 50))
                assert found.tiers["ram"] + found.tiers["redis"] == 294
        stats = {t.table: t for t in admin.stats().tables}["keyed"].tiers
        assert [t.tier for t in stats] == ["ram", "redis"] and stats[1].state == "closed"
        assert stats[0].hits and stats[0].misses and stats[1].fetches and stats[1].fetch_s > 0
        for refused in (
            lambda: client.topk("keyed", vectors=values[0], k=1),
            lambda: admin.upsert("keyed", [1], values[:1]),
        ):
            with pytest.raises(ServiceError, match=r"FAILED_PRECONDITION.*Redis"):
                refused()
        assert admin.warm("keyed", keys[:100]) == 100
        assert client.lookup("keyed", keys[:100]).tiers["ram"] == 100


def test_a_catalog_comes_first_and_redis_gives_the_rest(store, root, tmp_path, values):
    only = tmp_path / "root"
    publish_table(only, "keyed", values[:10], **FP32)
    with serving(only, "--redis", store.url) as (_, client, _):
        assert np.array_equal(client.lookup("keyed", [3]).values, values[3:4])
        assert client.lookup("dense", [3]).tiers["redis"] == 1


def test_new_versions_go_live_and_are_never_mixed(fresh, root, tmp_path, values, keys):
    """A server learns of them in Redis; no answer has rows of two."""
    catalog, stop, wrong = into(fresh), threading.Event(), []
    newer = tmp_path / "root"
    with from_redis(fresh.url, tmp_path) as (_, client, admin):
        first = client.lookup("keyed", keys[:1]).version

        def ask():
            rng = np.random.default_rng(3)
            while not stop.is_set():
                places = rng.integers(0, N, 100)
                found = client.lookup("keyed", keys[places])
                expected = values[places] if found.version == first else -values[places]
                if found.degraded or not np.array_equal(found.values, expected):
                    wrong.append(found)

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for each in asking:
            each.start()
        version = publish_table(newer, "keyed", -values, keys, **FP32)
        while version == first:
            version = publish_table(newer, "keyed", -values, keys, **FP32)
        catalog.publish(artifact(newer, "keyed"))
        eventually(lambda: client.lookup("keyed", keys[:1]).version == version, 10)
        time.sleep(0.2)
        stop.set()
        for each in asking:
            each.join()
        assert not wrong
        assert admin.rollback("keyed").version == first
        assert np.array_equal(client.lookup("keyed", keys[:5]).values, values[:5])
    assert catalog.versions("keyed") == sorted([first, version])
    assert catalog.expire("keyed", 1) == [first]
    left = {key.decode() for key in redis.Redis(port=fresh.port).scan_iter("*")}
    assert not [key for key in left if first in key] and [key for key in left if version in key]


def test_publishing_goes_on_where_it_was_and_nothing_half_loaded_is_served(root, tmp_path, monkeypatch, keys, values):
    with RedisServer() as server:
        catalog, sent = into(server), []

        class Interrupted(Exception):
            pass

        monkeypatch.setattr("embedserve.quant.redis_catalog.PAGES_A_BATCH", 50)
        true_set_all = catalog.connection.set_all

        def set_all(items):
            if len(sent) == 3:
                raise Interrupted
            sent.append(len(items))
            true_set_all(items)

        catalog.connection.set_all = set_all
        with pytest.raises(Interrupted):
            catalog.publish(artifact(root, "keyed"))
        assert catalog.tables() == [] and catalog.current("keyed") is None
        with pytest.raises(FailedPrecondition, match=r"not complete .loading, 150 of 375"):
            catalog.open("keyed", artifact(root, "keyed").manifest.version)
        sent.clear()
        catalog.connection.set_all = lambda items: (sent.append(len(items)), true_set_all(items))
        catalog.publish(artifact(root, "keyed"))
        assert sum(sent) == 225
        with from_redis(server.url, tmp_path) as (_, client, _):
            assert np.array_equal(client.lookup("keyed", keys).values, values)
        sent.clear()
        catalog.publish(artifact(root, "keyed"))
        assert not sent, "publishing again checks, and writes no page"


def pages_in(server: RedisServer) -> list[bytes]:
    return sorted(key for key in redis.Redis(port=server.port).scan_iter("*") if b":{" in key and key.count(b":") == 4)


@pytest.mark.parametrize(
    "damage", ["short", "flipped", "foreign", "other page", "other version", "schema", "gone", "no string"]
)
def test_damaged_pages_are_unavailable_and_neither_rows_nor_missing(fresh, root, tmp_path, keys, values, damage):
    client_of = redis.Redis(port=fresh.port)
    names = pages_in(fresh)
    broken = names[::3]
    version = artifact(root, "keyed").manifest
    for name, other in zip(broken, names[1::3], strict=False):
        value = client_of.get(name)
        if damage == "no string":
            client_of.delete(name)
            client_of.hset(name, "a", "b")
        elif damage == "gone":
            client_of.delete(name)
        else:
            client_of.set(name, {
                "short": value[:-1], "flipped": value[:-3] + bytes([value[-3] ^ 1]) + value[-2:], "foreign": b"a session, say",
                "other page": client_of.get(other), "schema": value[:2] + b"\x02" + value[3:],
                "other version": _page(name.replace(version.version.encode(), b"20200101T000000Z"), version.format, 0, b""),
            }[damage])  # fmt: skip
    with from_redis(fresh.url, tmp_path) as (_, client, admin):
        found = client.lookup("keyed", keys)
        places = set(found.degraded_positions)
        assert found.degraded and 0.2 * N < len(places) < 0.5 * N and not len(found.missing)
        intact = np.array([i for i in range(N) if i not in places])
        assert np.array_equal(found.values[intact], values[intact])
        default = artifact(root, "keyed").default_row
        assert (found.values[sorted(places)] == default).all()
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            client.lookup("keyed", keys, on_unavailable="fail")
        redis_tier = admin.stats().tables[0].tiers[1]
        assert redis_tier.unavailable >= len(places)
        assert bool(redis_tier.damaged_pages) == (damage not in ("gone", "no string"))


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_without_redis_hot_keys_are_served_and_others_say_so(store, tmp_path, keys, values, how):
    hot, cold = keys[:200], keys[1000:2000]
    with from_redis(store.url, tmp_path) as (_, client, admin):
        for _ in range(3):
            client.lookup("keyed", hot)
        store.kill() if how == "killed" else store.pause()
        try:
            end, failed, times = time.monotonic() + 2, 0, []
            while time.monotonic() < end:
                asked = cold[np.random.default_rng(len(times)).integers(0, 1000, 20)]
                client.lookup("keyed", asked)
                begun = time.monotonic()
                found = client.lookup("keyed", hot)
                times.append(time.monotonic() - begun)
                failed += found.degraded or not np.array_equal(found.values, values[:200])
            assert not failed and np.median(times) < 0.02
            assert client.lookup("keyed", cold[:50]).degraded
            with pytest.raises(ServiceError, match="UNAVAILABLE"):
                client.lookup("keyed", cold, on_unavailable="fail")
            assert admin.stats().tables[1].tiers[1].state in ("open", "half-open")
        finally:
            store.start() if how == "killed" else store.resume()
        back = time.monotonic()
        eventually(lambda: not client.lookup("keyed", cold).degraded, 5)
        assert time.monotonic() - back < 2
        assert np.array_equal(client.lookup("keyed", cold).values, values[1000:2000])


def test_redis_that_comes_back_empty_is_unavailable_and_not_a_table_of_missing_keys(fresh, tmp_path, keys, root):
    with from_redis(fresh.url, tmp_path) as (_, client, _):
        fresh.kill()
        fresh.start()
        eventually(lambda: redis.Redis(port=fresh.port).ping())
        found = client.lookup("keyed", keys[500:600])
        assert found.degraded and len(found.degraded_positions) > 90 and not len(found.missing)
        into(fresh).publish(artifact(root, "keyed"))
        eventually(lambda: not client.lookup("keyed", keys[500:600]).degraded)


def test_health_of_a_table_follows_redis_if_told_to(fresh, tmp_path, keys):
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with (
        from_redis(fresh.url, tmp_path, "--health-needs-redis") as (server, client, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            client.lookup("keyed", np.random.default_rng().choice(keys, 10))
            return health.Check(health_pb2.HealthCheckRequest(service="keyed")).status

        assert status() == health_pb2.HealthCheckResponse.SERVING
        fresh.pause()
        eventually(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING)
        fresh.resume()
        eventually(lambda: status() == health_pb2.HealthCheckResponse.SERVING)


def test_requests_that_miss_the_same_key_fetch_it_once(store, tmp_path, keys, values):
    connection = redis.Redis(port=store.port)
    with from_redis(store.url, tmp_path, "--redis-timeout-ms", "5000") as (server, _, _):

        def calls() -> int:
            return connection.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]

        before, answers = calls(), []
        store.pause()

        def ask():
            with Client(server.address) as client:
                answers.append(client.lookup("keyed", keys[2500:2501], timeout_s=20))

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for each in asking:
            each.start()
        time.sleep(1)
        store.resume()
        for each in asking:
            each.join()
        assert len(answers) == 8 and all(np.array_equal(found.values, values[2500:2501]) for found in answers)
        assert calls() - before == 1


def test_a_cluster_with_a_node_killed(root, tmp_path, keys, values):
    with RedisCluster() as cluster:
        into(cluster).publish(artifact(root, "keyed"))
        with from_redis(cluster.url, tmp_path) as (_, client, _):
            found = client.lookup("keyed", keys)
            assert np.array_equal(found.values, values) and not found.degraded
            lost = cluster.nodes[1]
            redis.Redis(port=lost.port).save()
            lost.kill()
            degraded = client.lookup("keyed", keys)
            # A third of the pages are gone, but for what is in RAM; every other row is there.
            places = np.zeros(N, bool)
            places[np.array(degraded.degraded_positions, np.int64)] = True
            assert degraded.degraded and 0.1 < places.mean() < 0.45
            assert np.array_equal(degraded.values[~places], values[~places])
            lost.start()
            eventually(lambda: not client.lookup("keyed", keys).degraded)


def test_sentinels_lead_to_the_master_and_to_the_next_one(root, tmp_path, keys, values):
    with RedisServer() as master, RedisServer() as replica, RedisServer("--sentinel") as sentinel:
        redis.Redis(port=replica.port).replicaof("127.0.0.1", master.port)
        asked = redis.Redis(port=sentinel.port)
        asked.execute_command("SENTINEL MONITOR", "rows", "127.0.0.1", master.port, 1)
        for option in (("down-after-milliseconds", 500), ("failover-timeout", 2000)):
            asked.execute_command("SENTINEL SET", "rows", *option)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/rows"
        RedisCatalog(RedisConnection(url, 5)).publish(artifact(root, "keyed"))
        eventually(lambda: redis.Redis(port=replica.port).dbsize() == redis.Redis(port=master.port).dbsize())
        eventually(lambda: asked.execute_command("SENTINEL REPLICAS", "rows"), 30)
        with from_redis(url, tmp_path) as (_, client, _):
            assert np.array_equal(client.lookup("keyed", keys[:100]).values, values[:100])
            master.kill()
            assert client.lookup("keyed", keys[1000:1100]).degraded
            eventually(lambda: not client.lookup("keyed", keys[1000:1100]).degraded, 30)
            assert np.array_equal(client.lookup("keyed", keys[1000:1100]).values, values[1000:1100])


@pytest.mark.parametrize(
    "url", ["http://h", "redis+sentinel://h:1", "redis+cluster://", "redis://h:port", "nonsense", "redis+cluster://h:x"]
)
def test_urls_that_cannot_be_are_refused_with_what_is_expected(url):
    with pytest.raises(ConfigError, match=r"redis: .*expected redis://host"):
        RedisConnection(url)


def test_what_stands_against_publishing_is_said(root):
    with RedisServer("--requirepass", "secret", "--maxmemory", "3mb") as server:
        with pytest.raises(Unavailable, match="user and password in the URL"):
            into(server).tables()
        wrong = RedisCatalog(RedisConnection(f"redis://:guess@127.0.0.1:{server.port}"))
        with pytest.raises(Unavailable) as refused:
            wrong.tables()
        assert "guess" not in str(refused.value)
        right = RedisCatalog(RedisConnection(f"redis://:secret@127.0.0.1:{server.port}", 5))
        with pytest.raises(EmbedserveError, match="full: raise its maxmemory"):
            for number in range(40):
                right.prefix = f"p{number}"
                right.publish(artifact(root, "dense"))


def test_anothers_keys_and_schemas_are_not_read(fresh, root):
    client, catalog = redis.Redis(port=fresh.port), into(fresh)
    version = artifact(root, "keyed").manifest.version
    raw = client.get(f"embedserve:{{keyed}}:manifest:{version}")
    client.set(
        f"embedserve:{{keyed}}:manifest:{version}", raw.replace(b'"schema":1,"manifest"', b'"schema":7,"manifest"')
    )
    with pytest.raises(ArtifactError, match="schema 7; this release reads 1"):
        catalog.open("keyed")
    client.hset("embedserve:{keyed}:versions", "v", "no state")
    with pytest.raises(ArtifactError, match="another application"):
        catalog.versions("keyed")
    assert into(fresh, prefix="other").tables() == []


def test_a_server_without_a_redis_says_so(tmp_path):
    with (
        pytest.raises(RuntimeError, match="exit code 1"),
        ServerProcess(None, "--redis", "redis://127.0.0.1:1/0", log=tmp_path / "log"),
    ):
        pass
    assert "127.0.0.1:1" in (tmp_path / "log").read_text()
