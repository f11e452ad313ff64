"""Deltas: what they give is the version they were made from, to the bit, or nothing at all."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import publish_table
from hypothesis import given
from hypothesis import strategies as st
from killed import ENV

from embedserve.quant import Catalog, RowType, changed_fraction, make_delta
from embedserve.quant.delta import DELTA_FILE, DELTA_MANIFEST, MAX_CHAIN
from embedserve.quant.errors import ArtifactError, FailedPrecondition, InvalidArgument

DIM = 16
FILES = ("manifest.json", "rows.safetensors")


def random_rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


def without(root: Path, other: Path, *versions: str, table: str = "t") -> Catalog:
    """A catalog elsewhere that has only these versions, the last of them current."""
    for version in versions:
        shutil.copytree(root / table / version, other / table / version)
    (other / table / "CURRENT").write_text(versions[-1] + "\n")
    return Catalog(other)


def sent(root: Path, old: str, new: str, to: Path, table: str = "t") -> Path:
    """The delta's folder, named as it would be in a catalog."""
    catalog = Catalog(root)
    make_delta(catalog.open(table, old), catalog.open(table, new), to / new)
    return to / new


def same_files(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)


@given(st.data())
def test_any_two_versions(tmp_path_factory, data):
    tmp = tmp_path_factory.mktemp("delta")
    root, rng = tmp / "root", np.random.default_rng(data.draw(st.integers(0, 10**6)))
    keyed = data.draw(st.booleans())
    n, m = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    row_type = data.draw(st.sampled_from(list(RowType)))
    old_rows, new_rows = random_rows(n), random_rows(m, 1)
    kept = min(n, m)
    same = rng.random(kept) < data.draw(st.sampled_from([0, 0.5, 0.95, 1]))
    new_rows[:kept][same] = old_rows[:kept][same]
    old_keys = new_keys = None
    if keyed:
        pool = rng.choice(10**6, n + m, replace=False) - 500
        old_keys = pool[:n]
        new_keys = np.concatenate((old_keys[:kept], pool[n : n + m - kept]))
        if data.draw(st.booleans()):
            order = rng.permutation(m)
            new_keys, new_rows = new_keys[order], new_rows[order]
    old = publish_table(root, "t", old_rows, old_keys, row_type=row_type)
    new = publish_table(root, "t", new_rows, new_keys, row_type=row_type)
    if Catalog(root).open("t", old).manifest.format != Catalog(root).open("t", new).manifest.format:
        return  # one of them needed wide rows
    folder = sent(root, old, new, tmp)
    other = without(root, tmp / "other", old)
    assert other.install_delta("t", folder) == new and other.current("t") == old
    assert same_files(root / "t" / new, tmp / "other" / "t" / new)
    assert other.publish("t", new) == new


