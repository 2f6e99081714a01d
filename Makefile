# `make train` and `make test` do everything a fresh machine needs, then their job.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
CONFIG := torchtitan_integration/configs/deepseek_v3_debug_cpu.toml
# torch the environment holds; other versions get an environment of their own (make lanes)
TORCH := 2.13.0

# tests run in so many processes at once; 0: one after another. A file's tests stay in one process,
# which makes what they share once, and files that take long come first (tests/conftest.py)
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ON_A_CPU := not gpu and not multigpu and not browser
QUICK := not slow and not exhaustive and $(ON_A_CPU)
# least percentage of the product's lines that the tests of make test run
COVERED := 85

export OMP_NUM_THREADS := 1
# a hundred processes import the same files: what one has compiled is there for the others
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-slow test-exhaustive docs docs-test one-rank lanes coverage fuzz defects mutants cuda-table acceptance lint format clean

# make train RANKS=1|2|4: the same model and sequences; one rank has all experts and exchanges nothing
RANKS ?= 2
ON_1_RANKS := --parallelism.data_parallel_shard_degree=1 --parallelism.expert_parallel_degree=1 \
	--training.local_batch_size=16
ON_4_RANKS := --parallelism.data_parallel_shard_degree=4 --training.local_batch_size=4
train: $(READY)
	$(BIN)/megamoe train $(CONFIG) $(ON_$(RANKS)_RANKS)

test: $(READY)
	$(PYTEST) -m "$(QUICK)"

test-all: test test-slow test-exhaustive

# those that measure time come last, one after another
test-slow: $(READY)
	$(PYTEST) -m "slow and not alone and $(ON_A_CPU)"
	$(BIN)/python -m pytest -m "slow and alone and $(ON_A_CPU)"

# every style, size and routing of what the slow tests show for some
test-exhaustive: $(READY)
	$(PYTEST) -m "exhaustive and $(ON_A_CPU)"

# the documentation as a site, in outputs/site; a broken link or anchor fails. To search it:
# python -m http.server --directory outputs/site
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	$(PIP) --no-build-isolation -e '.[titan,dev,site]'
	$(BIN)/mkdocs build --strict

# the page of a report in headless Chromium: needs Debian's packages chromium and chromium-driver
docs-test: $(READY)
	$(PIP) --no-build-isolation -e '.[titan,dev,docs]'
	$(BIN)/python -m pytest -m browser tests/browser

# every layout of docs/layouts.md against one rank; part of test-all
one-rank: $(READY)
	$(PYTEST) tests/integration/test_one_rank.py

# lines that make test runs, in every process it starts: twice the time of the tests
coverage: $(READY)
	$(PYTEST) -m "$(QUICK)" --cov --cov-report=term --cov-fail-under=$(COVERED)

# make fuzz SEED=7 PROGRAMS=500: generated programs, eagerly and compiled; outside test-all. MINUTES=5
# ends it earlier, FUZZ_RECORD= keeps no record. Torch's memory of operators and shapes costs more
# than it saves in graphs with a size for every count
SEED ?= 1
PROGRAMS ?= 2000
MINUTES ?= 600
FUZZ_RECORD ?= benchmarks/results/fuzz_cpu.json
fuzz: export TORCH_FAKE_TENSOR_DISPATCH_CACHE := 0
fuzz: $(READY)
	$(BIN)/python -m moe_compile.testing.fuzz --seed $(SEED) --programs $(PROGRAMS) \
		--minutes $(MINUTES) --keep outputs/fuzz $(if $(FUZZ_RECORD),--record $(FUZZ_RECORD))

# make defects SEED=1: faults of before, put back one at a time, and whether the fuzzer finds them
DEFECTS_RECORD ?= benchmarks/results/defects_cpu.json
defects: export TORCH_FAKE_TENSOR_DISPATCH_CACHE := 0
defects: $(READY)
	$(BIN)/python -m tests.mutants.defects --seed $(SEED) --record $(DEFECTS_RECORD)

# make mutants SEED=1 COUNT=64: the product changed in one place at a time, and whether tests tell
COUNT ?= 64
MUTANTS_RECORD ?= benchmarks/results/mutants_cpu.json
mutants: $(READY)
	$(BIN)/python -m tests.mutants --seed $(SEED) --count $(COUNT) --workers $(WORKERS) \
		--record $(MUTANTS_RECORD)

# CUDA code for an H100 that need not be there: generated, read, held to bars; an hour or two
CUDA_RECORD ?= benchmarks/results/cuda_code.json
cuda-table: $(READY)
	$(BIN)/python -m benchmarks.cuda --json $(CUDA_RECORD)

# layers and models of other packages, compiled; half an hour. Cases that the results have already are
# not run again, unless with ACCEPTANCE_FLAGS=--again
ACCEPTANCE := .venv-acceptance
ACCEPTANCE_FLAGS ?=
acceptance: $(ACCEPTANCE)/.ready
	$(ACCEPTANCE)/bin/python -m benchmarks.acceptance --workers $(WORKERS) $(ACCEPTANCE_FLAGS)

$(ACCEPTANCE)/.ready: benchmarks/acceptance/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ACCEPTANCE)
	grep -v '^triton==' constraints.txt > $(ACCEPTANCE)/constraints.txt
	$(ACCEPTANCE)/bin/python -m pip install --quiet -c $(ACCEPTANCE)/constraints.txt \
		'torch==$(TORCH)' 'setuptools>=77,<82' wheel
	DS_BUILD_OPS=0 $(ACCEPTANCE)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		-r benchmarks/acceptance/requirements.txt
	$(ACCEPTANCE)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make lanes VERSIONS="2.11.0 2.15.0": every torch in an environment of its own, made and removed one
# at a time, 6 GB each; a quarter of an hour a lane. What passed before is not run again, unless with
# LANES_FLAGS=--again
VERSIONS ?=
LANES_FLAGS ?=
lanes: $(READY)
	$(BIN)/python -m benchmarks.lanes $(VERSIONS) --workers $(WORKERS) $(LANES_FLAGS)

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
	rm -rf $(VENV) .venv-torch-* .venv-acceptance .coverage* outputs .pytest_cache .mypy_cache .ruff_cache
