"""A server process from its first line to its last, and what it refuses meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from conftest import publish_table
from grpc_health.v1 import health_pb2, health_pb2_grpc

from embedserve.client import Client, ServiceError
from embedserve.loadtest.servers import ServerProcess
from embedserve.proto import admin_pb2, admin_pb2_grpc, embedding_pb2
from embedserve.quant import Catalog

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def check_health(channel: grpc.Channel, service: str) -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def test_health_of_the_server_the_service_and_each_table(server):
    with grpc.insecure_channel(server.address) as channel:
        for name in ("", "embedserve.v1.EmbeddingService", "items", "users", "big"):
            assert check_health(channel, name) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check_health(channel, "nope")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_admin_is_on_its_own_port_only(server, catalog_root, client):
    client.lookup("items", [1, 2])
    with grpc.insecure_channel(server.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        tables = {t.table: t for t in stub.ListTables(admin_pb2.ListTablesRequest()).tables}
        assert set(tables) == {"items", "users", "big"} and tables["items"].rows == 1000
        described = stub.DescribeTable(admin_pb2.DescribeTableRequest(table="items"))
        assert list(described.versions) == Catalog(catalog_root).versions("items")
        assert json.loads(described.manifest_json)["dim"] == 24 and described.row_stride_bytes == 28
        lookups = next(m for m in stub.GetStats(admin_pb2.GetStatsRequest()).methods if m.method == "Lookup")
        assert lookups.handled > 0 and lookups.rows > 0
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeTable(admin_pb2.DescribeTableRequest(table="nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        admin_pb2_grpc.AdminServiceStub(channel).ListTables(admin_pb2.ListTablesRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def run_serve(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embedserve.cli.run", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_what_cannot_be_served_is_one_sentence_and_exit_code_1(server, catalog_root, tmp_path):
    port = server.address.split(":")[1]
    (tmp_path / "typo.toml").write_text('root = "x"\nmax_id = 5\n')
    (tmp_path / "bad.toml").write_text("root = ")
    publish_table(tmp_path / "root", "t", np.ones((3, 4), np.float32))
    rows = next((tmp_path / "root" / "t").glob("2*")) / "rows.safetensors"
    rows.write_bytes(rows.read_bytes()[:-1])
    root = ("--root", str(catalog_root))
    for flags, words in (
        ((*root, "--port", port), f"port: cannot listen on 127.0.0.1:{port}: in use"),
        (("--root", str(tmp_path / "nothing")), "no published table"),
        (("--root", str(tmp_path / "root")), "bytes, but the manifest says"),
        ((*root, "--tables", "nope"), "no table 'nope'"),
        ((*root, "--config", str(tmp_path / "typo.toml")), "unknown setting 'max_id'; did you mean 'max_ids'?"),
        ((*root, "--config", str(tmp_path / "bad.toml")), "not TOML"),
        ((*root, "--max-ids", "0"), "max_ids"),
        ((*root, "--tls-cert", "x.pem"), "tls_cert and tls_key go together"),
        ((*root, "--auth-tokens", str(tmp_path / "none")), "cannot read tokens"),
    ):
        done = run_serve(*flags)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, (flags, done.stderr)
    assert run_serve("--no-such-flag").returncode == 2


def test_sigterm_lets_requests_in_flight_finish_and_refuses_new_ones(catalog_root):
    with ServerProcess(catalog_root) as process, grpc.insecure_channel(process.address) as channel:
        grpc.channel_ready_future(channel).result(10)
        stop, failures, answered = threading.Event(), [], [0]

        def caller():
            with Client(process.address) as client:
                while not stop.is_set():
                    try:
                        client.lookup("items", np.arange(200), timeout_s=5)
                        answered[0] += 1
                    except ServiceError as error:
                        failures.append(error)
                        return

        threads = [threading.Thread(target=caller) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert process.stop() == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert answered[0] > 50
        assert {f.code for f in failures} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}, failures


def test_sigint_stops_too(catalog_root):
    with ServerProcess(catalog_root) as process:
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(20) == 0


def test_overload_is_refused_with_a_time_to_retry_after(catalog_root):
    with ServerProcess(catalog_root, "--max-concurrent-streams", "1") as process, Client(process.address) as client:
        first = client.lookup_stream("items", iter_until(hold := threading.Event()))
        next(first)
        with pytest.raises(ServiceError) as caught:
            next(client.lookup_stream("items", [[1]]))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and caught.value.retry_after_s > 0
        client.lookup("items", [1])  # other calls have room of their own
        hold.set()
        assert list(first) == []
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                next(client.lookup_stream("items", [[1]]))
                return
            except ServiceError:
                time.sleep(0.05)
        raise AssertionError("the stream's room was not given back")


def test_unary_calls_past_the_limit_are_refused_and_their_room_is_given_back(tmp_path):
    publish_table(tmp_path / "root", "t", np.random.default_rng(0).standard_normal((20_000, 32), np.float32))
    refused, answered, start = [], [], threading.Barrier(12)
    with ServerProcess(tmp_path / "root", "--max-concurrent-requests", "2") as process:

        def caller():
            with Client(process.address) as client:
                start.wait()
                try:
                    answered.append(client.topk("t", query_ids=np.arange(1000), k=1, timeout_s=60))
                except ServiceError as error:
                    refused.append(error)

        threads = [threading.Thread(target=caller) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answered) >= 2 and len(answered) + len(refused) == 12 and refused
        for error in refused:
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s > 0
            assert "max_concurrent_requests" in str(error)
        with Client(process.address) as client:
            for _ in range(10):
                client.topk("t", query_ids=[1], k=1)


def iter_until(event):
    yield [1]
    event.wait(10)


def test_a_deadline_that_has_passed_is_not_worked_on(client):
    with pytest.raises(ServiceError) as caught:
        client.topk("items", query_ids=np.arange(600), k=100, timeout_s=0.0005)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_client_waits_for_a_server_that_comes_back(catalog_root):
    with ServerProcess(catalog_root) as process:
        port = process.address.split(":")[1]
        with Client(process.address, timeout_s=20) as client:
            client.lookup("items", [1])
            process.stop()
            restarted: list[ServerProcess] = []
            thread = threading.Thread(
                target=lambda: restarted.append(ServerProcess(catalog_root, "--port", port).__enter__())
            )
            thread.start()
            for _ in range(100):
                try:
                    client.lookup("items", [1])
                    break
                except ServiceError as error:
                    assert error.code is grpc.StatusCode.UNAVAILABLE
                    time.sleep(0.1)
            thread.join()
            assert client.lookup("items", [1]).values.shape == (1, 24)
            restarted[0].__exit__(None, None, None)


def test_the_first_request_is_not_much_slower_than_the_hundredth(catalog_root):
    """The best of five servers: what each of them pays would show there, and what the machine does at times would not."""
    firsts, hundredths = [], []
    for _ in range(5):
        with ServerProcess(catalog_root) as process, grpc.insecure_channel(process.address) as channel:
            grpc.channel_ready_future(channel).result(10)
            check_health(channel, "items")  # the client's own first time
            call = channel.unary_unary("/embedserve.v1.EmbeddingService/Lookup")

            request = embedding_pb2.LookupRequest(table="items", ids=np.arange(256)).SerializeToString()
            times = []
            for _ in range(120):
                begun = time.perf_counter()
                call(request)
                times.append(time.perf_counter() - begun)
            firsts.append(times[0])
            hundredths.append(np.median(times[80:]))
    assert min(firsts) < 3 * np.median(hundredths), (firsts, hundredths)


def test_json_logs_are_json(catalog_root, tmp_path):
    log = tmp_path / "log"
    with ServerProcess(catalog_root, "--log-format", "json", log=log) as process:
        process.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"serving", "draining", "stopped"} <= {line["message"] for line in lines}
    assert next(line for line in lines if line["message"] == "serving")["rows"] > 0


def test_settings_come_from_file_environment_and_flags_in_that_order(catalog_root, tmp_path, monkeypatch):
    from embedserve.quant.errors import ConfigError
    from embedserve.server import load_config

    file = tmp_path / "c.toml"
    file.write_text(f'root = "{catalog_root}"\nport = 1\nmax_k = 7\nmax_ids = 9\ntables = ["items"]\n')
    monkeypatch.setenv("EMBEDSERVE_PORT", "2")
    monkeypatch.setenv("EMBEDSERVE_MAX_K", "8")
    config = load_config(file, {"port": 3, "host": None})
    assert (config.port, config.max_k, config.max_ids, config.tables) == (3, 8, 9, ("items",))
    monkeypatch.setenv("EMBEDSERVE_TOKEN", "for the client commands")
    load_config(file)
    monkeypatch.setenv("EMBEDSERVE_MAXK", "8")
    with pytest.raises(ConfigError, match="EMBEDSERVE_MAXK: unknown setting 'maxk'; did you mean 'max_k'"):
        load_config(file)


@pytest.mark.parametrize("name,value", [
    ("min_recall", 1.1), ("min_recall", -0.1), ("min_cosine", 2), ("max_changed_fraction", -1), ("max_row_loss", 1.5),
    ("reload_jitter", -1), ("reload_bandwidth", 1000), ("memory_budget", -5), ("max_upserted_rows", -1), ("keep_versions", 0),
])  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused_by_name(catalog_root, name, value):
    from embedserve.quant.errors import ConfigError
    from embedserve.server import load_config

    with pytest.raises(ConfigError, match=name):
        load_config(None, {"root": catalog_root, name: value})


def test_huge_pages_and_locked_memory_serve_the_same_rows(catalog_root, item_values, tmp_path):
    import resource

    flags = ["--huge-pages"]
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] > 64 << 20:
        flags.append("--lock-memory")
    with ServerProcess(catalog_root, *flags) as process, Client(process.address) as client:
        assert abs(client.lookup("items", np.arange(1000)).values - item_values).max() < 0.02


def test_catalog_root_may_be_relative(catalog_root, monkeypatch):
    monkeypatch.chdir(catalog_root.parent)
    with ServerProcess(Path(catalog_root.name)) as process, Client(process.address) as client:
        client.lookup("items", [1])
