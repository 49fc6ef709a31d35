# SPDX-License-Identifier: Apache-2.0
# make demo, make test, make test-integration, make lint, make format, make bench, make clean.
# Each sets up what it needs in $(VENV) first: the packages of requirements/ and this package, editable.
#
#   PYTHON       interpreter to make the environment with (3.10 to 3.13; found if not given)
#   VENV         folder of the environment (.venv)
#   RANKS        ranks of demo and bench (2)
#   BENCH_ARGS   further arguments for benchmarks/step_time.py
#   PYTEST_ARGS  further arguments for pytest, e.g. PYTEST_ARGS="tests/unit/launcher -x"
#   PIP_ARGS     further arguments for pip install, e.g. an index with CPU-only wheels of torch
#   INTEGRATION_VENV, INTEGRATION_ARGS  of test-integration what VENV and PYTEST_ARGS are of test

SHELL := /bin/sh
VENV ?= .venv
RANKS ?= 2
PYTEST_ARGS ?= tests/unit
INTEGRATION_VENV ?= .venv-integration
INTEGRATION_ARGS ?= tests/integration
BENCH_ARGS ?=
PIP_ARGS ?=

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	if $$p -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$p; break; fi; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-integration lint format bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,12s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): requirements/requirements.txt requirements/requirements-dev.txt setup.py pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.10 to 3.13 found. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)" >&2; \
		echo "or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is not a Python 3.10 to 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu they are a package of their own:" >&2; \
		echo "  apt-get install python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2; \
		exit 1; }
	@echo "==> 1/3 environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> 2/3 requirements (torch is large: this takes some minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -r requirements/requirements-dev.txt
	@echo "==> 3/3 this package"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

# On CPU unless asked otherwise, so that it runs the same with and without GPUs.
demo: $(STAMP)
	DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu} $(BIN)/deepspeed --num_accelerators $(RANKS) examples/shared_encoder/train.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# In an environment of its own, with the libraries of requirements-integration.txt.
$(INTEGRATION_VENV)/.installed: requirements/requirements.txt requirements/requirements-integration.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(INTEGRATION_VENV)
	$(INTEGRATION_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
		-r requirements/requirements-integration.txt
	$(INTEGRATION_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

test-integration: $(INTEGRATION_VENV)/.installed
	DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu} $(INTEGRATION_VENV)/bin/python -m pytest $(INTEGRATION_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/step_time.py --ranks $(RANKS) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(INTEGRATION_VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
