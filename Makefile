# Everything a developer or CI runs. `make help` lists the targets.
#
#   PYTHON=python3.12      the interpreter that makes .venv
#   TORCH_PIP_ARGS=…       more pip arguments for torch alone (say, the index of its CPU builds)
#   PYTEST_ARGS="-k name"  more arguments for `make test`

PYTHON ?= python3
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := .ci/constraints.txt
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
LINKS := build/typing/headrace
QUICK := -m "not model and not slow and not gpu"
SOURCES := engine service clients/python tests .ci

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: $(INSTALLED) $(KERNELS) ## make .venv with the pinned dependencies, this tree (editable), the compiled kernels

$(SERVING): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Headrace needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "Could not make $(VENV). On Debian the module comes with: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (torch first: what follows must find the pinned one)"
	$(PIP) install $(TORCH_PIP_ARGS) "$$(grep '^torch==' $(CONSTRAINTS))"
	@echo "Installing what else the server needs (a minute or two without a word)"
	$(PIP) install -q -c $(CONSTRAINTS) setuptools wheel
	$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[server]'
	@touch $@

$(INSTALLED): $(SERVING)
	@echo "Installing the tools for development (some minutes without a word)"
	$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[server,dev]'
	@touch $@

# Without a compiler everything works, more slowly: that is said, and no reason to stop.
$(KERNELS): $(SERVING) $(wildcard engine/native/kernels/*) engine/native/build.py
	@echo "Compiling the kernels for the processor (half a minute to some minutes, once)"
	@$(BIN)/python -m headrace.engine.native.build || \
	  echo "Going on without compiled kernels: slower, and their tests are skipped." >&2
	@touch $@

.PHONY: demo
demo: $(SERVING) $(KERNELS) ## serve a real model and send it twenty requests at once
	@$(BIN)/headrace demo

# ---- checks ----------------------------------------------------------------------------------------

.PHONY: check
check: check-format check-lint check-types check-imports check-stubs check-protos check-docker ## all but the tests

.PHONY: check-format check-lint check-types check-imports check-stubs check-protos check-docker
check-format: $(INSTALLED)
	$(BIN)/ruff format --check .

check-lint: $(INSTALLED)
	$(BIN)/ruff check .

check-types: $(INSTALLED) links
	$(BIN)/mypy -p headrace.engine -p headrace.service -p headrace.clients
	$(BIN)/mypy tests .ci

check-imports: $(INSTALLED) links
	PYTHONPATH=build/typing $(BIN)/lint-imports --no-logo --cache-dir build/import_linter

check-stubs: $(INSTALLED)
	$(BIN)/python .ci/generate_stubs.py --check

check-protos: $(INSTALLED)
	$(BIN)/python .ci/lint_protos.py

check-docker: $(INSTALLED)
	@if $(BIN)/hadolint --version >/dev/null 2>&1; then \
	  echo "hadolint docker/Dockerfile.*"; $(BIN)/hadolint docker/Dockerfile.*; \
	else echo "hadolint does not run on this machine: Dockerfiles not linted"; fi

# mypy and import-linter read the packages under their import names, without a reinstall for a new file.
.PHONY: links
links:
	@mkdir -p $(LINKS)
	@ln -sfn ../../../engine $(LINKS)/engine
	@ln -sfn ../../../service $(LINKS)/service
	@ln -sfn ../../../clients/python $(LINKS)/clients
	@ln -sfn ../../../proto/gen/headrace/v1 $(LINKS)/v1

.PHONY: test
test: install ## the whole test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: install ## the tests that need no model and take no time
	$(BIN)/python -m pytest $(QUICK) $(PYTEST_ARGS)

.PHONY: test-contract
test-contract: install ## engine tests over checks of what CUDA kernels demand, small blocks, then 256
	$(BIN)/python -m pytest --kernel-contract 0 tests/engine tests/e2e $(QUICK) $(PYTEST_ARGS)
	$(BIN)/python -m pytest --kernel-contract 256 tests/e2e $(QUICK) $(PYTEST_ARGS)

.PHONY: coverage
coverage: install ## the tests that need no model, with the branches that they leave out
	$(BIN)/python -m pytest $(QUICK) --cov --cov-report=term $(PYTEST_ARGS)

# ---- changes ---------------------------------------------------------------------------------------

.PHONY: format
format: $(INSTALLED) ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

.PHONY: proto
proto: $(INSTALLED) ## regenerate proto/gen from the protos
	$(BIN)/python .ci/generate_stubs.py

.PHONY: pins
pins: $(INSTALLED) ## write the installed versions into .ci/constraints.txt
	@{ sed -n '/^#/p' $(CONSTRAINTS); \
	   $(PIP) freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+[a-z0-9.]*$$//'; } > $(CONSTRAINTS).new
	@mv $(CONSTRAINTS).new $(CONSTRAINTS)

.PHONY: clean
clean: ## remove all that was built, .venv included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find engine service clients tests proto .ci -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- measurements: one `bench-NAME` target each ----------------------------------------------------
