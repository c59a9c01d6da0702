# make demo and make test need only python3 (3.11 or later) and make: each installs what it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-for-tests
READY_FOR_DEMO := $(VENV)/.ready-for-demo
LOCK := requirements.lock
LOCKED ?=
PYTEST := $(BIN)/pytest tests -n 2 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 2
EVENTS ?=
ROUNDS ?= 4
SMALL := --set passes.max_events=8 --set train.batch_size=8 --set train.threads=1
LIVING := --set passes.max_events=16 --set train.batch_size=16 --set train.threads=1
# Tests start thousands of processes: none of them compiles our modules again, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all check types style docs bench gpu soak faults lock proto reference format release clean

demo: $(READY_FOR_DEMO)
	$(BIN)/headrace demo $(if $(EVENTS),--events $(EVENTS))

test: $(READY)
	$(PYTEST) -m "not long and not kafka and not slow"

test-all: test
	$(PYTEST) -m "(long or kafka) and not slow"

# With -j2 the types, which take half of the time, are checked beside the rest.
check: types style

types: $(READY)
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m headrace.proto.generate --check
	$(BIN)/pytest -q tests/test_tidy.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/docs/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs"

bench: $(READY)
	$(BIN)/python -m tests.bench

# Tests and rates on a GPU, in ten minutes by estimate: DRY=1 prints the plan, DEVICE=cpu runs a small one without a GPU.
gpu: $(READY)
	$(BIN)/python -m tests.bench.gpu $(if $(DRY),--dry) $(if $(DEVICE),--device $(DEVICE))

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
	  $(BIN)/pip freeze --all --exclude pip --exclude-editable; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)

proto: $(READY)
	$(BIN)/python -m headrace.proto.generate

reference: $(READY)
	$(BIN)/python docs/generate.py

release: $(READY)
	rm -rf build/release
	$(BIN)/python -c 'from pathlib import Path; from tests.wheel import build; build(Path("build/release"))'
	$(BIN)/twine check --strict build/release/dist/*
	$(BIN)/check-wheel-contents build/release/dist/*.whl
	$(BIN)/pytest -q tests/e2e/test_wheel.py
	@sed -n '/^## Releases/,/^## /p' CONTRIBUTING.md | sed '$$d'

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

INSTALL = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
  "Headrace needs Python 3.11 or later; run make PYTHON=python3.11")' && $(PYTHON) deploy/environment.py $(VENV)

$(READY): pyproject.toml
	$(INSTALL) dev,docs $(if $(LOCKED),--constraint $(LOCK))
	touch $@ $(READY_FOR_DEMO)

$(READY_FOR_DEMO): pyproject.toml
	$(INSTALL) train,ui $(if $(LOCKED),--constraint $(LOCK))
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
