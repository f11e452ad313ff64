"""The write-ahead log of upserts: what was acknowledged is there, whatever happened to its writer or its disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from killed import ENV

from embedserve.quant import Place, UpsertLog, Upserts, latest
from embedserve.quant.artifact import UpsertMark
from embedserve.quant.errors import ArtifactError, ResourceExhausted

START = Place()


def batch(*keys: int, value: float = 1, dim: int = 3) -> Upserts:
    return Upserts(np.array(keys, np.int64), np.full((len(keys), dim), value, np.float32))


def rows(log: UpsertLog, place: Place = START) -> dict[int, float]:
    read = log.read(place)
    assert read.damage is None
    found = latest(read.batches, 3)
    assert (found.values == found.values[:, :1]).all()
    return dict(zip(found.keys.tolist(), found.values[:, 0].tolist(), strict=True))


@pytest.fixture
def log(tmp_path: Path) -> UpsertLog:
    return UpsertLog(tmp_path)


def only_segment(log: UpsertLog) -> Path:
    (path,) = log.directory.glob("*.log")
    return path


def test_the_last_row_of_a_key_counts(log):
    assert log.read(START).batches == [] and log.identity() is None and log.rotate() is None
    log.append([batch(5, -7, 5, value=1), batch(5, value=2)], START)
    log.append([batch(2**63 - 1, value=3)], START)
    assert rows(log) == {5: 2, -7: 1, 2**63 - 1: 3}


def test_a_key_given_twice_in_a_batch_reads_as_its_last_row(log):
    log.append([Upserts(np.array([1, 1], np.int64), np.array([[1, 1, 1], [2, 2, 2]], np.float32))], START)
    assert rows(log) == {1: 2}


def test_reading_goes_on_from_a_place(log):
    log.append([batch(1)], START)
    place = log.read(START).place
    assert log.read(place).batches == [] and place == log.extent()
    log.append([batch(2)], place)
    assert rows(log, place) == {2: 1}


def test_batches_of_another_dim_are_left_out(log):
    log.append([batch(1), batch(2, dim=4)], START)
    assert rows(log) == {1: 1} and len(latest(log.read(START).batches, 5).keys) == 0


@given(cut=st.integers(1, 60))
def test_a_torn_tail_is_no_damage_and_the_next_writer_removes_it(tmp_path_factory, cut):
    log = UpsertLog(tmp_path_factory.mktemp("log"))
    log.append([batch(1)], START)
    whole = only_segment(log).stat().st_size
    log.append([batch(2, 3, value=9)], START)
    assert only_segment(log).stat().st_size - whole > 60
    os.truncate(only_segment(log), whole + cut)
    assert rows(log) == {1: 1}
    log.append([batch(4)], START)
    assert rows(log) == {1: 1, 4: 1}


def test_zeros_after_a_loss_of_power_are_a_torn_tail(log):
    log.append([batch(1)], START)
    with open(only_segment(log), "ab") as file:
        file.write(bytes(5000))
    assert rows(log) == {1: 1}
    log.append([batch(2)], START)
    assert rows(log) == {1: 1, 2: 1}


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(tmp_path_factory, at, bit):
    """Nothing wrong is ever read: rows before it only, and no more are taken, unless it is in the last record's
    payload, which reads as one that was never finished."""
    log = UpsertLog(tmp_path_factory.mktemp("log"))
    for key in (1, 2, 3):
        log.append([batch(key, value=key)], START)
    path = only_segment(log)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    read = log.read(START)
    found = dict(
        zip(*[x.tolist() for x in (latest(read.batches, 3).keys, latest(read.batches, 3).values[:, 0])], strict=True)
    )
    assert found in ({}, {1: 1}, {1: 1, 2: 2})
    if read.damage:
        with pytest.raises(ArtifactError, match="damaged"):
            log.append([batch(4)], START)
        assert path.read_bytes() == data
    else:
        assert found == {1: 1, 2: 2}


@pytest.mark.parametrize("head", [b"", b"ESUPSERT", b"\x00" * 100, os.urandom(200)])
def test_a_foreign_segment_is_damage(log, head):
    log.append([batch(1)], START)
    only_segment(log).write_bytes(head)
    assert log.read(START).damage and not log.read(START).batches
    with pytest.raises(ArtifactError):
        log.append([batch(2)], START)
    with pytest.raises(ArtifactError):
        log.identity()


def test_a_length_that_lies_allocates_nothing(log):
    """A record whose head says 4 GB, with a right checksum: it reads as unfinished."""
    import struct
    import zlib

    log.append([batch(1)], START)
    head = struct.pack("<4sII", b"ESUR", 0xFFFFFFF0, 0)
    with open(only_segment(log), "ab") as file:
        file.write(head + zlib.crc32(head).to_bytes(4, "little") + b"x" * 100)
    assert rows(log) == {1: 1}


def test_rotation_parts_what_is_older_than_a_version_from_what_is_newer(log):
    log.append([batch(1)], START)
    mark = log.rotate()
    assert mark == UpsertMark(log=log.identity(), through=1) == log.rotate()
    log.append([batch(2)], START)
    assert rows(log) == {1: 1, 2: 1}
    assert rows(log, log.begin(mark)) == {2: 1}
    assert rows(log, log.begin(UpsertMark(log="0" * 16, through=1))) == {1: 1, 2: 1}  # of another catalog's log
    assert [len(b.keys) for b in log.read(START, through=1).batches] == [1]
    log.trim(1)
    assert rows(log) == {2: 1} and log.segments() == [2] and log.begin(mark).segment == 2
    log.trim(2)
    assert log.segments() == [2]  # the last one grows on


def test_a_reader_goes_on_over_segments_that_were_trimmed(log):
    log.append([batch(1)], START)
    place = log.read(START).place
    mark = log.rotate()
    log.append([batch(2)], place)
    log.trim(mark.through)
    assert rows(log, place) == {2: 1}


def test_writers_take_turns(log):
    def write(first: int) -> None:
        mine, place = UpsertLog(log.directory.parent), START
        for key in range(first, first + 50):
            mine.append([batch(key, value=key)], place)
            place = mine.read(place).place
            if key % 10 == 0:
                mine.rotate()

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(log) == {k: k for first in (0, 1000, 2000) for k in range(first, first + 50)}


def test_a_full_disk_stores_all_of_a_batch_or_nothing(log):
    log.append([batch(1)], START)
    size = only_segment(log).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(ResourceExhausted, match="nothing of this was stored"):
            log.append([batch(*range(1000))], START)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert only_segment(log).stat().st_size == size and rows(log) == {1: 1}
    log.append([batch(2)], START)
    assert rows(log) == {1: 1, 2: 1}


WRITER = """
import sys
from pathlib import Path
import numpy as np
from embedserve.quant import Place, UpsertLog, Upserts
log, place, key = UpsertLog(Path(sys.argv[1])), Place(), 0
while True:
    log.append([Upserts(np.array([key], np.int64), np.full((1, 3), key, np.float32))], place)
    print(key, flush=True)
    place, key = log.read(place).place, key + 1
    if key % 7 == 0:
        log.rotate()
