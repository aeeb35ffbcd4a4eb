# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# two test workers: tests/conftest.py says which tests share one
WORKERS ?= -n 2
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-control test test-all check install agents all-agents agents-table clean

demo: install  ## learn the demo tasks from scratch on this machine: minutes, no GPU
	$(BIN)/python examples/demo/run.py runs/demo --seed $(SEED)

demo-control: install  ## the same with rewards shuffled within each group: must not learn
	$(BIN)/python examples/demo/run.py runs/demo-control --seed $(SEED) --control

test: install agents check  ## what CI runs
	$(BIN)/python -m pytest -m "not long" $(WORKERS)

test-all: install all-agents check  ## adds the long tests
	$(BIN)/python -m pytest $(WORKERS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

agents: install  ## the unmodified agent CLIs that tests and examples drive
	$(BIN)/harness agents install mini-swe-agent opencode codex qwen-code

all-agents: agents
	$(BIN)/harness agents install claude-code gemini-cli aider

agents-table: install all-agents  ## every agent at its tasks before a scripted engine, as a table
	BLACKFORGE_AGENTS_TABLE=benchmarks/results/agents.md $(BIN)/python -m pytest tests/harness/test_agents.py

$(VENV)/.installed: pyproject.toml constraints.txt requirements/sglang-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[trainer,sglang-cpu,postgres,ray,parquet,providers,wandb,demo,dev]' --config-settings editable_mode=compat
	$(BIN)/pip install -q --no-deps -r requirements/sglang-cpu.txt
	touch $@

clean:
	rm -rf $(VENV) runs
