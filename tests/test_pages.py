"""Every command of README.md and docs/ is typed here, or stands in ELSEWHERE with the reason.

The commands and files are read from the pages, so a story fails when page and program part. A story puts in what a
reader would: free ports, the reader's own files, fewer steps.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from harness.tasks.sources import load_sources
from proxy.engine.process import free_port
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.read import RolloutFilter, rollouts
from proxy.pool.rollouts.runs import find_run
from tests.conftest import need
from tests.harness.test_agents import need_agent
from tests.test_command_lines import PARSERS
from trainer.config import KINDS, Config, Loss
from trainer.config.monitor import FAMILIES, SCALARS, known
from trainer.config.optimizer import Optimizer

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md", "CONTRIBUTING.md", "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "site"),
)  # fmt: skip
OURS = "make|proxy|harness|trainer|sandboxes|python3? -m"
OTHERS = "python3?|torchrun|apt-get|docker|pip|npm|npx|git|curl|ssh|psql|your-agent"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{OURS}|{OTHERS}) ")
INLINE = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{OURS}) [^=]")
BLANK = re.compile(r"\W*[A-Z_]+\W*|\.\.\.|\W+")
"""An argument that a reader fills in: `NAME`, `FILE...`, `[...]`."""

TESTS = "the test commands themselves"
LONG = "minutes on a quiet machine: tests/test_benchmarks.py, test_demo.py and test_everything.py run the short forms"
MACHINES = "needs other machines: tests/trainer/test_machines.py and tests/sandboxes/docker/test_hosts.py stand in"
GPU = "needs a GPU for its figures: tests/test_gpu_stages.py runs each stage small"
EIGHT_GPUS = "needs a node of eight GPUs: the stories type these commands small, without CUDA_VISIBLE_DEVICES"
OWN_AGENT = "the stories type its two halves: the own agent at tasks, and a run that feeds the trainer"
INSTALLED = "the stories type it with other names: RUNNING"
GIGABYTES = "fetches gigabytes of CUDA wheels: tests/test_gpu_lock.py resolves them"
DOCTORS = "tests/proxy/test_doctor.py and tests/trainer/test_doctor.py type it"
SHARED = "removes bundles that other tests use: tests/sandboxes/docker/test_bundles.py has a daemon of its own"
SYSTEM = "installs system packages: .ci/run does so, and docker/gpu.Dockerfile for a GPU"
VENVS = "makes an environment: `make install` does so, with all extras"
INSTALLS = "the installs that `make test` and `make test-all` begin with"
RUNTIME = "every install of an agent brings it along, so `make agents` does"
RECIPES = "examples/everything/run.py types it: tests/test_everything.py runs a short form of that"
ROLLS_BACK = "needs a run of some steps: tests/trainer/test_rollback.py makes one and types it"
EIGHT_RANKS = "needs eight ranks: tests/trainer/test_four_ranks.py types it with four"
MAKES = "the target runs what a test runs: tests/test_site.py, tests/test_gpu_lock.py or tests/harness/test_agents.py"
PICTURES = "needs a recorded demo: tests/proxy/dashboard/test_pictures.py takes some of a made pool"
SCRUBS = "needs recordings of agents: tests/captures/test_scrub.py makes some and types it"
VERIFIES = "a task's verifier, not for a terminal: tests/harness/test_verifier.py runs such ones"
BATCHES = "imports torch for a small file: tests/pool/test_batches.py"
JUDGED = "tests/harness/test_rescore.py and test_judges.py type it with scripted agents and judges"
HACKS = "tests/harness/test_integrity.py types it with an agent that weakens tests, and asks a scripted judge"
RESAMPLES = "needs a run that has solved its tasks: tests/harness/test_resample.py makes one and types it"
CONTINUES = "only a paused run goes on: tests/trainer/test_monitor.py types both"
DASHBOARD = "goes on until it is stopped: tests/proxy/dashboard/test_command.py types it"
EVALUATES = "needs a trainer that publishes: tests/harness/test_evaluator.py types it, or runs it by its parts"
NATIVE = "tests/harness/native/test_run.py runs it before a scripted model, in two kinds of sandboxes"
SDKS = "tests/harness/test_agents.py runs it, where `make all-agents` has installed it"
VARIED = "tests/harness/test_augmented_prompts.py types it with the agents that `make all-agents` installs"
TRACES = "needs a recorded run: tests/proxy/test_traces.py, test_spans.py and tests/trainer/test_imported.py type it"
ELSEWHERE = {
    "apt-get install g++ git libnuma1 make npm python3-dev python3-venv": SYSTEM,
    "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[postgres]'": VENVS,
    "python3 -m pytest -q tests || exit 1": VERIFIES,
    "make install": INSTALLS,
    "make test-all": TESTS,
    "make agents-table": MAKES,
    "make lock-gpu": MAKES,
    "make site": MAKES,
    "make pictures POOL=runs/demo/pool.db": PICTURES,
    "harness agents install mini-swe-agent codex": INSTALLS,
    "harness agents install runtime": RUNTIME,
    "harness run run.toml": RECIPES,
    "proxy serve engine.toml": RECIPES,
    "trainer launch trainer.toml": RECIPES,
    "trainer launch runs/train.toml --nproc 8": EIGHT_RANKS,
    "trainer rollback train.toml --to 8": ROLLS_BACK,
    "trainer rollback train.toml --to 8 --discard": ROLLS_BACK,
    "python -m benchmarks.warm": LONG,
    "python -m tests.captures.scrub": SCRUBS,
    "proxy pool export runs/pool.db train --format atif --output traces/atif": TRACES,
    "proxy pool export runs/pool.db train --format chat --output traces/chat.jsonl": TRACES,
    "proxy pool export runs/pool.db train --format hf-traces --output traces/hub": TRACES,
    "proxy pool export runs/pool.db train --format otel --endpoint http://127.0.0.1:4318/v1/traces": TRACES,
    "proxy pool import runs/demonstrations.db teacher traces/atif --model runs/tiny": TRACES,
    "harness agents install openai-agents": SDKS,
    "harness run examples/tasks.jsonl --agent openai-agents -n 4": SDKS,
    "harness run examples/tasks.jsonl --agent openai-agents -n 4"
    " --augment shell,locale,tool_names,observations": VARIED,
    "harness agents install native": NATIVE,
    "harness run examples/tasks.jsonl --agent native-threshold -n 4": NATIVE,
    "proxy pool show runs/run-tasks-native-threshold/pool.db 1": NATIVE,
    "harness run tasks.jsonl --agent opencode -n 8 --run-dir runs/train --until-step 100"
    " --eval-tasks heldout.jsonl --proxy http://127.0.0.1:8000": EVALUATES,
    "harness evaluations runs/train": EVALUATES,
    "make demo-scaffolds": LONG,
    "proxy dashboard runs/pool.db": DASHBOARD,
    "proxy dashboard runs/demo/pool.db": DASHBOARD,
    "harness run tasks.jsonl --agent qwen-code --integrity tell": HACKS,
    "harness run tasks.jsonl --agent qwen-code --integrity mask --integrity-judge honesty.toml "
    "--integrity-share 0.05": HACKS,
    "harness run tasks.jsonl --agent qwen-code --reward examples.reward_function:brief": JUDGED,
    "harness run tasks.jsonl --agent qwen-code --reward judge.toml": JUDGED,
    "harness rescore runs/train --reward judge.toml": JUDGED,
    "harness run tasks.jsonl --agent opencode -n 8 --resample first --proxy http://127.0.0.1:8000": RESAMPLES,
    "harness rescore runs/train --reward examples.reward_function:brief --write": JUDGED,
    "trainer continue train.toml": CONTINUES,
    "trainer continue --pool postgresql://HOST/NAME --run mixed": CONTINUES,
    "make demo": LONG,
    "make demo SEED=1": LONG,
    "make demo-control": LONG,
    "make everything": LONG,
    "python examples/everything/run.py runs/everything": LONG,
    "make install-gpu": GIGABYTES,
    "proxy doctor": DOCTORS,
    "proxy doctor runs/serve.toml": DOCTORS,
    "trainer doctor": DOCTORS,
    "trainer doctor runs/train.toml": DOCTORS,
    "proxy pool export runs/pool.db train --step 1 --format slime --output 0.pt": BATCHES,
    "proxy pool export runs/pool.db train --step 1 --format verl --output step-1.pkl": BATCHES,
    "make test": TESTS,
    "make check": TESTS,
    "python -m benchmarks.events --out benchmarks/results/events.json": LONG,
    "python -m benchmarks.repetition --out benchmarks/results/repetition.json": LONG,
    "python benchmarks/async_run.py --out benchmarks/results/async_run.json": LONG,
    "python benchmarks/ceilings.py --out benchmarks/results/ceilings.json": LONG,
    "python benchmarks/context.py --seed 0 --out context.json": LONG,
    "python benchmarks/gateway.py --out benchmarks/results/gateway.json": LONG,
    "python benchmarks/gpu.py --carry wheels": "fetches wheels: tests/test_gpu_stages.py",
    "python benchmarks/gpu.py --stage attention": GPU,
    "python benchmarks/gpu.py --out gpu.json": GPU,
    "python benchmarks/prefixes.py --out benchmarks/results/prefixes.json": LONG,
    "python benchmarks/mtp.py --out benchmarks/results/mtp.json": LONG,
    "python benchmarks/schedule.py --out benchmarks/results/schedule.json --picture docs/schedule.svg": LONG,
    "python benchmarks/signal.py --seed 0": LONG,
    "python benchmarks/signal.py --part hack --quick": LONG,
    "python benchmarks/waiting.py --out benchmarks/results/waiting.json": LONG,
    "python benchmarks/trainer.py --threads 2 --out benchmarks/results/trainer.json": LONG,
    "python benchmarks/tree.py --threads 2 --out benchmarks/results/tree.json": LONG,
    "harness run tasks.jsonl --agent codex --docker unix:///var/run/docker.sock --docker tcp://a:2375=2"
    " --docker tcp://b:2375=1/64": MACHINES,
    "sandboxes gc --docker tcp://a:2375 --docker tcp://b:2375": MACHINES,
    "sandboxes gc --bundles": SHARED,
    "proxy engine engine.toml": MACHINES,
    "proxy serve serve.toml": MACHINES,
    "harness run tasks.jsonl --agent opencode -n 8 --concurrency 64 --run-dir runs/train --until-step 100"
    " --proxy http://127.0.0.1:8000 --pool postgresql://USER@HOST/NAME": MACHINES,
    "harness run tasks.jsonl --agent command --command 'your-agent \"$INSTRUCTION\"' -n 8 --concurrency 64"
    " --run-dir runs/train --until-step 100 --proxy http://127.0.0.1:8000": OWN_AGENT,
    "harness agents install opencode": INSTALLED,
    "harness agents install mini-swe-agent": INSTALLED,
    "harness eval examples/tasks.jsonl --agent opencode --run-dir runs/before"
    " --proxy http://127.0.0.1:8000": EIGHT_GPUS,
    "CUDA_VISIBLE_DEVICES=0,1,2,3 proxy engine runs/serve.toml &": EIGHT_GPUS,
    "CUDA_VISIBLE_DEVICES=4,5,6,7 trainer launch runs/train.toml --steps 0": EIGHT_GPUS,
    "CUDA_VISIBLE_DEVICES=4,5,6,7 trainer logprobs runs/train.toml --run before": EIGHT_GPUS,
    "CUDA_VISIBLE_DEVICES=4,5,6,7 trainer launch runs/train.toml": EIGHT_GPUS,
    "harness run tasks.jsonl --agent opencode -n 8 --concurrency 64 --run-dir runs/qwen --until-step 100"
    " --proxy http://127.0.0.1:8000": EIGHT_GPUS,
    "torchrun --nnodes 4 --node-rank 0 --nproc-per-node 8 --master-addr HEAD --master-port 29500"
    " -m trainer.commands.worker launch /shared/train.toml": MACHINES,
    "torchrun --nnodes 4 --node-rank 1 --nproc-per-node 8 --master-addr HEAD --master-port 29500"
    " -m trainer.commands.worker launch /shared/train.toml": MACHINES,
}

SERVING = (
    "proxy tiny-model runs/tiny",
    "proxy engine runs/serve.toml &",
    "proxy serve runs/serve.toml &",
    "OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any-name your-agent",
)
RUNNING = (
    "harness agents install opencode mini-swe-agent",
    "harness run examples/tasks.jsonl --agent opencode -n 4 --concurrency 2",
    'harness run examples/tasks.jsonl --sandbox process --agent command --command "python3 -I -S'
    ' $PWD/examples/agents/shell_agent.py"',
    "harness watch runs/run-tasks-opencode",
    "harness behaviour runs/run-tasks-opencode",
    "harness eval examples/tasks.jsonl --agent mini-swe-agent --proxy http://127.0.0.1:8000",
    "harness run tasks.jsonl --agent command --command 'your-agent \"$INSTRUCTION\"' --run-dir runs/try"
    " --proxy http://127.0.0.1:8000",
    "harness behaviour runs/try",
    "harness replay runs/train 17 --config runs/serve.toml",
    "harness eval tasks.jsonl --agent mini-swe-agent -n 4 --run-dir runs/difficulty --proxy http://127.0.0.1:8000",
    "harness run tasks.jsonl --agent opencode -n 8 --concurrency 16",
    "harness run run.toml --seed 2",
    "harness resume runs/mixed",
    "harness watch runs/mixed",
    "harness watch --pool postgresql://HOST/NAME --name mixed",
    "harness replay runs/mixed 17 --config runs/serve.toml",
    "harness behaviour runs/mixed",
    "harness behaviour --pool postgresql://HOST/NAME --name mixed --by agent",
    "harness behaviour runs/mixed --event retry_loop",
    "harness validate examples/tasks/harbor",
    "harness validate tasks.jsonl --repeat 3 --concurrency 8",
    "harness validate tasks.jsonl --judge http://127.0.0.1:8000/v1 --judge-model qwen3-32b",
    "sandboxes ls",
    "sandboxes gc",
    "sandboxes gc --host old-machine",
)
TRAINING = (
    "trainer launch runs/train.toml",
    "harness run tasks.jsonl --agent opencode -n 8 --run-dir runs/train --until-step 100 --proxy http://127.0.0.1:8000",
    "harness behaviour runs/train",
    "harness behaviour runs/train --event retry_loop",
    "trainer launch train.toml",
    "trainer logprobs train.toml --run after",
    "trainer inspect train.toml 12",
    "trainer inspect train.toml 12 --html step.html",
    "trainer inspect train.toml 12 --rollout 345",
    "trainer sft warm.toml",
    "proxy pool verify runs/pool.db",
    "proxy pool show runs/pool.db 1",
    "proxy replay runs/serve.toml 1 --port 8001",
    "proxy serve runs/serve.toml --engine http://127.0.0.1:30000 &",
    "trainer launch --proxy http://127.0.0.1:8000",
)
EXPORTING = (
    "proxy pool account runs/pool.db train",
    "proxy pool archive runs/pool.db train --older-than 20 --to runs/archive --drop",
    "proxy pool export runs/pool.db train --format parquet --output train.parquet",
    "proxy pool export runs/pool.db train --output train.jsonl",
    "proxy pool export runs/pool.db train --step 1 --format parquet --output step-1.parquet",
)

YOUR_AGENT = """\
#!{python}
import os
from openai import OpenAI  # OPENAI_BASE_URL and OPENAI_API_KEY from the environment
question = os.environ.get("INSTRUCTION", "What is there?")
reply = OpenAI().chat.completions.create(
    model="any", messages=[{{"role": "user", "content": question}}], max_tokens=16
)
print(reply.choices[0].message.content)
"""
ALWAYS_PASSES = """\
{"id": "any", "instruction": "Look around.", "max_turns": 2, "timeout": 120, "verifier": {"command": "true"}, \
"solution": {"command": "true"}}
"""
REWARDS_THAT_DIFFER = """\
{"id": "chance", "instruction": "Look around.", "max_turns": 2, "timeout": 120, "verifier": {"command": \
"printf '0.%s' $(od -An -N2 -tu2 /dev/urandom) > $REWARD_FILE"}, "solution": {"command": "true"}}
"""
TEACHER = "".join(
    json.dumps(
        {
            "schema_version": "ATIF-v1.8",
            "session_id": name,
            "agent": {"name": "teacher", "version": "1"},
            "steps": [
                {"step_id": 1, "source": "user", "message": "Look around."},
                {"step_id": 2, "source": "agent", "message": f"There is {name}."},
            ],
        }
    )
    + "\n"
    for name in ("a.txt", "b.txt")
)
"""Replies that ended by themselves. Those of a random model are cut by their length, all but a few."""


def commands_of(page: str) -> list[str]:
    """The commands in a page's plain code blocks, without the remarks beside them; lines that go on are joined."""
    commands, block = [], None
    for line in re.sub(r" \\\n\s*", " ", (ROOT / page).read_text()).splitlines():
        if line.startswith("```"):
            block = line[3:] or "plain" if block is None else None
        elif block == "plain" and COMMAND.match(line + " "):
            commands.append(re.split(r"\s+# ", line)[0].strip())
    return commands


def inline_of(page: str) -> set[str]:
    """The commands of our programs that stand inside of a page's sentences."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    spans = (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose))
    return {span for span in spans if INLINE.match(span)}


def is_mention(command: str) -> bool:
    """Whether words in a sentence only name a verb or its options: what a reader would type has arguments besides."""
    program, *words = command.split()
    if program not in PARSERS or "..." in words:
        return program in PARSERS
    _, words = verb_of(program, words)
    after_option = [before.startswith("-") for before in ["", *words]]
    given = (word for word, value in zip(words, after_option, strict=False) if not value and not word.startswith("-"))
    return all(BLANK.fullmatch(word) for word in given)


def verb_of(program: str, words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the verb that these words begin with, and the words behind it."""
    parser = PARSERS[program]()
    while inner := [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]:
        if not words or words[0] not in inner[0].choices:
            break
        parser, words = inner[0].choices[words[0]], words[1:]
    return parser, words


def block_of(page: str, name: str) -> str:
    """The file `name` as the page shows it: in a block of its own, or in a here-document."""
    text = (ROOT / page).read_text()
    shown = re.search(
        rf"(?:cat > {re.escape(name)} <<'END'\n(.*?)^END$|```toml\n# {re.escape(name)}\n(.*?)^```)", text, re.M | re.S
    )
    assert shown, f"{page} shows no {name}"
    return shown[1] or shown[2]


