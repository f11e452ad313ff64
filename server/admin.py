"""The calls of AdminService, from request to response messages; knows no transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from embedserve.proto import admin_pb2, wire_pb2
from embedserve.quant import Upserts
from embedserve.quant.errors import FailedPrecondition, InvalidArgument, NotFound
from embedserve.quant.kernels import _native
from embedserve.server import wire
from embedserve.server.engine import Engine
from embedserve.server.reload import Reloader, TableLog, Taken
from embedserve.server.stats import MethodStats, Window
from embedserve.server.upkeep import ShadowCounts, Upkeep
from embedserve.server.upserts import UpsertWriter
from embedserve.server.versions import ServedVersion

NONE = ShadowCounts()


class Admin:
    """Answers what is served and how it fares, and changes it."""

    def __init__(
        self,
        engine: Engine,
        reloader: Reloader,
        upserts: UpsertWriter,
        upkeep: Upkeep,
        stats: Mapping[str, MethodStats],
        frontend: str,
        in_progress: Callable[[], int],
    ) -> None:
        self._engine, self._reloader, self._upserts, self._upkeep = engine, reloader, upserts, upkeep
        self._stats, self._frontend, self._in_progress = stats, frontend, in_progress
        self._started = time.monotonic()

    def list_tables(self, request: admin_pb2.ListTablesRequest) -> admin_pb2.ListTablesResponse:
        tables = self._engine.served.tables.values()
        return admin_pb2.ListTablesResponse(tables=[_summary(table.current) for table in tables])

    def describe_table(self, request: admin_pb2.DescribeTableRequest) -> admin_pb2.DescribeTableResponse:
        served = self._engine.served
        history = self._reloader.tables.get(request.table, TableLog())
        refused = history.refusal
        if refused and request.table not in served.tables:
            raise NotFound(f"table {request.table!r} is not served: {refused.reason}")
        version = served.resolve(request.table, request.version)
        return admin_pb2.DescribeTableResponse(
            summary=_summary(version),
            versions=list(served.tables[request.table].versions),
            manifest_json=version.manifest.model_dump_json(by_alias=True),
            row_stride_bytes=version.manifest.format.stride,
            resident_bytes=version.held.resident_bytes,
            upserted_rows=len(version.overlay.keys),
            loading=history.loading,
            refused=admin_pb2.Refusal(version=refused.version, reason=refused.reason, time=refused.time)
            if refused
            else None,
        )

    def get_stats(self, request: admin_pb2.GetStatsRequest) -> admin_pb2.GetStatsResponse:
        methods = [
            admin_pb2.MethodStats(
                method=name,
                handled=s.handled,
                failed=s.failed,
                rows=s.rows,
                codes=s.codes,
                windows=[_window(window) for window in self._upkeep.windows.of(name)],
            )
            for name, s in self._stats.items()
        ]
        tables = [
            admin_pb2.TableStats(
                table=name, version=table.current.name, taken=history.taken, refused=history.refused,
                rolled_back=history.rolled_back, last_reload_s=history.last_reload_s,
                upserted_rows=len(table.current.overlay.keys), memory_bytes=sum(v.memory_bytes for v in table.open),
                tiers=_tiers(table.current), shadow_compared=self._upkeep.shadow.get(name, NONE).compared,
                shadow_differing=self._upkeep.shadow.get(name, NONE).differing, rows=table.current.rows,
                as_published=history.refusal is None and history.named == table.current.name, loading=history.loading,
            )
            for name, table in self._engine.served.tables.items()
            if (history := self._reloader.tables.get(name, TableLog()))
        ]  # fmt: skip
        uptime_s = time.monotonic() - self._started
        return admin_pb2.GetStatsResponse(
            uptime_s=uptime_s,
            frontend=self._frontend,
            kernels=_native.kernels(),
            methods=methods,
            tables=tables,
            pool_bytes=self._engine.tiers.pool_bytes,
            in_progress=self._in_progress(),
        )

    def reload(self, request: admin_pb2.ReloadRequest) -> admin_pb2.ReloadResponse:
        if request.version and not request.table:
            raise InvalidArgument("table", "empty, but a version is given: say of which table")
        taken = (
            [self._reloader.reload(request.table, request.version)] if request.table else self._reloader.reload_all()
        )
        return admin_pb2.ReloadResponse(tables=[_reloaded(each) for each in taken])

    def rollback(self, request: admin_pb2.RollbackRequest) -> admin_pb2.RollbackResponse:
        return admin_pb2.RollbackResponse(table=_reloaded(self._reloader.rollback(request.table, request.version)))

    def unload(self, request: admin_pb2.UnloadRequest) -> admin_pb2.UnloadResponse:
        self._reloader.unload(request.table)
        return admin_pb2.UnloadResponse()

    def warm(self, request: wire_pb2.WarmRequest) -> admin_pb2.WarmResponse:
        version = self._engine.served.resolve(request.table)
        keys = wire.as_ids(wire.joined(request.keys, 8, "keys"))
        if version.cached is None:
            raise FailedPrecondition(f"table {request.table!r} is held whole in RAM: there is nothing to warm")
        return admin_pb2.WarmResponse(loaded=version.cached.warm(keys))

    def upsert(self, request: wire_pb2.UpsertRequest) -> admin_pb2.UpsertResponse:
        dim = self._engine.served.resolve(request.table).dim
        keys = wire.as_ids(wire.joined(request.keys, 8, "keys"))
        values = np.frombuffer(wire.joined(request.values, 4, "values"), "<f4")
        if len(values) != len(keys) * dim:
            raise InvalidArgument("values", f"{len(values)} for {len(keys)} keys of dim {dim}; send keys x dim")
        if not len(keys):
            raise InvalidArgument("keys", "none; send one a row")
        version = self._upserts.upsert(request.table, Upserts(keys, values.reshape(-1, dim)))
        return admin_pb2.UpsertResponse(version=version.name, upserted_rows=len(version.overlay.keys))


def _reloaded(taken: Taken) -> admin_pb2.TableReload:
    return admin_pb2.TableReload(
        table=taken.table, version=taken.version, previous=taken.previous, changed=taken.changed
    )


def _window(window: Window) -> admin_pb2.Window:
    p50, p90, p99, p999 = (1e3 * each for each in window.latencies_s)
    return admin_pb2.Window(
        seconds=window.seconds, calls=window.calls, qps=window.qps, p50_ms=p50, p90_ms=p90, p99_ms=p99, p999_ms=p999
    )


def _tiers(version: ServedVersion) -> list[admin_pb2.TierStats]:
    """Of the version that answers, since it was opened. Tables held whole are not counted: every row found is a hit."""
    if version.cached is None:
        return []
    counts = version.cached.counts()
    ram = admin_pb2.TierStats(
        tier="ram", hits=counts["hits"], misses=counts["misses"], unknown=counts["unknown"], rows=counts["rows"],
        bytes=counts["bytes"], evictions=counts["evictions"], declined=counts["declined"],
    )  # fmt: skip
    cold = admin_pb2.TierStats(
        tier="redis" if version.redis else "disk", hits=counts["fetched"], rows=version.manifest.rows,
        unavailable=counts["unavailable"], fetches=counts["fetches"], fetch_s=counts["fetch_ns"] / 1e9,
        state=version.redis.state if version.redis else "", damaged_pages=version.redis.damaged_pages if version.redis else 0,
    )  # fmt: skip
    return [ram, cold]


def _summary(version: ServedVersion) -> admin_pb2.TableSummary:
    manifest = version.manifest
    return admin_pb2.TableSummary(
        table=manifest.table, version=manifest.version, rows=version.rows, dim=manifest.dim,
        row_type=manifest.row_type.value, metric=manifest.metric.value,
    )  # fmt: skip
