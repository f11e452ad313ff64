"""Runs the tests of native code with the package of one folder in front of the installed one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

target = Path(sys.argv[1]).resolve()
sys.meta_path[:] = [
    finder for finder in sys.meta_path if "scikit_build" not in type(finder).__module__ + type(finder).__name__.lower()
]
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, str(target))
for module in ("embedserve.quant.kernels._native", "embedserve.server._lookup"):
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin and Path(spec.origin).is_relative_to(target), spec
files = ["tests/quant/test_kernels.py", "tests/quant/test_key_index.py", "tests/server/test_native_lookup.py"]
tests = [*files, "-q", "-p", "no:cacheprovider"]
sys.exit(
    pytest.main(
        [*tests, "--deselect", "tests/quant/test_kernels.py::test_no_function_is_shared_between_instruction_sets"]
    )
)
