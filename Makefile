# One way in: `make demo` scores an example, `make test` runs the tests. Both set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(wildcard csrc/*.cpp csrc/*.hpp csrc/*.h)

.PHONY: demo test test-long exploits lint bench faults fuzz docs format clean install

demo: install
	$(BIN)/prism-fast score examples/transformer_tiny --data sample --out runs/demo --token-budget 20480

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not long and not exploit"

# The whole runs that CI adds.
test-long: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long"

# Every trick; `make exploits EVERY=8` takes each eighth.
EVERY ?= 1
exploits: install
	PRISM_EXPLOITS_EVERY=$(EVERY) $(BIN)/python -m pytest -n 2 --dist worksteal -m exploit tests/exploits

bench: install
	$(BIN)/python -m benchmarks

# 200 random faults against whole runs; about an hour.
faults: install
	$(BIN)/python -m tests.faults.run --injections 200 --out benchmarks/results/faults.json

fuzz: install
	$(BIN)/python -m tests.fuzz.run --inputs 1000000 --out benchmarks/results/fuzz.json

# The site, with no warning left: site/index.html.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CORE)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CORE)

install: $(STAMP)

# Installed again only when the build inputs change; Python sources are used from the tree (editable).
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt scikit-build-core pybind11 ninja torch
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build runs site
