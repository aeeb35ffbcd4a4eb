# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# four test workers keep two cores busy, as many tests wait (five took no less time); tests/conftest.py says which tests
# share one
WORKERS ?= -n 4
export HF_HUB_OFFLINE := 1
# No GPUs: what make runs, it runs after `make install`, which is for the CPU. PyPI's torch would find them all the same.
export CUDA_VISIBLE_DEVICES :=
# Empty means no: tests start hundreds of processes from these sources, and each would compile them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: site pictures demo demo-control demo-scaffolds everything test test-all short-tests all-tests compiled failed-tests check install install-gpu gpu-packages lock-gpu
.PHONY: agents all-agents agents-table sdks all-sdks clean

demo: install  ## learn the demo tasks from scratch on this machine: minutes, no GPU
	$(BIN)/python examples/demo/run.py runs/demo --seed $(SEED)

demo-control: install  ## the same with rewards shuffled within each group: must not learn
	$(BIN)/python examples/demo/run.py runs/demo-control --seed $(SEED) --control

demo-scaffolds: install  ## two agents are trained, two others evaluated: 25 minutes on two quiet cores
	$(BIN)/harness agents install smolagents mini-swe-agent aider native
	$(BIN)/python examples/scaffolds/learn.py runs/scaffolds --seed $(SEED)

everything: install  ## every part in one small run, which ends with a figure for each: needs Docker and PostgreSQL
	$(BIN)/harness agents install mini-swe-agent codex
	$(BIN)/python examples/everything/run.py runs/everything --seed $(SEED)

# names the tests that failed; kept only of a run that came to its end
FAILED := .pytest_cache/v/cache/lastfailed
# Types are checked beside the tests. A make that tests or installs call gets none of this one's jobs.
ALONE = env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL
TESTS = $(ALONE) $(BIN)/python -m pytest

# Agents are downloaded while types are checked.
test: install  ## what CI runs
	$(MAKE) -j3 check short-tests

test-all: install  ## adds the long tests
	$(MAKE) -j3 check all-tests

short-tests: install agents sdks compiled
	rm -f $(FAILED)
	$(TESTS) -m "not long" $(WORKERS) || { code=$$?; [ $$code = 1 ] || rm -f $(FAILED); exit $$code; }

all-tests: install all-agents all-sdks compiled
	$(TESTS) $(WORKERS)

# Once, before all workers compile the same at the same time: what they import, and the tests as pytest rewrites them.
compiled: install
	$(BIN)/python -m compileall -q -j 0 proxy harness sandboxes trainer
	mkdir -p build
	$(TESTS) -qq --collect-only > build/tests.txt || { cat build/tests.txt; exit 1; }

failed-tests: install check  ## those that failed last time, one after the other
	$(TESTS) -m "not long" --last-failed --last-failed-no-failures none

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: install  ## docs/ as a site in build/site; every warning is an error
	$(BIN)/python -m docs.site.build build/site

POOL ?= runs/demo/pool.db
pictures: install sdks  ## the pictures of docs/dashboard.md again, from a pool of real runs
	$(BIN)/python -m tests.proxy.dashboard.pictures $(POOL) docs/dashboard

install: $(VENV)/.installed

# Both installs use $(VENV), and each takes the other's mark away: their versions of torch differ.
install-gpu: gpu-packages  ## instead of install, on a machine with NVIDIA GPUs: 4.5 GB of wheels
	$(BIN)/pip install -q --no-deps -e . --config-settings editable_mode=compat
	$(BIN)/python -m proxy.engine.toolkit

gpu-packages: $(VENV)/.gpu-packages

lock-gpu:  ## make requirements/gpu.txt again; needs python3.11 and python3.12
	$(PYTHON) requirements/lock.py

agents: install  ## the unmodified agent CLIs that tests and examples drive
	$(ALONE) $(BIN)/harness agents install mini-swe-agent opencode codex qwen-code native

all-agents: agents
	$(ALONE) $(BIN)/harness agents install claude-code gemini-cli aider cline kilo pi claude-agent-sdk deepagents openai-agents pydantic-ai smolagents

sdks: install  ## the SDKs, and the browser's driver, that tests run in an environment of their own
	$(ALONE) $(BIN)/python -m tests.proxy.sdks.environments google_genai playwright

all-sdks: install
	$(ALONE) $(BIN)/python -m tests.proxy.sdks.environments

agents-table: install all-agents all-sdks  ## every agent at its tasks before a scripted engine, as a table
	BLACKFORGE_AGENTS_TABLE=benchmarks/results/agents.md $(BIN)/python -m pytest tests/harness/test_agents.py tests/proxy/sdks/test_frameworks.py

# An earlier install-gpu brought sglang-kernel, for its own torch. Without it `proxy engine` runs on the CPU.
$(VENV)/.installed: pyproject.toml constraints.txt requirements/sglang-cpu.txt
	@echo "installing some 4 GB into $(VENV): 2 to 10 minutes, without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[trainer,sglang-cpu,postgres,ray,parquet,providers,wandb,demo,docs,dev]' --config-settings editable_mode=compat
	$(BIN)/pip install -q --no-compile --no-deps -r requirements/sglang-cpu.txt
	$(BIN)/pip uninstall -qq -y sglang-kernel
	rm -f $(VENV)/.gpu-packages
	touch $@

# The lock is whole, so nothing else may come: with dependencies, pip asks hashes of extras too, which no lock can name.
$(VENV)/.gpu-packages: requirements/gpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --require-hashes --no-deps --only-binary :all: -r requirements/gpu.txt
	rm -f $(VENV)/.installed
	touch $@

clean:
	rm -rf $(VENV) runs