@pytest.mark.parametrize("keyed", [False, True])
def test_a_delta_of_five_per_cent_of_the_rows_is_at_most_eight_of_the_size(tmp_path, keyed):
    root, n = tmp_path / "root", 20_000
    rows = random_rows(n)
    keys = np.random.default_rng(2).choice(2**62, n, replace=False) if keyed else None
    old = publish_table(root, "t", rows, keys)
    rows[np.random.default_rng(3).choice(n, n // 20, replace=False)] += 1
    new = publish_table(root, "t", rows, keys)
    sent(root, old, new, tmp_path)
    size = sum(f.stat().st_size for f in (tmp_path / new).iterdir())
    assert size <= 0.08 * Catalog(root).open("t", new).manifest.total_bytes
    counted = json.loads((tmp_path / new / DELTA_MANIFEST).read_text())
    assert (counted["changed"], counted["appeared"], counted["vanished"]) == (n // 20, 0, 0)
    assert changed_fraction(Catalog(root).open("t", old), Catalog(root).open("t", new)) == pytest.approx(0.05)


def test_counts_of_what_appeared_and_vanished(tmp_path):
    root, rows = tmp_path / "root", random_rows(100)
    old = publish_table(root, "t", rows, np.arange(100))
    new = publish_table(root, "t", rows[10:], np.concatenate((np.arange(10, 95), np.arange(1000, 1005))))
    made = make_delta(Catalog(root).open("t", old), Catalog(root).open("t", new), tmp_path / "d")
    assert (made.changed, made.appeared, made.vanished) == (0, 5, 15)


def chain(tmp_path: Path, length: int) -> tuple[Path, list[str]]:
    root, rows = tmp_path / "root", random_rows(200)
    names = []
    for i in range(length):
        rows[i] += 1
        names.append(publish_table(root, "t", rows))
    return root, names


def bare(root: Path, other: Path, names: list[str], tmp_path: Path) -> None:
    """Puts deltas, without rows, where the versions would be."""
    for old, new in itertools.pairwise(names):
        shutil.copytree(sent(root, old, new, tmp_path), other / "t" / new)


def test_a_chain_is_completed_from_its_beginning(tmp_path):
    root, names = chain(tmp_path, 5)
    other = without(root, tmp_path / "other", names[0])
    bare(root, tmp_path / "other", names, tmp_path)
    assert other.versions("t") == names
    other.publish("t", names[-1])
    assert all(same_files(root / "t" / name, tmp_path / "other" / "t" / name) for name in names)


def test_a_chain_has_a_limit(tmp_path):
    root, names = chain(tmp_path, MAX_CHAIN + 2)
    other = without(root, tmp_path / "other", names[0])
    bare(root, tmp_path / "other", names, tmp_path)
    with pytest.raises(ArtifactError, match=f"more than {MAX_CHAIN} deltas in a row; publish a full version"):
        other.open("t", names[-1])
    other.open("t", names[-2])
    other.open("t", names[-1])  # now shorter


def test_a_broken_link(tmp_path):
    root, names = chain(tmp_path, 4)
    other = without(root, tmp_path / "other", names[0])
    bare(root, tmp_path / "other", names, tmp_path)
    shutil.rmtree(tmp_path / "other" / "t" / names[1])
    with pytest.raises(ArtifactError, match=f"changes version {names[1]}, which"):
        other.open("t", names[2])
    assert other.open("t").manifest.version == names[0]  # what is current is none the worse
    # The full artifact takes the place of the missing link.
    shutil.rmtree(tmp_path / "other" / "t" / names[2])
    shutil.copytree(root / "t" / names[2], tmp_path / "other" / "t" / names[2])
    other.publish("t", names[3])
    assert same_files(root / "t" / names[3], tmp_path / "other" / "t" / names[3])


def test_a_delta_sent_with_its_rows_needs_no_base(tmp_path):
    root, names = chain(tmp_path, 2)
    folder = sent(root, *names, tmp_path)
    without(root, tmp_path / "other", names[0])
    shutil.rmtree(tmp_path / "other" / "t" / names[0])
    other = Catalog(tmp_path / "other")
    with pytest.raises(ArtifactError, match="copy the full version instead"):
        other.install_delta("t", folder)
    assert other.versions("t") == []
    shutil.copy(root / "t" / names[1] / "rows.safetensors", folder)
    assert other.publish("t", other.install_delta("t", folder)) == names[1]
    assert same_files(root / "t" / names[1], tmp_path / "other" / "t" / names[1])


def test_a_base_of_the_same_name_but_other_rows_is_refused(tmp_path):
    root, names = chain(tmp_path, 2)
    folder = sent(root, *names, tmp_path)
    publish_table(tmp_path / "other", "t", random_rows(200, 9))
    other = Catalog(tmp_path / "other")
    made = tmp_path / "other" / "t" / other.current("t")
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "version": names[0]}))
    made.rename(made.with_name(names[0]))
    with pytest.raises(ArtifactError, match="made for another version named"):
        other.install_delta("t", folder)
    assert not (tmp_path / "other" / "t" / names[1] / "rows.safetensors").exists()


