"""Runs the tests of native code with the package of one folder in front of the installed one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

target = Path(sys.argv[1]).resolve()
sys.meta_path[:] = [
    finder for finder in sys.meta_path if "scikit_build" not in type(finder).__module__ + type(finder).__name__.lower()
]
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, str(target))
names = (
    "quant/test_kernels",
    "quant/test_key_index",
    "quant/test_upserted_tables",
    "index/test_layers",
    "index/test_rescore",
    "server/test_native_lookup",
)
files = [f"tests/{name}.py" for name in names]
tests = [*files, "-q", "-p", "no:cacheprovider"]
failed = pytest.main(
    [*tests, "--deselect", "tests/quant/test_kernels.py::test_no_function_is_shared_between_instruction_sets"]
)
for module in ("embedserve.quant.kernels._native", "embedserve.server._lookup"):
    origin = sys.modules[module].__file__
    assert origin and Path(origin).is_relative_to(target), origin
sys.exit(failed)
