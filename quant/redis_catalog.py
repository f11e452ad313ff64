"""Tables and versions in Redis, for servers that have no catalog of files.

    PREFIX:tables                               set of table names
    PREFIX:{TABLE}:current                      the current version's name
    PREFIX:{TABLE}:versions                     hash: version -> JSON of VersionState
    PREFIX:{TABLE}:manifest:VERSION             JSON of RedisManifest
    PREFIX:TABLE:VERSION:{SHARD}:PAGE           a page of rows

Rows lie in pages, by position where keys are positions, else by a hash of the key, with their keys: so no server
needs memory for each key. The braces are Redis Cluster's hash tags: pages spread over SHARDS slots, and a
command for many pages of one shard goes to one node. A page (little-endian):

    "ES"  u8 schema  u8 row type | wide << 4  u32 dim  u16 rows  u16 0  u32 CRC-32     then keys i64[rows] if hashed, then rows

The CRC is of the page's own key in Redis, the twelve bytes before it, and what follows it, so that a page that is
damaged, cut short, or another version's is not taken for rows. A version is loaded page by page, checked, made complete, and
made current by one SET; a load that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedserve.quant.artifact import Artifact, Manifest
from embedserve.quant.catalog import check_table_name
from embedserve.quant.errors import ArtifactError, FailedPrecondition, NotFound
from embedserve.quant.kernels import _native
from embedserve.quant.redis_connection import RedisConnection
from embedserve.quant.rows import RowFormat

SCHEMA: Final = 1
PREFIX = "embedserve"
SHARDS = 64
ROWS_A_PAGE = 8
PAGES_A_BATCH = 1000
PASS_KEYS = 32_000_000  # keys whose pages are put in order at once: half a gigabyte
SAMPLED_PAGES = 200
HEADER = struct.Struct("<2sBBIHHI")
Progress = Callable[[int], None]


class RedisManifest(BaseModel):
    """A version in Redis: the manifest of its artifact, and how its rows are laid out."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    manifest: Manifest
    rows_a_page: int = Field(ge=1, le=1024)
    pages: int = Field(ge=1)
    shards: int = Field(ge=1, le=16384)
    default_row: list[float]
    sample_keys: list[int]


class VersionState(BaseModel):
    """loading: pages before `done` are there. leaving: being removed, and not to be opened."""

    state: Literal["loading", "complete", "leaving"]
    done: int = 0
    pages: int = 0


