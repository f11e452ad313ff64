"""Locust drives real servers, and counts what they count."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import publish_table, serving

USERS = Path(__file__).parents[2] / "loadtest"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("locust") / "root"
    publish_table(root, "items", np.random.default_rng(0).standard_normal((2000, 32)).astype(np.float32))
    return root


def locust(
    address: str, tmp_path: Path, *flags: str, file: str = "locustfile.py"
) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit code, rows of the CSV by name, what was printed."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(USERS / file),
        "--host",
        address,
        "--headless",
        "--stop-timeout",
        "10",
    ]
    command += ["--csv", str(tmp_path / "out"), "--html", str(tmp_path / "report.html"), "--only-summary", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    with open(tmp_path / "out_stats.csv", newline="") as file_:
        return done.returncode, {row["Name"]: row for row in csv.DictReader(file_)}, done.stdout + done.stderr


def test_counts_are_the_servers_own(root, tmp_path):
    with serving(root) as (server, _, admin):
        code, rows, output = locust(
            server.address, tmp_path, "--rows", "2000", "-u", "6", "-r", "6", "-t", "6s", "--rate", "20"
        )
        assert code == 0, output
        methods = {m.method: m for m in admin.stats().methods}
    for name in ("Lookup", "LookupBatch", "TopK"):
        assert int(rows[name]["Request Count"]) == methods[name].handled > 10
        assert int(rows[name]["Failure Count"]) == methods[name].failed == 0
    rate = float(rows["Aggregated"]["Requests/s"])
    assert 60 < rate < 130 and (tmp_path / "report.html").stat().st_size > 10_000


def test_failures_carry_code_and_message(root, tmp_path):
    with serving(root) as (server, _, _):
        code, rows, output = locust(
            server.address, tmp_path, "--table", "nothing", "-u", "2", "-r", "2", "-t", "2s", "--rate", "5"
        )
    assert code == 1 and int(rows["Lookup"]["Failure Count"]) == int(rows["Lookup"]["Request Count"]) > 0
    assert "NOT_FOUND: no table 'nothing'; there is: items" in output


def test_a_trace_is_asked_for_in_its_order_and_processes_share_the_work(root, tmp_path):
    np.save(tmp_path / "trace.npy", np.arange(1990, 2000))
    with serving(root) as (server, _, admin):
        flags = ("--trace", str(tmp_path / "trace.npy"), "--topk-weight", "0", "--batch-weight", "0", "--ids", "10")
        code, rows, output = locust(
            server.address, tmp_path, *flags, "-u", "4", "-r", "4", "-t", "4s", "--rate", "10", "--processes", "2"
        )
        assert code == 0, output
        lookup = {m.method: m for m in admin.stats().methods}["Lookup"]
        assert int(rows["Lookup"]["Request Count"]) == lookup.handled and lookup.rows == 10 * lookup.handled


def test_users_come_in_steps(root, tmp_path):
    with serving(root) as (server, _, _):
        flags = ("--rows", "2000", "--rate", "10", "--step-users", "2", "--step-seconds", "2", "--steps", "2")
        code, rows, output = locust(server.address, tmp_path, *flags, file="locust_steps.py")
    assert code == 0, output
    assert 20 < int(rows["Aggregated"]["Request Count"]) < 140
