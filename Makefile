# Two commands matter: `make demo` and `make test`. Each makes its own environment in .venv on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1

.PHONY: demo demo-deploy test test-deploy bench lint package package-bare docs clean

demo: .venv/.installed
	$(BIN)/bpfed run --data digits --rounds 30 --seed 0 --adapt off --calibrate pilot:3 --out runs/demo --overwrite

demo-deploy: .venv/.deploy
	$(BIN)/bpfed deploy demo --out runs/demo-deploy

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Real processes on loopback; minutes, and they want a quiet machine.
test-deploy: .venv/.test
	BPFED_TEST_DEPLOY=1 $(BIN)/python -m pytest tests/deploy/test_real.py tests/deploy/test_socket.py tests/deploy/test_strangers.py

bench: .venv/.test
	$(BIN)/python -m benchmarks

lint: .venv/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy

# Wheel and sdist: built, their contents checked, installed, and run. The second installs all dependencies anew.
package: .venv/.dev
	$(BIN)/python .ci/package.py

package-bare: .venv/.dev
	$(BIN)/python .ci/package.py --bare

# The site, from docs/, docstrings and settings; a warning or a broken link fails it. Open site/index.html.
# With SITE=site/0.12.0 it stands beside other versions, and each page links them.
SITE ?= site
docs: .venv/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -b html -d $(SITE)/.doctrees docs $(SITE)
	$(BIN)/python docs/check_site.py $(SITE)
	$(BIN)/python docs/readability.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bpfed needs Python 3.11 or newer; run e.g. 'make $(MAKECMDGOALS) PYTHON=python3.12'"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt bpfed/__init__.py
	$(PIP_ENV) $(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.deploy: .venv/.installed
	$(PIP_ENV) $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[deploy]'
	touch $@

.venv/.test: .venv/.installed
	$(PIP_ENV) $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

.venv/.dev: .venv/.test
	$(PIP_ENV) $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/.docs: .venv/.deploy
	$(PIP_ENV) $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv runs build site *.egg-info
