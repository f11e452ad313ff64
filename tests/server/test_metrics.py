"""What the server says of itself: Prometheus, GetStats, the status page, top. All of them tell the same."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import yaml
from conftest import eventually, publish_table, serving
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from embedserve.client import ServiceError
from embedserve.server import stats

DOCKER = Path(__file__).parents[2] / "docker"
US = st.integers(0, 10**9)


@given(US)
def test_a_bucket_holds_what_it_says_within_a_sixteenth(us):
    bucket = stats.bucket_of(us)
    below = stats.upper_us(bucket - 1) if bucket else 0
    assert below <= us < stats.upper_us(bucket) <= max(us + 1, us * 17 // 16 + 1)


@given(st.lists(US, min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_those_of_the_values_within_a_sixteenth(values, q):
    counts = [0] * stats.BUCKETS
    for value in values:
        counts[stats.bucket_of(value)] += 1
    true = sorted(values)[max(0, int(np.ceil(q * len(values) - 1e-9)) - 1)]
    assert (
        true < 1e6 * stats.quantile_s(counts, q) * (1 + 1e-9)
        and 1e6 * stats.quantile_s(counts, q) <= true * 17 / 16 + 1.001
    )


def test_histograms_of_windows_are_what_came_between():
    method = stats.MethodStats()
    windows = stats.Windows({"Lookup": method})
    for _ in range(5):
        method.ended(time.perf_counter() - 0.010, 3)
    ten, minute, all_of_it = windows.of("Lookup")
    assert ten.calls == minute.calls == all_of_it.calls == 5
    assert all(0.010 <= each < 0.012 for each in all_of_it.latencies_s)
    method.ended(time.perf_counter(), 0, "NOT_FOUND")
    assert (method.handled, method.failed, method.rows) == (6, 1, 15)


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return answer.read().decode()


def samples(address: str) -> dict[tuple[str, frozenset], float]:
    families = text_string_to_metric_families(page(address, "/metrics"))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A server with a pool, after some calls of every kind."""
    root = tmp_path_factory.mktemp("metrics") / "root"
    values = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    publish_table(root, "items", values)
    publish_table(root, "small", values[:5])
    with serving(root, "--memory-pool-size", str(1 << 20), "--whole-tables", "small") as (server, client, admin):
        for _ in range(7):
            client.lookup("items", np.arange(100))
        for _ in range(3):
            client.topk("items", vectors=values[0], k=2)
        list(client.lookup_stream("items", [[1], [2]]))
        client.lookup_batch({"items": [1], "small": [2]})
        for table in ("none", "x" * 50, "<b>"):
            with pytest.raises(ServiceError):
                client.lookup(table, [1])
        yield server, client, admin


def test_prometheus_and_get_stats_count_alike(asked):
    server, _, admin = asked
    found, own = samples(server.metrics_address), {m.method: m for m in admin.stats().methods}
    for (name, labels), value in found.items():
        tags = dict(labels)
        if name == "grpc_server_handled_total":
            assert own[tags["grpc_method"]].codes[tags["grpc_code"]] == value
            assert tags["grpc_service"] == "embedserve.v1.EmbeddingService"
        if name == "grpc_server_handling_seconds_count":
            assert own[tags["grpc_method"]].handled == value
    assert dict(own["Lookup"].codes) == {"OK": 7, "NOT_FOUND": 3} and own["Lookup"].failed == 3
    assert own["LookupStream"].handled == 2 and own["LookupBatch"].rows == 2 and own["TopK"].handled == 3
    window = own["Lookup"].windows[2]
    assert window.calls == 10 and 0 < window.p50_ms <= window.p99_ms <= window.p999_ms < 1000 and window.qps > 0
    buckets = [(float(dict(labels)["le"]), value) for (name, labels), value in found.items()
               if name == "grpc_server_handling_seconds_bucket" and dict(labels)["grpc_method"] == "Lookup"]  # fmt: skip
    assert [value for _, value in sorted(buckets)] == sorted(value for _, value in buckets) and max(buckets)[1] == 10


def test_labels_are_bounded_by_what_is_served(asked):
    """A table that a request names and nobody serves is no label."""
    server, _, _ = asked
    assert {dict(labels)["table"] for _, labels in samples(server.metrics_address) if "table" in dict(labels)} == {
        "items",
        "small",
    }


