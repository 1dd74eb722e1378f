# `make` lists the targets. `make demo` and `make lint` need only Python 3.11+. The tests also need packages of the system (a JDK,
# Maven, PgBouncer; for e2e a container engine or its parts): as root on Debian or a derivative they are installed, otherwise the
# missing ones are reported. All other parts are fetched or built into .venv and ~/.cache/mailboat.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up

DISTRIBUTIONS := crds relay operator devservers demo
CODE          := .ci/stages.py $(DISTRIBUTIONS) tests e2e $(wildcard bench examples)
COMPILE       := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
                 --no-emit-index-url
# One worker more than cores: with two workers, two cores are idle half of the time, because many tests wait for time-outs.
# `make test WORKERS=0` runs the tests in one process.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo playground parts test parts-api test-api parts-e2e e2e verify lint format lock crds bench \
  bench-peers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with all dependencies of development (a prerequisite of the other targets)

$(STAMP): locks/dev.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Mailboat needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Use another one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "The virtual environment could not be created; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  $(DISTRIBUTIONS:%=--editable ./%)
	@touch $@

demo: $(STAMP) ## Show delivery from Postgres to Kafka while a relay is killed, without a lost event
	@$(BIN)/python -m mailboat_demo

playground: $(STAMP) ## Run Postgres, Kafka, Redis, a relay, a producer and a consumer until Ctrl-C; prints the addresses
	@$(BIN)/python -m mailboat_demo.playground

# The long tests open pages in a browser.
PICTURES := $(if $(filter all,$(SCOPE)),pictures)

parts: $(STAMP) ## Fetch and build the real servers of the tests (as root: with apt-get, too)
	@.ci/packages test $(PICTURES) || echo "Some packages of the system could not be installed; tests that need them are skipped."
	@$(BIN)/python -m mailboat_devservers

# The gate leaves out the long tests; SCOPE=all includes them.
ifeq ($(SCOPE),all)
  LONG    :=
  STORIES := e2e
else
  LONG    := and not verify
  STORIES := $(foreach story,install sidecar disruption,e2e/stories/test_$(story).py)
endif
PYTEST := $(BIN)/python -m pytest --durations=25

test: parts ## Run the tests against real servers; SCOPE=all includes the long tests
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not api $(LONG)"

parts-api: $(STAMP)
	@$(BIN)/python -m mailboat_devservers api

test-api: parts-api ## Run the tests against a real Kubernetes API server; the first run builds it
	$(PYTEST) -n 2 --dist worksteal -m "api $(LONG)"

parts-e2e: $(STAMP)
	@.ci/packages e2e
	@PYTHONPATH=tests $(BIN)/python e2e $(SCOPE)

e2e: parts-e2e ## Run three stories on a real cluster (as root: with apt-get, too); STORY=scale runs one, SCOPE=all runs all
	$(PYTEST) -p no:cacheprovider $(if $(STORY),e2e/stories/test_$(STORY).py,$(STORIES))

verify: $(STAMP) ## Run the gate, the long tests, all stories and the demo, in about an hour
	@CI=true $(PYTHON) .ci/stages.py verify

lint: $(STAMP) ## Check format, style, types and layers
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(DISTRIBUTIONS)
	$(BIN)/mypy --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls tests
	$(BIN)/mypy --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls e2e
	MYPYPATH=bench $(BIN)/mypy bench
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Format the code and apply automatic fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lock: $(STAMP) ## Compile locks/*.in into locks/*.txt; UPGRADE=1 takes the newest versions
	$(COMPILE) $(if $(UPGRADE),--upgrade) locks/dev.in -o locks/dev.txt
	$(COMPILE) $(if $(UPGRADE),--upgrade) locks/go.in -o locks/go.txt
	for image in build operator relay; do $(COMPILE) --upgrade locks/$$image.in -o locks/$$image.txt || exit; done

crds: $(STAMP) ## Generate the CRDs and the reference of the resources from the models
	@$(BIN)/python crds/generate.py

bench: $(STAMP) ## Measure drains, steady rates, writers and consumers, and print tables
	@$(BIN)/python bench/bench.py

bench-peers: $(STAMP) ## Measure Debezium and watermill-sql, fetched with Maven and Go, beside the relay
	@$(BIN)/python bench/peers.py

clean: ## Remove the environment and all caches of this checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
