# Unbroken: the only way to run anything. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PYTHONSAFEPATH := 1
# Tests start thousands of processes: where the machine says not to keep compiled modules, each would compile its own.
export PYTHONDONTWRITEBYTECODE :=
export PYTHON ?= python3.11

BIN := .venv/bin
STAMP := .venv/.setup-done
SOURCES := core sidecar operator local cli tests benchmarks examples tools
TEST_OUTPUT ?= test-output
REPORT = $(TEST_OUTPUT)/$(or $(REPORT_NAME),$@).xml
PYTEST := $(BIN)/python -m pytest

##@ Everyday
.PHONY: help setup test demo check format
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "; print "usage: make TARGET [NAME=value]"} \
	    /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z][a-z0-9-]*:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Make .venv from nothing but Python 3.11 (PYTHON=interpreter); the other targets do it themselves
$(STAMP): requirements-dev.lock pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

test: $(STAMP) ## Run the tests that need nothing but Python: unit, contract, simulation, integration (ARGS=pytest arguments)
	$(PYTEST) -n 3 --dist worksteal -m 'not cluster and not soak and not nightly' tests/unit tests/contract tests/simulation tests/integration \
	    --junitxml=$(REPORT) $(ARGS)

demo: $(STAMP) ## Train on a cluster on this machine and break it in six ways, under 3 minutes (KEEP=1 leaves it up)
	$(BIN)/python -m unbroken_local.demo $(if $(KEEP),--keep)

check: $(STAMP) ## Check format, lint, types, import contracts, Dockerfiles, the lock file, the generated files and the site
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy core sidecar operator local cli tests benchmarks examples tools
	$(BIN)/mypy --python-version 3.10 core sidecar/unbroken/faults sidecar/unbroken/inprocess sidecar/unbroken/launch sidecar/unbroken/memory sidecar/unbroken/keeper sidecar/unbroken/probes
	$(BIN)/lint-imports
	$(BIN)/hadolint --failure-threshold style images/*/Dockerfile
	$(BIN)/python tools/lock.py --check
	@$(MAKE) verify docs

format: $(STAMP) ## Format the code and fix what the linter can fix
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

##@ Generated files
.PHONY: generate verify docs lock
GENERATED = crds/*.yaml charts/unbroken/files/*.yaml charts/unbroken/dashboards/*.json charts/unbroken/README.md docs/reference/*.md docs/metrics.md docs/behaviours.md docs/topology.md \
    docs/topology/*.svg tests/data/messages/*.jsonl

generate: $(STAMP) ## Write the generated files again: CRD, references of API, metrics, values and behaviours, dashboards, pictures
	$(BIN)/python -m unbroken_operator.generate
	$(BIN)/python tools/metrics_reference.py
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tools.dashboards
	$(BIN)/python tools/chart_values.py
	$(BIN)/python tools/cli_reference.py
	$(BIN)/python tools/behaviours.py
	$(BIN)/python tools/record_messages.py
	$(BIN)/python tools/topology_pictures.py

docs: $(STAMP) ## Build the site of the documents into build/docs, and fail on a link or an anchor that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

verify: $(STAMP) ## Write the generated files again and fail when one of them differs
	@before=$$(sha256sum $(GENERATED) 2>/dev/null || true); $(MAKE) generate >/dev/null; \
	after=$$(sha256sum $(GENERATED) 2>/dev/null || true); \
	if [ "$$before" != "$$after" ]; then \
	    echo 'verify: generated files were not up to date; `make generate` has now written them:'; \
	    diff <(echo "$$before") <(echo "$$after") | sed -n 's/^> [0-9a-f]* */  /p'; exit 1; \
	fi

lock: $(STAMP) ## Choose the newest versions again, and write all locks with their hashes
	$(BIN)/python tools/lock.py
	for tool in pip-audit checkov; do \
	    echo $$tool | $(BIN)/uv pip compile - --generate-hashes --no-header --no-annotate --quiet --upgrade \
	        --python $(BIN)/python --output-file tools/scanners/$$tool.lock; \
	done

##@ Supply chain
.PHONY: audit scan
audit: $(STAMP) ## Ask the package index for known vulnerabilities of all that is locked; fails with "not done" where it does not answer
	$(BIN)/python tools/scanners/audit.py

scan: $(STAMP) ## Scan the rendered chart with checkov, for one namespace and for all; each exception is in tools/scanners/exceptions.yaml
	$(WITH_HELM) $(BIN)/python tools/scanners/scan.py

##@ Deeper
.PHONY: cluster-test test-integrations test-torch matrix gpu-check chart-test dashboards-test e2e sim nightly soak bench cost images pictures live-page rendezvous-kill
cluster-test: $(STAMP) ## Run tests that need a real API server (UNBROKEN_TEST_KUBECONFIGS=name=kubeconfig:..., TESTS=folders)
	$(PYTEST) $(or $(TESTS),tests/contract tests/integration) -m cluster --junitxml=$(REPORT) $(ARGS)

WITH_HELM = UNBROKEN_TEST_HELM="$${UNBROKEN_TEST_HELM:-$$(command -v helm || tools/get-helm.sh)}"

OF_RELEASES := $(addprefix -,$(filter older torchtitan,$(RELEASES)))
FRAMEWORKS := .cache/frameworks$(OF_RELEASES)
TORCHTITAN := .cache/frameworks-torchtitan
NAMED := $(if $(filter torchtitan,$(RELEASES)),torchtitan,not torchtitan)
OF_NAMED := $(if $(filter torchtitan,$(RELEASES)),$(addprefix tests/integrations/,test_frameworks.py test_torchtitan.py),tests/integrations --ignore tests/integrations/test_torchtitan.py)
.cache/frameworks%/.setup-done: requirements-integrations%.lock $(STAMP) tools/frameworks.sh
	@tools/frameworks.sh $(@D) $<
	@touch $@
.cache/frameworks/.setup-done: requirements-integrations.lock $(STAMP) tools/frameworks.sh
	@tools/frameworks.sh $(@D) $<
	@touch $@

test-integrations: $(FRAMEWORKS)/.setup-done ## Train with the frameworks of unbroken.integrations and break it, in an environment of its own (RELEASES=older for the oldest ones, RELEASES=torchtitan for that one, ARGS=pytest arguments)
	$(FRAMEWORKS)/bin/python -m pytest -n 2 $(OF_NAMED) -m 'integrations and not soak and not nightly' -k '$(NAMED)' --junitxml=$(REPORT) $(ARGS)

MATRIX := $(CURDIR)/$(TEST_OUTPUT)/matrix.jsonl
matrix: $(FRAMEWORKS)/.setup-done $(TORCHTITAN)/.setup-done ## Compare every framework and kind of parallelism after each fault with a calm run, and write docs/matrix.md; minutes
	@mkdir -p $(TEST_OUTPUT); rm -f $(MATRIX)
	UNBROKEN_MATRIX=$(MATRIX) $(FRAMEWORKS)/bin/python -m pytest tests/integrations/test_frameworks.py tests/integration/inprocess/test_layouts.py -k 'not torchtitan' $(ARGS)
	UNBROKEN_MATRIX=$(MATRIX) $(TORCHTITAN)/bin/python -m pytest tests/integrations/test_frameworks.py -k torchtitan $(ARGS)
	UNBROKEN_MATRIX=$(MATRIX) PYTHONPATH=. $(FRAMEWORKS)/bin/python tools/matrix.py

