"""Decode-gather of random ids from a table much larger than cache, beside its peers and its floor.

The floor prefetches and reads the same lines and writes as many bytes, without decoding. All contenders take
turns in random order, with new ids for every call. Each allocates its results, as a service does for its answers,
and from one allocator, so that none finds its memory warmer than another does. The first call of a turn is not
timed: it finds the caches full of another contender's results, which have yet to be written back.
Peers that are not installed are left out, aloud.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embedserve.loadtest.results import Figure
from embedserve.quant import Output, RowType
from embedserve.quant.kernels import _native

DIMS = (16, 64, 128, 384)
N_IDS = (256, 4_096, 65_536)
TABLE_BYTES, QUICK_BYTES = 768 << 20, 16 << 20
IDS_A_CONTENDER, MIN_ROUNDS, MAX_ROUNDS = 3_000_000, 9, 400
TILE_ROWS = 4_096

_FORK = multiprocessing.get_context("fork")

Contender = Callable[[npt.NDArray[np.int64]], object]


def run(quick: bool, say: Callable[[str], None]) -> list[Figure]:
    """Million rows a second of one core, medians; at 4,096 ids also of two."""
    for module in ("torch", "fbgemm_gpu"):
        if importlib.util.find_spec(module) is None:
            say(
                f"{module} is not installed: its figures are left out (pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0)"
            )
    _keep_freed_memory()
    figures: list[Figure] = []
    table_bytes = QUICK_BYTES if quick else TABLE_BYTES
    for row_type in (RowType.INT8, RowType.INT4):
        for dim in DIMS[1:2] if quick else DIMS:
            figures += _one_format(row_type, dim, table_bytes, quick, say)
            gc.collect()
    return figures


def _one_format(row_type: RowType, dim: int, table_bytes: int, quick: bool, say: Callable[[str], None]) -> list[Figure]:
    stride = _native.stride(row_type.native, False, dim)
    n_rows = table_bytes // stride // TILE_ROWS * TILE_ROWS
    rows = huge_array(n_rows * stride).reshape(n_rows, stride)
    _fill(rows, _encoded_tile(row_type, dim, stride))
    table = _native.Table(rows, dim, row_type.native, False)
    peers = {
        "numpy": _numpy_peer(rows, row_type, dim),
        **_torch_peer(row_type, dim, n_rows),
        **_fbgemm_peer(rows, row_type, dim),
    }

    def gather(floor: bool) -> Contender:
        return lambda ids: table.gather(ids, Output.FLOAT32, None, _new_result(4 * dim * len(ids)), floor)

    contenders = {"ours": gather(floor=False), "floor": gather(floor=True), **peers}
    figures = []
    for n in N_IDS[:2] if quick else N_IDS:
        rounds = 3 if quick else max(MIN_ROUNDS, min(MAX_ROUNDS, IDS_A_CONTENDER // n))
        rate = _alternate(contenders, n, n_rows, rounds)
        name = f"{row_type.value} x {dim}, {n:,} ids"
        best = max(peers, key=lambda peer: rate[peer])
        figures += [Figure(name, rate["ours"], "M rows/s", peer, rate[peer]) for peer in ("floor", *peers)]
        line = f"{name}: {rate['ours']:.1f} M rows/s, {rate['ours'] / rate['floor']:.2f} of the floor, {rate['ours'] / rate[best]:.2f}x {best}"
        if n == N_IDS[1] and len(os.sched_getaffinity(0)) > 1:
            one, two = _two_cores(table, dim, n, n_rows)
            one_floor, two_floor = _two_cores(table, dim, n, n_rows, floor=True)
            figures.append(Figure(f"{name}, 2 cores", two, "M rows/s", "1 core", one))
            figures.append(
                Figure(f"{name}, 2 cores of the floor", two_floor, "M rows/s", "1 core of the floor", one_floor)
            )
            line += f"; two cores {two / one:.2f}x (floor {two_floor / one_floor:.2f}x)"
        say(line)
    return figures


def _alternate(contenders: dict[str, Contender], n: int, n_rows: int, rounds: int) -> dict[str, float]:
    """Million rows a second of each, medians over the rounds."""
    generator = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in generator.permutation(list(contenders)):
            contenders[name](generator.integers(0, n_rows, n))
            ids = generator.integers(0, n_rows, n)
            begun = time.perf_counter()
            contenders[name](ids)
            seconds[name].append(time.perf_counter() - begun)
    return {name: n / statistics.median(times) / 1e6 for name, times in seconds.items()}


def _new_result(n_bytes: int) -> npt.NDArray[np.uint8]:
    """From malloc and aligned to a cache line, as the peers' results are."""
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n_bytes]


def _keep_freed_memory() -> None:
    """Has malloc reuse what was freed, however large: else peers fault a large result in anew, page by page."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library without it, such as musl's
        return
    m_trim_threshold, m_mmap_max = -1, -4  # glibc's malloc.h
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


def _two_cores(table: _native.Table, dim: int, n: int, n_rows: int, floor: bool = False) -> tuple[float, float]:
    """Rates of one and of two cores, in turns: forked processes share the table, and no interpreter's lock."""
    calls = max(4, min(2_000, 2_000_000 // n))
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for cores in (1, 2):
            barrier, spent = _FORK.Barrier(cores), _FORK.Array("d", cores)

            def loop(number: int, barrier: Any = barrier, spent: Any = spent) -> None:
                os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
                ids = np.random.default_rng(number).integers(0, n_rows, (calls, n))
                out = huge_array(4 * dim * n)
                barrier.wait()
                begun = time.perf_counter()
                for row in ids:
                    table.gather(row, Output.FLOAT32, None, out, floor)
                spent[number] = time.perf_counter() - begun

            workers = [_FORK.Process(target=loop, args=(number,)) for number in range(cores)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rates[cores].append(cores * calls * n / max(spent[:]) / 1e6)
    return statistics.median(rates[1]), statistics.median(rates[2])


def huge_array(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Written memory in huge pages where the kernel has them, aligned to a cache line."""
    memory = mmap.mmap(-1, n_bytes + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)[:n_bytes]
    array[:] = 1  # an untouched page reads as one shared page of zeros, which flatters
    return array


def _encoded_tile(row_type: RowType, dim: int, stride: int) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(0).standard_normal((TILE_ROWS, dim), np.float32)
    tile = np.empty((TILE_ROWS, stride), np.uint8)
    _native.encode(values, tile, row_type.native, False, 0, 0)
    return tile


def _fill(rows: npt.NDArray[Any], tile: npt.NDArray[Any]) -> None:
    rows.reshape(-1, *tile.shape)[:] = tile


def _numpy_peer(rows: npt.NDArray[np.uint8], row_type: RowType, dim: int) -> Contender:
    def gather(ids: npt.NDArray[np.int64]) -> object:
        taken = rows[ids]
        header = taken[:, :4].copy().view(np.float16).astype(np.float32)
        codes = taken[:, 4:]
        if row_type is RowType.INT4:
            codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(ids), -1)
        return codes[:, :dim] * header[:, :1] + header[:, 1:]

    return gather


def _torch_peer(row_type: RowType, dim: int, n_rows: int) -> dict[str, Contender]:
    """torch.ops.quantized.embedding_bag_*: one id a bag; FP32 scale and bias behind INT8 codes, FP16 behind INT4's."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    torch.set_num_threads(1)
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((TILE_ROWS, dim), np.float32))
    pack = (
        torch.ops.quantized.embedding_bag_byte_prepack
        if row_type is RowType.INT8
        else torch.ops.quantized.embedding_bag_4bit_prepack
    )
    tile = pack(values).numpy()
    weights = huge_array(n_rows * tile.shape[1]).reshape(n_rows, tile.shape[1])
    _fill(weights, tile)
    packed = torch.from_numpy(weights)
    bag = torch.ops.quantized
    operator = (
        bag.embedding_bag_byte_rowwise_offsets if row_type is RowType.INT8 else bag.embedding_bag_4bit_rowwise_offsets
    )
    offsets = {n: torch.arange(n) for n in N_IDS}

    def gather(ids: npt.NDArray[np.int64]) -> object:
        return operator(packed, torch.from_numpy(ids), offsets[len(ids)], False, 0, False, None, None, False)

    return {"torch quantised bag": gather}


def _fbgemm_peer(rows: npt.NDArray[np.uint8], row_type: RowType, dim: int) -> dict[str, Contender]:
    """FBGEMM's CPU inference operator on the very same bytes (its layout is ours), one id a bag."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return {}
    import fbgemm_gpu  # noqa: F401 (registers the operators)
    import torch

    sparse_type = {RowType.INT8: 2, RowType.INT4: 3}[row_type]  # fbgemm_gpu.split_embedding_configs.SparseType
    weights = torch.from_numpy(rows.reshape(-1))
    on_host = torch.tensor(
        [3], dtype=torch.int32
    )  # fbgemm_gpu.split_table_batched_embeddings_ops_common.EmbeddingLocation.HOST
    dims = torch.tensor([0, dim], dtype=torch.int32)
    offsets = {n: torch.arange(n + 1, dtype=torch.int64) for n in N_IDS}
    operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
    on_cpu = torch.zeros(0, dtype=torch.uint8)

    def gather(ids: npt.NDArray[np.int64]) -> object:
        return operator(
            dev_weights=weights, uvm_weights=on_cpu, weights_placements=on_host, weights_offsets=torch.tensor([0], dtype=torch.int64),
            weights_tys=torch.tensor([sparse_type], dtype=torch.uint8), D_offsets=dims, total_D=dim, max_int2_D=0,
            max_int4_D=dim if row_type is RowType.INT4 else 0, max_int8_D=dim if row_type is RowType.INT8 else 0,
            max_float16_D=0, max_float32_D=0, indices=torch.from_numpy(ids), offsets=offsets[len(ids)], pooling_mode=0,
            indice_weights=None, output_dtype=0, lxu_cache_weights=None, lxu_cache_locations=None, row_alignment=4,
            max_float8_D=0, fp8_exponent_bits=-1, fp8_exponent_bias=-1,
        )  # fmt: skip

    return {"FBGEMM": gather}
