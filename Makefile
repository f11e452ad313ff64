# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard quant/kernels/*.h quant/kernels/*.cpp server/native/*.h server/native/*.cpp server/cache/*.h)

.PHONY: demo test loadtest bench lint sanitize wheel proto arm64 clean

# Trains, imports, publishes, serves and queries MovieLens factors; leaves the catalog in demo-catalog/.
demo: $(VENV)/.installed
	$(BIN)/embedserve demo --root demo-catalog

test: $(VENV)/.tested
	$(BIN)/python -m pytest

# Locust without its web UI against a started server; leaves loadtest-report/ with an HTML page and CSVs.
# make loadtest HOST=127.0.0.1:50051 LOCUST="--table items --rows 9066 -u 20 -r 20 -t 1m --rate 10"
HOST ?= 127.0.0.1:50051
LOCUST ?= --table items --rows 1000 -u 10 -r 10 -t 30s
loadtest: $(VENV)/.tested
	mkdir -p loadtest-report
	$(BIN)/locust -f loadtest/locustfile.py --host $(HOST) --headless --only-summary --stop-timeout 10 \
	  --html loadtest-report/report.html --csv loadtest-report/stats $(LOCUST)

# Every benchmark beside its peers, some of which must be installed (h2load of nghttp2, hnswlib, libcachesim, torch);
# takes most of an hour. Leaves bench-report/report.html, and the figures as docs/performance.md.
bench: $(VENV)/.tested
	$(BIN)/embedserve bench all --report bench-report --json bench-report/figures.json
	cp bench-report/report.md docs/performance.md

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tests/typing/embedserve

# Kernel tests against native code built with AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.tested
	PYTHON=$(abspath $(BIN))/python tests/native/run_sanitized

# Builds the wheel, installs it in a venv of its own, and runs it there, away from this folder.
wheel: $(VENV)/bin/python
	rm -rf build/wheel build/wheel-venv
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip install --quiet build/wheel/*.whl
	cd build && wheel-venv/bin/embedserve demo --root wheel-demo --seconds 1 >/dev/null
	rm -rf build/wheel-demo

# Regenerates proto/*_pb2*.py from proto/embedserve/v1/*.proto.
proto: $(VENV)/.dev
	mkdir -p .build-proto
	$(BIN)/python -m grpc_tools.protoc -Iembedserve/proto=proto/embedserve/v1 --python_out=.build-proto --pyi_out=.build-proto \
	  --grpc_python_out=.build-proto embedserve/proto/embedding.proto embedserve/proto/admin.proto
	$(BIN)/python -m grpc_tools.protoc -Iembedserve/proto=proto/embedserve/v1 --python_out=.build-proto --pyi_out=.build-proto \
	  embedserve/proto/wire.proto
	cp .build-proto/embedserve/proto/*.py* proto/
	rm -r .build-proto

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Each of these builds the native code once; a later one brings what an earlier one would.
$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e .
	touch $@

$(VENV)/.tested: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $(VENV)/.installed $(VENV)/.tested $@

clean:
	rm -rf build demo-catalog $(VENV)

# The NEON kernels under emulation; needs g++-aarch64-linux-gnu and qemu-user-static.
arm64:
	mkdir -p build
	aarch64-linux-gnu-g++ -O2 -std=c++20 -Wall -Wextra -ffp-contract=off -static -o build/neon_equals_scalar \
	  tests/native/neon_equals_scalar.cpp quant/kernels/isa_neon.cpp quant/kernels/isa_scalar.cpp quant/kernels/key_index.cpp
	qemu-aarch64-static build/neon_equals_scalar
