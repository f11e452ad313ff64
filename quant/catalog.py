"""A directory of tables and their versions.

ROOT/TABLE/CURRENT       one line: the current version; replaced atomically
ROOT/TABLE/VERSION/      an artifact (artifact.py), or a delta that becomes one when it is opened (delta.py)
ROOT/TABLE/upserts/      rows written since (upsert_log.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from embedserve.quant import delta
from embedserve.quant.artifact import (
    INDEX_FILE,
    MANIFEST,
    PARTIAL_PREFIX,
    ROWS_FILE,
    VERSION_NAME,
    Artifact,
    ArtifactWriter,
    Manifest,
    read_manifest,
    write_durably,
)
from embedserve.quant.errors import ArtifactError, InvalidArgument, NotFound
from embedserve.quant.upsert_log import UpsertLog

TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
CURRENT = "CURRENT"
_TIME_FORMAT = "%Y%m%dT%H%M%SZ"
_TIME_NAME = re.compile(r"\d{8}T\d{6}Z")


def check_table_name(table: str) -> str:
    """Returns the name, or raises InvalidArgument: letters, digits, - and _ only, so that it is one folder's name."""
    if not TABLE_NAME.fullmatch(table):
        raise InvalidArgument(
            "table", f"{table[:200]!r} is no table name; allowed are 1 to 128 letters, digits, '-' and '_'"
        )
    return table


class Catalog:
    """The tables below one root. Reads see only whole versions; nothing is cached."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tables(self) -> list[str]:
        """Names of the tables that have a version, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(
            entry.name
            for entry in self.root.iterdir()
            if TABLE_NAME.fullmatch(entry.name) and self.versions(entry.name)
        )

    def versions(self, table: str) -> list[str]:
        """Names of a table's versions, oldest first."""
        directory = self.root / check_table_name(table)
        if not directory.is_dir():
            return []
        return sorted(
            e.name for e in directory.iterdir() if VERSION_NAME.fullmatch(e.name) and (e / MANIFEST).is_file()
        )

    def current(self, table: str) -> str | None:
        """The published version's name, or None before the first publish. Raises ArtifactError on a damaged CURRENT."""
        path = self.root / check_table_name(table) / CURRENT
        try:
            with open(path, "rb") as file:
                line = file.read(100).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None
        if not VERSION_NAME.fullmatch(line):
            raise ArtifactError(f"{path}: {line!r} is not a version's name")
        return line

    def open(self, table: str, version: str = "", verify: bool = False) -> Artifact:
        """Opens a version, the current one by default. Raises NotFound or ArtifactError."""
        versions = self.versions(table)
        if not versions:
            raise NotFound(f"no table {table!r} in {self.root}; there is: {', '.join(self.tables()) or 'none'}")
        name = version or self.current(table)
        if name is None:
            raise NotFound(f"table {table!r} has no published version; publish one of: {', '.join(versions)}")
        if name not in versions:
            raise NotFound(f"table {table!r} has no version {name!r}; there is: {', '.join(versions)}")
        directory = self.root / table / name
        if delta.is_bare(directory):
            self.complete(table, name)
        artifact = Artifact(directory, verify)
        if artifact.manifest.table != table:
            raise ArtifactError(f"{artifact.directory}: its manifest is of table {artifact.manifest.table!r}")
        return artifact

    def complete(self, table: str, version: str) -> None:
        """Makes a version's rows from its delta and the version that it names, which is completed first if need be.

        Raises ArtifactError if a link of that chain is missing, damaged or not the one the delta was made from.
        """
        pending: list[str] = []
        at = version
        while not pending or delta.is_bare(self.root / table / at):
            if len(pending) >= delta.MAX_CHAIN:
                raise ArtifactError(
                    f"{self.root / table / version}: more than {delta.MAX_CHAIN} deltas in a row; publish a full version"
                )
            pending.append(at)
            at = delta.read_delta(self.root / table / at).base
        for each in reversed(pending):
            delta.apply_delta(self.root / table / each, self.writer)

    def install_delta(self, table: str, source: Path) -> str:
        """Takes a delta's folder, whatever it is called, into the catalog, as an unpublished version, and completes it. Returns its name.

        Nothing is left behind when its base is not here; unless the folder holds the full rows too: then those are taken.
        """
        check_table_name(table)
        manifest = read_manifest(source, name="")
        found = delta.read_delta(source)
        if manifest.table != table:
            raise ArtifactError(f"{source}: is of table {manifest.table!r}, not {table!r}")
        names = [MANIFEST, delta.DELTA_MANIFEST, delta.DELTA_FILE, *([INDEX_FILE] if manifest.index else [])]
        try:
            self.open(table, found.base)
        except (NotFound, ArtifactError) as error:
            if not (source / ROWS_FILE).is_file():
                raise ArtifactError(
                    f"{source}: changes version {found.base}, which is not here ({error}); copy the full version instead"
                ) from None
            names.append(ROWS_FILE)
        with self.writer(table) as writer, contextlib.suppress(FileExistsError):
            writer.commit_copy(manifest.version, [source / name for name in names])
        self.open(table, manifest.version)
        return manifest.version

    def upsert_log(self, table: str) -> UpsertLog:
        return UpsertLog(self.root / check_table_name(table))

    def writer(self, table: str) -> ArtifactWriter:
        """Begins a new version of a table."""
        return ArtifactWriter(self.root / check_table_name(table))

    def commit(self, writer: ArtifactWriter, table: str, manifest: dict[str, Any]) -> Manifest:
        """Gives what was written the name of a new version, and its manifest."""
        while True:
            try:
                return writer.commit(self.next_version(table), manifest)
            except FileExistsError:
                continue  # another writer took the name in this very second

    def next_version(self, table: str) -> str:
        """A name for a new version: the time in UTC, or one second past the newest, whichever is later."""
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        names = self.versions(table)
        with contextlib.suppress(ArtifactError):  # a damaged CURRENT names nothing
            names.append(self.current(table) or "")  # which may have been deleted, and still be served
        times = [name for name in names if _TIME_NAME.fullmatch(name)]
        if times:
            now = max(now, datetime.strptime(max(times), _TIME_FORMAT) + timedelta(seconds=1))
        return now.strftime(_TIME_FORMAT)

    def publish(self, table: str, version: str = "") -> str:
        """Makes a version (the newest by default) current, after checking every byte of it. Returns its name."""
        versions = self.versions(table)
        name = version or (versions[-1] if versions else "")
        self.open(table, name, verify=True)
        directory = self.root / table
        partial = directory / f"{PARTIAL_PREFIX}current"
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one publisher at a time; a killed one's lock is gone with it
            self._trim_upserts(table, name)
            write_durably(partial, name.encode() + b"\n")
            os.replace(partial, directory / CURRENT)
            os.fsync(lock)
        finally:
            os.close(lock)
        return name

    def _trim_upserts(self, table: str, new: str) -> None:
        """Forgets upserts that neither the version about to be published nor the one before it needs."""
        try:
            before = self.current(table)
            if before is None or before == new:
                return
            marks = [read_manifest(self.root / table / version).upserts for version in (before, new)]
            log = self.upsert_log(table)
            if any(mark is None or mark.log != log.identity() for mark in marks):
                return
        except ArtifactError:
            return  # what is damaged says nothing about what may go
        log.trim(min(mark.through for mark in marks if mark))
