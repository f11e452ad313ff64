"""Importing files other libraries wrote, and refusing what cannot be stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference as ref
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from embedserve.quant import Calibration, Catalog, ImportOptions, Metric, RowType, import_table, open_keys, open_matrix
from embedserve.quant.errors import EmbedserveError, SourceError

VALUES = np.random.default_rng(0).standard_normal((300, 20)).astype(np.float16).astype(np.float32)


def imported(tmp_path, spec, keys=None, **options):
    catalog = Catalog(tmp_path / "root")
    matrix = open_matrix(str(spec))
    key_array = open_keys(str(keys), matrix.shape[0]) if keys else None
    manifest = import_table(catalog, "t", matrix, ImportOptions(**options), key_array)
    return catalog.open("t", manifest.version, verify=True)


def values_of(artifact):
    m = artifact.manifest
    return ref.decode(artifact.rows, m.row_type.native, m.wide, m.dim)


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("suffix", [".npy", ".npz", "compressed.npz"])
def test_numpy_files_of_any_float_order_and_layout(tmp_path, dtype, order, suffix):
    array = np.asarray(VALUES, dtype, order=order)
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, array)
    elif suffix == ".npz":
        np.savez(path, array)
    else:
        np.savez_compressed(path, array)
    artifact = imported(tmp_path, path, row_type=RowType.FP32)
    assert np.array_equal(values_of(artifact), VALUES)
    assert artifact.manifest.source_dtype == array.dtype.name


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_safetensors_files(tmp_path, dtype):
    safetensors.numpy.save_file({"weights": VALUES.astype(dtype), "step": np.array([3])}, tmp_path / "x.safetensors")
    artifact = imported(tmp_path, tmp_path / "x.safetensors", row_type=RowType.FP32)
    assert np.array_equal(values_of(artifact), VALUES.astype(dtype).astype(np.float32))


def test_the_artifact_is_a_safetensors_file_others_can_read(tmp_path):
    keys = np.random.default_rng(1).permutation(300).astype(np.int64) * 7 - 1000
    np.savez(tmp_path / "x.npz", v=VALUES, k=keys)
    artifact = imported(tmp_path, f"{tmp_path}/x.npz:v", f"{tmp_path}/x.npz:k")
    arrays = safetensors.numpy.load_file(artifact.directory / "rows.safetensors")
    assert np.array_equal(arrays["keys"], keys)
    assert np.array_equal(arrays["rows"], artifact.rows)
    np.testing.assert_allclose(arrays["default_row"], VALUES.mean(0), atol=0.01)
    out = np.empty(302, np.int64)
    artifact.native_table().find(np.append(keys, [2, -(10**15)]), out)
    assert out.tolist() == [*range(300), -1, -1]


@pytest.mark.parametrize("row_type", list(RowType))
def test_rows_equal_the_reference_whatever_the_chunks(tmp_path, row_type, monkeypatch):
    monkeypatch.setattr("embedserve.quant.sources.CHUNK_BYTES", 1000)
    np.save(tmp_path / "x.npy", VALUES)
    artifact = imported(tmp_path, tmp_path / "x.npy", row_type=row_type, calibration=Calibration.MSE)
    oracle = ref.Encoder(row_type.native, artifact.manifest.wide, False, "mse")
    assert artifact.rows.tobytes() == b"".join(oracle.row(row) for row in VALUES)


def test_quality_in_the_manifest(tmp_path):
    np.save(tmp_path / "x.npy", VALUES)
    artifact = imported(tmp_path, tmp_path / "x.npy", metric=Metric.COSINE)
    quality, decoded = artifact.manifest.quality, values_of(artifact)
    assert quality.max_error == pytest.approx(abs(decoded - VALUES).max(), rel=1e-6)
    assert quality.mse == pytest.approx(np.square(decoded - VALUES, dtype=np.float64).mean(), rel=1e-4)
    assert 0.9999 < quality.mean_cosine <= 1.0
    assert quality.recall_at_10 > 0.97 and quality.recall_queries == 200
    assert quality.max_abs == abs(VALUES).max()


def test_one_row_that_fp16_cannot_scale_makes_the_table_wide(tmp_path):
    values = VALUES.copy()
    values[250] = np.linspace(1000.3, 1000.8, 20)
    np.save(tmp_path / "x.npy", values)
    artifact = imported(tmp_path, tmp_path / "x.npy")
    assert artifact.manifest.wide and artifact.manifest.format.stride == 28
    assert abs(values_of(artifact)[250] - values[250]).max() <= 0.5 / 255 / 2 + 1e-4


def test_nonfinite_values_are_refused_by_key_and_column_or_counted(tmp_path):
    values = VALUES.copy()
    values[123, 4], values[200, 0] = np.nan, -np.inf
    np.savez(tmp_path / "x.npz", v=values, k=np.arange(300) + 5000)
    with pytest.raises(SourceError, match=r"key 5123 \(row 123\), column 4: is nan"):
        imported(tmp_path, f"{tmp_path}/x.npz:v", f"{tmp_path}/x.npz:k")
    assert Catalog(tmp_path / "root").tables() == []
    artifact = imported(tmp_path, f"{tmp_path}/x.npz:v", nonfinite="zero", row_type=RowType.FP32)
    assert artifact.manifest.quality.nonfinite_zeroed == 2
    assert values_of(artifact)[123, 4] == 0


def test_a_value_fp16_cannot_hold_names_the_way_out(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 70000]], np.float32))
    with pytest.raises(SourceError, match=r"row 1\), column 1: 70000 does not fit fp16 rows; import with --bits 32"):
        imported(tmp_path, tmp_path / "x.npy", row_type=RowType.FP16)


def test_duplicate_keys_are_refused_by_key(tmp_path):
    keys = np.arange(300)
    keys[299] = 17
    np.savez(tmp_path / "x.npz", v=VALUES, k=keys)
    with pytest.raises(SourceError, match="key 17 appears twice, at rows 17 and 299"):
        imported(tmp_path, f"{tmp_path}/x.npz:v", f"{tmp_path}/x.npz:k")


def bad_files(folder: Path) -> dict[str, str]:
    """Name of each bad source to what its error must say."""
    np.save(folder / "good.npy", VALUES)
    whole = (folder / "good.npy").read_bytes()
    (folder / "cut.npy").write_bytes(whole[:-1])
    (folder / "long.npy").write_bytes(whole + b"x")
    (folder / "header.npy").write_bytes(whole[:50])
    (folder / "foreign.npy").write_bytes(b"PAR1" * 100)
    (folder / "empty.npy").write_bytes(b"")
    np.save(folder / "objects.npy", np.array([[{}]], object), allow_pickle=True)
    np.save(folder / "ints.npy", np.ones((3, 3), int))
    np.save(folder / "vector.npy", np.ones(3, np.float32))
    np.save(folder / "norows.npy", np.ones((0, 3), np.float32))
    np.save(folder / "nocolumns.npy", np.ones((3, 0), np.float32))
    np.savez(folder / "two.npz", a=VALUES, b=VALUES)
    (folder / "foreign.npz").write_bytes(b"not a zip")
    safetensors.numpy.save_file({"a": VALUES}, folder / "good.safetensors")
    tensors = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(tensors[:-4])
    (folder / "foreign.safetensors").write_bytes(b"\xff" * 100)
    lying = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 999]}}).encode()
    (folder / "lying.safetensors").write_bytes(len(lying).to_bytes(8, "little") + lying + bytes(16))
    (folder / "x.csv").write_text("1,2")
    return {
        "cut.npy": "truncated", "long.npy": "truncated or damaged", "header.npy": "not a .npy", "foreign.npy": "not a .npy",
        "empty.npy": "not a .npy", "objects.npy": "never unpickled", "ints.npy": "expected a matrix", "vector.npy": "expected a matrix",
        "norows.npy": "no rows", "nocolumns.npy": "no rows or no columns", "two.npz": "name one as PATH:NAME",
        "two.npz:c": "no array named 'c'", "foreign.npz": "not a .npz", "cut.safetensors": "truncated",
        "foreign.safetensors": "not a safetensors", "lying.safetensors": "malformed", "x.csv": "cannot import .csv",
        "absent.npy": "no such file",
    }  # fmt: skip


def test_each_bad_file_gives_one_clear_error(tmp_path):
    for name, message in bad_files(tmp_path).items():
        with pytest.raises(SourceError, match=message):
            open_matrix(str(tmp_path / name))


def test_bad_keys_give_one_clear_error(tmp_path):
    np.savez(tmp_path / "x.npz", v=VALUES, few=np.arange(10), floats=VALUES[:, 0], past=np.full(300, 2**63, np.uint64))
    for name, message in {"few": "10 keys for 300 rows", "floats": "expected a vector of integers"}.items():
        with pytest.raises(SourceError, match=message):
            open_keys(f"{tmp_path}/x.npz:{name}", 300)
    with pytest.raises(SourceError, match=r"past 2\^63"):
        imported(tmp_path, f"{tmp_path}/x.npz:v", f"{tmp_path}/x.npz:past")


@given(st.binary(max_size=300), st.sampled_from([".npy", ".npz", ".safetensors"]), st.integers(0, 200))
def test_random_bytes_never_do_worse_than_an_error(tmp_path_factory, noise, suffix, at):
    folder = tmp_path_factory.mktemp("noise")
    np.save(folder / "x.npy", VALUES[:3])
    np.savez(folder / "x.npz", VALUES[:3])
    safetensors.numpy.save_file({"a": VALUES[:3]}, folder / "x.safetensors")
    path = folder / f"x{suffix}"
    data = bytearray(path.read_bytes())
    data[at : at + len(noise)] = noise
    path.write_bytes(data)
    try:
        for _ in open_matrix(str(path)).chunks():
            pass
    except SourceError:
        pass


def run_import(tmp_path, *flags, setup="pass"):
    code = f"import sys\n{setup}\nfrom embedserve.cli import main\nmain()"
    command = [
        sys.executable,
        "-c",
        code,
        "import",
        str(tmp_path / "x.npy"),
        "--root",
        str(tmp_path / "root"),
        "--table",
        "t",
        *flags,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path):
    """RLIMIT_FSIZE stands in for the end of the disk: the kernel refuses the write in the same place."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((50_000, 16), np.float32))
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (500000, 500000))"
    process = run_import(tmp_path, setup=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no space" in errors and "nothing was published" in errors and "Traceback" not in errors
    assert list((tmp_path / "root" / "t").iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((10_000, 64), np.float32))
    # An interrupt at the third chunk, as a person would send it at an unlucky moment.
    setup = (
        "import os, signal\nimport embedserve.quant.importer as i, embedserve.quant.sources as s\ns.CHUNK_BYTES = 100000\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore it
        "a = i._Totals.add\nn = [0]\ndef add(self, chunk):\n a(self, chunk)\n n[0] += 1\n"
        " if n[0] == 3: os.kill(os.getpid(), signal.SIGINT)\ni._Totals.add = add"
    )
    process = run_import(tmp_path, setup=setup)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; nothing was published" in errors
    assert list((tmp_path / "root" / "t").iterdir()) == []


def test_memory_is_bounded_whatever_the_source(tmp_path):
    """400 MB of source with keys imports within 250 MB of peak memory, Python and numpy included."""
    rows = 1_600_000
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (rows, 64)).flush()
    np.save(tmp_path / "k.npy", np.arange(rows)[::-1] * 3)
    peak = run_peak(tmp_path)
    assert peak < 250 << 10, f"{peak / 1024:.0f} MB"


def run_peak(tmp_path):
    setup = "import atexit, re\natexit.register(lambda: print('peak', re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]))"
    process = run_import(tmp_path, "--keys", str(tmp_path / "k.npy"), setup=setup)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return int(output.split("peak")[1])


def test_dim_has_a_limit(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1, 65_537), np.float32))
    with pytest.raises(EmbedserveError, match="past 65536"):
        imported(tmp_path, tmp_path / "x.npy")
