# `make demo` and `make test` first install everything in .venv. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := runs/demo
MINUTES ?= 4
CONFIG := experiments/demo/demo.yaml

.PHONY: help setup demo check test lint clean
help:
	@echo "make demo   search, derive, retrain and animate on a text that comes with Python (4 minutes on two idle cores; MINUTES=8 for more)"
	@echo "make check  format, lint and the quick tests (under a minute)"
	@echo "make test   format, lint and all tests (about 4 minutes on two idle cores)"
	@echo "make clean  remove $(DEMO) and caches; .venv stays"

setup: $(VENV)/installed
$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

# The command continues if an earlier `make demo` was interrupted.
demo: setup
	$(BIN)/python -m nas.run $(CONFIG) --run $(DEMO) --minutes $(MINUTES)

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "not slow"

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf $(DEMO) build *.egg-info .pytest_cache .ruff_cache
