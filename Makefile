# Every target installs what it needs into .venv first, and only when something that decides about the
# installation has changed. Variables that a user may set:
#   PYTHON=python3.12         the interpreter that .venv is made with (3.11 or later)
#   TORCH='torch==2.13.0'     what pip is asked for, first and alone; README, "Choosing a torch build"
#   VENV=.venv                where the environment lies; VENV=../.venv is one for all releases of a course
#   PYTEST_ARGS='-k pool'     handed to pytest by `make test` and `make soak`
#   SOAK=50                   how many times the examples of a property `make soak` tries

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Tests start hundreds of processes. Without compiled files each one would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PYTEST_ARGS ?=
SOAK ?= 50

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
CODE := mooncake_lite kernels_numba transport store scheduler tests tutorials

.PHONY: help venv labs demo test check bench paper questions soak clean

help:
	@echo "make demo    install, pull the model, start clusters of 4 or 5 ranks, play six scenes (3 to 5 minutes)"
	@echo "make test    install and run every test"
	@echo "make check   format, lint, types, import arrows, quick tests (about a minute)"
	@echo "make bench   run the benchmarks that there are; JSON into bench-results/"
	@echo "make soak    random tests with 50 times their examples, a million requests with faults, 15,000 with drawn"
	@echo "             parameters; new ones each time"
	@echo "make venv    only install"
	@echo "make labs    install only what most labs need, without torch and MPI: 0.5 GB in place of 2"
	@echo "make clean   remove .venv, caches and results; pulled models stay (mooncake-lite cache clear)"

# The stamp is newer than everything that decides about the installation. The choice of torch is part of
# it: its file changes only when the variable does. Python compiles what is imported; all of torch would take
# half a minute. What every worker of pytest imports is compiled once, by the core that pip leaves idle. Numba is
# compiled too: children of labs write no compiled files.
$(STAMP): pyproject.toml constraints.txt Makefile $(VENV)/.torch
	@$(PIP) install --quiet --upgrade pip
	@echo "installing $(TORCH)"
	@$(PIP) install --no-compile '$(TORCH)'
	@{ $(BIN)/python -m compileall -qq $(filter-out tests tutorials,$(CODE)); $(BIN)/python -c 'import torch'; } > /dev/null 2>&1 & \
	$(PIP) install --no-compile -c constraints.txt -e '.[test,gpu]'; \
	$(BIN)/python -c 'import numba.cuda' > /dev/null 2>&1 || :; \
	wait
	@touch $@

$(VENV)/.torch: FORCE | $(BIN)/python
	@if [ "$$(cat $@ 2>/dev/null)" != '$(TORCH)' ]; then echo '$(TORCH)' > $@; fi

.PHONY: FORCE
FORCE:

$(BIN)/python:
	@command -v '$(PYTHON)' > /dev/null || { \
	  echo "make: $(PYTHON) is not there; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$('$(PYTHON)' --version 2>&1) is too old; use 3.11 or later: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; \
	  exit 1; }
	@'$(PYTHON)' -m venv '$(VENV)' || { rm -rf '$(VENV)'; \
	  echo "make: $(PYTHON) -m venv $(VENV) failed; the lines above say why" >&2; exit 1; }

venv: $(STAMP)

# Checks labs, packs and grades them, and runs the simulator and the arena. `make venv` adds the rest.
# GROUPS=kernels also installs the compiler of lab 1.
labs: $(BIN)/python
	@$(PIP) install --quiet --upgrade pip
	@$(PIP) install -c constraints.txt --group labs $(addprefix --group ,$(GROUPS))
	@$(PIP) install --no-deps -e .

demo: $(STAMP)
	@$(BIN)/mooncake-lite demo

# First three files at a time, the longest ones first, as tests/conftest.py deals them out: many tests wait more
# than they compute. Then, two at a time, what is marked `cluster`: tests that watch what processes do within
# seconds, or that need most of the machine. tests/counting.py adds what both have started, and has limits.
# pytest ends with 5 when it collects nothing: a failure, unless PYTEST_ARGS chose from one part.
test: $(STAMP)
	@set +e; \
	export TEST_COUNTS="$$(mktemp -d)"; trap 'rm -rf "$$TEST_COUNTS"' EXIT; \
	run=('$(BIN)/python' -m pytest -p tests.counting); \
	"$${run[@]}" -n 3 -m 'not cluster' $(PYTEST_ARGS); first=$$?; \
	"$${run[@]}" -n 2 -m cluster $(PYTEST_ARGS); second=$$?; \
	case "$$first $$second" in '0 0' | '0 5' | '5 0') ;; *) exit 1 ;; esac; \
	$(BIN)/python -m tests.counting "$$TEST_COUNTS"

# Types are checked beside the tests: without its cache mypy takes 40 s of one core.
check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@types="$$(mktemp)"; trap 'rm -f "$$types"' EXIT; \
	$(BIN)/mypy > "$$types" 2>&1 & mypy=$$!; \
	failed=0; $(BIN)/python -m pytest -q -n 3 -m quick tests || failed=1; \
	wait $$mypy || failed=1; \
	cat "$$types"; exit $$failed

bench: $(STAMP)
	@mkdir -p bench-results
	@for what in kernels transport store scheduler engine ideas predictions simulator goodput faults; do \
	  $(BIN)/mooncake-lite bench $$what --json bench-results/$$what.json; \
	done

# The paper's experiments on the public trace, and their page. MOONCAKE_LITE_TRACES names its folder. Forty runs:
# half an hour on two cores. Results that are there are kept.
paper: $(STAMP)
	@$(BIN)/python docs/tools/make_paper.py "$(MOONCAKE_LITE_TRACES)"

# The questions that the paper leaves open, and their pages. Results that are there are kept; Ctrl-C keeps each run
# that has ended.
questions: $(STAMP)
	@$(BIN)/python docs/tools/make_questions.py

# Property tests, and others that repeat something, with SOAK times their examples, drawn anew. A failure prints
# how to repeat it.
soak: $(STAMP)
	@$(BIN)/python -m pytest --timeout=7200 --soak $(SOAK) $(PYTEST_ARGS)

clean:
	rm -rf '$(VENV)' bench-results build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-tier
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +
