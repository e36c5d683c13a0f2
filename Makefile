# Every target does all of its own set-up in .venv, with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEVICE ?= cpu
GRID   ?= quick
PIP    := $(BIN)/python -m pip install -q -c constraints.txt
OLDEST := build/triton-oldest
AOT    := bench/results/aot.csv
BUILD  := pyproject.toml setup.py $(wildcard csrc/*)

.PHONY: help demo test test-device lint format bench bench-quick bench-rows bench-page bench-predictions aot train train-biased clean

help:
	@echo "make demo         a trained model writes from fp16, q8, q4 and nf4 caches"
	@echo "make test         all tests"
	@echo "make test-device  the parity tests on DEVICE=cpu|cuda|mps"
	@echo "make lint         formatting, lint, types, layers"
	@echo "make bench        time the ops beside what torch has, ten minutes at most (DEVICE=cpu|cuda)"
	@echo "make bench-quick  the same in about a minute"
	@echo "make bench-rows   the same cases through pytest-benchmark (GRID=quick|cpu|core)"
	@echo "make aot          compile the Triton kernels ahead of time and record what they cost"
	@echo "make train        train both demo models again (close to three hours)"
	@echo "make train-biased give the GQA demo model large key biases again (minutes)"

# torch comes first: the C++ extension is built against it, without build isolation.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy setuptools wheel ninja
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[cli]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch $(BUILD)
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -e '.[lint]' --no-build-isolation
	@touch $@

# The oldest Triton, for compiling only: PYTHONPATH puts it in front of the one in .venv.
$(OLDEST)/.done: constraints-oldest.txt $(VENV)/.torch
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install -q -c constraints-oldest.txt --no-deps --target $(OLDEST) triton
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/caramba-fast demo

test: $(VENV)/.test $(OLDEST)/.done
	$(BIN)/python -m pytest --device=$(DEVICE)

test-device: $(VENV)/.test
	$(BIN)/python -m pytest --device=$(DEVICE) -m device

# import-linter reads an ordinary install: an editable one hides the layers behind a finder.
lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror csrc/*
	$(BIN)/mypy
	rm -rf build/lint
	CARAMBA_FAST_BUILD_CPP=0 $(PIP) --no-deps --no-build-isolation --target build/lint .
	cd build/lint && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*

bench: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.run --device $(DEVICE) --time-limit 480 --out runs/bench-$(DEVICE).csv

bench-quick: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.run --device $(DEVICE) --quick

# What a quiet machine measured, as the page that is in the repository.
bench-page: $(VENV)/.test
	cp runs/bench-$(DEVICE).csv bench/results/$(DEVICE).csv
	cp runs/bench-$(DEVICE).json bench/results/$(DEVICE).json
	$(BIN)/python -m caramba_fast.bench.report $$(ls bench/results/cpu.csv bench/results/cuda.csv 2>/dev/null) > docs/performance.md

bench-rows: $(VENV)/.test
	GRID=$(GRID) $(BIN)/python -m pytest --device=$(DEVICE) tests/bench_rows.py --benchmark-columns=median,iqr,rounds

# What is expected on an H200, from bench/results/aot.csv: to be written before anything is measured.
bench-predictions: $(VENV)/.test
	$(BIN)/python -m caramba_fast.bench.predict

# Each Triton replaces its own rows of the table.
aot: $(VENV)/.test $(OLDEST)/.done
	rm -f $(AOT)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m caramba_fast.bench.aot --out $(AOT)
	$(BIN)/python -m caramba_fast.bench.aot --out $(AOT)

train: $(VENV)/.demo
	for name in gqa dba; do \
		$(BIN)/python examples/train_demo.py --architecture $$name --out runs/demo-$$name && \
		$(BIN)/python examples/demo_card.py runs/demo-$$name --name $$name || exit 1; \
	done

train-biased: $(VENV)/.demo
	$(BIN)/python examples/train_biased.py

clean:
	rm -rf build dist *.egg-info caramba_fast/*.so .pytest_cache .ruff_cache .mypy_cache
