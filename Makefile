.DEFAULT_GOAL := help
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=

.PHONY: help venv demo test test-long lint fmt proto proto-check settings bench-smoke clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(VENV)/.done ## .venv with pinned versions (PIP_FLAGS goes to pip)

$(VENV)/.done: constraints.txt pyproject.toml setup.py $(wildcard kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'PyTorch and what it needs: up to some GB, minutes without a word from pip'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt setuptools torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@echo 'this package with its C++ kernels, and the other dependencies: a minute or two'
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[model,serve,dev]'
	touch $@

demo: venv ## Agent sessions over the store: without, empty, warm after a restart
	$(BIN)/python -m model_adapter.demo --out out/demo

test: venv ## The whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-long: venv ## The long randomised and kill tests as well
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'long or not long' --long

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: venv ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: venv ## Generate kvstore/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvstore/v1/*.proto

proto-check: venv ## Is kvstore/v1 what proto/ generates?
	$(BIN)/python tests/check_generated.py

settings: venv ## Write docs/settings.md from kvstore/config.py
	$(BIN)/python -c "from kvstore.cli.settings import page; print(page(), end='')" > docs/settings.md

bench-smoke: venv ## Every benchmark at its smoke size
	$(BIN)/python -m benchmarks --smoke

clean: ## Remove what was built
	rm -rf $(VENV) build out *.egg-info kernels/_records*.so
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
