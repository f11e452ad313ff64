"""The command line as a person or a program uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import publish_table

from embedserve.loadtest.redis_server import RedisServer
from embedserve.loadtest.servers import ServerProcess


def run(*words, code=0, cwd=None, env=None):
    command = [sys.executable, "-m", "embedserve.cli.run", *map(str, words)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {}), "COLUMNS": "200"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


COMMANDS = (
    "demo", "import", "publish", "delta", "fold", "tables", "describe", "verify", "serve", "lookup", "topk",
    "reload", "rollback", "unload", "upsert", "warm", "top", "plan", "health", "bench",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command):
    assert f"embedserve {command}" in run(command, "--help").stdout
    assert "Example" in run(command, "--help").stdout


def test_help_lists_every_command():
    listing = run("--help").stdout
    assert all(command in listing for command in COMMANDS)


def test_from_a_file_to_published_and_back(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((500, 12)))
    root = tmp_path / "root"
    made = json.loads(
        run(
            "import", tmp_path / "x.npy", "--root", root, "--table", "t", "--bits", 4, "--calibration", "mse", "--json"
        ).stdout
    )
    assert (
        made["rows"] == 500
        and made["row_type"] == "int4"
        and made["source_dtype"] == "float64"
        and not made["published"]
    )
    assert "not published" in run("tables", "--root", root).stdout
    assert "no published version" in run("describe", "--root", root, "--table", "t", code=1).stderr
    assert made["version"] in run("publish", "--root", root, "--table", "t").stdout
    listing = json.loads(run("tables", "--root", root, "--json").stdout)
    assert listing == [{"table": "t", "current": made["version"], "versions": [made["version"]]}]
    described = json.loads(run("describe", "--root", root, "--table", "t", "--json").stdout)
    assert described["quality"] == made["quality"]
    assert "ok" in run("verify", "--root", root).stdout
    rows = root / "t" / made["version"] / "rows.safetensors"
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    assert "not those that were written" in run("verify", "--root", root, code=1).stderr


def test_queries(server, catalog_root):
    found = json.loads(run("lookup", server.address, "users", "--json", "--", -123456, 1).stdout)
    assert found["missing"][0] == 0
    assert "no such id" in run("lookup", server.address, "items", 5, 99999).stdout
    best = json.loads(run("topk", server.address, "items", "--id", 3, "-k", 4, "--exclude", 3, "--json").stdout)
    assert len(best["results"][0]) == 4 and all(row["id"] != 3 for row in best["results"][0])
    np.save(catalog_root.parent / "q.npy", np.ones(24, np.float32))
    assert "vector 0" in run("topk", server.address, "items", "--vector", catalog_root.parent / "q.npy").stdout


def test_a_table_s_life_with_a_server(tmp_path):
    """Publish, reload, roll back, upsert, fold, and a delta for a machine elsewhere: as a person would type it."""
    root, other = tmp_path / "root", tmp_path / "other"
    values = np.random.default_rng(0).standard_normal((2000, 12)).astype(np.float32)

    def made(rows):
        np.save(tmp_path / "x.npy", rows)
        words = ("import", tmp_path / "x.npy", "--root", root, "--table", "t", "--publish", "--json")
        return json.loads(run(*words).stdout)["version"]

    old = made(values)
    shutil.copytree(root, other)
    with ServerProcess(root, "--no-watch") as server:
        values[:50] += 1
        new = made(values)
        steer = (server.admin_address, "t")
        assert run("reload", server.admin_address).stdout.strip() == f"t: serves {new}, {old} before"
        assert run("reload", server.admin_address, "--table", "t").stdout.strip() == f"t: serves {new}, as before"
        assert run("rollback", *steer).stdout.strip() == f"t: serves {old}, {new} before"
        assert "no version 'x' open" in run("rollback", *steer, "--version", "x", code=1).stderr
        np.save(tmp_path / "keys.npy", np.array([5, 1999]))
        np.save(tmp_path / "rows.npy", np.full((2, 12), 3, np.float32))
        written = run("upsert", *steer, tmp_path / "keys.npy", tmp_path / "rows.npy").stdout
        assert f"2 rows written; 2 lie over {old}" in written
        found = json.loads(run("lookup", server.address, "t", 5, "--json").stdout)
        assert found["values"] == [[3.0] * 12] and found["version"] == old
        assert run("unload", *steer).stdout.strip() == "t: not served any more"
        assert "NOT_FOUND" in run("lookup", server.address, "t", 5, code=1).stderr
    folded = run("fold", "--root", root, "--table", "t", "--publish").stdout
    assert "2,000 rows, upserts in place; published" in folded
    assert "no upserts over" in run("fold", "--root", root, "--table", "t", code=1).stderr
    out = tmp_path / "delta"
    sent = json.loads(run("delta", old, new, "--root", root, "--table", "t", "--out", out, "--json").stdout)
    assert (sent["changed"], sent["appeared"], sent["vanished"]) == (50, 0, 0)
    assert "exists" in run("delta", old, new, "--root", root, "--table", "t", "--out", out, code=1).stderr
    assert new in run("publish", "--root", other, "--table", "t", "--delta", out).stdout
    assert "ok" in run("verify", "--root", other, "--table", "t").stdout


def test_an_index_is_built_and_served(tmp_path):
    root, rng = tmp_path / "root", np.random.default_rng(0)
    centres = rng.standard_normal((30, 16))
    np.save(
        tmp_path / "x.npy", (centres[rng.integers(0, 30, 20_000)] + rng.standard_normal((20_000, 16)) / 2).astype("f4")
    )
    np.save(tmp_path / "q.npy", centres.astype("f4"))
    run("import", tmp_path / "x.npy", "--root", root, "--table", "t")
    words = (
        "index",
        "build",
        "t",
        "--root",
        root,
        "--spec",
        "PQ8x4fs",
        "--recall",
        0.8,
        "--queries",
        tmp_path / "q.npy",
    )
    built = run(*words, "--publish", "--report", tmp_path / "report").stdout
    assert "PQ8x4fs, recall@10" in built and "on q.npy" in built and "published" in built
    assert "<polyline" in (tmp_path / "report" / "report.html").read_text()
    with ServerProcess(root) as server:
        found = json.loads(run("topk", server.address, "t", "--id", 3, "--json").stdout)
        true = json.loads(run("topk", server.address, "t", "--id", 3, "--json", "--exact").stdout)
        assert (found["exact"], true["exact"]) == (False, True) and len(found["results"][0]) == 10
    assert "Example" in run("index", "build", "--help").stdout
    assert "either --queries or --query-table" in run(*words, "--query-table", "t", code=2).stderr
    assert "no table 'u'" in run("index", "build", "u", "--root", root, code=1).stderr


def test_redis_takes_what_is_published_and_gives_it_to_servers(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((300, 8)))
    root, keys = tmp_path / "root", tmp_path / "keys.npy"
    np.save(keys, np.arange(50))
    with RedisServer() as redis:
        for version in range(3):
            run("import", tmp_path / "x.npy", "--root", root, "--table", "t", "--publish")
            done = run("publish", "--root", root, "--table", "t", "--to", redis.url, "--expire", "--keep", 1).stdout
            assert "current in Redis is" in done and ("removed" in done) == (version > 0)
        with ServerProcess(None, "--redis", redis.url) as server:
            assert "50 of 50 keys loaded" in run("warm", server.admin_address, "t", keys).stdout
            assert len(json.loads(run("lookup", server.address, "t", 1, 299, 300, "--json").stdout)["missing"]) == 1
            looked = run("top", server.admin_address, "--once").stdout
            assert all(word in looked for word in ("Lookup", "as published", "redis", "closed"))
            assert run("health", server.address).stdout == "SERVING\n"
            assert run("health", server.address, "--table", "t:current").stdout == "SERVING\n"
            run("health", server.address, "--table", "u", code=1)
        assert "UNAVAILABLE" in run("health", server.address, code=3).stdout
    assert "Redis at" in run("publish", "--root", root, "--table", "t", "--to", redis.url, code=1).stderr


def test_a_plan_says_what_a_server_will_take(tmp_path):
    """Within 5 % of what one then has in memory, pages of the files included."""
    root = tmp_path / "root"
    publish_table(root, "large", np.random.default_rng(0).standard_normal((1_500_000, 64), np.float32))
    publish_table(root, "small", np.ones((1000, 8), np.float32), np.arange(1000) * 3)
    pool = ("--memory-pool-size", str(80 << 20))
    for flags in ((), pool):
        planned = json.loads(run("plan", "--root", root, *flags, "--json").stdout)
        assert planned["fits"] and [t["table"] for t in planned["tables"]] == ["large", "small"]
        with ServerProcess(root, *flags) as server:
            status = Path(f"/proc/{server.pid}/status").read_text()
            resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10
        assert abs(planned["steady"] / resident - 1) < 0.05, (planned, resident)
    assert "does not fit" in run("plan", "--root", root, "--memory-budget", 150_000_000, code=1).stdout
    assert "1,500,000" in run("plan", "--root", root).stdout


@pytest.mark.parametrize("words,code,message", [
    (("tables", "--root", "/nonexistent"), 0, ""),
    (("describe", "--root", "/nonexistent", "--table", "t"), 1, "no table 't'"),
    (("describe", "--root", "/nonexistent", "--table", "../t"), 1, "no table name"),
    (("import", "absent.npy", "--root", "/nonexistent", "--table", "t"), 1, "no such file"),
    (("import", "x.npy", "--root", "r", "--table", "t", "--bits", "7"), 2, "--bits"),
    (("lookup", "127.0.0.1:1", "t", "1"), 3, "UNAVAILABLE"),
    (("topk", "127.0.0.1:1", "t"), 2, "--id or --vector"),
    (("reload", "127.0.0.1:1"), 3, "UNAVAILABLE"),
    (("publish", "--root", "/nonexistent", "--table", "t", "--delta", "d", "--version", "v"), 2, "either --version or --delta"),
    (("publish", "--root", "/nonexistent", "--table", "t", "--delta", "/nowhere"), 1, "no manifest.json"),
    (("fold", "--root", "/nonexistent", "--table", "t"), 1, "no table 't'"),
    (("delta", "a", "b", "--root", "/nonexistent", "--table", "t", "--out", "d"), 1, "no table 't'"),
    (("bench", "nope"), 2, "there is: kernels"),
    (("serv",), 2, "serve"),
])  # fmt: skip
def test_failures_are_one_message_and_a_code(words, code, message):
    assert message in run(*words, code=code).stderr


def test_demo_runs_and_leaves_its_catalog(tmp_path):
    output = run("demo", "--root", tmp_path / "demo", "--seconds", "0.5", env={"NO_COLOR": "1"}).stdout
    assert "for user 15" in output and "p99" in output and "embedserve serve --root" in output
    recall = float(output.split("recall@10 against FP32, all users")[1].split()[1])
    assert recall >= 0.99
    assert {p.name for p in (tmp_path / "demo").iterdir()} == {"users", "items"}


@pytest.mark.parametrize("name", ["kernels", "import", "lookup", "reload", "topk", "tiers", "load"])
def test_benchmarks_run_and_write_their_rows(tmp_path, name):
    run("bench", name, "--quick", "--json", tmp_path / "f.json", "--report", tmp_path, env={"PATH": "/usr/bin:/bin"})
    page, figures = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert f"embedserve bench {name}" in page and ("<polyline" in page) == (name == "load")
    rows = json.loads((tmp_path / "f.json").read_text())
    assert rows and all(set(row) == {"name", "ours", "unit", "peer", "peer_value", "ratio"} for row in rows)
    assert all(row["ours"] > 0 and row["peer_value"] > 0 for row in rows)
    assert figures.count(f"## {name}\n") == 1 and all(f"| {row['name']} |" in figures for row in rows)
