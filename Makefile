# make serve       run a broker from this checkout on 127.0.0.1:25000
# make test        lint, types and the quick tests
# make test-slow   the rest: tests at length, and more examples of each property
# make docs        the documentation as a site, in dist/docs
# make wheel       the wheel, compiled if there is a C compiler; MQKS_COMPILED=0: pure Python
# The environment is made once and installed into again only when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
DB ?= mqks.db
# Tests run side by side in so many processes: they wait half of their time.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 2)
BIN = $(VENV)/bin
PYTEST = $(BIN)/pytest -q -n $(JOBS) --maxprocesses 8

.PHONY: serve test test-slow lint docs wheel clean

serve: $(VENV)/.installed
	$(BIN)/mqks serve --db $(DB)

# Tests start Python often, and what it has compiled is kept for the next time.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: lint
	$(PYTEST) -m "not slow and not lakes"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow or lakes or hypothesis" --hypothesis-profile=full

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/.made
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site . dist/docs

wheel: $(VENV)/.made
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Nothing is compiled for editable installations: nor is the compiler's package got.
docs $(VENV)/.installed $(VENV)/.installed-dev: export MQKS_COMPILED = 0

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "MQKS needs Python 3.11 or newer, and $(PYTHON) is not." \
			"Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) cannot make environments." \
			"On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.made
	@echo "Installing MQKS and what it needs into $(VENV): about half a minute."
	@$(BIN)/python -m pip install --quiet --editable '.[server]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tools/java_classes.py $(VENV)/.made
	@echo "Installing MQKS and all that its tests need into $(VENV): some minutes, once."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m tools.sdists
	$(BIN)/python -m tools.java_classes
	@touch $(VENV)/.installed $@
