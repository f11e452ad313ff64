"""A process that dies at a chosen step: imported by the drivers of crash tests, which run in processes of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

CHANGES = ("open", "write", "pwrite", "fsync", "fdatasync", "rename", "replace", "mkdir", "posix_fallocate", "ftruncate", "close")  # fmt: skip
# For subprocess.run(env=…): drivers are given as text and find this module by it.
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def die_before(step: int) -> None:
    """Has this process kill itself in front of its `step`-th system call that changes a file."""
    count = 0

    def counted(call):
        def stepped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return stepped

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
