# Everything lives in .venv; nothing needs root, a GPU or a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready

.PHONY: demo test lint unit swarm-test bench clean

demo: $(SETUP)
	$(BIN)/python -m benchmarks.demo $(ARGS)

test: $(SETUP)
	$(MAKE) lint unit swarm-test

lint: $(SETUP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not swarm" -n 2

swarm-test: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m swarm

bench: $(SETUP)
	$(BIN)/python -m benchmarks.compare $(ARGS)

# torch comes first: what depends on it would otherwise choose a build by itself.
$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip<26"
	$(BIN)/python -m pip install --quiet torch==2.13.0 "numpy<2"
	$(BIN)/python -m pip install --quiet -e ".[bloombee,bench,codecs,dev]"
	$(BIN)/bloombee-spec patch apply
	touch $@

clean:
	rm -rf $(VENV) .cache build *.egg-info
