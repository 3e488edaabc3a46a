# Two commands work on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each process of a run would compile FedSync anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow examples full coverage lint house docs bench soak clean
.DELETE_ON_ERROR:

# PyTorch first and pinned: the plain name would bring gigabytes of CUDA along.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[sim,dev]"
	touch $@

# The main job: FedAvg and LB-BSP on a real SuperLink and five SuperNode processes.
demo: $(STAMP)
	$(BIN)/fedsync compare fedavg lb-bsp --runtime local --set stop.rounds=20 --target-accuracy 0.9 --out runs/demo --overwrite

# Four processes on two cores: much of the time goes by waiting for processes of Flower. A file's tests stay together,
# files begin in the order of tests/parallel.py, and the number of tests is not known before the end.
PYTEST := $(BIN)/python -m pytest -p tests.parallel --numprocesses 4 --dist loadfile --no-loadscope-reorder \
	-o console_output_style=classic

# What each change runs: all tests but those that take about a second or more.
test: $(STAMP)
	$(PYTEST) -m "not slow and not full and not examples"

# The tests that take about a second or more: most of them are federations, some of real processes. CI runs them, too.
slow: $(STAMP)
	$(PYTEST) -m "slow and not full and not examples"

# What needs libraries that FedSync itself does without: adapters to them, and the examples of examples/.
examples: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[examples]"
	$(PYTEST) -m examples tests/client tests/examples

# The size of the code, which tests/test_house.py and tests/test_path.py hold down.
house: $(STAMP)
	$(BIN)/python -m bench.cost.house
	$(BIN)/python -m bench.cost.path

# Everything: also repeats, long runs and the scripts of bench/.
full: lint
	$(PYTEST) -m "not examples"

# Everything, with the lines of fedsync/ that no test runs.
coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, into site/.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The measurements of docs/benchmarks/, one script each.
bench: $(STAMP)
	for script in $$(grep -l '__name__ == "__main__"' bench/*/*.py bench/*/*/*.py | grep -v soak.py); do $(BIN)/python $$script || exit 1; done

# The fault campaign of docs/internals/fault-tests.md, more than an hour: every fault ten times, then a thousand orders.
soak: $(STAMP)
	$(BIN)/python bench/faults/soak.py
	$(BIN)/python bench/faults/soak.py --orders 1000

clean:
	rm -rf $(VENV) runs build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