def test_what_makes_no_delta(tmp_path):
    root = tmp_path / "root"
    dense = publish_table(root, "t", random_rows(50))
    catalog = Catalog(root)
    others = {
        "keys": publish_table(root, "t", random_rows(50), np.arange(50)),
        "row type": publish_table(root, "t", random_rows(50), row_type=RowType.FP16),
        "dim": publish_table(root, "t", random_rows(50)[:, :8]),
    }
    for other in others.values():
        with pytest.raises(FailedPrecondition, match="publish the new version in full"):
            make_delta(catalog.open("t", dense), catalog.open("t", other), tmp_path / "d")
        assert not (tmp_path / "d").exists()
        assert changed_fraction(catalog.open("t", dense), catalog.open("t", other)) == 1
    (tmp_path / "d").mkdir()
    with pytest.raises(FileExistsError):
        make_delta(catalog.open("t", dense), catalog.open("t", dense), tmp_path / "d")


def test_a_delta_of_another_table_is_refused(tmp_path):
    root, names = chain(tmp_path, 2)
    folder = sent(root, *names, tmp_path)
    with pytest.raises(ArtifactError, match="is of table 't', not 'u'"):
        Catalog(root).install_delta("u", folder)
    with pytest.raises(InvalidArgument):
        Catalog(root).install_delta("../u", folder)


def test_a_delta_s_folder_may_have_any_name_and_its_version_may_not(tmp_path):
    root, names = chain(tmp_path, 2)
    folder = sent(root, *names, tmp_path)
    renamed = folder.rename(tmp_path / "friday's delta")
    assert without(root, tmp_path / "other", names[0]).install_delta("t", renamed) == names[1]
    manifest = json.loads((renamed / "manifest.json").read_text())
    for name in ("../../escaped", "", "a/b", ".hidden", "x\n"):
        (renamed / "manifest.json").write_text(json.dumps({**manifest, "version": name}))
        with pytest.raises(ArtifactError, match="version: String should match"):
            without(root, tmp_path / f"other{len(name)}", names[0]).install_delta("t", renamed)
    assert not (tmp_path / "escaped").exists()


def test_installing_twice_changes_nothing(tmp_path):
    root, names = chain(tmp_path, 2)
    folder = sent(root, *names, tmp_path)
    other = without(root, tmp_path / "other", names[0])
    assert other.install_delta("t", folder) == other.install_delta("t", folder) == names[1]


@given(
    name=st.sampled_from([DELTA_FILE, DELTA_MANIFEST, "manifest.json"]), at=st.integers(0, 10**6), bit=st.integers(0, 7)
)
def test_a_flipped_bit_gives_an_error_or_the_true_rows(tmp_path_factory, flipped, name, at, bit):
    """Never other rows, and never a version that is half there."""
    root, names, folder = flipped
    tmp = tmp_path_factory.mktemp("flip")
    other = without(root, tmp / "other", names[0])
    shutil.copytree(folder, tmp / names[1])
    path = tmp / names[1] / name
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        version = other.install_delta("t", tmp / names[1])
        other.open("t", version, verify=True)
    except (ArtifactError, InvalidArgument):
        assert not (tmp / "other" / "t" / names[1] / "rows.safetensors").exists()
    else:
        rows = "rows.safetensors"
        assert (root / "t" / names[1] / rows).read_bytes() == (tmp / "other" / "t" / version / rows).read_bytes()


@pytest.fixture(scope="module")
def flipped(tmp_path_factory) -> tuple[Path, list[str], Path]:
    tmp = tmp_path_factory.mktemp("flipped")
    rows, keys = random_rows(60), np.arange(60) * 3
    old = publish_table(tmp / "root", "t", rows, keys)
    rows[5:9] += 1
    new = publish_table(tmp / "root", "t", rows[3:], keys[3:])
    return tmp / "root", [old, new], sent(tmp / "root", old, new, tmp)


