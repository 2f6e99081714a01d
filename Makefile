# `make train` and `make test` do everything a fresh machine needs, then their job.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
CONFIG := torchtitan_integration/configs/deepseek_v3_debug_cpu.toml
# torch the environment holds; other versions get an environment of their own (make test-torch)
TORCH := 2.13.0

# tests run in so many processes at once, each with its own share of the tests; 0: one after another
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

export OMP_NUM_THREADS := 1

.PHONY: train test test-all test-torch fuzz lint format clean

train: $(READY)
	$(BIN)/megamoe train $(CONFIG)

test: $(READY)
	$(PYTEST) -m "not slow and not gpu and not multigpu"

# slow cases one after another: they know time limits that two at once would miss
test-all: test
	$(BIN)/python -m pytest -m "slow and not gpu and not multigpu"

# make fuzz SEED=7 PROGRAMS=500: generated programs, eagerly and compiled; outside test-all
SEED ?= 1
PROGRAMS ?= 2000
FUZZ_RECORD ?= benchmarks/results/fuzz_cpu.json
fuzz: $(READY)
	$(BIN)/python -m moe_compile.testing.fuzz --seed $(SEED) --programs $(PROGRAMS) \
		--keep outputs/fuzz --record $(FUZZ_RECORD)

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

# torch first and by exact version: a range may bring another build of several gigabytes. It stays
# as it came, with the triton it came with: any other would make pip look for another torch.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is too old, 3.11 is the least: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	grep -v -e '^torch==' -e '^triton==' constraints.txt > $(CONSTRAINTS)
	echo 'torch==$(TORCH)' >> $(CONSTRAINTS)
	$(PIP) 'torch==$(TORCH)' 'setuptools>=77,<82'
	$(BIN)/python -m pip show --quiet triton 2> /dev/null || grep '^triton==' constraints.txt >> $(CONSTRAINTS)
	$(PIP) --no-build-isolation -e '.[titan,dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* outputs .pytest_cache .mypy_cache .ruff_cache
