# What one can do here. `make` alone lists it. Needs Python 3.11+ and nothing else: every target sets up what it uses.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up

DISTRIBUTIONS := crds relay operator harbor
CODE          := $(DISTRIBUTIONS) tests $(wildcard bench examples)
COMPILE       := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
                 --no-emit-index-url
# Each worker has servers of its own, hence at most four. `make test WORKERS=0` runs the tests one after the other.
WORKERS ?= auto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo parts test test-faults lint format lock bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything that development needs (done by the other targets as well)

$(STAMP): locks/dev.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Mailboat needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Name another one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "No virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  $(DISTRIBUTIONS:%=--editable ./%)
	@touch $@

demo: $(STAMP) ## Watch events flow from Postgres to Kafka, a relay die, and nothing get lost
	@$(BIN)/python -m mailboat.demo

parts: $(STAMP) ## Fetch and build the real servers that the tests run against
	@$(BIN)/python -m mailboat_harbor

test: parts ## Run the tests against real servers
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal -m "not faults"

test-faults: parts ## Run the long tests: minutes of kills, millions of rows
	$(BIN)/python -m pytest -m faults

lint: $(STAMP) ## Check format, style, types and layers
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(DISTRIBUTIONS)
	$(BIN)/mypy --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls tests
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Format the code, mend what can be mended
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lock: $(STAMP) ## Compile locks/*.in into locks/*.txt; with UPGRADE=1 to the newest versions
	$(COMPILE) $(if $(UPGRADE),--upgrade) locks/dev.in -o locks/dev.txt
	$(COMPILE) $(if $(UPGRADE),--upgrade) locks/go.in -o locks/go.txt

bench: $(STAMP) ## Measure the relay against a bare pipe, and print a table
	@$(BIN)/python bench/bench.py

clean: ## Remove the environment and all caches of this checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
