"""No text of an agent's takes the detectors' time: their rules look at it once."""

import json
import time
from typing import Any

import pytest

from harness.integrity.detect import detect
from harness.integrity.evidence import Evidence, FileChange
from tests.integrity.rendered import recorded

FILES = ("a.py", "tests/test_a.py", "Makefile", "a.lean", "a.html", "conftest.py", "check.sh", "notes.md", "data/a.csv")


@pytest.mark.parametrize("seed", ["\n", "{", "a.b.", "all tests ", "git show HEAD@ "])
def test_repeated_text_is_read_in_seconds(seed: str) -> None:
    text = (seed * 65_536)[:65_536]
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": text})}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text},
        {"role": "assistant", "content": text},
    ]
    changes = [FileChange(path, True, text[:30_000] + "x", text) for path in FILES]
    evidence = Evidence(text, dict.fromkeys(FILES, text), changes, {"/tests/t.sh": text}, work="/app")
    began = time.process_time()
    detect(recorded(messages), evidence)
    assert time.process_time() - began < 60


@pytest.mark.long
def test_many_short_calls_are_read_in_seconds() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Measure the speed, and write it to results/n.json."}]
    changes = []
    for number in range(600):
        name = f"results/{number}.json"
        reads, writes = f"cat /srv/data/{number}.txt", f"echo '{{\"time\": {number}.2345}}' > {name}"
        for key, command in (("a", reads), ("b", writes)):
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            calls = [{"id": f"{key}{number}", "type": "function", "function": function}]
            shown = f"value-{number}: {number}.9876 token_{number}_{number}"
            messages += [
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_call_id": f"{key}{number}", "content": shown},
            ]
        changes.append(FileChange(name, False, None, f'{{"time": {number}.2345}}'))
    evidence = Evidence("Measure the speed, and write it to results/n.json.", {}, changes, {}, work="/app")
    began = time.process_time()
    detect(recorded(messages), evidence)
    assert time.process_time() - began < 60