class RedisVersion:
    """An open version: its manifest, and where each key's page is. The same shape as an Artifact, without rows."""

    keys: None = None

    def __init__(self, prefix: str, document: RedisManifest) -> None:
        self.document, self.manifest = document, document.manifest
        self.default_row: npt.NDArray[np.float32] = np.array(document.default_row, np.float32)
        self._form = f"{prefix}:{self.manifest.table}:{self.manifest.version}:{{%d}}:%d".encode()  # no name holds a %

    def sample_keys(self, n: int) -> npt.NDArray[np.int64]:
        return np.array(self.document.sample_keys[:n], np.int64)

    def native_table(
        self, rows: npt.NDArray[np.uint8] | None = None, upserts: _native.Table | None = None
    ) -> _native.Table:
        """A table of the rows' format without any: they are not on this machine."""
        fmt = self.manifest.format
        none = np.empty((0, fmt.stride), np.uint8)
        return _native.Table(none, fmt.dim, fmt.type.native, fmt.wide, upserts=upserts)

    def pages_of(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The page [n] that holds each key, -1 for positions that do not exist."""
        if self.manifest.has_keys:
            return _hashed_pages(keys, self.document.pages)
        valid = (keys >= 0) & (keys < self.manifest.rows)
        return np.where(valid, keys // self.document.rows_a_page, -1)

    def page_key(self, page: int) -> bytes:
        return self._form % (page % self.document.shards, page)

    def page_keys(self, pages: npt.NDArray[np.int64]) -> list[bytes]:
        form = self._form
        return [form % pair for pair in zip((pages % self.document.shards).tolist(), pages.tolist(), strict=True)]


class RedisCatalog:
    """The tables below one prefix. Every call may raise Unavailable."""

    def __init__(self, connection: RedisConnection, prefix: str = PREFIX) -> None:
        self.connection, self.prefix = connection, prefix

    # What a server asks; the shape is Catalog's.

    def tables(self) -> list[str]:
        names = [name.decode() for name in self.connection.execute("SMEMBERS", f"{self.prefix}:tables")]
        return sorted(name for name in names if self.versions(name))

    def versions(self, table: str) -> list[str]:
        """Names of the complete versions, oldest first."""
        return sorted(name for name, state in self._states(table).items() if state.state == "complete")

    def current(self, table: str) -> str | None:
        value = self.connection.execute("GET", self._key(table, "current"))
        return value.decode() if value is not None else None

    def open(self, table: str, version: str = "") -> RedisVersion:
        """Raises NotFound, FailedPrecondition for a version that is not complete, ArtifactError for one that cannot be read."""
        name = version or self.current(table)
        states = self._states(table)
        if name is None or name not in states:
            there = ", ".join(self.versions(table)) or "none"
            raise NotFound(f"Redis has no version {name or '(current)'} of table {table!r}; there is: {there}")
        if states[name].state != "complete":
            raise FailedPrecondition(
                f"{table} {name} in Redis is not complete ({states[name].state}, {states[name].done:,} of {states[name].pages:,} pages); "
                "publish it again: it goes on where it was"
            )
        raw = self.connection.execute("GET", self._key(table, f"manifest:{name}"))
        if raw is None:
            raise ArtifactError(f"{table} {name} in Redis has no manifest")
        try:
            document = RedisManifest.model_validate_json(raw)
        except ValidationError as error:
            schema = _schema_of(raw)
            raise ArtifactError(
                f"{table} {name} in Redis is of schema {schema}; this release reads {SCHEMA}: publish it again with this one"
                if schema != SCHEMA
                else f"{table} {name} in Redis: its manifest cannot be read: {error.errors()[0]['msg']}"
            ) from None
        if (document.manifest.table, document.manifest.version) != (table, name):
            raise ArtifactError(f"{table} {name} in Redis: its manifest is of another version")
        return RedisVersion(self.prefix, document)

    # What publishing does.

    def publish(self, artifact: Artifact, progress: Progress = lambda rows: None) -> RedisManifest:
        """Loads a version, checks it, makes it current. Goes on where an earlier, interrupted call was. Hears of rows done."""
        manifest = artifact.manifest
        table, name = check_table_name(manifest.table), manifest.version
        n_pages = -(-manifest.rows // ROWS_A_PAGE)
        state = self._states(table).get(name, VersionState(state="loading", pages=n_pages))
        if state.state == "leaving" or state.pages != n_pages:
            self._remove(table, name, state)
            state = VersionState(state="loading", pages=n_pages)
        document = RedisManifest(
            schema=SCHEMA, manifest=manifest, rows_a_page=ROWS_A_PAGE, pages=n_pages, shards=SHARDS,
            default_row=[float(value) for value in artifact.default_row],
            sample_keys=[int(key) for key in artifact.sample_keys(64)],
        )  # fmt: skip
        opened = RedisVersion(self.prefix, document)
        if state.state != "complete":
            self.connection.execute("SADD", f"{self.prefix}:tables", table)
            self._load(artifact, opened, state, progress)
        self._check(artifact, opened)
        self.connection.execute("SET", self._key(table, f"manifest:{name}"), document.model_dump_json(by_alias=True))
        self._note(table, name, VersionState(state="complete", done=n_pages, pages=n_pages))
        self.connection.execute("SET", self._key(table, "current"), name)
        return document

    def expire(self, table: str, keep: int) -> list[str]:
        """Removes all versions but the newest `keep` complete ones and the current one. Returns their names."""
        complete = self.versions(table)
        kept = {*complete[max(0, len(complete) - keep) :], self.current(table) or ""}
        gone = [name for name in sorted(self._states(table)) if name not in kept]
        for name in gone:
            self._remove(table, name, self._states(table)[name])
        return gone

    def _load(self, artifact: Artifact, version: RedisVersion, state: VersionState, progress: Progress) -> None:
        table, name = artifact.manifest.table, artifact.manifest.version
        batch: list[tuple[bytes, bytes]] = []
        rows = 0
        done = state.done
        self._note(table, name, VersionState(state="loading", done=done, pages=version.document.pages))
        for page, count, value in _pages(artifact, version, state.done):
            batch.append((version.page_key(page), value))
            rows += count
            if len(batch) == PAGES_A_BATCH:
                self.connection.set_all(batch)
                done += len(batch)
                batch = []
                self._note(table, name, VersionState(state="loading", done=done, pages=version.document.pages))
                progress(min(artifact.manifest.rows, done * ROWS_A_PAGE))
        self.connection.set_all(batch)
        progress(artifact.manifest.rows)

    def _check(self, artifact: Artifact, version: RedisVersion) -> None:
        """Every page is there, and sampled ones hold their rows."""
        pages = range(version.document.pages)
        there = sum(
            self.connection.count([version.page_key(page) for page in pages[first : first + PAGES_A_BATCH]])
            for first in range(0, len(pages), PAGES_A_BATCH)
        )
        if there != len(pages):
            self._note(
                artifact.manifest.table, artifact.manifest.version, VersionState(state="loading", pages=len(pages))
            )
            raise ArtifactError(
                f"Redis holds {there:,} of {len(pages):,} pages of {version.manifest.version}; publish it again"
            )
        rng = np.random.default_rng()
        chosen = sorted({int(page) for page in rng.integers(0, len(pages), SAMPLED_PAGES)})
        sampled = [(page, value) for page, _, value in _pages(artifact, version, 0, set(chosen))]
        values = self.connection.get_all([version.page_key(page) for page, _ in sampled])
        for (page, expected), found in zip(sampled, values, strict=True):
            if found != expected:
                self._note(
                    artifact.manifest.table, artifact.manifest.version, VersionState(state="loading", pages=len(pages))
                )
                raise ArtifactError(
                    f"page {page} of {version.manifest.version} in Redis is not what was written; publish it again"
                )

    def _remove(self, table: str, name: str, state: VersionState) -> None:
        self._note(table, name, VersionState(state="leaving", pages=state.pages))
        self.connection.execute("DEL", self._key(table, f"manifest:{name}"))
        base = f"{self.prefix}:{table}:{name}".encode()
        pages = range(state.pages)
        for first in range(0, len(pages), PAGES_A_BATCH):
            self.connection.unlink(
                [b"%b:{%d}:%d" % (base, page % SHARDS, page) for page in pages[first : first + PAGES_A_BATCH]]
            )
        self.connection.execute("HDEL", self._key(table, "versions"), name)

    def _states(self, table: str) -> dict[str, VersionState]:
        raw = self.connection.execute("HGETALL", self._key(table, "versions"))
        try:
            return {name.decode(): VersionState.model_validate_json(state) for name, state in raw.items()}
        except (ValidationError, UnicodeDecodeError):
            raise ArtifactError(
                f"{self._key(table, 'versions')} in Redis is not a list of versions; is prefix {self.prefix!r} another application's?"
            ) from None

    def _note(self, table: str, version: str, state: VersionState) -> None:
        self.connection.execute("HSET", self._key(table, "versions"), version, state.model_dump_json())

    def _key(self, table: str, name: str) -> str:
        return f"{self.prefix}:{{{check_table_name(table)}}}:{name}"


def _schema_of(raw: bytes) -> Any:
    try:
        document = json.loads(raw)
        return document.get("schema") if isinstance(document, dict) else None
    except ValueError:
        return None


def _hashed_pages(keys: npt.NDArray[np.int64], n_pages: int) -> npt.NDArray[np.int64]:
    """splitmix64's finaliser (Steele, Lea, Flood 2014), as in key_index.h, modulo the pages."""
    x = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(n_pages)).astype(np.int64)


