# make demo and make test need only python3 (3.11 or later) and make: they create the environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK := requirements.lock
LOCKED ?=
PYTEST := $(BIN)/pytest tests -n 2 --dist loadfile --no-loadscope-reorder
EVENTS ?=
ROUNDS ?= 4
SMALL := --set passes.max_events=8 --set train.batch_size=8 --set train.threads=1
LIVING := --set passes.max_events=16 --set train.batch_size=16 --set train.threads=1
# Tests start thousands of processes: none of them compiles our modules again, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all check docs bench soak faults lock proto format clean

demo: $(READY)
	$(BIN)/headrace demo $(if $(EVENTS),--events $(EVENTS))

test: $(READY)
	$(PYTEST) -m "not long and not kafka and not slow"

test-all: test
	$(PYTEST) -m "(long or kafka) and not slow"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m headrace.proto.generate --check
	$(BIN)/pytest -q tests/test_tidy.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/docs/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs"

bench: $(READY)
	$(BIN)/python -m tests.bench

soak: $(READY)
	$(PYTEST) -m "not long and not kafka and not slow" --hypothesis-profile soak --timeout 3600
	$(BIN)/pytest tests -m slow --timeout 3600
	$(BIN)/python -m tests.bench --only long-commits memory-curve

faults: $(READY)
	$(BIN)/pytest tests/faults
	rm -rf build/faults && mkdir -p build/faults
	$(BIN)/python -c 'from pathlib import Path; from tests.integration.stream_job import write_job; write_job(Path("build/faults"), num_lines=700)'
	$(BIN)/headrace faults build/faults/job.toml --rounds $(ROUNDS) --set store.mirror=mirror $(SMALL)
	$(BIN)/headrace faults build/faults/job.toml --rounds $(ROUNDS) --set 'cluster={trainers=3,shards=2}' $(SMALL)
	rm -rf build/living && mkdir -p build/living
	$(BIN)/python -c 'from pathlib import Path; from tests.integration.stream_job import write_living_job; write_living_job(Path("build/living"), num_lines=700)'
	$(BIN)/headrace faults build/living/job.toml --rounds 2 $(LIVING)
	$(BIN)/headrace faults build/living/job.toml --rounds 2 --set 'cluster={trainers=3,shards=2}' $(LIVING)
	$(BIN)/headrace faults build/living/job.toml --rounds 1 --operator $(LIVING)

# The versions in the environment. With LOCKED=1 a new environment gets exactly these.
lock: $(READY)
	{ echo "# Written by \`make lock\`: what a run of CI had. pyproject.toml says what is needed."; \
	  $(BIN)/pip freeze --exclude-editable; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)

proto: $(READY)
	$(BIN)/python -m headrace.proto.generate

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or later; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev,docs,kafka,postgres,ray,ui]' $(if $(LOCKED),--constraint $(LOCK))
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
