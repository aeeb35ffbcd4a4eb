"""tasks.jsonl: what is accepted, and the sentence for each way to get it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.tasks import load_tasks
from proxy.pool.errors import UserError
from tests.harness.conftest import HELLO, ROOT, write_tasks


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
        ("[]", "line 2: the object: Expected `object`"),
        (json.dumps(HELLO), "line 2: id 'hello' is used twice"),
        (json.dumps(HELLO | {"id": 7}), "line 2: id: Expected `str`, got `int`"),
        (json.dumps({"id": "b", "instruction": "x"}), "line 2: the object: Object missing required field `verifier`"),
        (json.dumps(HELLO | {"id": "b", "verifier": {}}), "line 2: verifier: Object missing required field `command`"),
        (json.dumps(HELLO | {"id": "b", "timout": 3}), "line 2: the object: Object contains unknown field `timout`"),
        (json.dumps(HELLO | {"id": "b", "timeout": 0}), "line 2: timeout: Expected `float` > 0"),
        (json.dumps(HELLO | {"id": "b", "files": {"../x": ""}}), "line 2: files: '../x' leads out of the sandbox"),
        (json.dumps(HELLO | {"id": "b", "files": {"~//x": ""}}), "line 2: files: '~//x' leads out of the sandbox"),
        (json.dumps(HELLO | {"id": "b", "env": {"A=B": ""}}), "line 2: env: 'A=B' is no name"),
        (json.dumps(HELLO | {"id": "b", "instruction": "x" * 100_001}), "line 2: instruction: 100001 bytes"),
        (b'{"id": "\xff"}', "line 2: not a JSON object"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path: Path, line: str | bytes, sentence: str) -> None:
    path = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    path.write_bytes(path.read_bytes() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError) as raised:
        load_tasks(path)
    assert f"{path} {sentence}" in str(raised.value)


@pytest.mark.parametrize("content, sentence", [(None, "cannot be read"), ("\n\n", "holds no task")])
def test_a_file_without_tasks_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    if content is not None:
        (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_tasks(tmp_path / "tasks.jsonl")
