# `make demo` trains a model, `make test` checks everything, `make chaos` breaks many runs, `make bench` measures how
# long they take. All make their own virtual environment in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test chaos bench colabs clean

demo: .venv/demo.installed
	$(BIN)/python -m jaxloop.examples.digits --workdir=runs/digits

test: .venv/test.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

chaos: .venv/test.installed
	$(BIN)/python tests/chaos.py

bench: .venv/bench.installed
	$(BIN)/python -m benchmarks --output=BENCHMARKS.md

colabs: .venv/test.installed
	$(BIN)/python colabs/execute.py

clean:
	rm -rf .venv runs

.venv/%.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