def _pages(
    artifact: Artifact, version: RedisVersion, first: int, only: set[int] | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Pages from `first` on, in order: number, rows, bytes. `only`: these alone."""
    fmt, n_pages = artifact.manifest.format, version.document.pages
    wanted: Sequence[int] = range(first, n_pages) if only is None else sorted(only)
    if artifact.keys is None:
        for page in wanted:
            rows = artifact.rows[page * ROWS_A_PAGE : (page + 1) * ROWS_A_PAGE]
            yield page, len(rows), _page(version.page_key(page), fmt, len(rows), rows.tobytes())
        return
    passes = -(-artifact.manifest.rows // PASS_KEYS)
    step = -(-n_pages // passes)
    for begin in range(0, n_pages, step):
        here = (
            [page for page in wanted if begin <= page < begin + step]
            if only is not None
            else range(max(begin, first), min(begin + step, n_pages))
        )
        if not here:
            continue
        order, starts = _sorted_by_page(artifact, n_pages, here[0], here[-1] + 1)
        for page in here:
            positions = np.sort(order[starts[page - here[0]] : starts[page - here[0] + 1]])
            payload = artifact.keys[positions].tobytes() + artifact.rows[positions].tobytes()
            yield page, len(positions), _page(version.page_key(page), fmt, len(positions), payload)


def _sorted_by_page(
    artifact: Artifact, n_pages: int, begin: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of the rows in pages [begin, end), page after page, and where each page's start."""
    assert artifact.keys is not None
    chosen, pages = [], []
    for at in range(0, artifact.manifest.rows, PASS_KEYS // 8):
        of = _hashed_pages(np.ascontiguousarray(artifact.keys[at : at + PASS_KEYS // 8]), n_pages)
        inside = np.flatnonzero((of >= begin) & (of < end))
        chosen.append(inside + at)
        pages.append(of[inside])
    page, position = np.concatenate(pages), np.concatenate(chosen)
    order = np.argsort(page, kind="stable")
    return position[order], np.searchsorted(page[order], np.arange(begin, end + 1))


def _page(key: bytes, fmt: RowFormat, count: int, payload: bytes) -> bytes:
    head = HEADER.pack(b"ES", SCHEMA, fmt.type.native | fmt.wide << 4, fmt.dim, count, 0, 0)[:12]
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head, zlib.crc32(key)))) + payload
