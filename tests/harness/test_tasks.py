"""tasks.jsonl: what is accepted, and the sentence for each way to get it wrong."""

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.tasks import Step, Task, TaskLimits, TaskPart, Verifier, load_tasks, parts_of
from harness.tasks.schema import (
    Artifact,
    Case,
    Checker,
    Collect,
    McpServer,
    Solution,
    TaskImage,
    TaskService,
    VerifierEnvironment,
)
from harness.tasks.verdict_options import Augment, Clean
from proxy.pool.errors import UserError
from tests.harness.conftest import HELLO, ROOT, write_tasks

ANSWERED = {"id": "b", "instruction": "What is 6 * 7?", "domain": "qa", "checker": {"kind": "exact", "answer": "42"}}
WORDS = {"name": "words", "command": ["python3", "words.py"]}
DATABASE = {"name": "db", "image": {"name": "postgres:16"}}
TABLES = {
    "tasks.jsonl": Task,
    "verifier": Verifier,
    "mcp": McpServer,
    "cases": Case,
    "artifacts": Artifact,
    "collect": Collect,
    "environment": VerifierEnvironment,
    "image": TaskImage,
    "services": TaskService,
    "limits": TaskLimits,
    "steps": Step,
    "solution": Solution,
    "clean": Clean,
    "augment": Augment,
    "checker": Checker,
}
"""Heading in docs/tasks.md -> the struct whose fields stand in the table there."""


def test_the_smallest_task_gets_its_defaults(tmp_path: Path) -> None:
    small = {"id": "a", "instruction": "do", "verifier": {"command": "true"}}
    (task,) = load_tasks(write_tasks(tmp_path / "tasks.jsonl", small))
    assert (task.domain, task.timeout, task.verifier.timeout) == ("agent", 600, 120)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.jsonl")), ids=lambda path: path.name)
