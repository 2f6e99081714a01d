# `make train` and `make test` do everything a fresh machine needs, then their job.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG := torchtitan_integration/configs/deepseek_v3_debug_cpu.toml
# torch the environment holds; other versions get an environment of their own (make test-torch)
TORCH := 2.13.0

export OMP_NUM_THREADS := 1

.PHONY: train test test-all test-torch lint format clean

train: $(READY)
	$(BIN)/megamoe train $(CONFIG)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu and not multigpu"

test-all: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not multigpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make test-torch VERSION=2.11.0: the suite on another torch, in an environment of its own
test-torch:
	@test -n "$(VERSION)" || { echo "say which torch: make test-torch VERSION=2.11.0"; exit 2; }
	$(MAKE) test VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)

# torch first and by exact version: a range may bring another build of several gigabytes
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet 'setuptools>=77,<82'
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt --no-build-isolation -e ".[titan,dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* outputs .pytest_cache .mypy_cache .ruff_cache
