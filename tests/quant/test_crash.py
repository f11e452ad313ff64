"""A writer that is killed at any step leaves the last good version current and whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import publish_table
from killed import ENV

# One process forks a writer for every step, which kills itself in front of its n-th system call that changes
# a file, and checks after each what a server would find.
DRIVER = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from embedserve.quant import Catalog, ImportOptions, import_table, open_keys, open_matrix
from killed import die_before

source, root = sys.argv[1], Path(sys.argv[2])

def write():
    manifest = import_table(Catalog(root), "t", open_matrix(source + ":v"), ImportOptions(), open_keys(source + ":k", 40))
    Catalog(root).publish("t", manifest.version)

def current_value():
    values = np.empty((40, 4), np.float32)
    missing = Catalog(root).open("t", verify=True).native_table().gather(np.arange(40), 0, None, values)
    assert missing is None and (values == values[0, 0]).all()
    return values[0, 0]

shutil.copytree(root, root.with_name("before"))
for step in range(1, 200):
    shutil.rmtree(root)
    shutil.copytree(root.with_name("before"), root)
    pid = os.fork()
    if pid == 0:
        die_before(step)
        write()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    finished = status == 0
    assert finished or os.WTERMSIG(status) == signal.SIGKILL
    value = current_value()
    assert value == 2 if finished else value in (1, 2)
    for version in Catalog(root).versions("t"):
        Catalog(root).open("t", version, verify=True)
    if finished:
        break
    write()  # the next writer succeeds, and removes what the killed one left
    assert current_value() == 2
    assert [p.name for p in (root / "t").iterdir() if p.name.startswith(".partial")] == []
else:
    raise AssertionError("the writer never came to its end")
print("killed", step - 1)
"""


def test_killed_at_every_step(tmp_path: Path):
    old, new = (np.full((40, 4), x, np.float32) for x in (1.0, 2.0))
    root = tmp_path / "root"
    publish_table(root, "t", old, np.arange(40))
    np.savez(tmp_path / "new.npz", v=new, k=np.arange(40))
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "new.npz"), str(root)]
    driver = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV)
    assert driver.returncode == 0, driver.stderr
    assert int(driver.stdout.split()[1]) > 15