def test_sections_that_lie_are_refused(tmp_path, flipped):
    """Right hashes over wrong sections: positions out of range, runs that overlap, keys too few, bombs."""
    import hashlib

    import zstandard

    from embedserve.quant.safetensors_file import build_header, read_header

    root, names, folder = flipped
    tensors = read_header(folder / DELTA_FILE)
    data = (folder / DELTA_FILE).read_bytes()
    whole = {
        name: zstandard.ZstdDecompressor().decompressobj().decompress(data[t.offset : t.offset + t.nbytes])
        for name, t in tensors.items()
    }

    def words(*values: int) -> bytes:
        return np.array(values, "<i8").tobytes()

    lies = [
        {"literals": words(-1, 1)}, {"literals": words(10**12)}, {"literals": words(5, 0)}, {"literals": b"abc"},
        {"rows": whole["rows"][:-1]}, {"rows": b""}, {"keys": words(1)}, {"run": words(10**18, 1)}, {"run": words(57, 0)},
        {"from": words(59)}, {"from": words(-2)}, {"run": bytes(1 << 26)}, {"default_row": b""}, {"default_row": bytes(80)},
        {"literals": b""}, {"from": words(3, -1), "run": words(50, 7)},
    ]  # fmt: skip
    for i, lie in enumerate(lies):
        parts = {name: zstandard.ZstdCompressor().compress(lie.get(name, whole[name])) for name in tensors}
        header, _ = build_header({name: ("U8", (len(part),)) for name, part in parts.items()})
        lying = tmp_path / str(i) / names[1]
        shutil.copytree(folder, lying)
        raw = header + b"".join(parts.values())
        (lying / DELTA_FILE).write_bytes(raw)
        document = json.loads((lying / DELTA_MANIFEST).read_text())
        document["file"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "xxh3": None}
        (lying / DELTA_MANIFEST).write_text(json.dumps(document))
        other = without(root, tmp_path / f"other{i}", names[0])
        with pytest.raises(ArtifactError):
            other.install_delta("t", lying)
        assert not (tmp_path / f"other{i}" / "t" / names[1] / "rows.safetensors").exists(), lie.keys()


KILLED = """
import os, shutil, sys
from pathlib import Path
from embedserve.quant import Catalog
from killed import die_before

folder, before, work, new = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
old = Catalog(before).current("t")
for step in range(1, 300):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(before, work)
    pid = os.fork()
    if pid == 0:
        die_before(step)
        Catalog(work).publish("t", Catalog(work).install_delta("t", folder))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    catalog = Catalog(work)
    current = catalog.current("t")
    assert current == (new if status == 0 else current) and current in (old, new)
    catalog.open("t", verify=True)
    for version in catalog.versions("t"):
        catalog.open("t", version, verify=True)
    assert catalog.publish("t", catalog.install_delta("t", folder)) == new
    catalog.open("t", verify=True)
    if status == 0:
        break
else:
    raise AssertionError("never came to its end")
print(step)
"""


def test_killed_at_every_step(tmp_path, flipped):
    root, names, folder = flipped
    without(root, tmp_path / "before", names[0])
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "before"), str(tmp_path / "work"), names[1]]
    driver = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV)
    assert driver.returncode == 0, driver.stderr
    assert int(driver.stdout) > 25


def test_a_full_disk_while_a_delta_is_applied_leaves_it_to_be_applied_later(tmp_path, flipped):
    import resource
    import signal

    root, names, folder = flipped
    other = without(root, tmp_path / "other", names[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / DELTA_FILE).stat().st_size + 10, hard))
    try:
        with pytest.raises(Exception, match="no space"):
            other.install_delta("t", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert other.publish("t", other.install_delta("t", folder)) == names[1]
    assert os.listdir(tmp_path / "other" / "t" / names[1])
