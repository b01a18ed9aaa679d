# Everything runs in .venv, which is made on first use; the lanes of other versions in environments of their own.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --progress-bar off --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test oldest alone bench sanitize clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

demo: .venv/.installed ## run the demonstration, into output/demo
	.venv/bin/python tools/demo.py --output output/demo

test: .venv/.installed ## lint, check the types and run the tests
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -n auto

oldest: .venv-oldest/.installed ## run the tests with the oldest versions that are supported, tests/oldest.txt
	.venv-oldest/bin/python -m pytest -n auto

# Files of tests that need mmsegmentation, by their imports; the README has a snippet for it.
NEED_MMSEG = tests/test_readme.py $(shell grep -lE '^(import|from) mm' tests/test_*.py)

alone: .venv-alone/.installed ## run the tests of timm_gated where mmsegmentation is not installed
	.venv-alone/bin/python -m pytest -n auto $(NEED_MMSEG:%=--ignore=%)

bench: .venv/.installed ## time gated networks against all dense runtimes, into output/bench
	.venv/bin/python tools/benchmark_inference.py --output output/bench

sanitize: .venv/.installed ## run the tests of the kernels under AddressSanitizer and UBSan
	.venv/bin/python tools/sanitize_kernels.py -n auto

clean: ## remove the environments, caches and build products; output/ and data/ stay
	rm -rf .venv .venv-oldest .venv-alone build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What an environment is made anew for
PACKAGE = setup.py pyproject.toml timm_gated/version.py $(wildcard timm_gated/csrc/*)

.venv/.installed: $(PACKAGE)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv/bin/python -m pip install $(PIP_FLAGS) -e '.[all]'
	touch $@

.venv-oldest/.installed: $(PACKAGE) tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) -c tests/oldest.txt -e '.[all]'
	touch $@

.venv-alone/.installed: $(PACKAGE)
	$(PYTHON) -m venv .venv-alone
	.venv-alone/bin/python -m pip install $(PIP_FLAGS) --upgrade pip
	.venv-alone/bin/python -m pip install $(PIP_FLAGS) -e '.[analysis,bench,dev]'
	touch $@