def test_tiers_and_tables_are_there(asked):
    server, _, admin = asked
    found = samples(server.metrics_address)
    items = {t.table: t for t in admin.stats().tables}["items"]
    ram = frozenset({"table": "items", "tier": "ram"}.items())
    assert found["embedserve_tier_hits_total", ram] == items.tiers[0].hits >= 600
    assert found["embedserve_pool_bytes", frozenset()] == 1 << 20
    assert found["embedserve_table_as_published", frozenset({"table": "items"}.items())] == 1
    assert ("embedserve_table_info", frozenset({"table": "items", "version": items.version}.items())) in found
    assert found["process_resident_memory_bytes", frozenset()] > 1e7


def test_dashboard_and_alerts_ask_for_what_there_is(asked):
    server, _, _ = asked
    names = {name for name, _ in samples(server.metrics_address)}
    names |= {re.sub("_total$", "", name) for name in names}
    board = json.loads((DOCKER / "grafana/dashboards/embedserve.json").read_text())
    asks = [target["expr"] for each in board["panels"] for target in each["targets"]]
    asks += [
        rule["expr"]
        for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(asks) > 20
    only_with_redis = {"embedserve_breaker_state"}
    for ask in asks:
        wanted = set(re.findall(r"\b(?:embedserve|grpc_server|process)_\w+", ask))
        assert wanted and wanted <= names | only_with_redis, (ask, wanted - names)


@pytest.mark.parametrize(
    "file", ["compose.yaml", "prometheus.yml", "kubernetes.yaml", "grafana/provisioning/datasources/prometheus.yml"]
)
def test_deployment_files_are_yaml_and_name_files_that_are_there(file):
    documents = list(yaml.safe_load_all((DOCKER / file).read_text()))
    assert documents and all(documents)
    if file == "compose.yaml":
        services = documents[0]["services"]
        for service in services.values():
            for mount in service.get("volumes", []):
                source = mount.split(":")[0]
                assert source in documents[0]["volumes"] or (DOCKER / source).exists(), mount
            assert set(service.get("depends_on", [])) <= set(services)


def test_the_status_page_and_its_figures(asked):
    server, _, _ = asked
    html = page(server.metrics_address, "/")
    assert "<title>embedserve</title>" in html and "http" not in re.sub(r"http://www\.w3\.org\S*", "", html), (
        "no assets from elsewhere"
    )
    found = json.loads(page(server.metrics_address, "/stats.json"))
    assert {t["table"] for t in found["tables"]} == {"items", "small"} and found["methods"][0]["windows"][0][
        "p99_ms"
    ] >= 0
    for path in ("/nothing", "/../pyproject.toml", "/stats.json/x"):
        with pytest.raises(HTTPError, match="404"):
            page(server.metrics_address, path)


def test_windows_move_on(asked):
    _server, client, admin = asked

    def ten_seconds():
        return {m.method: m for m in admin.stats().methods}["Lookup"].windows[0]

    client.lookup("small", [1])
    assert ten_seconds().calls >= 1 and ten_seconds().seconds <= 12
    eventually(lambda: ten_seconds().calls == 0, 14)


def test_figures_can_be_read_while_many_ask(asked):
    server, client, _ = asked
    stop, failures = threading.Event(), []

    def ask():
        while not stop.is_set():
            try:
                client.lookup("items", np.arange(50))
            except ServiceError as error:
                failures.append(error)

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for each in callers:
        each.start()
    counts = [
        sum(v for (name, _), v in samples(server.metrics_address).items() if name == "grpc_server_handled_total")
        for _ in range(20)
    ]
    stop.set()
    for each in callers:
        each.join()
    assert counts == sorted(counts) and counts[-1] > counts[0] and not failures


def test_metrics_may_be_off_and_a_port_in_use_is_said(tmp_path, asked):
    server, _, _ = asked
    publish_table(tmp_path / "root", "t", np.ones((3, 4), np.float32))
    with serving(tmp_path / "root", "--no-metrics") as (other, _, _):
        assert other.metrics_address == ""
    port = server.metrics_address.rpartition(":")[2]
    with (
        pytest.raises(RuntimeError, match="exit code 1"),
        serving(tmp_path / "root", "--metrics-port", port, log=tmp_path / "log"),
    ):
        pass
    assert f"metrics_port: cannot listen on 127.0.0.1:{port}" in (tmp_path / "log").read_text()
