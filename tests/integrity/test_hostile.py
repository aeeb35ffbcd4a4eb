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
