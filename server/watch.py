"""Notices what is published: by the system's notifications where they come, by looking every second where they do not."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import watchfiles

from embedserve.quant import Artifact, Catalog, Place
from embedserve.server.engine import Engine
from embedserve.server.reload import Reloader
from embedserve.server.upserts import UpsertWriter

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
GATHER_MS = 20  # changes that come together are looked at together


class Watcher:
    """Tells the reloader of published versions and the upsert writer of other servers' upserts; `start`, then `stop` once."""

    def __init__(self, engine: Engine, reloader: Reloader, upserts: UpsertWriter) -> None:
        self._engine, self._reloader, self._upserts = engine, reloader, upserts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._due: dict[str, float] = {}
        self._extents: dict[str, Place] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            for _ in self._wakes(self._folders()):
                try:
                    self._look()
                except Exception:  # (the thread outlives it; the catalog may come back)
                    log.exception("the catalog cannot be watched")

    def _folders(self) -> list[Path]:
        """Folders whose own entries tell of news; files within versions are of no interest."""
        root = self._engine.config.root
        if root is None:
            return []
        tables = [root / name for name in Catalog(root).tables()]
        return [folder for folder in (root, *tables, *(table / "upserts" for table in tables)) if folder.is_dir()]

    def _wakes(self, folders: list[Path]) -> Iterator[None]:
        """Yields at every change and at least every second, until there are other folders to watch."""
        if not folders:  # Redis alone
            while not self._stop.wait(LOOK_EVERY_S):
                yield
            return
        try:
            changes = watchfiles.watch(
                *folders, watch_filter=None, debounce=4 * GATHER_MS, step=GATHER_MS, stop_event=self._stop, recursive=False,
                rust_timeout=int(LOOK_EVERY_S * 1000), yield_on_timeout=True, raise_interrupt=False,
            )  # fmt: skip
            for _ in changes:
                yield
                if self._folders() != folders:
                    return
        except (OSError, RuntimeError) as error:
            log.warning("no notifications from the file system (%s); looking every %g s", error, LOOK_EVERY_S)
            while not self._stop.wait(LOOK_EVERY_S):
                yield

    def _look(self) -> None:
        now = time.monotonic()
        changed = self._reloader.changed_tables()
        for name in changed:
            self._due.setdefault(name, now + random.uniform(0, self._engine.config.reload_jitter))
        for name, due in list(self._due.items()):
            if name not in changed:
                del self._due[name]
            elif due <= now:
                del self._due[name]
                self._reloader.request(name)
        for name, table in self._engine.served.tables.items():
            if not isinstance(table.current.artifact, Artifact):
                continue
            extent = self._engine.upsert_log(name).extent()
            if self._extents.get(name) != extent:
                self._extents[name] = extent
                self._upserts.refresh(name)
