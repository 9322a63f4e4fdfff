# make demo | test | test-slow | bench | lint | build. Each sets up what it needs; a second run is a no-op of seconds.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Another package index for torch, as one that carries CPU or CUDA builds: make build TORCH_INDEX=URL
TORCH_INDEX ?=
JOBS ?= 2
# A test that hangs fails after so many seconds (pytest-timeout).
export PYTEST_TIMEOUT ?= 900

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CPP_BUILD := build/cpp

CPP_SOURCES := $(shell find src include cmake -type f 2>/dev/null) CMakeLists.txt
CPP_TESTS := $(shell find tests/cpp -type f 2>/dev/null)

.PHONY: help build demo test test-slow test-cpp test-python lint format bench sanitize clean
.DEFAULT_GOAL := help

help:
	@sed -n '1s/^# //p' Makefile

# --- set-up -------------------------------------------------------------------------------------------------------

# A stamp is written last, so an interrupted step is done again.
$(STAMPS)/system: tools/install_system_packages
	@mkdir -p build
	@PYTHON="$(PYTHON)" tools/install_system_packages

$(STAMPS)/packages: requirements.txt tools/make_venv | $(STAMPS)/system
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" tools/make_venv $(VENV)
	@mkdir -p $(STAMPS) && touch $(STAMPS)/system $@

$(STAMPS)/built: $(CPP_SOURCES) pyproject.toml $(STAMPS)/packages
	@echo "Building the C++ library ..."
	@PATH="$(CURDIR)/$(BIN):$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps $(if $(CI),--config-settings=cmake.define.PACKED_SDPA_WERROR=ON) --editable .
	@touch $@

build: $(STAMPS)/built

# --- what people run ------------------------------------------------------------------------------------------------

demo: build
	$(BIN)/packed-sdpa demo --out demo_out $(ARGS)

bench: build
	$(BIN)/packed-sdpa bench --all --markdown docs/performance.md --json bench_out/bench.json --plot docs/plots $(ARGS)

# --- tests ----------------------------------------------------------------------------------------------------------

$(STAMPS)/cpp_tests: $(CPP_TESTS) $(STAMPS)/built
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S tests/cpp -B $(CPP_BUILD) -G Ninja \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -DCMAKE_PREFIX_PATH="$$($(BIN)/python -c 'import packed_sdpa; print(packed_sdpa.cmake_prefix_path)')" \
	  > build/cpp-configure.log || { cat build/cpp-configure.log; exit 1; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(CPP_BUILD) --parallel $(JOBS)
	@touch $@

test-cpp: $(STAMPS)/cpp_tests
	$(BIN)/ctest --test-dir $(CPP_BUILD) --output-on-failure $(ARGS)

test-python: build
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test: test-cpp test-python

test-slow: sanitize
	$(BIN)/python -m pytest -q -m slow $(ARGS)

# The torch-free parts under address, undefined-behaviour and thread sanitizers.
sanitize: build
	@for kind in SANITIZE THREAD_SANITIZE; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" && export PATH && \
	  cmake -S tests/cpp -B build/$$kind -G Ninja -DPACKED_SDPA_$$kind=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	    > build/sanitize-configure.log && cmake --build build/$$kind --parallel $(JOBS) && \
	  ctest --test-dir build/$$kind --output-on-failure || exit 1; \
	done

lint: build
	$(BIN)/ruff check python tests examples tools
	$(BIN)/ruff format --check python tests examples tools
	$(BIN)/mypy
	git ls-files '*.cpp' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: build
	$(BIN)/ruff check --fix python tests examples tools
	$(BIN)/ruff format python tests examples tools
	git ls-files '*.cpp' '*.h' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build $(VENV)