def test_every_command_on_a_page_is_typed_by_a_story_or_has_its_reason() -> None:
    shown = {command for page in PAGES for command in commands_of(page)}
    assert len(shown) > 30
    shown |= {command for page in PAGES for command in inline_of(page) if not is_mention(command)}
    assert shown - {*SERVING, *RUNNING, *TRAINING, *EXPORTING, *ELSEWHERE} == set(), (
        "type it in a story, or say why not"
    )
    assert {*SERVING, *RUNNING, *TRAINING, *EXPORTING, *ELSEWHERE} - shown == set(), "no page shows this any more"


def test_what_a_sentence_names_of_a_program_exists() -> None:
    """Verbs, options, and those of their values that are choices."""
    wrong = []
    for command in {command for page in PAGES for command in inline_of(page) if is_mention(command)}:
        program, *words = command.split()
        parser, rest = verb_of(program, words)
        known = parser._option_string_actions
        options = [(word, value) for word, value in zip(rest, [*rest, ""][1:], strict=True) if word.startswith("-")]
        choices = {word: known[word].choices for word, _ in options if word in known}
        bad = [word for word, value in options if word not in choices]
        bad += [value for word, value in options if choices.get(word) and not BLANK.fullmatch(value or "...")
                and value not in (choices[word] or ())]  # fmt: skip
        wrong += [command] if bad or (rest == words and not options) else []
    assert wrong == []


