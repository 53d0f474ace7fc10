# Needs only make and a Python >= 3.10 with the venv module; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# Handed on as they are: make train ARGS="--env Acrobot-v1", make test PYTEST_ARGS="-k house"
ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
# Training imports few of these modules, and Python compiles each when it is first imported. Tests start many processes, so
# everything is compiled before them.
INSTALL := $(PY) -m pip --disable-pip-version-check install --no-compile -c constraints.txt
# Two stamps: what training needs, and all the rest
TRAINING := $(VENV)/.training
ALL := $(VENV)/.installed
SOURCES := sb3_grpo benchmarks tests docs setup.py

.DEFAULT_GOAL := help
.PHONY: help venv train test test-slow docs lint type format dist release-check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(ALL) ## create .venv and install the package, editable, with all that tests and benchmarks need

# torch comes first so that nothing after it can pick another build: see constraints.txt.
$(TRAINING): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed and $(PYTHON) is {v.major}.{v.minor}: pass another one, make PYTHON=python3.12")'
	@echo '== Installing what training needs into $(VENV), about 1 GB, the first time only: PyTorch'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@echo '== Stable-Baselines3, this package, progress bar and plots'
	$(INSTALL) -e .
	@echo '== Compiling machine code meanwhile'
	$(PY) -m sb3_grpo.compile & $(INSTALL) -e '.[extra]' && wait
	@touch $@

$(ALL): $(TRAINING)
	@echo '== Installing what tests, benchmarks and documentation need, about 1.4 GB more, the first time only'
	$(INSTALL) -e '.[tests,benchmarks]'
	-$(PY) -m compileall -q -j 0 $(VENV)/lib > /dev/null
	@touch $@

train: $(TRAINING) ## train GRPO on CartPole, evaluate it, draw the learning curve, record an animation
	$(PY) -m benchmarks.quickstart $(ARGS)

test: lint type ## lint, type check and run every test that is not slow
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not slow" $(PYTEST_ARGS)

test-slow: $(ALL) ## run the slow tests
	$(PY) -m pytest -n $(JOBS) -m slow $(PYTEST_ARGS)

docs: $(ALL) ## build the documentation into docs/_build/html, warnings being errors
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

lint: $(ALL) ## ruff, black, codespell and proselint, changing nothing
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m black --check -q $(SOURCES)
	$(VENV)/bin/codespell $(SOURCES) *.md
	$(VENV)/bin/proselint check *.md docs/*.md $$(find sb3_grpo benchmarks docs/tour -name '*.py')

type: $(ALL) ## mypy
	$(PY) -m mypy

format: $(ALL) ## sort imports, apply ruff's safe fixes, reformat
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m black -q $(SOURCES)

dist: $(ALL) ## build the wheel and the source archive into dist/ and check their metadata
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

release-check: dist ## install the wheel with the lowest and with the newest versions it allows, and train; minutes, some GB
	PATH="$(abspath $(VENV))/bin:$$PATH" .ci/release

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist docs/_build docs/auto_tour *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