def test_every_example_is_accepted(path: Path) -> None:
    assert load_tasks(path)


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("{", "line 2: not a JSON object"),
        ("[]", "line 2: expected an object"),
        (json.dumps(HELLO), "line 2: id 'hello' is used twice"),
        (json.dumps(HELLO | {"id": 7}), "line 2: id = 7: expected `str`, got `int`"),
        (json.dumps({"id": "b", "instruction": "x"}), "line 2: verifier: a task of domain 'agent' has none"),
        (json.dumps(HELLO | {"id": "b", "verifier": {}}), "line 2: verifier: a task of domain 'agent' has none"),
        (json.dumps(HELLO | {"id": "b", "timout": 3}), "line 2: unknown key `timout`"),
        (json.dumps(HELLO | {"id": "b", "timeout": 0}), "line 2: timeout = 0: expected `float` > 0"),
        (json.dumps(HELLO | {"id": "b", "files": {"../x": ""}}), "line 2: files: '../x' leads out of the sandbox"),
        (json.dumps(HELLO | {"id": "b", "files": {"~//x": ""}}), "line 2: files: '~//x' leads out of the sandbox"),
        (json.dumps(HELLO | {"id": "b", "env": {"A=B": ""}}), "line 2: env: 'A=B' is no name"),
        (json.dumps(HELLO | {"id": "b", "instruction": "x" * 100_001}), "line 2: instruction: 100001 bytes"),
        (json.dumps(HELLO | {"id": "b", "timeout": -5}), "line 2: timeout = -5: expected `float` > 0"),
        (json.dumps(HELLO | {"id": "b", "domain": "games"}), "line 2: domain = 'games' is unknown; choose from"),
        (json.dumps(HELLO | {"id": "b", "domain": "qa"}), "line 2: checker: a task of domain 'qa' needs one"),
        (
            json.dumps(HELLO | {"id": "b", "services": [{"name": "a b", "image": {}}]}),
            "line 2: services[0].name = 'a b': ",
        ),
        (json.dumps(HELLO | {"id": "b", "services": [{"name": "a", "image": {}}]}), "line 2: services[0].image: names"),
        (json.dumps(HELLO | {"id": "b", "services": [DATABASE, DATABASE]}), "line 2: services[0].name: 'db' is taken"),
        (json.dumps(HELLO | {"id": "b", "image": {}}), "line 2: image: names nothing"),
        (json.dumps(HELLO | {"id": "b", "mcp": [{"name": "a b", "url": "http://m"}]}), "line 2: mcp[0].name = 'a b': "),
        (json.dumps(HELLO | {"id": "b", "mcp": [{"name": "a"}]}), "line 2: mcp[0]: gives no command and url; give one"),
        (json.dumps(HELLO | {"id": "b", "mcp": [WORDS | {"url": "http://m"}]}), "line 2: mcp[0]: gives both a command"),
        (json.dumps(HELLO | {"id": "b", "mcp": [{"name": "a", "url": "m"}]}), "line 2: mcp[0].url: 'm' is no address"),
        (json.dumps(HELLO | {"id": "b", "mcp": [WORDS, WORDS]}), "line 2: mcp[0].name: 'words' is taken"),
        (
            json.dumps(HELLO | {"id": "b", "mcp": [WORDS | {"env": {"A B": ""}}]}),
            "line 2: mcp[0].env: 'A B' is no name",
        ),
        (
            json.dumps(HELLO | {"id": "b", "daemons": True, "verifier": {"command": "x", "environment": {}}}),
            "line 2: verifier.environment: goes with a fresh sandbox; set where = 'fresh'",
        ),
        (
            json.dumps(HELLO | {"id": "b", "verifier": {"command": "x", "artifacts": [{"path": "db:/dump"}]}}),
            "line 2: verifier.artifacts[0].path: 'db' is no service of the task; it has none",
        ),
        (
            json.dumps(
                HELLO
                | {"id": "b", "services": [DATABASE]}
                | {"verifier": {"command": "x", "collect": [{"command": "x", "service": "bd"}]}}
            ),
            "line 2: verifier.collect[0].service: 'bd' is no service of the task; it has db",
        ),
        (
            json.dumps(
                HELLO
                | {"id": "b", "services": [DATABASE]}
                | {"verifier": {"command": "x", "artifacts": [{"path": "db:/../etc"}]}}
            ),
            "line 2: verifier.artifacts[0].path: 'db:/../etc' is no place in the sandbox",
        ),
        (json.dumps(HELLO | {"id": "b", "image": {"directory": "none"}}), "line 2: image.directory: "),
        (json.dumps(HELLO | {"id": "b", "network": "lan"}), "line 2: network = 'lan' is unknown; choose from"),
        (json.dumps(HELLO | {"id": "b", "limits": {"cpus": 0}}), "line 2: limits.cpus = 0: expected `float` > 0"),
        (
            json.dumps(HELLO | {"id": "b", "limits": {"system_calls": ["read"]}}),
            "line 2: limits.system_calls: sandboxes refuse no call 'read'; only these: ptrace, ",
        ),
        (json.dumps(HELLO | {"id": "b", "work": "app"}), "line 2: work: 'app' must be absolute"),
        (json.dumps(HELLO | {"id": "b", "directories": {"/": "."}}), "line 2: directories: '/' is all of the sandbox"),
        (json.dumps(HELLO | {"id": "b", "directories": {"x": "none"}}), "line 2: directories: "),
        (json.dumps(HELLO | {"id": "b", "max_turns": 0}), "line 2: max_turns = 0: expected `int` >= 1"),
        (
            json.dumps(ANSWERED | {"checker": {"kind": "guess"}}),
            "line 2: checker.kind = 'guess' is unknown; choose from",
        ),
        (json.dumps(ANSWERED | {"checker": {"kind": "exact"}}), "line 2: checker.answer: the kind 'exact' needs it"),
        (json.dumps(ANSWERED | {"checker": {"kind": "regex", "pattern": "("}}), "line 2: checker.pattern: '('"),
        (
            json.dumps(ANSWERED | {"checker": {"kind": "regex", "pattern": "(?i)" + "[\u0001-\uffff]" * 9}}),
            "line 2: checker.pattern: 9 ranges of characters that reach beyond ÿ, and at most 8 are quick to compile",
        ),
        (json.dumps(HELLO | {"id": "b", "mcp": [WORDS | {"name": "x\n"}]}), "line 2: mcp[0].name = 'x\\n': "),
        (json.dumps(HELLO | {"id": "b", "services": [DATABASE | {"name": "x\n"}]}), "line 2: services[0].name = "),
        (
            json.dumps(HELLO | {"id": "b", "verifier": {"cases": [{"call": "a:b\n"}]}}),
            "line 2: verifier.cases[0].call = ",
        ),
        (json.dumps(ANSWERED | {"checker": {"kind": "code"}}), "line 2: verifier: goes with the checker kind 'code'"),
        (b'{"id": "\xff"}', "line 2: not a JSON object"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path: Path, line: str | bytes, sentence: str) -> None:
    path = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    path.write_bytes(path.read_bytes() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError) as raised:
        load_tasks(path)
    assert f"{path} {sentence}" in str(raised.value)


