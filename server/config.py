"""The server's configuration: these classes are its documentation.

Sources, the later overrides the earlier: defaults here, a TOML file, environment variables `EMBEDSERVE_<NAME>`,
command-line flags. A name that is none of these is refused, with the nearest one that is.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from embedserve.quant.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "EMBEDSERVE_"
CLIENT_TOKEN = f"{ENV_PREFIX}TOKEN"  # read by the commands that ask a server
MIB = 1 << 20


class ServerConfig(BaseSettings):
    """Everything `embedserve serve` can be told. Each field: what it is, its unit, and why its default."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    root: Path | None = Field(None, description="catalog directory")
    redis: str = Field("", description="URL of a Redis to which tables were published: redis://, rediss://, redis+sentinel://host:port/service, redis+cluster://host:port; serves those that root has not")  # fmt: skip
    redis_prefix: str = Field("embedserve", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="what all keys in Redis begin with")  # fmt: skip
    redis_timeout_ms: int = Field(200, ge=1, le=60_000, description="how long to wait for Redis, to connect and for each answer, before rows count as unavailable")  # fmt: skip
    health_needs_redis: bool = Field(False, description="turn a table's health to NOT_SERVING while Redis, its only full tier, does not answer; else it goes on with what is in RAM")  # fmt: skip
    tables: tuple[str, ...] = Field((), description="tables to serve; empty: every table with a published version")
    keep_versions: int = Field(
        2,
        ge=1,
        le=100,
        description="versions of each table to keep open for pins and Rollback, the current one included",
    )

    memory_pool_size: int = Field(0, ge=0, description="bytes of one pool in RAM for rows of all tables, the others being read from disk; 0: every table is held whole, but those that only Redis has share a quarter of the memory")  # fmt: skip
    swap_strategy: Literal["s3fifo", "lru", "lfu"] = Field("s3fifo", description="which rows leave the pool: s3fifo resists scans; lru follows what is asked for now; lfu keeps what is asked for often")  # fmt: skip
    whole_tables: tuple[str, ...] = Field((), description="tables held whole beside memory_pool_size")
    memory_floors: dict[str, int] = Field({}, description="bytes of the pool that a table's rows keep, by table")
    memory_ceilings: dict[str, int] = Field({}, description="bytes of the pool that a table's rows may take at most, by table")  # fmt: skip
    shadow_check: float = Field(0.0, ge=0, le=1, description="share of rows answered from the pool that are compared with the colder tier, off the request's path")  # fmt: skip

    host: str = Field("127.0.0.1", description="address to listen on; loopback until you decide otherwise")
    port: int = Field(50051, ge=0, le=65535, description="port of EmbeddingService; 0 picks a free one")
    admin_port: int = Field(50052, ge=0, le=65535, description="port of AdminService, same host; 0 picks a free one")

    metrics: bool = Field(True, description="serve Prometheus's /metrics and a status page, to all who reach the port")
    metrics_port: int = Field(9464, ge=0, le=65535, description="port of both, same host; 0 picks a free one")
    traces: str = Field("", description="URL of an OpenTelemetry collector (OTLP over gRPC, as http://127.0.0.1:4317) that gets a span for each request; OTEL_TRACES_SAMPLER says for which")  # fmt: skip

    huge_pages: bool = Field(False, description="copy rows into anonymous huge pages: fewer TLB misses for big tables, but memory of its own and a slower start")  # fmt: skip
    lock_memory: bool = Field(False, description="mlock rows so that they are never paged out; needs RLIMIT_MEMLOCK")

    watch: bool = Field(True, description="take up a version when it is published; else only on Reload and SIGHUP")
    reload_jitter: float = Field(0.0, ge=0, description="seconds within which replicas spread their reloads, each at a random time")  # fmt: skip
    reload_bandwidth: int = Field(2048 * MIB, ge=MIB, description="bytes a second at which versions are read, checked and freed while others are served")  # fmt: skip
    memory_budget: int = Field(0, ge=0, description="bytes of all open versions; a reload that would pass it is refused; 0: nine tenths of what this machine or container has")  # fmt: skip
    min_recall: float | None = Field(None, ge=0, le=1, description="refuse a version whose recall@10 is less")
    min_cosine: float | None = Field(None, ge=-1, le=1, description="refuse a version whose mean cosine to its source is less")  # fmt: skip
    max_changed_fraction: float | None = Field(None, ge=0, le=1, description="refuse a version of whose rows more differ from those served; read from both, so it takes a while")  # fmt: skip
    max_row_loss: float = Field(0.5, ge=0, le=1, description="refuse a version that has fewer rows than the one served by more than this fraction: a training that was cut short; 1 allows any")  # fmt: skip
    max_upserted_rows: int = Field(200_000, ge=0, description="rows that may lie over a version before they are folded into the next; each Upsert takes time in proportion")  # fmt: skip

    search_threads: int = Field(
        0, ge=0, le=1024, description="searches of approximate indexes at once; 0: one a processor"
    )

    max_ids: int = Field(262_144, ge=1, description="ids in one request")
    max_queries: int = Field(1_024, ge=1, description="queries in one TopK request")
    max_k: int = Field(2_048, ge=1, description="k of one TopK request")
    max_request_bytes: int = Field(4 * MIB, ge=1024, le=2**31 - 1, description="bytes of one request message")
    max_response_bytes: int = Field(4 * MIB, ge=1024, le=2**31 - 1, description="bytes of one response; gRPC clients refuse more than 4 MiB unless told otherwise")  # fmt: skip
    max_concurrent_requests: int = Field(256, ge=1, le=4096, description="requests in progress at once; more are RESOURCE_EXHAUSTED with a time to retry after")  # fmt: skip
    max_concurrent_streams: int = Field(64, ge=1, le=4096, description="open LookupStream calls; each holds a thread")

    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key, turns TLS on for both ports")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    tls_client_ca: Path | None = Field(None, description="PEM roots that client certificates must chain to (mTLS)")
    auth_tokens: Path | None = Field(
        None, description="file of bearer tokens, one a line, any of which admits a caller"
    )
    admin_tokens: Path | None = Field(None, description="the same for AdminService, separate from auth_tokens")

    drain_s: float = Field(10.0, ge=0, description="how long requests in flight may take after SIGTERM")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for programs")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")

    @model_validator(mode="after")
    def _agree(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return self


def load_config(file: Path | None = None, flags: dict[str, Any] | None = None) -> ServerConfig:
    """Merges file, environment and flags. Raises ConfigError: which field, what was given, what is allowed."""
    names = set(ServerConfig.model_fields)
    from_file = _read_toml(file) if file else {}
    for name in from_file:
        _refuse_unknown(name, names, str(file))
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable != CLIENT_TOKEN:
            _refuse_unknown(variable[len(ENV_PREFIX) :].lower(), names, f"environment variable {variable}")
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    # pydantic-settings puts the environment below what it is called with, so the file must step aside for it.
    in_environment = {name for name in names if ENV_PREFIX + name.upper() in os.environ}
    values = {name: value for name, value in from_file.items() if name not in in_environment} | given
    try:
        config = ServerConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise ConfigError(f"{where}: {first['msg']} (given: {first.get('input')!r})") from None
    if config.root is None and not config.redis:
        raise ConfigError(
            f"root: not set; give --root, {ENV_PREFIX}ROOT or a line in --config (or redis, to serve what was published there)"
        )
    return config


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None


def _refuse_unknown(name: str, names: set[str], source: str) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    raise ConfigError(f"{source}: unknown setting {name!r}; did you mean {near[0]!r}?")
