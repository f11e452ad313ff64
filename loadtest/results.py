"""A benchmark's figures: ours beside a peer's or a ceiling's, and their ratio."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
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
