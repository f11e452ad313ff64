"""One Redis, a Sentinel's master, or a Cluster, by its URL; and what each of its nodes is good for just now.

redis://[user:password@]host:port[/db]            rediss:// the same with TLS
redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]
redis+cluster://[user:password@]host:port[,host:port…]
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any
from urllib.parse import unquote, urlsplit

from embedserve.quant.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 32
FAILURES_TO_OPEN = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
RETRY_WITHIN_S = 0.01


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Spares a node that does not answer, and its callers the wait.

    CLOSED ──3 failures in a row──> OPEN ──pause──> HALF_OPEN: one call is let through ──it succeeds──> CLOSED
                                     ^                                  │
                                     └──────── twice the pause ─────────┘ it fails
    """

    def __init__(self, name: str) -> None:
        self.name, self.state = name, State.CLOSED
        self._failures, self._pause_s, self._until = 0, FIRST_PAUSE_S, 0.0
        self._lock = threading.Lock()

    def admits(self) -> bool:
        """Whether to ask the node. In HALF_OPEN only the caller that turned it so is."""
        if self.state is State.CLOSED:
            return True
        with self._lock:
            if self.state is State.OPEN and time.monotonic() >= self._until:
                self.state = State.HALF_OPEN
                self._until = time.monotonic() + LONGEST_PAUSE_S  # should that caller never tell
                return True
            if self.state is State.HALF_OPEN and time.monotonic() >= self._until:
                self._until = time.monotonic() + LONGEST_PAUSE_S
                return True
            return False

    def succeeded(self) -> None:
        if self.state is State.CLOSED and not self._failures:
            return
        with self._lock:
            if self.state is not State.CLOSED:
                log.info("Redis answers again", extra={"node": self.name})
            self.state, self._failures, self._pause_s = State.CLOSED, 0, FIRST_PAUSE_S

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            if self.state is State.CLOSED and self._failures < FAILURES_TO_OPEN:
                return
            if self.state is State.CLOSED:
                log.error("Redis does not answer: %s", error, extra={"node": self.name})
            self._pause_s = FIRST_PAUSE_S if self.state is State.CLOSED else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._until = time.monotonic() + self._pause_s * random.uniform(0.8, 1.0)
            self.state = State.OPEN


