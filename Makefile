# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint sanitize proto clean

# Trains, imports, publishes, serves and queries MovieLens factors; leaves the catalog in demo-catalog/.
demo: $(VENV)/.installed
	$(BIN)/embedserve demo --root demo-catalog

test: $(VENV)/.tested
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tests/typing/embedserve

# Kernel tests against native code built with AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.tested
	PYTHON=$(abspath $(BIN))/python tests/native/run_sanitized

# Regenerates proto/*_pb2*.py from proto/embedserve/v1/*.proto.
proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -Iembedserve/proto=proto/embedserve/v1 --python_out=.build-proto --pyi_out=.build-proto \
	  --grpc_python_out=.build-proto embedserve/proto/embedding.proto embedserve/proto/admin.proto
	$(BIN)/python -m grpc_tools.protoc -Iembedserve/proto=proto/embedserve/v1 --python_out=.build-proto --pyi_out=.build-proto \
	  embedserve/proto/wire.proto
	cp .build-proto/embedserve/proto/*.py* proto/
	rm -r .build-proto

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard quant/kernels/*.h quant/kernels/*.cpp) | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.tested
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf build demo-catalog $(VENV)
