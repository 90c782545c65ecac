# `make demo` and `make test` do all the set-up that they need, in .venv.

PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint types test-programs test-gpu test-compat test-cluster fuzz paper peers plots clean
.DEFAULT_GOAL := help

help:  ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1 \t/p' Makefile | expand -t 16

demo: $(VENV)/.installed  ## train a language model on 4 workers and measure what they send (about two minutes)
	$(VENV)/bin/parallax run --nproc 4 examples/lm/demo.py $(ARGS)

test: lint types  ## lint, types, and the tests that start no program of their own (minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-programs: $(VENV)/.installed-dev  ## whole programs from the command line, and compiled ones (two to four minutes)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m programs --numprocesses 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev  ## mypy
	$(VENV)/bin/mypy

test-gpu: $(VENV)/.installed-dev  ## the tests that need CUDA devices
	@if $(VENV)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(VENV)/bin/python -m pytest -m gpu $(ARGS); \
	else echo "no CUDA device here: nothing was tested"; fi

test-compat: $(VENV)/.installed-compat  ## models of other libraries, which it installs
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m compat $(ARGS)

test-cluster: $(VENV)/.installed-dev  ## training over shaped links; needs root, and Debian's package iproute2
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m cluster tests/cluster $(ARGS)

FUZZ ?= 300

fuzz: $(VENV)/.installed-dev  ## random programs against one process, as many as FUZZ says
	OMP_NUM_THREADS=1 FUZZ=$(FUZZ) $(VENV)/bin/python -m pytest tests/test_properties.py --timeout 0 $(ARGS)

paper: $(VENV)/.installed  ## write docs/paper.md: predictions and the paper's figures
	$(VENV)/bin/python benchmarks/paper.py

peers:  ## environments of the libraries that benchmarks/evaluate.py compares with, in PEERS (minutes)
	benchmarks/peers/setup.sh

plots: $(VENV)/.installed-bench  ## a page of figures from the results of benchmarks/evaluate.py
	$(VENV)/bin/python benchmarks/plots.py $(wildcard benchmarks/results/*.json)

clean:  ## remove all that make and the tools made, .venv too
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Redone when what is to be installed changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (PyTorch is a large download the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (PyTorch is a large download the first time)"
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-compat: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (PyTorch is a large download the first time)"
	$(PIP) -e '.[dev,compat]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (PyTorch is a large download the first time)"
	$(PIP) -e '.[dev,bench]'
	@touch $@
