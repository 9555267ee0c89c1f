# `make` alone lists the targets. `make demo` and `make test` do all the set-up they need.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## virtual environment, dependencies, Java, warm kernels
$(READY): pyproject.toml scripts/setup
	@PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup && touch $@

demo: $(READY) ## faults planted and found, a pipeline that counts right, killed twice
	@$(BIN)/tidegate demo

test: lint types tests ## lint + types + tests: what CI runs
check: test ## the same as `make test`

lint: $(READY) ## ruff, and its formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	@$(BIN)/mypy

tests: $(READY) ## the tests alone; interop runs where the jars can be fetched, browser tests where Chromium is
	@bash scripts/kafka-jars || true
	@bash scripts/chromium
	@$(BIN)/pytest -n $(WORKERS) --dist loadgroup 

kafka: $(READY) ## fetch the real Kafka for the interop tests
	@bash scripts/kafka-jars

bench: $(READY) ## the benchmarks (nothing else should be running)
	@$(BIN)/python -c 'import aiokafka, duckdb, google.protobuf, lmdb, polars, rocksdict' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@bash scripts/bench

soak: $(READY) ## what is too long for every commit
	@$(BIN)/pytest -n $(WORKERS) -m soak --timeout 7200

reference: $(READY) ## write the pages and lists that are made of the code
	@for page in python-reference config-reference cli-reference error-reference metric-reference http-reference glossary llms; do $(BIN)/python scripts/$$page --write; done

docs: $(READY) ## the handbook as a site, into build/site
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "build/site/index.html"

format: $(READY) ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## remove everything that was built or fetched
	@rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

.PHONY: help setup demo test check lint types tests kafka bench soak reference docs format clean
