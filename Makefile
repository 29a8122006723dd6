# Everything lives in .venv; nothing needs root, a GPU or a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready

# The second host has an environment of its own: it needs another transformers.
PETALS_VENV := .venv-petals
PETALS_BIN := $(PETALS_VENV)/bin
PETALS_SETUP := $(PETALS_VENV)/.ready

.PHONY: demo test lint unit swarm-test test-petals bench clean

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

# Two runs: tests that start servers of their own need the cores that the shared swarm would keep busy.
swarm-test: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 -m "swarm and not own_swarm"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 -m own_swarm

# The same tests. Those of what this host does not have are skipped, and the report says which and why.
test-petals: $(PETALS_SETUP)
	OMP_NUM_THREADS=1 $(PETALS_BIN)/python -m pytest -rs -m "not swarm" -n 2
	OMP_NUM_THREADS=1 $(PETALS_BIN)/python -m pytest -rs -m swarm

bench: $(SETUP)
	$(BIN)/python -m benchmarks.compare $(ARGS)

# torch comes first: what depends on it would otherwise choose a build by itself.
$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip<26"
	$(BIN)/python -m pip install --quiet torch==2.13.0 "numpy<2"
	$(BIN)/python -m pip install --quiet -e ".[bloombee,api,bench,codecs,dev]"
	$(BIN)/bloombee-spec patch apply
	touch $@

$(PETALS_SETUP): pyproject.toml
	$(PYTHON) -m venv $(PETALS_VENV)
	$(PETALS_BIN)/python -m pip install --quiet --upgrade "pip<26"
	$(PETALS_BIN)/python -m pip install --quiet torch==2.13.0 "numpy<2"
	$(PETALS_BIN)/python -m pip install --quiet -e ".[petals,codecs,dev]"
	$(PETALS_BIN)/python -m pip install --quiet --no-deps petals==2.2.0.post1
	$(PETALS_BIN)/bloombee-spec patch apply
	touch $@

clean:
	rm -rf $(VENV) $(PETALS_VENV) .cache build *.egg-info
