# Everything a contributor or a new user runs. Each target sets up what it needs in $(VENV).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check crds format bench bench-dualmap clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## Serve a graph of simulated workers, replay a real trace, scale, report (under 3 minutes)
	$(BIN)/penstock demo --output-dir demo-output

test: $(VENV)/.dev ## Run all tests
	$(BIN)/pytest

check: $(VENV)/.dev ## Lint, format, types and import layers: what CI runs before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m penstock_graph.crd --check

crds: $(VENV)/.dev ## Write the CustomResourceDefinitions from the models
	$(BIN)/python -m penstock_graph.crd

format: $(VENV)/.dev ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## Print every benchmark, ratios measured side by side in one run
	$(BIN)/python bench/run.py

bench-dualmap: $(VENV)/.dev ## Reproduce the DualMap paper; TRACES="--conversation FILE ..." gives the whole traces
	$(BIN)/python bench/dualmap/run.py $(TRACES)

clean: ## Remove what the targets made
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
