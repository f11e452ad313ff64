"""Starts and stops real server processes for demos, benchmarks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

STOP_TIMEOUT_S = 30


class ServerProcess:
    """`embedserve serve` in a process of its own, on free ports unless told otherwise; a context manager.

    address, admin_address, metrics_address: "host:port" once entered. cpus: pins the process.
    """

    def __init__(
        self,
        root: Path | None,
        *flags: str,
        cpus: set[int] | None = None,
        env: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command = [sys.executable, "-m", "embedserve.cli.run", "serve", *(["--root", str(root)] if root else [])]
        for flag in ("--port", "--admin-port", "--metrics-port"):
            if flag not in flags:
                self._command += [flag, "0"]
        self._command += flags
        self._cpus, self._env, self._log = cpus, env, log
        self.address = self.admin_address = self.metrics_address = ""

    def __enter__(self) -> ServerProcess:
        self.process, line = start(self._command, self._cpus, self._env, self._log)
        words = line.split()
        found = dict(zip(words[::2], words[1::2], strict=True))
        self.address, self.admin_address = found["listening"], found["admin"]
        self.metrics_address = found.get("metrics", "")
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        """SIGTERM, then waits; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finish(self.process)


def start(
    command: Sequence[str], cpus: set[int] | None = None, env: dict[str, str] | None = None, log: Path | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Starts a server that prints one line `listening …` and returns it with that line. Raises RuntimeError if it ends first."""
    with open(log or os.devnull, "a") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **(env or {})}
        )
    if cpus:
        os.sched_setaffinity(process.pid, cpus)
    assert process.stdout
    line = process.stdout.readline()
    if not line.startswith("listening"):
        finish(process)
        raise RuntimeError(f"server did not start: {line.strip()} (exit code {process.returncode}, log {log})")
    return process, line


def finish(process: subprocess.Popen[str]) -> None:
    """Ends a process whatever its state."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout:
        process.stdout.close()
