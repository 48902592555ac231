# Every target builds .venv from pyproject.toml and constraints.txt when it is missing or stale.
# Needs: make, Python >= 3.11 with venv, and pip's package index. No GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests run in this many processes, one thread each: more threads than cores slow torch down.
WORKERS ?= 2

# The checkout root must stay off sys.path: its kernels/ would shadow Hugging Face's `kernels`.
export PYTHONSAFEPATH := 1

.PHONY: venv demo test lint
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/moelora demo

test: export OMP_NUM_THREADS := 1
test: export MKL_NUM_THREADS := 1
test: lint
	$(BIN)/pytest -q -n $(WORKERS)

# mypy does not follow the editable install's import hook, so it reads a throw-away link tree
# that has the shape of the installed package.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/moelora
	for d in cli slicing kernels validate; do ln -s "../../../$$d" "build/typing/moelora/$$d"; done
	$(BIN)/mypy
