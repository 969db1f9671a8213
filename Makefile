# `make demo` and `make test` need Python 3.11 or later and the package registry; no compiler, no root.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-compiled lint format clean

help:  ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/.installed  ## Start a swarm on this machine and let it write a text.
	$(BIN)/swarm demo --once

# Two at once, whole files in their order (those that wait come first), then those that judge time, one by one; both in any case.
# Status 1: tests have failed. With a higher one some did not run, so no list of the failed is left, which .ci/run would read.
WORKERS ?= 2
# A worker that crashes is not replaced: with `loadfile`, pytest-xdist 3.8 then waits for ever.
BESIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

test: $(VENV)/.installed-dev  ## Run the tests.
	@worst=0; set -x; \
	$(BIN)/python -m pytest -m "not slow and not alone" $(BESIDE) || worst=$$?; \
	$(BIN)/python -m pytest -m "alone and not slow" tests/e2e || { last=$$?; [ $$last -le $$worst ] || worst=$$last; }; \
	[ $$worst -le 1 ] || rm -f .pytest_cache/v/cache/lastfailed; \
	exit $$worst

test-slow: $(VENV)/.installed-dev  ## Run the tests that take minutes.
	$(BIN)/python -m pytest -m slow

test-compiled: .venv-compiled/.installed-compiled  ## Run what touches the engine on llama-cpp-python (compiles it, about 4 minutes).
	SWARM_ENGINE=llama-cpp-python .venv-compiled/bin/python -m pytest -m "not slow" $(BESIDE) \
		tests/e2e/test_verify.py tests/swarm/native tests/swarm/experts tests/swarm/backbone tests/swarm/wire tests/swarm/gate

lint: $(VENV)/.installed-dev  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## Mend what can be mended automatically.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environments.
	rm -rf .venv .venv-compiled

.PRECIOUS: %/bin/python %/.installed %/.installed-dev %/.installed-compiled

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "swarm needs Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $*

%/.installed: pyproject.toml | %/bin/python
	$*/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

%/.installed-dev: pyproject.toml | %/bin/python
	$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $*/.installed

%/.installed-compiled: pyproject.toml | %/bin/python
	$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,compiled]'
	@touch $@
