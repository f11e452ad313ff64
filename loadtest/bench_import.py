"""Import of FP32 rows into INT8: gigabytes of source a second, peak memory, and how soon the table answers.

Each import runs in a process of its own, the source in the page cache. Peers quantise the same rows in
memory: they neither read, write, check, hash nor measure.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedserve.loadtest.results import Figure
from embedserve.quant import Catalog
from embedserve.quant.kernels import _native

DIM, ROUNDS = 64, 5
PEER_ROWS, PEER_BLOCK = 500_000, 10_000
PEAK_LIMIT_MB, OPEN_LIMIT_S = 500.0, 1.0

_IMPORT = """
import sys, time
from pathlib import Path
from embedserve.quant import Catalog, ImportOptions, import_table, open_matrix
source = open_matrix(sys.argv[1])
begun = time.perf_counter()
import_table(Catalog(Path(sys.argv[2])), "t", source, ImportOptions())
seconds = time.perf_counter() - begun
# Not getrusage, which counts what this process was before it became Python.
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak_kb) / 1024)
"""


def run(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """Medians of alternating rounds."""
    rows = 200_000 if quick else 10_000_000
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        source, catalog = Path(folder) / "x.npy", Path(folder) / "catalog"
        say(f"writing {rows:,} rows x {DIM} of FP32")
        _write_source(source, rows)
        gigabytes = rows * DIM * 4 / 1e9
        one: list[float] = []
        all_cores: list[float] = []
        peaks: list[float] = []
        peers: dict[str, list[float]] = {name: [] for name in _peers()}
        for number in range(1 if quick else ROUNDS):
            for rates, cores in ((one, {cpus[0]}), (all_cores, set(cpus))):
                seconds, peak_mb = _import(source, catalog, cores)
                rates.append(gigabytes / seconds)
                peaks.append(peak_mb)
            for name, quantise in _peers().items():
                peers[name].append(_peer_rate(quantise))
            say(
                f"round {number + 1}: {one[-1]:.2f} GB/s on one core, {all_cores[-1]:.2f} on {len(cpus)}, peak {peaks[-1]:.0f} MB"
            )
        Catalog(catalog).publish("t")
        opened_s = _open_and_answer(catalog, rows)
    figures = [
        Figure("import, 1 core", statistics.median(one), "GB/s", name, statistics.median(r))
        for name, r in peers.items()
    ]
    figures.append(Figure("import, 1 core", statistics.median(one), "GB/s", "target", 1.0))
    figures.append(
        Figure(f"import, {len(cpus)} cores", statistics.median(all_cores), "GB/s", "1 core", statistics.median(one))
    )
    figures.append(Figure("peak memory", max(peaks), "MB", "limit", PEAK_LIMIT_MB, lower_is_better=True))
    figures.append(Figure(f"open {rows:,} rows and answer", opened_s, "s", "limit", OPEN_LIMIT_S, lower_is_better=True))
    return figures


def _write_source(path: Path, rows: int) -> None:
    block = np.random.default_rng(0).standard_normal((100_000, DIM), np.float32)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, DIM)})
        for _ in range(0, rows, len(block)):
            file.write(block.tobytes())
        os.fsync(file.fileno())


def _import(source: Path, catalog: Path, cpus: set[int]) -> tuple[float, float]:
    """Seconds and peak resident MB of one import; older versions are removed afterwards."""
    pin = ["taskset", "-c", ",".join(map(str, sorted(cpus)))]
    command = [*pin, sys.executable, "-c", _IMPORT, str(source), str(catalog)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for version in Catalog(catalog).versions("t")[:-1]:
        for file in (catalog / "t" / version).iterdir():
            file.unlink()
        (catalog / "t" / version).rmdir()
    seconds, peak_mb = map(float, output.split())
    return seconds, peak_mb


def _open_and_answer(catalog: Path, rows: int) -> float:
    ids = np.random.default_rng(0).integers(0, rows, 256)
    out = np.empty((256, DIM), np.float32)
    begun = time.perf_counter()
    Catalog(catalog).open("t").native_table().gather(ids, 0, None, out)
    return time.perf_counter() - begun


Quantise = Callable[[npt.NDArray[np.float32]], object]


def _peer_rate(quantise: Quantise) -> float:
    """Gigabytes a second, in blocks that malloc need not map anew; the first pass warms up."""
    values = np.random.default_rng(0).standard_normal((PEER_ROWS, DIM), np.float32)
    for _ in range(2):
        begun = time.perf_counter()
        for start in range(0, PEER_ROWS, PEER_BLOCK):
            quantise(values[start : start + PEER_BLOCK])
        seconds = time.perf_counter() - begun
    return values.nbytes / 1e9 / seconds


def _numpy(values: npt.NDArray[np.float32]) -> object:
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / 255
    return np.rint((values - low) / scale).astype(np.uint8)


def _kernel_alone(values: npt.NDArray[np.float32]) -> object:
    return _native.encode(values, np.empty((len(values), DIM + 4), np.uint8), 0, False, 0, 0)


def _peers() -> dict[str, Quantise]:
    peers: dict[str, Quantise] = {"numpy min-max, in memory": _numpy, "our kernel alone, in memory": _kernel_alone}
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        peers["torch byte_prepack, in memory"] = lambda values: torch.ops.quantized.embedding_bag_byte_prepack(
            torch.from_numpy(values)
        )
    return peers
