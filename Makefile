# Each target sets up what it needs. `make PYTHON=python3.13 ...` names the interpreter; ARGS="..." goes to the tool.
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
# The stamp is the last thing that set-up writes, so a half-made environment is made again; it carries the interpreter's
# name, so another one is, too.
READY := $(VENV)/ready$(if $(PYTHON),-$(subst /,-,$(PYTHON)))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help check test simulate torture mutate curriculum verify book bench demo constraints clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(READY): pyproject.toml constraints.txt scripts/make_venv
	@scripts/make_venv $(VENV) $(PYTHON)
	$(PY) -m pip install --quiet --require-hashes --requirement constraints.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(PY) -m pip check
	@touch $@

check: $(READY) ## format, lint, types, import contracts, and the rules that scripts/ hold
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m basedpyright
	$(VENV)/bin/lint-imports --no-cache
	$(PY) scripts/verify_source_budget.py
	$(PY) scripts/verify_runtime_dependencies.py
	$(PY) scripts/verify_sql_homes.py
	$(PY) scripts/verify_migrations_frozen.py
	$(PY) scripts/mutate.py --check
	$(PY) scripts/verify_clauses.py
	$(PY) scripts/build_notebooks.py --check

test: $(READY) ## every test, in parallel; ARGS="-k lease" chooses
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

simulate: $(READY) ## every order of a few transactions, then 2,000 seeded histories; ARGS="--scenario lease" chooses
	$(VENV)/bin/sovereign-agent simulate $(ARGS)

torture: $(READY) ## kill real workers on both engines, at random and at named points, and look for lies; ARGS="--engine sqlite"
	$(PY) scripts/torture.py $(ARGS)

mutate: $(READY) ## revert each decisive line in a copy and require that its test goes red; ARGS="--only relay"
	$(PY) scripts/mutate.py $(ARGS)

curriculum: $(READY) ## hold documents to the tree, and run the notebooks on every Python found; ARGS="notebooks --only ch06"
	$(PY) scripts/verify_curriculum.py $(ARGS)

# The shop's demo runs twice on one root: the second run meets whatever the first one left held.
verify: check test curriculum ## all of it: check, test, the curriculum, and the command line as the documents use it
	@box=$$(mktemp -d) && trap 'rm -rf "$$box"' EXIT && set -ex && \
	$(VENV)/bin/sovereign-agent init --root "$$box/organization" && \
	$(VENV)/bin/sovereign-agent doctor --root "$$box/organization" && \
	$(VENV)/bin/sovereign-agent supervisor --root "$$box/organization" --once && \
	$(VENV)/bin/sovereign-agent demo store --mode simulated --root "$$box/shop" && \
	$(VENV)/bin/sovereign-agent demo store --mode simulated --root "$$box/shop"

book: $(READY) ## build the course's notebooks from its chapters
	$(PY) scripts/build_notebooks.py

bench: $(READY) ## measure; ARGS go to the tool
	$(PY) benchmarks/run.py $(ARGS)

demo: $(READY) ## watch a worker die and the organization recover
	$(VENV)/bin/sovereign-agent demo crash

constraints: ## pin the development set anew, with hashes (uses the network); ARGS="--upgrade" moves to the newest
	@box=$$(mktemp -d) && trap 'rm -rf "$$box"' EXIT && \
	scripts/make_venv "$$box" $(PYTHON) && \
	"$$box/bin/python" -m pip install --quiet uv && \
	"$$box/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--group dev --extra live --extra postgres --custom-compile-command 'make constraints' \
		--output-file constraints.txt $(ARGS) pyproject.toml

clean: ## remove the environment, caches and built files
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