class RedisConnection:
    """Pooled connections; safe for concurrent use. Raises Unavailable where it says so, and never waits for long."""

    def __init__(self, url: str, timeout_s: float = 0.2) -> None:
        """Raises ConfigError for a URL that cannot be; connects on the first call. timeout_s: to connect, and for each answer."""
        import redis

        self._redis = redis
        self.name = _without_password(url)
        self._timeout_s = timeout_s
        self._breakers: dict[str, Breaker] = defaultdict(lambda: Breaker(""))
        self._open: Callable[[], Any] = self._opener(url)
        self._client: Any = None
        self._lock = threading.Lock()
        self._is_cluster = urlsplit(url).scheme == "redis+cluster"

    @property
    def state(self) -> State:
        """The worst of its nodes'."""
        states = [breaker.state for breaker in list(self._breakers.values())]
        return next((state for state in (State.OPEN, State.HALF_OPEN) if state in states), State.CLOSED)

    def execute(self, *command: Any) -> Any:
        """One command's answer. Raises Unavailable."""
        try:
            return self._the_client().execute_command(*command)
        except self._redis.RedisError as error:
            raise Unavailable(self._explained(error)) from None

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of their keys; None also where the node of a key cannot be reached, or refuses."""
        values: dict[bytes, bytes | None] = {}
        for node, of_node in self._by_node(keys).items():
            breaker = self._breaker(node)
            if not breaker.admits():
                continue
            for attempt in (1, 2):
                try:
                    answers = self._mget(node, of_node)
                    breaker.succeeded()
                    if not self._is_cluster:
                        return answers[0]
                    for group, found in zip(of_node, answers, strict=True):
                        values.update(zip(group, found, strict=True))
                    break
                except self._redis.RedisError as error:
                    breaker.failed(error)
                    if attempt == 2 or breaker.state is not State.CLOSED:
                        self._topology_may_have_changed()
                        break
                    time.sleep(random.uniform(0, RETRY_WITHIN_S))
        return [values.get(key) for key in keys]

    def set_all(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises Unavailable, with what Redis said: after it, some may be set and others not."""
        self._pipelined([("SET", key, value) for key, value in items])

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are there. Raises Unavailable."""
        return sum(self._pipelined([("EXISTS", key) for key in keys]))

    def unlink(self, keys: Sequence[bytes]) -> None:
        """Raises Unavailable."""
        self._pipelined([("UNLINK", key) for key in keys])

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _the_client(self) -> Any:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._open()
        return self._client

    def _breaker(self, node: str) -> Breaker:
        breaker = self._breakers[node]
        breaker.name = node
        return breaker

    def _pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if not commands:
            return []
        try:
            pipe = self._the_client().pipeline(**({} if self._is_cluster else {"transaction": False}))
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute()
        except self._redis.RedisError as error:
            raise Unavailable(self._explained(error)) from None
        return answers

    # One MGET, or in a cluster one for each slot, on each node.

    def _by_node(self, keys: Sequence[bytes]) -> dict[str, list[list[bytes]]]:
        if not self._is_cluster:
            return {self.name: [list(keys)]}
        nodes: dict[str, dict[int, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        try:
            client = self._the_client()
            slots: dict[bytes, int] = {}
            for key in keys:
                tag = key[key.index(b"{") : key.index(b"}")]
                if tag not in slots:
                    slots[tag] = client.keyslot(key)
                node = client.nodes_manager.get_node_from_slot(slots[tag])
                nodes[node.name][slots[tag]].append(key)
        except self._redis.RedisError as error:
            self._breaker(self.name).failed(error)
            return {}
        return {node: list(groups.values()) for node, groups in nodes.items()}

    def _mget(self, node: str, groups: list[list[bytes]]) -> list[list[bytes | None]]:
        client = self._the_client()
        if not self._is_cluster:
            return [client.execute_command("MGET", *groups[0])]
        connection = client.get_redis_connection(client.get_node(node_name=node))
        with connection.pipeline(transaction=False) as pipe:
            for group in groups:
                pipe.execute_command("MGET", *group)
            answers: list[list[bytes | None]] = pipe.execute()
        return answers

    def _topology_may_have_changed(self) -> None:
        if not self._is_cluster:
            return
        try:
            self._the_client().nodes_manager.initialize()
        except (self._redis.RedisError, OSError) as error:
            log.debug("no node of the cluster tells its slots: %s", error)

    def _opener(self, url: str) -> Callable[[], Any]:
        redis = self._redis
        options: dict[str, Any] = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s}
        try:
            parts = urlsplit(url)
            scheme = parts.scheme
            if scheme in ("redis", "rediss", "unix"):
                pool = redis.BlockingConnectionPool.from_url(
                    url, max_connections=MOST_CONNECTIONS, timeout=self._timeout_s, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0), **options
                )  # fmt: skip
                return lambda: redis.Redis(connection_pool=pool)
            if scheme not in ("redis+sentinel", "redis+cluster"):
                raise ValueError(f"unknown scheme {scheme!r}")
            login, _, hosts = parts.netloc.rpartition("@")
            nodes = [_host_port(host, 26379 if scheme == "redis+sentinel" else 6379) for host in hosts.split(",")]
            if login:
                user, _, password = login.rpartition(":")
                options |= {"password": unquote(password), **({"username": unquote(user)} if user else {})}
            if scheme == "redis+cluster":
                starts = [redis.cluster.ClusterNode(host, port) for host, port in nodes]
                return lambda: redis.RedisCluster(
                    startup_nodes=starts, require_full_coverage=False, max_connections=MOST_CONNECTIONS, **options
                )
            service, _, db = parts.path.strip("/").partition("/")
            if not service:
                raise ValueError("no service name behind the hosts")
            sentinel = redis.Sentinel(
                nodes, sentinel_kwargs={"socket_timeout": self._timeout_s}, **options, db=int(db or 0)
            )
            return lambda: sentinel.master_for(service)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"redis: {_without_password(url)!r}: {error}; expected redis://host:port/db, rediss://…, "
                "redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port"
            ) from None

    def _explained(self, error: Exception) -> str:
        said = str(error) or type(error).__name__
        hint = ""
        if "OOM" in said or "maxmemory" in said:
            hint = "; it is full: raise its maxmemory, or remove versions with --expire"
        elif isinstance(error, self._redis.AuthenticationError) or "NOAUTH" in said or "WRONGPASS" in said:
            hint = "; give user and password in the URL: redis://user:password@host"
        return f"Redis at {self.name}: {said}{hint}"


def _host_port(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(default))
    if not host:
        raise ValueError(f"no host in {text!r}")
    return host.strip("[]"), int(port)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://…{at}{tail}" if at else url
