# Every target says what it does in one line: `make help` prints them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
# The folders with Python in them, those not there yet left out.
CODE := $(wildcard src harness bench faults scripts tests examples)
# FULL=1 passes on: longer, complete runs of what is otherwise sampled.
FULL_FLAG := $(if $(FULL),--full)
# ARGS="-k name -x" goes to pytest.
ARGS ?=

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9%_-]+:.*## ' $(MAKEFILE_LIST) | sort \
		| awk -F ':.*## ' '{ printf "  %-14s %s\n", $$1, $$2 }'

.PHONY: setup
setup: setup-base setup-spark ## Prepare a bare Debian 12 machine: system packages, .venv, PostgreSQL 15 and 18

.PHONY: setup-base
setup-base: ## The part of setup that all but Spark's tests need
	scripts/setup.sh

.PHONY: setup-spark
setup-spark: ## The part of setup that lets Spark's JVMs start quickly
	$(PYTHON) -m harness.spark_classes || echo "setup: Spark's classes were not prepared: its JVMs start slowly"

.PHONY: test-python
test-python: ## Run the library's tests in another Python: PY=3.13 (with pyenv, set PYENV_VERSION too)
	scripts/lane.sh $(PY) --pg 18 $(or $(ARGS),-q tests/app tests/contract/client tests/contract/outbox)

.PHONY: lock
lock: ## Write requirements/dev.txt anew from pyproject.toml (ARGS=--upgrade takes newer versions)
	scripts/lock.sh $(ARGS)

.PHONY: lint
lint: ## Check style and formatting
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m ruff format --check $(CODE)

.PHONY: format
format: ## Format the code and apply safe fixes
	$(PYTHON) -m ruff format $(CODE)
	$(PYTHON) -m ruff check --fix $(CODE)

.PHONY: types
types: ## Check types: all code with mypy, with pyright tests/typing
	$(PYTHON) -m mypy $(CODE)
	.venv/bin/pyright tests/typing

.PHONY: types-all
types-all: types ## Also check the package and the examples with pyright, as score-house does
	.venv/bin/pyright src examples

.PHONY: test
test: test-15 test-18 ## Run the tests on PostgreSQL 15 and 18

.PHONY: test-15
test-15: ## Run the tests on PostgreSQL 15 (ARGS="-k name")
	$(PYTHON) -m pytest --pg 15 $(ARGS)

.PHONY: test-18
test-18: ## Run the tests on PostgreSQL 18 (ARGS="-k name")
	$(PYTHON) -m pytest --pg 18 $(ARGS)

.PHONY: sync
sync: ## Write the synchronous client anew from the asynchronous one
	$(PYTHON) scripts/unasync.py

.PHONY: check-sync
check-sync: ## Check that the synchronous client is what `make sync` writes
	$(PYTHON) scripts/unasync.py --check

.PHONY: docs
docs: ## Write the generated parts of the documentation anew
	$(PYTHON) -m scripts.docs

.PHONY: screenshots
screenshots: ## Take the pictures of the dashboard anew (needs Chromium; about three minutes)
	$(PYTHON) -m scripts.screenshots

.PHONY: check-docs
check-docs: ## Check that the generated documentation is what `make docs` writes
	$(PYTHON) -m scripts.docs --check

.PHONY: record
record: ## Record the terminal sessions in the documentation anew
	$(PYTHON) -m scripts.record

.PHONY: peers
peers: ## Install our peers into a place of its own and run docs/peers against PostgreSQL (needs pip's index)
	$(PYTHON) scripts/peers.py $(ARGS)

.PHONY: bench
bench: ## Run the benchmarks (FULL=1 for the complete run)
	$(PYTHON) -m bench $(FULL_FLAG)

.PHONY: score
score: ## Score all areas (FULL=1 for the complete run)
	$(PYTHON) -m bench.score all $(FULL_FLAG)

.PHONY: score-%
score-%: ## Score one area, for example score-core
	$(PYTHON) -m bench.score $* $(FULL_FLAG)

.PHONY: build
build: ## Build the wheel and the source archive into dist/
	$(PYTHON) -m hatchling build

.PHONY: clean
clean: ## Remove what tools left behind; keeps .venv, .postgres and .spark
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
