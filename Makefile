# Everything a contributor or a new user runs. Each target sets up what it needs in $(VENV).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

# Kubernetes: the image, the rendered manifests, and the tests against real clusters.
CONTAINER_TOOL    ?= docker
IMAGE             ?= penstock:dev
IMAGE_BUILD_FLAGS ?=
HELM              ?= helm

.DEFAULT_GOAL := help
.PHONY: help demo test test-cluster e2e check crds format image manifests manifests-check bench bench-dualmap clean

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

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

test: $(VENV)/.dev ## Run all tests; ARGS="-k name" chooses, here and for the other test targets
	$(BIN)/pytest $(ARGS)

test-cluster: $(VENV)/.dev ## Tests against a real kube-apiserver; needs KUBEBUILDER_ASSETS, skipped without
	$(BIN)/pytest tests/cluster -m cluster -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

e2e: $(VENV)/.dev ## Tests on a kind cluster; needs kind, kubectl, helm, KIND_NODE_IMAGE; skipped without
	$(BIN)/pytest e2e -m e2e -v -s -p no:randomly $(ARGS)

check: $(VENV)/.dev manifests-check ## Lint, format, types and import layers: what CI runs before the tests
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

image: ## Build the container image; CONTAINER_TOOL, IMAGE and IMAGE_BUILD_FLAGS choose how
	$(CONTAINER_TOOL) build --tag $(IMAGE) $(IMAGE_BUILD_FLAGS) .

# The version is only what the chart is rendered for; nothing in it depends on a newer one.
RENDER = $(HELM) template penstock charts/penstock --namespace penstock-system --kube-version 1.34.0 \
	--set clusterWide=true --set createNamespace=true

manifests: ## Render manifests/install.yaml from the chart
	$(RENDER) > manifests/install.yaml

manifests-check: # Drift of manifests/install.yaml from the chart; part of check where helm is there
	@if command -v $(HELM) > /dev/null; then \
	  $(RENDER) | diff -u manifests/install.yaml - || { echo "manifests/install.yaml: differs from the chart; run make manifests" >&2; exit 1; }; \
	else echo "manifests-check: skipped, no $(HELM) here"; fi

bench: $(VENV)/.dev ## Print every benchmark, ratios measured side by side in one run
	$(BIN)/python bench/run.py

bench-dualmap: $(VENV)/.dev ## Reproduce the DualMap paper; TRACES="--conversation FILE ..." gives the whole traces
	$(BIN)/python bench/dualmap/run.py $(TRACES)

clean: ## Remove what the targets made
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
