# `make demo` trains a model, `make test` runs the fast tests, `make test-slow` runs the other tests, `make lint` checks
# formatting, lint and types, `make chaos` breaks many runs, `make bench` measures speed, and `make test-wheel` and
# `make test-oldest` test a release. Each target creates the virtual environment that it needs, in .venv or (for the
# wheel) in a temporary directory.

# The newest installed Python that all packages of the tests support. JAX 0.11 and newer need 3.12.
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3,$(shell $(name) -c pass 2>/dev/null && echo $(name))))
OLDEST_PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# End the tests if a worker dies. Otherwise pytest-xdist would start another one, and would sometimes wait forever.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo test test-slow lint test-wheel test-oldest chaos bench colabs docs clean

demo: $(VENV)/demo.installed
	$(BIN)/python -m jaxloop.examples.digits --workdir=runs/digits

# To run only some of the tests, set TESTS=tests/test_loop.py, for example.
test: $(VENV)/test.installed
	$(BIN)/python -m pytest $(IN_PARALLEL) -m 'not slow' $(TESTS)

# Some of these tests run pyright.
test-slow: $(VENV)/test.installed $(VENV)/lint.installed
	$(BIN)/python -m pytest $(IN_PARALLEL) -m slow $(TESTS)

# The tools have fixed versions. Types are checked against the packages of the environment, so the tests' are needed too.
lint: $(VENV)/test.installed $(VENV)/lint.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Test the installed wheel: first without optional packages, then with all tests, which are copied to a directory
# without the sources.
ALL_TESTS := tests --pyargs jaxloop
# These tests need files of the source tree.
NEED_SOURCES := --deselect tests/test_docs.py::test_files_and_flags_that_a_page_names_are_there \
  --deselect tests/test_readme.py::test_what_the_readme_points_to_is_there

test-wheel:
	set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	bare="$$scratch/bare/bin/python"; $(PYTHON) -m venv "$$scratch/bare"; \
	mkdir "$$scratch/sources" "$$scratch/outside"; \
	cp -R jaxloop pyproject.toml README.md LICENSE "$$scratch/sources"; \
	"$$bare" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$$scratch" "$$scratch/sources"; \
	wheel=$$(echo "$$scratch"/jaxloop-*.whl); \
	cp -R tests colabs docs benchmarks requirements *.md pyproject.toml Makefile "$$scratch/outside"; \
	cd "$$scratch/outside"; \
	"$$bare" -m pip install --quiet --disable-pip-version-check "$$wheel"; \
	"$$bare" tests/programs/plain_install.py \
	  "$$("$$bare" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	"$$bare" -m pip install --quiet --disable-pip-version-check "$$wheel[test,lint]"; \
	"$$bare" -m pytest $(IN_PARALLEL) $(NEED_SOURCES) $(or $(TESTS),$(ALL_TESTS))

# Test the lowest versions that pyproject.toml allows, on the lowest Python, in a separate environment. Current packages
# (such as Equinox) may call functions that this JAX deprecates, so DeprecationWarnings are ignored.
test-oldest: .venv/oldest/installed
	.venv/oldest/bin/python -m pytest $(IN_PARALLEL) -W ignore::DeprecationWarning $(or $(TESTS),$(ALL_TESTS))

.venv/oldest/installed: pyproject.toml requirements/oldest.txt
	rm -rf .venv/oldest
	$(OLDEST_PYTHON) -m venv .venv/oldest
	.venv/oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/oldest.txt \
	  --editable '.[test,lint]'
	touch $@

chaos: $(VENV)/test.installed
	$(BIN)/python tests/chaos.py

bench: $(VENV)/bench.installed
	$(BIN)/python -m benchmarks --output=BENCHMARKS.md

colabs: $(VENV)/test.installed
	$(BIN)/python colabs/execute.py

docs: $(VENV)/docs.installed
	$(BIN)/python -m sphinx --fail-on-warning --keep-going docs docs/_build

clean:
	rm -rf .venv runs

$(VENV)/%.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
