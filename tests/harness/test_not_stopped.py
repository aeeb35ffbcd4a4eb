"""What a run says of tasks whose verdict an agent could buy."""

from typing import Any

import msgspec

from harness.tasks import Task
from harness.verdict.shared import KINDS, not_stopped
from tests.harness.conftest import HELLO

VERIFIER: dict[str, Any] = {"command": "true"}


def task(**fields: object) -> Task:
    return msgspec.convert(HELLO | fields, Task)


def test_a_task_is_open_to_what_its_sandbox_allows() -> None:
    assert not_stopped(task(), "docker") == {}
    root = {"profile": "harbor", "verifier": VERIFIER | {"where": "shared"}}
    assert set(KINDS) - set(not_stopped(task(**root), "docker")) == {"processes"}
    assert set(KINDS) - set(not_stopped(task(daemons=True), "docker")) == {"programs"}
    steps = [
        {"name": where, "instruction": "?", "verifier": VERIFIER | {"where": where}} for where in ("fresh", "shared")
    ]
    assert not_stopped(task(steps=steps), "docker")
