# `make demo` and `make test` first install everything in .venv. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO = runs/$(basename $(notdir $(CONFIG)))
MINUTES ?= 4
CONFIG ?= experiments/demo/demo.yaml
PAPER := runs/paper

.PHONY: help setup demo paper check test lint clean
help:
	@echo "make demo   search, derive, retrain and animate on the Bible (4 minutes on two idle cores; MINUTES=8 for more, CONFIG=experiments/demo/python.yaml for program text)"
	@echo "make paper  the method of the paper, arXiv 2009.04534: SuperNet, argmax, training, GIF (6 minutes on two idle cores)"
	@echo "make check  format, lint and the quick tests (under a minute)"
	@echo "make test   format, lint and all tests (about 4 minutes on two idle cores)"
	@echo "make clean  remove $(DEMO), $(PAPER) and caches; .venv stays"

setup: $(VENV)/installed
$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,test]'
	@touch $@

# The command continues if an earlier `make demo` was interrupted.
demo: setup
	$(BIN)/python -m nas.run $(CONFIG) --run $(DEMO) --minutes $(MINUTES)

# The command continues if an earlier `make paper` was interrupted. The search and the training of interleaved, with
# which the found pattern is compared, run at once.
resume = $(if $(wildcard $(PAPER)/$(1)/config.yaml),--resume)
train = $(BIN)/python retrain.py $(1) experiments/paper/paper.yaml --run $(PAPER)/$(2) $(call resume,$(2))
paper: setup
	mkdir -p $(PAPER)
	$(call train,experiments/paper/interleaved.yaml,interleaved) > $(PAPER)/interleaved.log & \
	$(BIN)/python search.py experiments/paper/paper.yaml --run $(PAPER)/search $(call resume,search) && wait
	$(BIN)/python derive.py $(PAPER)/search --force
	$(BIN)/python animate.py $(PAPER)/search
	$(call train,$(PAPER)/search/pattern.yaml,trained) --beside $(PAPER)/interleaved

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "not slow"

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf $(DEMO) $(PAPER) build *.egg-info .pytest_cache .ruff_cache