def test_a_task_on_a_page_is_one_and_fails_an_agent_that_does_nothing(tmp_path: Path) -> None:
    """Another exit status than 0 or 1 would be no verdict, so an idle agent would be masked and not get 0."""
    lines = [line for page in PAGES for line in json_lines(page) if '"verifier"' in line]
    assert len(lines) >= 5
    for number, line in enumerate(lines):
        home = tmp_path / str(number)
        verifier = json.loads(line)["verifier"]
        for directory in verifier.get("directories", {}).values():
            (home / directory).mkdir(parents=True)
        home.mkdir(exist_ok=True)
        (home / "tasks.jsonl").write_text(line)
        [task] = load_sources([str(home / "tasks.jsonl")]).mix.tasks
        if task.verifier.command:
            done = subprocess.run(["sh", "-c", task.verifier.command], cwd=home, capture_output=True, text=True)
            assert done.returncode == 1, f"{task.verifier.command}\n{done.stderr}"


def test_the_task_that_a_reader_validates_has_a_solution_that_passes(tmp_path: Path) -> None:
    [line] = json_lines("docs/tutorials/tasks.md")
    task = json.loads(line)
    for command in (task["solution"]["command"], task["verifier"]["command"]):
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)


def json_lines(page: str) -> list[str]:
    """The lines of a page's JSON blocks that are JSON objects by themselves."""
    blocks = re.findall(r"^```json\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if re.fullmatch(r"\{.*\}", line)]


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = re.compile(rf"(?<![\d.]){re.escape(project['version'])}(?![\d.]*\d)")
    assert [page for page in (*PAGES, "CHANGELOG.md") if own.search((ROOT / page).read_text())] == []


def test_the_changelog_names_every_way_out_of_a_pool_and_into_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    words = ("ATIF", "chat lines", "session traces", "OpenTelemetry", "`proxy pool import`", "Grafana", "Parquet")
    assert [word for word in words if word not in text] == []


def test_the_table_of_the_readme_names_every_page() -> None:
    table = "\n".join(re.findall(r"^\| (docs/.*?) \|", (ROOT / "README.md").read_text(), re.M))
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"docs/{page.name}" not in table] == []


