"""A benchmark's results as one page that needs nothing else: figures beside their peers, charts, and the machine."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from embedserve.loadtest.charts import svg
from embedserve.loadtest.results import Chart, Figure, Result, machine

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5d6b7e;--paper:#f6f7f9;--card:#fff;--line:#dfe4ea;
--c0:#2563eb;--c1:#c2410c;--c2:#15803d;--c3:#9333ea;--c4:#b91c1c;--c5:#0e7490}
@media(prefers-color-scheme:dark){:root{--ink:#e7ecf3;--soft:#94a3b8;--paper:#0f141b;--card:#18202b;--line:#2b3644;
--c0:#6ea8fe;--c1:#fb923c;--c2:#4ade80;--c3:#c084fc;--c4:#f87171;--c5:#22d3ee}}
*{box-sizing:border-box}body{margin:0;padding:1rem;background:var(--paper);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:72rem;margin:auto}h1{font-size:1.3rem;margin:0 0 .5rem}h2{font-size:1.1rem;margin:2rem 0 .6rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:.1rem .9rem;margin:0;color:var(--soft);font-size:.88rem}dd{margin:0;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem;margin:.7rem 0;overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:.7rem}.charts .card{margin:0;max-width:48rem}figcaption{font-weight:500}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th{color:var(--soft);font-weight:500}
th,td{padding:.35rem .7rem;text-align:right;border-top:1px solid var(--line);white-space:nowrap}tr:first-child th{border:0}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:11rem}
.bar{display:inline-block;width:6rem;height:.6rem;border-radius:.2rem;background:var(--line);position:relative;vertical-align:middle}
.bar i{position:absolute;left:0;top:0;bottom:0;border-radius:.2rem;background:var(--c0)}.bar b{position:absolute;left:50%;top:-.15rem;bottom:-.15rem;width:1px;background:var(--ink)}
@media(max-width:40rem){svg text{font-size:20px}tr:first-child{display:none}tr{display:flex;flex-wrap:wrap;gap:0 .6rem;padding:.5rem 0;border-top:1px solid var(--line)}
tr:nth-child(2){border:0}td{border:0;padding:0;min-width:0}td:first-child{flex:0 0 100%;font-weight:500}td:nth-child(4):before{content:"beside "}td:nth-child(6):before{content:"ratio "}}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}.key i{display:inline-block;width:.8rem;height:.2rem;vertical-align:middle;margin-right:.3rem}
"""


def write(directory: Path, title: str, results: Mapping[str, Sequence[Result]]) -> Path:
    """Writes DIRECTORY/report.html, a section for each benchmark by name, and its figures as report.md. Returns the first's path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.html"
    path.write_text(_page(title, results), encoding="utf-8")
    (directory / "report.md").write_text(_markdown(title, results), encoding="utf-8")
    return path


def _page(title: str, results: Mapping[str, Sequence[Result]]) -> str:
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in machine().items())
    sections = "".join(_section(name, found) for name, found in results.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><main><h1>{html.escape(title)}</h1><dl>{facts}</dl>{sections}</main></html>\n"
    )


def _markdown(title: str, results: Mapping[str, Sequence[Result]]) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in machine().items())]
    for name, found in results.items():
        lines += ["", f"## {name}", ""]
        lines += ["| | ours | unit | beside | | ratio |", "|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join(_cells(each))} |" for each in found if isinstance(each, Figure)]
    return "\n".join(lines) + "\n"


def _section(name: str, results: Sequence[Result]) -> str:
    charts = "".join(svg(each) for each in results if isinstance(each, Chart))
    rows = "".join(_row(each) for each in results if isinstance(each, Figure))
    head = "<tr><th>figure</th><th>ours</th><th>unit</th><th>beside</th><th></th><th>ratio</th><th>even at the line</th></tr>"
    table = f'<div class="card"><table>{head}{rows}</table></div>' if rows else ""
    return f'<h2>{html.escape(name)}</h2><div class="charts">{charts}</div>{table}'


def _row(figure: Figure) -> str:
    ratio = figure.ratio
    # A bar of logarithms: half way at 1, full at 10 times, empty at a tenth.
    share = 50 * (1 + max(-1.0, min(1.0, math.log10(ratio)))) if ratio > 0 else 0.0
    cells = _cells(figure)
    bar = f'<span class="bar"><i style="width:{share:.0f}%"></i><b></b></span>'
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + f"<td>{bar}</td></tr>"


def _cells(figure: Figure) -> tuple[str, ...]:
    ours, peer = f"{figure.ours:,.2f}", f"{figure.peer_value:,.2f}"
    return figure.name, ours, figure.unit, figure.peer, peer, f"{figure.ratio:.2f}"
