# attnbench: `make help` lists what can be made.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results/local
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install bench test test-gpu test-multigpu test-exhaustive test-slurm slurm-up \
	slurm-down lint format report writeup pack benchmarks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Of pip's lines those that say what takes long, one a file of a megabyte or more.
define PIP_IN_SHORT
/^ *Downloading .*( MB| GB)/ { n = split($$2, parts, "/"); print "  downloading " parts[n], $$3, $$4; fflush() }
/^Installing collected packages/ { print "  installing " NF - 3 " packages"; fflush() }
/^Successfully installed/ { print "  installed"; fflush() }
endef
export PIP_IN_SHORT

install: $(BIN)/.installed ## make .venv with the pinned versions

$(BIN)/.installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 2; }
	@echo "make: $(VENV) gets Python's environment and the versions of constraints.txt; torch and CUDA's"
	@echo "      libraries are some GB to download, each large file is named when it begins"
	@$(PYTHON) -m venv $(VENV)
	@set -o pipefail; $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check \
		-c constraints.txt -e '.[dev]' | awk "$$PIP_IN_SHORT"
	@touch $@

bench: install ## measure attention backends and model sizes on this machine
	$(BIN)/attnbench sweeps=quickstart results=$(RESULTS)

test: install ## run the tests that need nothing but a CPU
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-gpu: install ## run the tests that need one CUDA device
	$(BIN)/python -m pytest -m "gpu and not exhaustive" --numprocesses auto --maxprocesses 15 --dist worksteal

test-multigpu: install ## run the tests that need several CUDA devices
	$(BIN)/python -m pytest -m "multigpu and not exhaustive"

test-exhaustive: install ## run the long grids, on whatever devices there are
	$(BIN)/python -m pytest -m exhaustive --numprocesses 2 --dist worksteal

test-slurm: install ## run the tests on the cluster of slurm-up
	ATTNBENCH_REQUIRE_SLURM=1 $(BIN)/python -m pytest -m slurm

slurm-up: ## start a toy Slurm cluster on this machine (.ci/toy_slurm.sh install gets the packages)
	.ci/toy_slurm.sh up

slurm-down: ## stop it
	.ci/toy_slurm.sh down

lint: install ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## bring the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: install ## make tables, figures and reports again from RESULTS
	$(BIN)/attnbench-report $(RESULTS)

writeup: install ## write RESULTS as a paper and an appendix: Markdown, LaTeX, PDF, one HTML page
	$(BIN)/attnbench-writeup $(RESULTS)

pack: install ## move the records in RESULTS into compressed archives
	$(BIN)/attnbench-pack $(RESULTS)

benchmarks: install ## time the harness itself, and compile the kernels for Hopper
	$(BIN)/python -m benchmarks.bench_harness
	$(BIN)/python -m benchmarks.bench_tables
	$(BIN)/python -m benchmarks.bench_cluster
	$(BIN)/python -m benchmarks.compile_hopper
	$(BIN)/python -m benchmarks.compile_hopper masks
	$(BIN)/python -m benchmarks.compile_decode

clean: ## remove the environment and caches; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