def test_every_pool_in_a_command_is_one_that_a_page_makes() -> None:
    named = {pool for page in PAGES for command in commands_of(page) for pool in re.findall(r"runs/\S+\.db", command)}
    assert named == {
        "runs/pool.db",  # of the README's proxy, which the training runs of all pages use
        "runs/demo/pool.db",  # of `make demo`
        "runs/run-tasks-native-threshold/pool.db",  # of a run that starts its own proxy
        "runs/demonstrations.db",  # of `proxy pool import`
    }


def test_the_table_of_losses_has_the_kinds_and_the_defaults_of_the_code() -> None:
    text = (ROOT / "docs/training.md").read_text().partition("## The loss")[2].partition("\n## ")[0]
    loss, optimizer, config = Loss(), Optimizer(), Config(pool="p", run="r", model="m", output="o")
    defaults = {
        "loss.kind": loss.kind, "loss.cap": loss.bounds[1], "loss.floor": loss.bounds[0], "loss.norm": loss.norm,
        "loss.advantage": loss.advantage, "loss.minibatches": loss.minibatches, "loss.epochs": loss.epochs,
        "loss.kl": loss.kl, "optimizer.lr": optimizer.lr, "optimizer.clip": optimizer.clip,
        "keep_checkpoints": config.keep_checkpoints,
    }  # fmt: skip
    shown = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", text, re.M))
    assert {key: json.loads(shown.get(key, "null")) for key in defaults} == defaults
    assert tuple(re.findall(r"^\| `([a-z0-9_]+)` \| [^`]", text, re.M)) == KINDS


