# demo: one answer from a fresh clone.   test: the test suite.   check: only looks.   fix: repairs what check can repair.
# bench: how fast the answers come.   gpu-check: predictions against this machine's GPU.
# test-optimizers: the rules of optimizers against their libraries, in an environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TYPED := -p memplan.hardware -p memplan.models -p memplan.planner -p memplan.validator \
	-m memplan -m memplan.__main__ -m memplan.errors -m memplan.files -m memplan.units -m memplan.version

.PHONY: help demo test test-optimizers check fix bench gpu-check clean

help:
	@sed -n '1,3s/^# //p' Makefile

demo: $(VENV)/.plain
	@$(BIN)/memplan fit meta-llama/Llama-3.1-8B --gpu rtx-4090 --micro-batch 1 --seq 2048; \
	code=$$?; if [ $$code -gt 1 ]; then exit $$code; fi # 1 says that it does not fit, which is an answer

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

# --no-deps: what some of these libraries declare would replace torch.
test-optimizers:
	$(MAKE) VENV=$(VENV)-optimizers $(VENV)-optimizers/.test
	$(VENV)-optimizers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/optimizer-libraries.txt
	$(VENV)-optimizers/bin/python -m pytest -rs tests/planner/test_optimizers.py tests/planner/test_optimizer_libraries.py \
		tests/planner/test_optimizer_layerwise.py

# mypy takes the folder's name for the package's, so that it reads the package through a link of the right name.
check: $(VENV)/.dev build/types/memplan
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml $(TYPED)
	$(BIN)/lint-imports

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.plain
	$(BIN)/python benchmarks/bench.py

gpu-check: $(VENV)/.plain
	$(BIN)/python -m memplan.validator.gpu_check

clean:
	rm -rf $(VENV) $(VENV)-optimizers build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

build/types/memplan:
	mkdir -p build/types
	ln -sfn ../.. $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.plain: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.plain

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.plain
