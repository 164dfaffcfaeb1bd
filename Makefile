# Two commands do everything: `make demo` and `make test`. Each sets up .venv first, once.
# Settings: GLM5LAB_ENV=gpu|cpu, GLM5LAB_PYTHON=PATH, VLLM_CPU_WHEEL=FILE-or-URL.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-all lab static notebooks clean

help:
	@echo "make setup     create .venv from environment.yml (GPU) or environment-cpu.yml"
	@echo "make demo      set-up, then a GLM-5 GGUF file through every layer to a served answer"
	@echo "make test      set-up, then ruff, mypy, pytest and the notebooks"
	@echo "make test-all  the same with the slow tests"
	@echo "make lab       set-up, then JupyterLab on notebooks/"
	@echo "make clean     remove .venv and caches"

setup:
	@command -v $(PYTHON) >/dev/null || { echo "set-up: there is no $(PYTHON): apt-get install python3 python3-venv (or set PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -m tools.setup_env

demo: setup
	@$(BIN)/glm5lab demo

test: static
	$(BIN)/python -m pytest
	@$(MAKE) --no-print-directory notebooks

test-all: static
	$(BIN)/python -m pytest -m "slow or not slow"
	@$(MAKE) --no-print-directory notebooks

static: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Settings of nbval, and what it does about GPUs and kernels that die: notebooks/pytest.ini, conftest.py.
notebooks: setup
	@$(BIN)/python -m tools.notebooks check
	@$(BIN)/python -m pytest -c notebooks/pytest.ini notebooks

# JUPYTER_PREFER_ENV_PATH: .venv's kernel wins over one of the same name in the home folder.
# LAB: further options of JupyterLab, such as LAB="--no-browser --port=8889". Root, as in containers, has to be allowed.
lab: setup
	@JUPYTER_PREFER_ENV_PATH=1 $(BIN)/jupyter lab --ServerApp.root_dir=notebooks \
	  --LabApp.default_url=/lab/tree/00_environment.ipynb \
	  $$(test "$$(id -u)" != 0 || echo --allow-root) $(LAB)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache glm5lab.egg-info
	find glm5lab tests tools notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
