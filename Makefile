# Everything a fresh machine needs is Python 3.11 or newer with its venv module, and make.
#   make demo   install, train, evaluate, write the report        make test   install, run all tests
# The environment lives in .venv (make VENV=elsewhere to change); a stamp file in it keeps `make` from installing twice.

SHELL      := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV       ?= .venv
BIN        := $(VENV)/bin
PIP        := $(BIN)/python -m pip --disable-pip-version-check
PYTHONS    ?= python3 python3.13 python3.12 python3.11
# Two processes with one thread each: the tests are many tiny models, for which threads inside torch only cost time.
TEST_ARGS  ?= -n 2 --dist worksteal --durations=15
RUNS       ?= runs

unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_NO_INPUT := 1

.PHONY: help demo test lint types docs-coverage format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# A demo that was stopped goes on; one that is finished shows its verdict again.
demo: $(VENV)/.installed  ## train and compare the demo's arms on real text, write the report
	@$(BIN)/keel run recipes/demo.yaml --out $(RUNS)/demo $(if $(wildcard $(RUNS)/demo/recipe.yaml),--resume)

test: $(VENV)/.installed-dev  ## run all tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.installed-dev  ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## mypy over src/keel
	@$(BIN)/mypy

docs-coverage: $(VENV)/.installed-dev  ## every public module, class and function has a docstring
	@$(BIN)/interrogate --quiet src/keel && echo "docs coverage: every public name is documented"

format: $(VENV)/.installed-dev  ## apply ruff's safe fixes and its formatting
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

clean:  ## remove the environment, caches, builds and runs
	rm -rf $(VENV) $(RUNS) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A candidate counts only when it runs, is new enough and can make environments: version managers leave names that start nothing.
$(BIN)/python:
	@for candidate in $(PYTHONS); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$candidate" --version)"; \
	    exec "$$candidate" -m venv "$(VENV)"; \
	  fi; \
	done; \
	echo "keel needs Python 3.11 or newer with the venv module; none of these is: $(PYTHONS)." >&2; \
	echo "Install one (Debian and Ubuntu: apt install python3-venv) or name it: make PYTHONS=/path/to/python $(MAKECMDGOALS)" >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing keel into $(VENV) (a few minutes the first time)"
	@$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing keel and its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed
