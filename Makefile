# The commands of developers and CI. `make` without a target lists the targets.
PYTHON ?= python3
VENV := .venv
DEFAULT_MODELS := balance,activity
MODELS ?= $(or $(BALANCE_MODELS),$(DEFAULT_MODELS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CHECKED := balance_service bench tests deploy
# Quiet, except for errors and warnings: broken links and anchors, and pages that the navigation lacks.
SITE = report=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build 2>&1) || { echo "$$report"; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-all chaos chaos-mutants soak compose-test cluster-test browser-test bench bench-generations bench-quick bench-before check format docs site lock jar-digests audit clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) ## Create .venv, install the locked packages, download the jars

$(READY): pyproject.toml requirements.lock deploy/ivy.xml deploy/jars.sha256 $(wildcard balance_service/spark/java/*.java)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is required; $(PYTHON) is $$($(PYTHON) -V). Choose another with make PYTHON=…"; exit 2; }
	@echo "setting up $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'from balance_service.process.jars import resolve_jars; [resolve_jars(c) for c in ("kafka", "registry")]'
	@$(BIN)/python -c 'from balance_service.spark.jvm import own_jar; own_jar()'
	@$(BIN)/python -m balance_service.spark.class_archive 2>/dev/null || echo "no class archive: instances will start more slowly"
	@touch $@

run: setup ## Broker, registry and two instances on ports 5051 and 5052, until Ctrl-C; MODELS=balance,activity
	@exec env BALANCE_MODELS="$(MODELS)" $(BIN)/balance-service local --instances 2 --sample-events

demo: setup ## A demonstration on a temporary stack, which checks each step; about a minute
	@exec $(BIN)/balance-service demo

test: check ## All checks, unit tests, the main end-to-end tests; about 12 minutes on 2 cores
	@$(BIN)/python -m tests.lanes

test-all: test ## `test`, then the integration tests, the other end-to-end tests and the chaos suite; about 90 minutes on 2 cores
	@$(BIN)/python -m tests.lanes rest

chaos: setup ## A short run of the chaos suite; CHAOS_MINUTES=30 for a long run, CHAOS_BROKERS=3, CHAOS_SEED=… to replay one
	@CHAOS_MINUTES=$(CHAOS_MINUTES) CHAOS_BROKERS=$(CHAOS_BROKERS) CHAOS_SEED=$(CHAOS_SEED) $(BIN)/pytest tests/chaos -s

chaos-mutants: setup ## Plant bugs one at a time, and check that the tests find each
	@$(BIN)/python -m tests.chaos.mutants

soak: setup ## An hour under load: memory, files, threads and sizes level off; SOAK_HOURS=8, SOAK_LEAK=1 plants a leak
	@SOAK_HOURS=$(SOAK_HOURS) SOAK_LEAK=$(SOAK_LEAK) $(BIN)/python -m tests.soak

compose-test: setup ## Test docker-compose.yml on a Docker engine; starts one if none runs (needs root)
	@$(BIN)/python -m tests.compose

cluster-test: setup ## Rebuild on a Spark cluster of three processes, which the test starts; about 3 minutes
	@$(BIN)/pytest tests/integration/test_batch_cluster.py -s

browser-test: setup ## Test the console in Chromium, which must be installed; about 10 minutes; keeps screenshots/
	@$(BIN)/python -m tests.browser

bench: setup ## Compare the service with Kafka Streams, PostgreSQL and Quix Streams; two hours, needs a JDK
	@$(BIN)/python -m bench

bench-generations: setup ## The cost of a rebuild, a comparison and a switch; 8 minutes
	@$(BIN)/python -m bench --only generations

bench-quick: setup ## Under 5 minutes; fails if replay is not 1.5 times as fast as with Kafka Streams
	@$(BIN)/python -m bench --quick

bench-before: setup ## Compare this checkout with an earlier one, about an hour; run `make setup` in BEFORE=FOLDER first
	@$(BIN)/python -m bench --before "$(or $(BEFORE),$(error set BEFORE to the earlier checkout: make bench-before BEFORE=FOLDER))"

check: setup ## Check format, lint, types, import contracts, spelling, and links
	@$(BIN)/ruff format --check --quiet $(CHECKED) && echo "format   ok"
	@$(BIN)/ruff check --quiet $(CHECKED) && echo "lint     ok"
	@$(BIN)/mypy --no-error-summary && echo "types    ok"
	@report=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$report"; exit 1; }; echo "imports  ok"
	@$(BIN)/codespell $(CHECKED) docs samples schemas *.md *.toml *.yml Makefile && echo "spelling ok"
	@$(SITE); echo "links    ok"

format: setup ## Format, and fix lint errors automatically
	@$(BIN)/ruff format $(CHECKED)
	@$(BIN)/ruff check --fix $(CHECKED)

docs: setup ## Generate docs/reference from the product, and the tests in docs/guarantees.md
	@$(BIN)/python -m tests.docs.pages
	@$(BIN)/python -m tests.promises

site: setup ## Build the documentation site in site/, without network; fails on a broken link
	@$(SITE)

lock: setup ## Update requirements.lock
	@$(BIN)/pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate --upgrade --quiet -o requirements.lock

# Without `setup`, which rejects jars whose digests have changed.
jar-digests: ## Download the jars of deploy/ivy.xml, replace those in the package, and write deploy/jars.sha256
	@$(BIN)/python -m balance_service.process.jars > deploy/jars.sha256.new && mv deploy/jars.sha256.new deploy/jars.sha256

audit: setup ## Look up locked packages and jars in a database of advisories; succeeds without network
	@$(BIN)/python -m tests.audit

clean: ## Remove the environment, caches and local data
	rm -rf $(VENV) site screenshots local-data state .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
