# Small networks are fastest on one thread; more threads on busy cores make an update many times slower.
export OMP_NUM_THREADS ?= 1

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# What `make sanitize` runs, as arguments of pytest.
NATIVE_TESTS ?= tests/test_native.py tests/test_acting.py tests/test_kernels.py tests/cuda/test_optimizers.py \
	-m "not slow and not gpu"

.PHONY: demo test coverage sanitize check format docs package bench reproduce

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

# Fails below what pyproject.toml demands; takes longer than the tests alone.
coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" --cov --cov-report term:skip-covered

sanitize: $(READY)
	BIN=$(BIN) .ci/sanitize $(NATIVE_TESTS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m docs.lines

# Warnings are errors: a link that leads nowhere, a class that is gone.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

# Archive and wheel in dist/, checked in an empty environment.
package: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	.ci/package

bench: $(READY)
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.state_bytes
	$(BIN)/python -m benchmarks.stress
	$(BIN)/python -m benchmarks.split_k
	$(BIN)/python -m benchmarks.audit

# Runs that benchmarks/results lacks, on all cores, or where WORKERS says: make reproduce WORKERS="--scheduler ADDRESS"
reproduce: $(READY)
	$(BIN)/python -m benchmarks.stress
	$(BIN)/python -m benchmarks.state_bytes
	$(BIN)/python -m benchmarks.halfcheetah $(WORKERS)
	$(BIN)/python -m benchmarks.fidelity $(WORKERS)
	$(BIN)/python -m benchmarks.sweep $(WORKERS)
	$(BIN)/python -m benchmarks.sticking $(WORKERS)
	$(BIN)/python -m benchmarks.recurrent_toy
	$(BIN)/python -m benchmarks.stages $(WORKERS)
	$(BIN)/python -m benchmarks.ablations $(WORKERS)
	$(BIN)/python -m benchmarks.learning $(WORKERS)
	$(BIN)/python -m benchmarks.boundary $(WORKERS)
	$(BIN)/python -m benchmarks.performance
	$(BIN)/python -m benchmarks.tables

$(READY): pyproject.toml constraints.txt setup.py $(wildcard cpu/*) $(wildcard cuda/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
