# `make demo` sets up, runs the main study and writes a report; `make test` sets up and runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test coverage soak check docs notebooks package format clean

demo: $(READY)
	$(BIN)/layerjump study smollm2 --text pydoc --tokens 16000 -o demo --force
	@echo "The report is demo/report.html: open it in a browser."

# Two workers with one thread each: many tests start processes, and more threads would compete for the cores. Simulated
# devices need processes of their own.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_simulated_cuda.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=25

# Line and branch coverage (docs/reliability.md lists what the tests leave out on purpose).
coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

# Long tests: kill and starve real runs, damage every kind of file, load the server.
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/programme.py --rounds 20 --seed 1
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz.py --inputs 10000
	OMP_NUM_THREADS=1 EXAMPLES=1000 $(BIN)/python -m pytest --timeout 7200 tests/server/test_openapi.py
	$(BIN)/python benchmarks/page.py --load --seconds 600 --model tests/fixtures/tiny-gpt2

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site, in site/; a broken link or a missing reference is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Run the notebooks on the bundled model, so that they hold the outputs of this version.
notebooks: $(READY)
	$(BIN)/python notebooks/execute.py

# Wheel and source distribution, in dist/.
package: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Install again only when the requirements have changed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,eval,docs]"
	touch $@

clean:
	rm -rf $(VENV) demo site dist
