# `make demo` and `make test` need only Python 3.11 or newer: they make .venv and install everything into it themselves.

PYTHON ?= python3
EXTRAS ?= dev,viz,docs
WORKERS ?= 2
EXAMPLE_SECONDS ?= 1800
SECONDS ?= 60

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LIMIT := $(if $(shell command -v timeout 2>/dev/null),timeout $(EXAMPLE_SECONDS))

# "yes" if the environment's Python runs and finds the package in this very directory; a moved one is made anew.
FIND := import importlib.util as u, os; \
	print("yes" * os.path.samefile(u.find_spec("regard").submodule_search_locations[0], "src/regard"))
USABLE = $(shell $(PY) -c '$(FIND)' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz test-gpu sanitize-gpu check format lint types examples docs bench bench-gpu clean anew

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## look at the built-in model: its heads, what is notable, and a report in report.html
	@$(PY) -m regard inspect --html report.html

# A worker that has nothing left takes tests from another. What Python compiles is kept for the processes that tests start.
# The interpreter's tests run beside the others, which often wait, and their report comes last.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP) ## run the tests and the doctests, and our kernels by Triton's interpreter
	@report=$$(mktemp) || exit; \
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -p no:cacheprovider tests/interpreted >"$$report" 2>&1 & beside=$$!; \
	trap 'rm -f "$$report"' EXIT; trap 'kill $$beside; exit 130' INT TERM HUP; \
	$(PY) -m pytest -n $(WORKERS) --dist worksteal tests --doctest-modules src/regard --ignore=src/regard/kernels; failed=$$?; \
	wait $$beside || failed=$$?; cat "$$report"; exit $$failed

fuzz: $(STAMP) ## hold random problems on every backend against a dense formula, for SECONDS=60 or as long as you like
	TRITON_INTERPRET=1 PYTHONPATH=src:tests/support $(PY) tests/support/fuzz.py $(SECONDS) $(SEED)

test-gpu: ## run the tests that need a CUDA device, with the Python that has it; WORKERS=12 shares them out if pytest-xdist is there
	PYTHONPATH=src $(PYTHON) -m pytest -q -p no:benchmark $(if $(filter-out file,$(origin WORKERS)),-n $(WORKERS) --dist loadgroup) tests/gpu

sanitize-gpu: ## watch small cases of the Hopper kernels with compute-sanitizer, for memory and for races
	PYTHONPATH=src:tests:tests/support $(PYTHON) -m gpu.sanitized memcheck
	PYTHONPATH=src:tests:tests/support $(PYTHON) -m gpu.sanitized racecheck

check: lint types examples docs ## run the linter, the type checker and the examples, and build the docs

format: $(STAMP) ## rewrite the code in the one format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy --strict src/regard

examples: $(STAMP) ## run every example
	@for file in $(sort $(wildcard examples/*.py)); do \
		echo "$$file"; \
		out=$$($(LIMIT) $(PY) $$file 2>&1) || { code=$$?; echo "$$out"; echo "$$file failed with $$code"; exit 1; }; \
	done

docs: $(STAMP) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(STAMP) ## run every benchmark
	@for file in $(sort $(filter-out bench/_%,$(wildcard bench/*.py))); do \
		echo "$$file"; $(PY) $$file || exit 1; \
	done

bench-gpu: ## run the benchmarks that need a CUDA device, or ONLY="names" of them, with the Python that has it
	@failed=; for file in $(or $(ONLY:%=bench/gpu/%.py),$(sort $(filter-out bench/gpu/_%,$(wildcard bench/gpu/*.py)))); do \
		echo "$$file"; PYTHONPATH=src $(PYTHON) $$file || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean: ## remove the environment and everything built
	rm -rf $(VENV) site dist build .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(if $(filter-out help clean,$(or $(MAKECMDGOALS),help)),$(if $(USABLE),,anew))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer; set PYTHON=")'
	@echo "installing into $(VENV); the first time takes minutes"
	$(if $(USABLE),,$(PYTHON) -m venv --clear $(VENV))
	$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

anew:
