# Everything lives in .venv; nothing needs root, a GPU or a model hub.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready

# The second host has an environment of its own: it needs another transformers.
PETALS_VENV := .venv-petals
PETALS_BIN := $(PETALS_VENV)/bin
PETALS_SETUP := $(PETALS_VENV)/.ready

# The main branches are not on a package index: HOST is a checkout.
HOST ?=
MAIN_VENV := .venv-bloombee-main
MAIN_BIN := $(MAIN_VENV)/bin
MAIN_SETUP := $(MAIN_VENV)/.ready
PETALS_MAIN_VENV := .venv-petals-main
PETALS_MAIN_BIN := $(PETALS_MAIN_VENV)/bin
PETALS_MAIN_SETUP := $(PETALS_MAIN_VENV)/.ready

.PHONY: demo test lint unit swarm-test test-petals test-bloombee-main test-petals-main bench clean

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

# make test-bloombee-main HOST=path/to/BloomBee. On a CPU this host serves no Llama, which the other swarm tests use.
test-bloombee-main: $(MAIN_SETUP)
	OMP_NUM_THREADS=1 $(MAIN_BIN)/python -m pytest -rs -n 2 tests/test_hosts.py tests/test_patching.py \
	  tests/test_patching_refusals.py tests/test_server_plugins.py tests/test_families_qwen3.py -m "not swarm"
	OMP_NUM_THREADS=1 $(MAIN_BIN)/python -m pytest -rs tests/test_bloombee_main.py

# make test-petals-main HOST=path/to/petals
test-petals-main: $(PETALS_MAIN_SETUP)
	OMP_NUM_THREADS=1 $(PETALS_MAIN_BIN)/python -m pytest -rs -n 2 -m "not swarm"
	OMP_NUM_THREADS=1 $(PETALS_MAIN_BIN)/python -m pytest -rs -m swarm tests/test_hosts.py tests/test_swarm_identity.py \
	  tests/test_swarm_sharing.py tests/test_relay_mode.py

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
	$(PETALS_BIN)/python -m pip install --quiet -e ".[petals,api,codecs,dev]"
	$(PETALS_BIN)/python -m pip install --quiet --no-deps petals==2.2.0.post1
	$(PETALS_BIN)/bloombee-spec patch apply
	touch $@

# An environment for the main branch of a host: $(1) where, $(2) its package, $(3) its name.
# --no-build-isolation: the hosts' own build files name nothing that setuptools does not have.
define INSTALL_MAIN
	test -f "$(HOST)/src/$(2)/__init__.py" || (echo "HOST=path to a checkout of $(3) main branch"; exit 1)
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade "pip<26" setuptools wheel
	$(1)/bin/python -m pip install --quiet -r patches/$(2)-main/requirements.txt
	$(1)/bin/python -m pip install --quiet -e ".[api,codecs,dev]"
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation "$(HOST)"
	$(1)/bin/bloombee-spec patch apply
	touch $@
endef

$(MAIN_SETUP): pyproject.toml patches/bloombee-main/requirements.txt
	$(call INSTALL_MAIN,$(MAIN_VENV),bloombee,BloomBee's)

$(PETALS_MAIN_SETUP): pyproject.toml patches/petals-main/requirements.txt
	$(call INSTALL_MAIN,$(PETALS_MAIN_VENV),petals,Petals')

clean:
	rm -rf $(VENV) $(PETALS_VENV) $(MAIN_VENV) $(PETALS_MAIN_VENV) .cache build *.egg-info
