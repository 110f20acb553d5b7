# Needs Python 3.11 to 3.13 and pip; everything else is installed into .venv from the pinned lists in requirements/.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CODE := jaxmllm sharding launch tests $(wildcard benchmarks)
# Two workers by default: each test process holds eight forced devices and their compiled programs.
TEST_WORKERS ?= 2
CPU_DEVICES := JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
SEED ?= 0

.PHONY: help quickstart shapes shapes-unified test test-slow test-exhaustive lint format lock clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   install, make sample data, train a small model on it (minutes, on CPU)"
	@echo "make shapes       make captioned shapes, train a model to draw them, draw and judge (SEED=0)"
	@echo "make shapes-unified   the same for answering questions about pictures and redrawing them"
	@echo "make test         fast tests          make test-slow   the slow ones (and test-exhaustive: more of these)"
	@echo "make lint         ruff and mypy       make format      let ruff rewrite"
	@echo "make lock         resolve requirements/ again from pyproject.toml"

quickstart: $(VENV)/.runtime sample/.made
	rm -rf runs/quickstart
	$(CPU_DEVICES) $(PY) -m jaxmllm train --config configs/quickstart.yaml

# On one device a step takes an eighth less time if glibc keeps freed memory for the next step, but not if
# the process has compiled before, which fragments the heap: so a separate process compiles (docs/performance.md)
KEPT_PAGES = MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=67108864

# Train a config, draw the prompts, judge what was drawn: $(call learn-to-draw,CONFIG,PROMPTS)
define learn-to-draw
	rm -rf runs/$(1)
	began=$$(date +%s) && \
	JAX_PLATFORMS=cpu $(PY) -m jaxmllm train --config configs/$(1).yaml run.seed=$(SEED) --compile-only && \
	$(KEPT_PAGES) JAX_PLATFORMS=cpu $(PY) -m jaxmllm train --config configs/$(1).yaml run.seed=$(SEED) && \
	trained=$$(date +%s) && \
	JAX_PLATFORMS=cpu $(PY) -m jaxmllm draw --run $(CURDIR)/runs/$(1) --jsonl shapes/$(2).jsonl --steps 20 \
		--guidance 2.5 --seed $(SEED) --out runs/$(1)/drawn && \
	drawn=$$(date +%s) && \
	$(PY) -m jaxmllm shapes --judge runs/$(1)/drawn --json runs/$(1)/judged.json \
		--seconds-training $$((trained - began)) --seconds-sampling $$((drawn - trained))
endef

shapes: $(VENV)/.runtime shapes/.made
	$(call learn-to-draw,shapes-clips,draw)

shapes-unified: $(VENV)/.runtime shapes/.made
	$(call learn-to-draw,shapes-unified,edit)

test: $(VENV)/.dev
	$(PY) -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile

test-slow: $(VENV)/.dev
	$(PY) -m pytest -m "slow and not exhaustive" -n $(TEST_WORKERS) --dist loadfile

test-exhaustive: $(VENV)/.dev
	$(PY) -m pytest -m exhaustive -n $(TEST_WORKERS) --dist load $(if $(SHARE),--share $(SHARE))

lint: $(VENV)/.dev
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

lock: $(VENV)/.dev
	$(PY) -m pip install --quiet uv
	$(PY) -m uv pip compile pyproject.toml $(LOCK_FLAGS) --constraints requirements/pins.txt -o requirements/runtime.txt
	$(PY) -m uv pip compile pyproject.toml $(LOCK_FLAGS) --extra dev --constraints requirements/runtime.txt -o requirements/dev.txt

# One list for every supported Python version and platform, without the address of any package index.
LOCK_FLAGS := --quiet --upgrade --universal --python-version 3.11 --fork-strategy fewest \
	--no-annotate --no-header --no-emit-index-url --no-emit-find-links

clean:
	rm -rf $(VENV) sample shapes runs .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "jaxmllm needs Python 3.11 to 3.13; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements/runtime.txt pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r $<
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	$(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

sample/.made: jaxmllm/tools/sample_data.py jaxmllm/tools/sample_media.py | $(VENV)/.runtime
	$(PY) -m jaxmllm sample-data sample
	@touch $@

shapes/.made: $(wildcard jaxmllm/tools/shapes*.py) | $(VENV)/.runtime
	$(PY) -m jaxmllm shapes shapes
	@touch $@