TORCH ?= 2.15.0
OF_TORCH = .cache/torch-$(TORCH)
test-torch: $(STAMP) ## Run the tests that use torch with another release of it, which is fetched with all of CUDA (TORCH=2.15.0, ARGS=pytest arguments)
	@tools/torch_release.sh $(OF_TORCH) $(TORCH)
	$(OF_TORCH)/bin/python -m pytest -n 2 tests/unit/unbroken tests/integration/inprocess tests/integration/memory tests/integration/torchrun tests/integration/sidecar \
	    -m 'not cluster and not soak and not nightly' --junitxml=$(REPORT) $(ARGS)

gpu-check: $(STAMP) ## Check all that needs a GPU, in under 8 minutes on one: the tests, an abort, 100 restarts; one table in test-output/gpu-check.md
	PYTHONPATH=. $(BIN)/python -m tests.gpu --out $(TEST_OUTPUT)/gpu-check.md

chart-test: $(STAMP) ## Test the chart with helm (fetched if missing), and on the cluster named full in UNBROKEN_TEST_KUBECONFIGS if there is one
	$(WITH_HELM) UNBROKEN_REQUIRE=helm \
	    $(PYTEST) tests/integration/chart --junitxml=$(REPORT) $(ARGS)

dashboards-test: $(STAMP) ## Test alerts with promtool, and each panel on a Prometheus that scrapes a job with faults; needs both, and fails without
	$(WITH_HELM) UNBROKEN_REQUIRE=helm,prometheus \
	    $(PYTEST) tests/integration/chart/test_alert_rules.py tests/e2e/dashboards/test_e2e_dashboards.py --junitxml=$(REPORT) $(ARGS)

e2e: $(STAMP) ## Run the end-to-end tests (on real API servers where UNBROKEN_TEST_KUBECONFIGS names some)
	$(PYTEST) -n 3 tests/e2e -m 'not nightly' --junitxml=$(REPORT) $(ARGS)

sim: $(STAMP) ## Simulate random faults in virtual time (SEEDS=first:last), or show one seed in full (SEED=number); LOOP=1: with cluster and operators alone
	$(if $(LOOP),,PYTHONPATH=. $(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),0:1000)))
	$(if $(LOOP)$(if $(SEED),,1),PYTHONPATH=. $(BIN)/python -m tests.simulation --control-loop $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),0:300)))

NIGHTLY := $(CURDIR)/$(TEST_OUTPUT)/nightly
nightly: $(STAMP) $(FRAMEWORKS)/.setup-done .cache/frameworks-older/.setup-done $(TORCHTITAN)/.setup-done ## Run what is too long for each change: tests marked nightly, more simulated schedules and random trainings, the oldest frameworks; goes on after a failure
	code=0; \
	$(PYTEST) -n 3 --dist worksteal -m 'nightly and not cluster' tests/unit tests/contract tests/simulation tests/integration --junitxml=$(NIGHTLY).xml || code=1; \
	UNBROKEN_SCHEDULES=3000 $(PYTEST) -n 2 tests/simulation/test_simulation.py --junitxml=$(NIGHTLY)-sim.xml || code=1; \
	UNBROKEN_LOOPS=300 $(PYTEST) -n 2 tests/simulation/test_control_loop.py --junitxml=$(NIGHTLY)-loop.xml || code=1; \
	UNBROKEN_TEST_KUBECONFIGS= $(PYTEST) -n 3 tests/e2e -m 'not cluster' --junitxml=$(NIGHTLY)-e2e.xml || code=1; \
	UNBROKEN_RANDOM_TRAININGS=200 $(FRAMEWORKS)/bin/python -m pytest -n 2 tests/integrations/test_random_trainings.py --junitxml=$(NIGHTLY)-random.xml || code=1; \
	UNBROKEN_RANDOM_LOOPS=30 $(FRAMEWORKS)/bin/python -m pytest -n 2 tests/integrations/test_random_loops.py --junitxml=$(NIGHTLY)-random-loops.xml || code=1; \
	.cache/frameworks-older/bin/python -m pytest -n 2 tests/integrations --ignore tests/integrations/test_torchtitan.py -m 'integrations and not soak' -k 'not torchtitan' --junitxml=$(NIGHTLY)-older.xml || code=1; \
	$(TORCHTITAN)/bin/python -m pytest -n 2 tests/integrations/test_torchtitan.py -m nightly --junitxml=$(NIGHTLY)-torchtitan.xml || code=1; \
	exit $$code

