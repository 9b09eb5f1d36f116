# `make demo` and `make test` set up what they need. PYTHON: a Python from 3.11 on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test files that run side by side: more than two cores, for tests that wait for processes compute nothing meanwhile.
JOBS ?= 6
KERNELS := $(shell grep -rl --include='*.py' 'numba\.njit' planner_service services worker_service)
PIP := $(BIN)/pip --disable-pip-version-check

# Runs tests, `loadfile`: those of one file in one process, for they share what they start. Names those that should be marked slow.
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --cpu-limit 2

.PHONY: help install demo test test-slow test-all test-sglang test-compat mutants test-compose check format stubs settings-page compose-check bench models clean

help:
	@echo "make demo           set up, run the mesh on the shipped models, show what it did"
	@echo "make test           set up, run all tests but those marked slow; under four minutes on two cores; TESTS=... runs these, slow or not"
	@echo "make test-slow      the slow tests: meshes of processes, training, long replays; about as long again"
	@echo "make test-all       both, as CI does"
	@echo "make test-sglang    install SGLang for CPUs in a folder of its own, run the tests against real servers"
	@echo "make test-compat    install LangChain, LiteLLM and OpenAI's npm client in a folder of their own, run the tests with them"
	@echo "make test-compose   build the images and run the tests in real containers (docker, or podman and podman-compose)"
	@echo "make mutants        plant faults in pure and failure-path modules and see whether tests notice; an hour; NAMES=..."
	@echo "make check          ruff, types, import rules, stubs, settings page, buf lint and breaking, vulnerabilities of dependencies"
	@echo "make bench          the benchmarks; JSON and plots under benchmarks/results"
	@echo "make models         train the shipped models anew (hours)"
	@echo "make install        set up everything for development in $(VENV)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What the mesh needs.
$(VENV)/.mesh: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[mesh]'
	@touch $@

# And what developers need besides.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.mesh

install: $(VENV)/.dev

demo: $(VENV)/.mesh
	$(BIN)/penstock demo $(DEMO)

# Once, where processes side by side would each compile their own.
$(VENV)/.kernels: $(VENV)/.dev $(KERNELS)
	$(BIN)/python -m scripts.compile_kernels
	@touch $@

test: $(VENV)/.kernels
	$(PYTEST) $(or $(TESTS),-m "not slow")

# Whole meshes of processes: more of them than this keep each other waiting.
test-slow: JOBS = 4
test-slow: $(VENV)/.kernels
	$(PYTEST) -m slow

# One after the other also with `make -j`.
test-all:
	$(MAKE) test
	$(MAKE) test-slow

test-sglang: $(VENV)/.dev
	tests/support/sglang_cpu/install.sh
	$(BIN)/pytest --sglang -m sglang $(TESTS)

test-compat: $(VENV)/.dev
	tests/compat/install.sh
	$(BIN)/pytest --compat tests/compat $(TESTS)

# PENSTOCK_IMAGE_BUILD_ARGS: more arguments of the image build, where pip needs settings of its own.
test-compose: $(VENV)/.dev
	$(BIN)/pytest --compose -m compose -s $(TESTS)

mutants: $(VENV)/.dev
	$(BIN)/python -m scripts.mutants $(NAMES)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/settings_page.py --check
	$(BIN)/python -m scripts.redis_users --check
	$(BIN)/python -m scripts.audit_dependencies
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python scripts/buf_breaking.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py

settings-page: $(VENV)/.dev
	$(BIN)/python scripts/settings_page.py

# Needs docker compose (the client alone is enough).
compose-check:
	$$(docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) \
		--profile cpu --profile gpu --profile observe config --quiet

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

models: $(VENV)/.dev
	$(BIN)/python -m models.training --work .penstock/models
	$(BIN)/python -m models.training --work .penstock/models --install models/family

clean:
	rm -rf $(VENV) .penstock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