def test_the_pages_say_which_numbers_of_a_step_no_rule_can_read() -> None:
    """The others that no rule can read are no numbers: histograms, names, states."""
    table = (ROOT / "docs/training.md").read_text().partition("\n| metric |")[2].partition("\n\n")[0]
    named = {name for cell in re.findall(r"^\|(.*?)\|", table, re.M) for name in re.findall(r"`([a-z]\w*)`", cell)}
    assert len(named) > 50
    no_numbers = {"staleness_groups", "staleness_tokens", "left_out_so_far", "command_counts", "alarms", "monitor",
                  "monitor_states", "monitor_tasks"}  # fmt: skip
    unread = named - SCALARS - FAMILIES - no_numbers
    [row] = re.findall(r"^\| `figure` \|.*? but not (.*?);", (ROOT / "docs/monitor.md").read_text(), re.M)
    assert unread == set(re.findall(r"`(\w+)`", row)) - {"mtp_acceptance_d"} and not known("mtp_acceptance_1")


class Reader:
    """Somebody in a directory of their own who types what the pages say."""

    def __init__(self, home: Path):
        self.home = home
        self.proxy, self.engine = free_port(), free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        (home / "examples").symlink_to(ROOT / "examples")
        (home / "runs").mkdir()
        (home / "bin").mkdir()
        agent = home / "bin" / "your-agent"
        agent.write_text(YOUR_AGENT.format(python=sys.executable))
        agent.chmod(0o755)
        self._env = os.environ | {"PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def fill_in(self, text: str) -> str:
        """The ports that are free here for the pages' own."""
        return (
            text.replace(":8000", f":{self.proxy}")
            .replace("30000", str(self.engine))
            .replace("port = 8000", f"port = {self.proxy}")
        )

    def types(self, command: str, *replaced: tuple[str, str], status: int = 0) -> str:
        """What the command prints; the test fails with it when the exit status is another."""
        done = subprocess.run(
            ["bash", "-c", self._filled(command, replaced)],
            cwd=self.home, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == status, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout

    def starts(self, command: str, *replaced: tuple[str, str]) -> "subprocess.Popen[bytes]":
        """A command that goes on beside the others until the reader leaves."""
        name = f"log-{len(self._started)}"
        self._started.append(
            subprocess.Popen(
                ["bash", "-c", "exec " + self._filled(command, replaced).removesuffix("&")],
                cwd=self.home, env=self._env, stdout=(self.home / name).open("wb"), stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return self._started[-1]

    def log(self, process: "subprocess.Popen[bytes]") -> str:
        return (self.home / f"log-{self._started.index(process)}").read_text()

    def waits(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        """Until the address answers; the test fails when the process ends before."""
        while True:
            try:
                with urlopen(url, timeout=5):
                    return
            except (URLError, OSError):
                assert process.poll() is None, self.log(process)
                time.sleep(0.2)

    def rollout_of(self, run: str) -> str:
        """The number of the rollout of a run that ended first."""
        results = (self.home / "runs" / run / "results.jsonl").read_text().splitlines()
        return str(json.loads(results[0])["rollout"])

    def leaves(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait()

    def _filled(self, command: str, replaced: tuple[tuple[str, str], ...]) -> str:
        for old, new in replaced:
            assert old in command
            command = command.replace(old, new)
        return self.fill_in(command)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, docker_daemon: str) -> Iterator[Reader]:
    """A reader who has followed the README until an agent of their own was recorded."""
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    for name in ("opencode", "codex", "mini-swe-agent"):
        need_agent(name)
    reader = Reader(tmp_path_factory.mktemp("reader"))
    model, engine, serve, agent = SERVING
    try:
        reader.types(model)
        (reader.home / "runs" / "serve.toml").write_text(reader.fill_in(block_of("README.md", "runs/serve.toml")))
        reader.waits(reader.starts(engine), reader.fill_in("http://127.0.0.1:30000/health"))
        reader.waits(reader.starts(serve), reader.fill_in("http://127.0.0.1:8000/health"))
        reader.types(agent)
        yield reader
    finally:
        reader.leaves()


def run_exists(pool: Path, name: str) -> bool:
    try:
        find_run(open_pool(str(pool)), name)
    except UserError:
        return False
    return True


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_commands_that_run_tasks(reader: Reader) -> None:
    (reader.home / "tasks.jsonl").write_text(ALWAYS_PASSES)
    install, first, process, watch, behaved, evaluate, own, saw, again, difficulty, many, *others = RUNNING
    file, resume, look, afar, replay, did, did_afar, looped, *rest = others
    reader.types(install)
    reader.types(first, ("-n 4", "-n 1"))
    assert "opencode" in reader.types(watch)
    assert "first edit" in reader.types(behaved)
    reader.types(process)
    reader.types(evaluate)
    reader.types(own, ("your-agent", f"{reader.home}/bin/your-agent"), ("--run-dir", "--sandbox process --run-dir"))
    assert "first edit" in reader.types(saw)
    reader.types(again, ("runs/train 17", f"runs/try {reader.rollout_of('try')}"))
    reader.types(difficulty, ("-n 4", "-n 1"))
    reader.types(many, ("-n 8", "-n 1 --run-dir runs/many"))
    settings = block_of("docs/runs.md", "run.toml").replace("group_size = 8", "group_size = 1")
    training = r"^(?:proxy|until_step|eval_tasks) = .*\n"  # no trainer feeds this story
    (reader.home / "run.toml").write_text(re.sub(training, "", settings, flags=re.M))
    reader.types(file)
    reader.types(resume)
    reader.types(look)
    reader.types(afar, ("postgresql://HOST/NAME", "runs/mixed/pool.db"))
    reader.types(replay, ("17 --config runs/serve.toml", "1"))
    assert "first edit" in reader.types(did)
    reader.types(did_afar, ("postgresql://HOST/NAME", "runs/mixed/pool.db"))
    assert "retry_loop is in" in reader.types(looped)
    for command in rest:
        reader.types(command)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_commands_that_train_and_look(reader: Reader) -> None:
    (reader.home / "tasks.jsonl").write_text(REWARDS_THAT_DIFFER)
    launch, work, did, looped, again, logprobs, *inspects, sft, verify, show, replay, serve, without_file = TRAINING
    settings = block_of("docs/cluster.md", "runs/train.toml").replace("steps = 100", "steps = 1")
    (reader.home / "runs" / "train.toml").write_text(reader.fill_in(settings) + "[batch]\ngroups = 1\n")
    config = ("train.toml", "runs/train.toml")
    trainer = reader.starts(launch)
    while not run_exists(reader.home / "runs" / "pool.db", "train"):
        assert trainer.poll() is None, reader.log(trainer)
        time.sleep(0.5)
    reader.types(work, ("-n 8", "-n 2"), ("100", "1"))
    assert trainer.wait() == 0, reader.log(trainer)
    assert "first edit" in reader.types(did)
    assert "retry_loop is in" in reader.types(looped)
    reader.types(again, config)
    reader.types(without_file, ("--proxy", "--output runs/policy --steps 1 --proxy"))  # the same run, which is done
    # the new weights must have sampled something: rollouts that a reader's run would go on with
    reader.types("harness eval tasks.jsonl --agent opencode --proxy http://127.0.0.1:8000 --run-dir runs/after")
    reader.types(logprobs, config)
    rollout = str(next(rollouts(open_pool(str(reader.home / "runs" / "pool.db")), RolloutFilter(first_step=1))).rollout)
    for inspect in inspects:
        reader.types(inspect, config, (" 12", " 1"), *([("345", rollout)] if "345" in inspect else []))
    assert (reader.home / "step.html").stat().st_size > 1000
    warm = block_of("docs/training.md", "warm.toml").replace("max_steps = 400", "max_steps = 2")
    (reader.home / "warm.toml").write_text(warm)
    (reader.home / "teacher.jsonl").write_text(TEACHER)
    reader.types("proxy pool import runs/pool.db teacher teacher.jsonl --model runs/tiny")
    reader.types(sft)
    for command in (verify, show, *EXPORTING):
        reader.types(command)
    assert (reader.home / "train.parquet").stat().st_size > 1000
    playing, beside = free_port(), free_port()
    reader.waits(reader.starts(replay, ("8001", str(playing))), f"http://127.0.0.1:{playing}/health")
    beside_the_first = ("&", f"--port {beside} --sandbox-socket runs/door2/proxy.sock")
    reader.waits(reader.starts(serve, beside_the_first), f"http://127.0.0.1:{beside}/health")
