# On a fresh machine `make demo` and `make test` do all the set-up. Needs bash and Python 3.10 or newer.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_FLAGS ?=

define CHECK_PYTHON
import sys, sysconfig
if sys.version_info < (3, 10):
    sys.exit("%s is older than Python 3.10; choose another: make PYTHON=/path/to/python3" % sys.executable)
if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
    sys.exit("%s was built without a shared library, which Triton's Python backend needs; use the system's "
             "python3, or one built with --enable-shared: make PYTHON=/path/to/python3" % sys.executable)
endef
export CHECK_PYTHON

.PHONY: demo serve test lint unit repository reproduce

demo: $(INSTALLED)  ## stream one answer through 1 prefill + 1 decode instance, then stop
	@$(BIN)/distserve demo

serve: $(INSTALLED)  ## the same, and stay up
	@$(BIN)/distserve serve

test: lint unit  ## everything that CI runs

lint: $(INSTALLED)
	@echo "ruff";          $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "mypy --strict"; $(BIN)/mypy
	@echo "import-linter"; $(BIN)/lint-imports

unit: $(INSTALLED)
	@$(BIN)/pytest -m "not slow and not gpu and not gpu2" $(PYTEST_FLAGS)

reproduce: $(INSTALLED)  ## measure docs/results.md again, into build/testbed (hours; QUICK=1: minutes; RESUME=1: go on)
	@$(BIN)/distserve testbed $(if $(QUICK),--quick) $(if $(RESUME),--resume)
	@$(BIN)/distserve bench orchestrator --output build/testbed/orchestrator.json

repository: $(INSTALLED)  ## write model_repository/ again
	@$(BIN)/planner generate -o model_repository --no-machine-check

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (minutes on the first run)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
	    -e '.[server,demo,openai,bench,dev]' \
	    | { grep --line-buffered -E '^ *(Downloading|Building|Installing|Successfully)' || true; }
	@touch $@