soak: $(FRAMEWORKS)/.setup-done ## 1,000 restarts in one process and with FSDP2 and Hugging Face's Trainer, a million messages to all who listen (MESSAGES=number), a million random faults in simulated jobs (SCHEDULES=number), as many in simulated clusters with operators (LOOPS=number), then faults in real jobs (JOBS=number)
	$(PYTEST) tests/integration -m soak $(ARGS)
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations --ignore tests/integrations/test_torchtitan.py -m soak $(ARGS)
	PYTHONPATH=. $(BIN)/python -m tests.fuzzing --messages $(or $(MESSAGES),1000000)
	UNBROKEN_SCHEDULES=$(or $(SCHEDULES),170000) $(PYTEST) -n 2 tests/simulation/test_simulation.py tests/simulation/test_mutations.py --timeout=0 $(ARGS)
	UNBROKEN_LOOPS=$(or $(LOOPS),35000) $(PYTEST) -n 2 tests/simulation/test_control_loop.py --timeout=0 $(ARGS)
	PYTHONPATH=. $(BIN)/python -m tests.soak --seeds 0:$(or $(JOBS),20)

OF_FRAMEWORKS := $(filter integrations,$(BENCH))
bench: $(STAMP) $(if $(OF_FRAMEWORKS),$(FRAMEWORKS)/.setup-done) ## Measure beside the peers on this machine (BENCH=recovery, rendezvous, process_rung, lost_time, memory, memory_copies, assignment, footprint, overhead, health, integrations or control_plane, ARGS=the benchmark's arguments)
	PYTHONPATH=$(CURDIR)/benchmarks:$(CURDIR) $(if $(OF_FRAMEWORKS),$(FRAMEWORKS)/bin,$(BIN))/python benchmarks/$(or $(BENCH),recovery).py $(ARGS)

cost: $(STAMP) ## Measure what a fault costs, ours beside the peers, and what that makes of weeks on a cluster; writes docs/cost.md and README.md; 15 quiet minutes (ARGS="--faults 5": more of them; ARGS=--reuse: only simulate)
	PYTHONPATH=$(CURDIR)/benchmarks $(BIN)/python benchmarks/cost.py $(ARGS)

images: ## Build the container images with buildah (BASE=python image by digest, TAG=tag, ARGS=arguments of buildah build)
	@tools/images.sh "$(BASE)" "$(or $(TAG),0.1.0)" $(ARGS)

pictures: $(STAMP) ## Draw the dashboards of a small fleet that breaks for 8 minutes: docs/dashboards/*.png; needs prometheus, node and chromium
	npm ci --prefix tools/dashboard_pictures --ignore-scripts --no-audit --no-fund
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.fleet --helm "$$(tools/get-helm.sh)" $(ARGS)

live-page: $(STAMP) ## Draw the live page of a job that breaks three times: docs/live-page.png; needs chromium
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tools.recordings.live_page_picture docs/live-page.png

rendezvous-kill: $(STAMP) ## Kill the rendezvous in the middle of a recovery, and record that the training continues: docs/rendezvous-kill.svg
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tools.recordings.rendezvous_kill --svg docs/rendezvous-kill.svg

##@ Cleaning
.PHONY: clean
clean: ## Remove everything that make made, .venv included
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .local-cluster \
	    demo-output digits-checkpoints tools/dashboard_pictures/node_modules $(TEST_OUTPUT) build dist
	find core sidecar operator local cli tests benchmarks examples tools -name __pycache__ -prune -exec rm -rf {} +
	find . -maxdepth 2 -name '*.egg-info' -prune -exec rm -rf {} +