@pytest.mark.parametrize("wide", ["\uffff", r"\uffff", r"\U0010ffff", r"\N{HALFWIDTH HANGUL LETTER I}"])
def test_a_pattern_that_takes_long_to_compile_is_refused_at_once(tmp_path: Path, wide: str) -> None:
    """Python goes through each character of a range up to U+FFFF. A file of such lines would take hours."""
    slow = ANSWERED | {"checker": {"kind": "regex", "pattern": f"(?i){f'[b-{wide}]' * (1990 // (len(wide) + 4))}"}}
    path = write_tasks(tmp_path / "tasks.jsonl", slow)
    began = time.process_time()
    with pytest.raises(UserError, match="use fewer of them"):
        load_tasks(path)
    assert time.process_time() - began < 1
    usual = {"kind": "regex", "pattern": r"(?i)[\u4e00-\u9fff-]+\s*[-–—]\s*" + "[一二三]-\\d" * 20}
    (task,) = load_tasks(write_tasks(tmp_path / "tasks.jsonl", ANSWERED | {"checker": usual}))
    assert task.checker is not None and task.checker.pattern == usual["pattern"]


@pytest.mark.parametrize("content, sentence", [(None, "cannot be read"), ("\n\n", "holds no task")])
def test_a_file_without_tasks_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_tasks(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize("heading, struct", TABLES.items(), ids=TABLES)
def test_the_page_describes_every_field_in_order(heading: str, struct: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs/tasks.md").read_text()
    section = re.search(rf"^##+ `{heading}`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert re.findall(r"^\| `(\w+)`", section[1], re.MULTILINE) == list(struct.__struct_fields__)


def test_a_directory_is_relative_to_its_file_and_its_content_is_part_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image/Dockerfile").write_text("FROM a")
    path = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"image": {"directory": "image"}})
    (before,) = load_tasks(path)
    assert before.image == TaskImage(directory=str(tmp_path / "image"))
    (tmp_path / "image/Dockerfile").write_text("FROM b")
    (after,) = load_tasks(path)
    assert before.digest != after.digest and msgspec.structs.replace(before, digest=after.digest) == after


def test_a_step_is_a_task_of_its_own_that_inherits_the_rest(tmp_path: Path) -> None:
    verifier = {"command": "true"}
    steps = [
        {"name": "one", "instruction": "first", "verifier": verifier, "setup": "echo 1", "timeout": 5},
        {"name": "two", "instruction": "second", "verifier": verifier | {"timeout": 7}},
    ]
    line = {"id": "a", "steps": steps, "setup": "echo 0", "files": {"x": "y"}, "env": {"A": "1"}}
    (task,) = load_tasks(write_tasks(tmp_path / "tasks.jsonl", line))
    one, two = (part.task for part in parts_of(task))
    assert (one.instruction, one.setup, one.timeout, one.files) == ("first", "echo 0\necho 1", 5, {"x": "y"})
    assert (two.instruction, two.setup, two.timeout, two.files) == ("second", "", 600, {})
    assert (one.env, two.verifier.timeout) == ({"A": "1"}, 7)
    assert parts_of(one) == (TaskPart(one),)
