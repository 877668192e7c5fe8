# Two commands for a fresh machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-models test-pipeline lint bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e ".[test]"
	touch $(STAMP)

demo: setup
	$(BIN)/earmill demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Models and pipeline side by side: two processes on two cores.
test: lint
	$(MAKE) --jobs=2 --output-sync=target test-models test-pipeline

test-models: setup
	$(BIN)/python -m pytest amtcore tests/amtcore

test-pipeline: setup
	$(BIN)/python -m pytest tests --ignore=tests/amtcore

bench: setup
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) demo-out build *.egg-info
