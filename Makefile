# Targets run in .venv, created on first use. Targets that test other versions have their own environments.
PYTHON ?= python3
PIP_FLAGS ?= --quiet --progress-bar off --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo check test docs docs-test newest oldest alone lock bench example arm browser sanitize wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: .venv/.installed ## run the demonstration, into output/demo
	.venv/bin/timm-gated demo --output output/demo

# Tests that a change is most likely to break
CORE = tests/utils tests/layers tests/loss $(addprefix tests/,models/test_models.py inference/test_kernels.py \
	analysis/test_statistics.py project/test_rooms.py)

check: .venv/.installed ## lint, check the types and run the core tests, in less than two minutes
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -n auto $(CORE)

test: .venv/.installed ## lint, check the types and run the tests
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -n auto

# mkdocs warns of a future version of itself unless the variable is set.
docs: export NO_MKDOCS_2_WARNING = 1
docs: .venv/.installed ## build the documentation, into output/site; needs no network
	.venv/bin/mkdocs build --strict --quiet

docs-test: .venv/.installed ## run the tutorials and the notebook, and check the site
	.venv/bin/python -m pytest --show-capture=stdout docs_tests

newest: .venv-newest/.installed ## run the tests with the newest versions of everything
	.venv-newest/bin/python -m pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager pip -e '.[all]'
	.venv-newest/bin/python -m pytest -n auto

oldest: .venv-oldest/.installed ## run the tests with the oldest supported versions, tests/oldest.txt
	.venv-oldest/bin/python -m pytest -n auto

# Test files that need mmsegmentation, found by their imports
NEED_MMSEG = $(shell grep -lE '^(import|from) mm' tests/*/test_*.py)

alone: .venv-alone/.installed ## run the tests of timm_gated without mmsegmentation
	.venv-alone/bin/python -m pytest -n auto $(NEED_MMSEG:%=--ignore=%)

# CUDA packages are left to torch: they depend on the platform.
lock: ## move constraints.txt, the tested versions, to the newest
	rm -rf .venv-newest
	$(MAKE) .venv-newest/.installed
	{ echo '# Versions that make installs and tests. Written by `make lock`.'; \
	.venv-newest/bin/python -m pip freeze --all --exclude-editable | sed -E '/^(nvidia-|cuda-|triton)/d; s/\+.*//'; \
	} > constraints.new
	mv constraints.new constraints.txt

bench: .venv/.installed ## benchmark gated networks against dense runtimes, into output/bench
	.venv/bin/timm-gated bench --output output/bench

SOURCES = $(wildcard timm_gated/csrc/*.c)

example: output/example/classify .venv/.installed ## build the C example with the compiler alone and compare it with Python
	.venv/bin/python examples/compare.py $<

output/example/classify: examples/classify.c $(SOURCES) $(wildcard timm_gated/csrc/*.h timm_gated/csrc/*.inc)
	mkdir -p $(@D)
	$(CC) -std=gnu11 -O3 -fno-math-errno -Itimm_gated/csrc $< $(SOURCES) -pthread -lm -o $@

arm: .venv/.installed ## test the C library for ARM in an emulator (gcc-aarch64-linux-gnu and qemu-user of Debian)
	CC='aarch64-linux-gnu-gcc -static' EMULATOR=qemu-aarch64 .venv/bin/python -m pytest -n auto \
		tests/inference/test_c_library.py tests/inference/test_single_kernels.py

browser: .venv/.installed ## test the explorer's page in Chromium (chromium and chromium-driver of Debian)
	.venv/bin/python -m pytest tests/browser/check_explore.py

sanitize: .venv/.installed ## run the kernel tests under AddressSanitizer and UBSan
	.venv/bin/python tools/dev/sanitize_kernels.py -n auto

wheel: .venv-build/.installed ## build a source distribution and a wheel with kernels, into dist; needs a compiler
	rm -rf dist
	.venv-build/bin/python -m build --no-isolation
	@! ls dist/*-none-any.whl 2> /dev/null || { echo 'error: no compiler: this wheel has no kernels'; exit 1; }
	.venv-build/bin/twine check --strict dist/*

.venv-build/.installed: constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt build setuptools twine
	touch $@

clean: ## remove environments, caches and build products, but not output/ and data/
	rm -rf .venv .venv-newest .venv-oldest .venv-alone .venv-build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A change to these files rebuilds the environments.
PACKAGE = setup.py pyproject.toml timm_gated/version.py $(wildcard timm_gated/csrc/*)

# Extras and version constraints of each environment; the constraints also apply to pip and to builds.
.venv/.installed .venv-newest/.installed .venv-oldest/.installed: EXTRAS = all
.venv-alone/.installed: EXTRAS = analysis,bench,dev
.venv/.installed .venv-alone/.installed: CONSTRAINTS = cat constraints.txt
.venv-newest/.installed: CONSTRAINTS = true
.venv-oldest/.installed: CONSTRAINTS = \
	grep -vE "^($$(sed -nE 's/==.*/|/p' tests/oldest.txt | tr -d '\n'))==" constraints.txt | cat - tests/oldest.txt

.venv/.installed .venv-alone/.installed: constraints.txt
.venv-oldest/.installed: constraints.txt tests/oldest.txt
.venv/.installed .venv-alone/.installed .venv-newest/.installed .venv-oldest/.installed: $(PACKAGE)
	$(PYTHON) -m venv --clear $(@D)
	$(CONSTRAINTS) > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --upgrade -c $(@D)/constraints.txt pip
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(@D)/constraints.txt --build-constraint $(@D)/constraints.txt \
		-e '.[$(EXTRAS)]'
	touch $@
