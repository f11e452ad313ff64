"""Versions on disk: each kind of damage has its error, and none is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import publish_table

from embedserve.quant import Catalog
from embedserve.quant.errors import ArtifactError, InvalidArgument, NotFound

VALUES = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publish_table(tmp_path / "root", "t", VALUES, np.arange(50) * 3)
    return tmp_path / "root"


def version_directory(root: Path) -> Path:
    return root / "t" / Catalog(root).current("t")


def edit_manifest(root: Path, change) -> None:
    path = version_directory(root) / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("change,message", [
    (lambda m: m.update(rows=51), "are not those of the manifest"),
    (lambda m: m.update(dim=9), "are not those of the manifest"),
    (lambda m: m.update(row_type="fp32"), "are not those of the manifest"),
    (lambda m: m.update(keys="positions"), "are not those of the manifest"),
    (lambda m: m.update(rows=-1), "rows: "),
    (lambda m: m.update(rows=10**30), "manifest"),
    (lambda m: m.update(schema=3), "schema"),
    (lambda m: m.update(surprise=1), "surprise"),
    (lambda m: m.pop("metric"), "metric"),
    (lambda m: m.update(version="20200101T000000Z"), "but lies in"),
    (lambda m: m.update(table="other"), "is of table 'other'"),
    (lambda m: m["files"]["rows.safetensors"].update(bytes=5), "but the manifest says 5"),
    (lambda m: m["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}), "not one of an artifact"),
    (lambda m: m["files"].update({"extra.bin": {"bytes": 1, "sha256": "0" * 64}}), "missing"),
    (lambda m: m["files"].pop("rows.safetensors"), "lists no rows.safetensors"),
])  # fmt: skip
def test_a_manifest_that_lies_is_refused(root, change, message):
    edit_manifest(root, change)
    with pytest.raises(ArtifactError, match=message):
        Catalog(root).open("t")


def test_a_hash_that_lies_is_found_by_verify_and_publish(root):
    edit_manifest(root, lambda m: m["files"]["rows.safetensors"].update(sha256="0" * 64))
    Catalog(root).open("t")
    for check in (lambda: Catalog(root).open("t", verify=True), lambda: Catalog(root).publish("t")):
        with pytest.raises(ArtifactError, match="not those that were written"):
            check()


def test_one_flipped_bit_is_found_by_verify(root):
    path = version_directory(root) / "rows.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="not those that were written"):
        Catalog(root).open("t", verify=True)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000])
def test_a_truncated_file_is_refused_at_once(root, size):
    path = version_directory(root) / "rows.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ArtifactError, match="bytes, but the manifest says"):
        Catalog(root).open("t")


def test_a_foreign_file_of_the_right_size_is_refused(root):
    path = version_directory(root) / "rows.safetensors"
    path.write_bytes(b"\x01" * path.stat().st_size)
    with pytest.raises(ArtifactError, match="not a safetensors file"):
        Catalog(root).open("t")


def test_a_manifest_that_is_not_one_is_refused(root):
    (version_directory(root) / "manifest.json").write_text("{not json")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        Catalog(root).open("t")


@pytest.mark.parametrize("name", ["../x", "a/b", "a.b", ".", "", "x" * 129, "a b", "é"])
def test_a_table_name_is_one_folders_name(tmp_path, name):
    for call in (
        Catalog(tmp_path).versions,
        Catalog(tmp_path).current,
        Catalog(tmp_path).writer,
        Catalog(tmp_path).open,
    ):
        with pytest.raises(InvalidArgument, match="allowed are"):
            call(name)
    assert list(tmp_path.iterdir()) == []


def test_names_that_do_not_exist_list_those_that_do(root):
    with pytest.raises(NotFound, match=r"no table 'u' .*there is: t"):
        Catalog(root).open("u")
    with pytest.raises(NotFound, match=f"no version 'v'.*{Catalog(root).current('t')}"):
        Catalog(root).open("t", "v")
    (root / "t" / "CURRENT").write_text("../../etc\n")
    with pytest.raises(ArtifactError, match="not a version's name"):
        Catalog(root).open("t")


def test_versions_sort_by_time_even_when_the_clock_goes_back(root):
    first = Catalog(root).current("t")
    (root / "t" / first).rename(root / "t" / "20990101T000000Z")
    edit = root / "t" / "20990101T000000Z" / "manifest.json"
    edit.write_text(edit.read_text().replace(first, "20990101T000000Z"))
    (root / "t" / "CURRENT").write_text("20990101T000000Z\n")
    assert publish_table(root, "t", VALUES) == "20990101T000001Z"
    assert Catalog(root).open("t").manifest.parent == "20990101T000000Z"


GOLDEN = Path(__file__).parent.parent / "golden"


def test_the_golden_catalog_of_schema_1_opens():
    """Written by the first release; every later one must read it."""
    artifact = Catalog(GOLDEN / "schema1").open("golden", verify=True)
    keys = np.array([-7, 0, 2**40, 99])
    out = np.empty((4, 5), np.float32)
    assert artifact.native_table().gather(keys, 0, None, out) == np.array([3], np.uint32).tobytes()
    assert out[0].tolist() == [0, 1, 2, 255, 128] and out[1].tolist() == [0.5] * 5 and out[3].tolist() == [0] * 5


def test_the_golden_catalog_of_schema_2_opens(tmp_path):
    """Two versions, the later a delta of the earlier that is yet to be applied, and upserts that it took in."""
    shutil.copytree(GOLDEN / "schema2", tmp_path / "root")
    catalog = Catalog(tmp_path / "root")
    old, new = catalog.versions("golden")
    out, keys = np.empty((4, 5), np.float32), np.array([-7, 0, 99, 5])
    first = catalog.open("golden", old, verify=True)
    assert first.native_table().gather(keys, 0, None, out) == np.array([3], np.uint32).tobytes()
    np.testing.assert_allclose(out[:3], [[0, 1, 2, 255, 128], [0.5] * 5, [-1, 0, 1, 2, 3]], atol=0.01)
    log = catalog.upsert_log("golden")
    (batch,) = log.read(log.begin(first.manifest.upserts)).batches
    assert batch.keys.tolist() == [99, 5] and batch.values.tolist() == [[8] * 5, [16] * 5]
    second = catalog.open("golden", new, verify=True)
    assert second.native_table().gather(keys, 0, None, out) is None
    np.testing.assert_allclose(out, [[0, 1, 2, 255, 128], [2, 0, 1, 2, 3], [8] * 5, [16] * 5], atol=0.01)
    assert not log.read(log.begin(second.manifest.upserts)).batches
