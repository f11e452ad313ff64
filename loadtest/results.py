"""A benchmark's figures: ours beside a peer's or a ceiling's, and their ratio."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from embedserve.quant.kernels import _native


@dataclass(frozen=True)
class Figure:
    """ratio: above 1 where ours is better, whichever way the unit counts."""

    name: str
    ours: float
    unit: str
    peer: str
    peer_value: float
    lower_is_better: bool = False

    @property
    def ratio(self) -> float:
        a, b = (self.peer_value, self.ours) if self.lower_is_better else (self.ours, self.peer_value)
        return a / b if b else float("nan")

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields.pop("lower_is_better")
        return {**fields, "ratio": self.ratio}


@dataclass(frozen=True)
class Chart:
    """Lines [(x, y)] by name, for a report. ticks: what to write at places of the x axis; none: its ends."""

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    log_x: bool = False
    ticks: dict[float, str] = field(default_factory=dict)


Result = Figure | Chart


def machine() -> dict[str, str]:
    """What a figure depends on besides the code."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    packages = {name: _version(name) for name in ("embedserve", "grpcio", "numpy", "faiss-cpu", "redis")}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores to this process, kernels {_native.kernels()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def print_figures(name: str, figures: list[Figure]) -> None:
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    table = Table(
        title=f"bench {name} · {when} · {platform.machine()}, kernels {_native.kernels()}", title_justify="left"
    )
    for column in ("name", "ours", "unit", "peer", "peer_value", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit", "peer") else "right", no_wrap=True)
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.ours:,.2f}",
            figure.unit,
            figure.peer,
            f"{figure.peer_value:,.2f}",
            f"{figure.ratio:.2f}",
        )
    Console(width=max(Console().width, 130)).print(table)
