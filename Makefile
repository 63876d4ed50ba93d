# Two commands do all the set-up: `make demo` and `make test`. `make help` lists the rest.
#
# torch: requirements-engine.txt pins a version, not a build. Where pip's index offers only the CUDA
# build, name the index of CPU builds first:   PIP_EXTRA_INDEX_URL=... make test
# Other arguments for pip:                     make test PIP_ARGS="--find-links DIRECTORY"

PYTHON ?= python3
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PINS := requirements-dev.txt requirements-engine.txt requirements-data.txt
STAMP := $(VENV)/installed
PYTEST_ARGS = $(strip $(if $(WORKERS),-n $(WORKERS) --dist worksteal) $(ARGS))
PIP_INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS)

# One engine thread a process: the tests start several, and two cores thrash under more.
export OMP_NUM_THREADS ?= 1
# promtool and prometheus, where .ci/run has unpacked them; tests that need them skip without.
export PATH := $(CURDIR)/build/debian/prometheus/usr/bin:$(PATH)

say = @printf '\n== %s\n'

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types imports tests format dashboards compile pure clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## build .venv with the pinned packages (the other commands do it when needed)

demo: $(STAMP) ## start a router and two engines, replay agent traffic, show what affinity saves
	@$(BIN)/python -m loadtest.demo

test: lint types imports tests ## prove it: ruff, mypy, import-linter, pytest
	$(say) 'all passed'

lint: $(STAMP) ## ruff: rules and format
	$(say) 'ruff check'
	@$(BIN)/ruff check .
	$(say) 'ruff format --check'
	@$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(say) 'mypy'
	@$(BIN)/mypy

imports: $(STAMP) ## import-linter: who may import whom
	$(say) 'lint-imports'
	@$(BIN)/lint-imports --no-cache

tests: $(STAMP) ## pytest alone; choose with ARGS="tests/unit -k index", side by side with WORKERS=2
	$(say) 'pytest $(PYTEST_ARGS)'
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(STAMP) ## let ruff rewrite the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

dashboards: $(STAMP) ## make the Grafana dashboard anew from deploy/grafana/build.py
	@$(BIN)/python deploy/grafana/build.py

compile: $(STAMP) ## compile the path of a request with mypyc, in place; needs a C compiler, and again after an edit
	HOMING_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --inplace
	@$(BIN)/homing version

pure: ## remove what was compiled, so that the sources run again
	rm -rf build/lib.* build/temp.* build/__native* build/router build/ops.txt
	find . -name '*.so' -not -path './$(VENV)/*' -delete

clean: pure ## remove caches and build output
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV)

$(STAMP): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Homing needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo '== python -m venv $(VENV)'; $(PYTHON) -m venv $(VENV); } || { \
	  rm -rf $(VENV); \
	  echo 'Python cannot make a virtual environment. On Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo '== pip install (pinned; torch is large, the first time takes a while)'
	@$(PIP_INSTALL) -r requirements-dev.txt -r requirements-engine.txt
	@$(PIP_INSTALL) --no-deps -r requirements-data.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
