# Needs GNU make, Python >= 3.10 with venv and pip, and a C compiler. All else comes from the package index.
PYTHON ?= python3
PYTEST_ARGS ?= --numprocesses=auto --maxprocesses=4

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt

# in a clone with core.symlinks=false all that installs or runs something stops here, with one line
# (-I: our types.py must not shadow that of the library)
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
FAULT := $(shell $(PYTHON) -I txl_lightning/_links.py)
$(if $(FAULT),$(error $(FAULT)))
endif

# what each stamp installs, and which stamps it makes up to date
EXTRA_test := [test]
EXTRA_dev := [dev]
GIVES_demo := demo
GIVES_test := demo test
GIVES_dev := demo test dev

.PHONY: help demo test check format clean
.NOTPARALLEL:

help:
	@echo "make demo     install, train the default experiment on the embedded corpus, evaluate, sample"
	@echo "make test     install, run the test suite (PYTEST_ARGS='-m slow' for the slow ones)"
	@echo "make check    install, ruff and mypy"
	@echo "make format   install, let ruff rewrite the files"
	@echo "make clean    remove $(VENV), build products and caches; runs/ stays"

demo: $(VENV)/installed-demo
	@$(BIN)/txl demo

test: $(VENV)/installed-test
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/installed-dev
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/mypy || failed=1; \
	exit $$failed

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find callbacks configs tests txl_lightning -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# the constraints hold for packages that are built here too (DeepSpeed comes as source): older pips read the first
# variable in build environments, newer ones the second
$(VENV)/installed-%: pyproject.toml setup.py $(CONSTRAINTS) | $(BIN)/python
	@echo "installing .$(EXTRA_$*) into $(VENV); the first time takes a minute or more, torch is large"
	@start=$$(date +%s); \
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.$(EXTRA_$*)' && \
	echo "installed in $$(($$(date +%s) - start)) s"
	@touch $(GIVES_$*:%=$(VENV)/installed-%)
