"""The command line as a person or a program uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest


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


COMMANDS = ("demo", "import", "publish", "tables", "describe", "verify", "serve", "lookup", "topk", "bench")


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


@pytest.mark.parametrize("words,code,message", [
    (("tables", "--root", "/nonexistent"), 0, ""),
    (("describe", "--root", "/nonexistent", "--table", "t"), 1, "no table 't'"),
    (("describe", "--root", "/nonexistent", "--table", "../t"), 1, "no table name"),
    (("import", "absent.npy", "--root", "/nonexistent", "--table", "t"), 1, "no such file"),
    (("import", "x.npy", "--root", "r", "--table", "t", "--bits", "7"), 2, "--bits"),
    (("lookup", "127.0.0.1:1", "t", "1"), 3, "UNAVAILABLE"),
    (("topk", "127.0.0.1:1", "t"), 2, "--id or --vector"),
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


@pytest.mark.parametrize("name", ["kernels", "import", "lookup"])
def test_benchmarks_run_and_write_their_rows(tmp_path, name):
    run("bench", name, "--quick", "--json", tmp_path / "f.json", env={"PATH": "/usr/bin:/bin"})
    rows = json.loads((tmp_path / "f.json").read_text())
    assert rows and all(set(row) == {"name", "ours", "unit", "peer", "peer_value", "ratio"} for row in rows)
    assert all(row["ours"] > 0 and row["peer_value"] > 0 for row in rows)