"""


def test_a_killed_writer_loses_nothing_acknowledged(log):
    rng = np.random.default_rng(0)
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(log.directory.parent)], stdout=subprocess.PIPE, text=True
        )
        acknowledged = [int(writer.stdout.readline()) for _ in range(int(rng.integers(1, 60)))]
        writer.kill()
        acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        writer.stdout.close()
        writer.wait()
        found = rows(log)
        assert acknowledged == list(range(len(acknowledged))) and found.keys() >= set(acknowledged)
        assert all(found[key] == key for key in acknowledged)
        log.append([batch(-1)], START)
        assert rows(log)[-1] == 1
        for path in log.directory.iterdir():
            path.unlink()


KILLED_EVERYWHERE = """
import os, sys
from pathlib import Path
import numpy as np
from embedserve.quant import Place, UpsertLog, Upserts
from killed import die_before

def one(key):
    return [Upserts(np.array([key], np.int64), np.full((1, 3), key, np.float32))]

def work(log, done):
    log.append(one(1), Place()); done(1)
    mark = log.rotate()
    log.append(one(2), Place()); done(2)
    log.append(one(3), Place()); done(3)

for step in range(1, 200):
    root = Path(sys.argv[1]) / str(step)
    root.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        write = os.write
        die_before(step)
        work(UpsertLog(root), lambda key: write(writer, bytes([key])))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    acknowledged = list(os.read(reader, 10))
    os.close(reader)
    log = UpsertLog(root)
    read = log.read(Place())
    assert read.damage is None, (step, read.damage)
    found = [int(k) for b in read.batches for k in b.keys]
    assert set(acknowledged) <= set(found) and found == sorted(found), (step, acknowledged, found)
    log.append(one(9), Place())
    assert [int(k) for b in log.read(Place()).batches for k in b.keys] == [*found, 9]
    if status == 0:
        break
else:
    raise AssertionError("never came to its end")
print(step)
"""


def test_killed_at_every_step(tmp_path):
    driver = subprocess.run(
        [sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path)], capture_output=True, text=True, check=False, env=ENV
    )
    assert driver.returncode == 0, driver.stderr
    assert int(driver.stdout) > 20
