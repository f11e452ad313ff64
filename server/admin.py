"""The calls of AdminService, from request to response messages; knows no transport."""

from __future__ import annotations

import time
from collections.abc import Mapping

from embedserve.proto import admin_pb2
from embedserve.quant.kernels import _native
from embedserve.server.engine import Engine, ServedVersion
from embedserve.server.stats import MethodStats


class Admin:
    """Answers what is served and how it fares."""

    def __init__(self, engine: Engine, stats: Mapping[str, MethodStats], frontend: str) -> None:
        self._engine, self._stats, self._frontend = engine, stats, frontend
        self._started = time.monotonic()

    def list_tables(self, request: admin_pb2.ListTablesRequest) -> admin_pb2.ListTablesResponse:
        return admin_pb2.ListTablesResponse(tables=[_summary(table.current) for table in self._engine.tables.values()])

    def describe_table(self, request: admin_pb2.DescribeTableRequest) -> admin_pb2.DescribeTableResponse:
        version = self._engine.resolve(request.table, request.version)
        return admin_pb2.DescribeTableResponse(
            summary=_summary(version),
            versions=list(self._engine.tables[request.table].versions),
            manifest_json=version.manifest.model_dump_json(by_alias=True),
            row_stride_bytes=version.manifest.format.stride,
            resident_bytes=version.ram.resident_bytes,
        )

    def get_stats(self, request: admin_pb2.GetStatsRequest) -> admin_pb2.GetStatsResponse:
        methods = [
            admin_pb2.MethodStats(method=name, handled=s.handled, failed=s.failed, rows=s.rows)
            for name, s in self._stats.items()
        ]
        uptime_s = time.monotonic() - self._started
        return admin_pb2.GetStatsResponse(
            uptime_s=uptime_s, frontend=self._frontend, kernels=_native.kernels(), methods=methods
        )


def _summary(version: ServedVersion) -> admin_pb2.TableSummary:
    manifest = version.manifest
    return admin_pb2.TableSummary(
        table=manifest.table, version=manifest.version, rows=manifest.rows, dim=manifest.dim,
        row_type=manifest.row_type.value, metric=manifest.metric.value,
    )  # fmt: skip
