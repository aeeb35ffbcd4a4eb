"""A recorded run for the tests of traces: one rollout of an agent with tools, a fork, a side call and a sub-agent."""

import json
from dataclasses import dataclass
from typing import Any

from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from tests.pool.make import TASK
from tests.proxy.conftest import SHELL, Serve, Stand, user

SYSTEM = {"role": "system", "content": "You work in a shell."}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -a"}}\n</tool_call>'
READ: dict[str, Any] = json.loads(json.dumps(SHELL).replace('"shell"', '"read"'))


def answer(prompt: str, ids: Any) -> str:
    """The model: it looks around, and then says what it saw."""
    if "A title" in prompt:
        return "Looking around"
    if "Only read" in prompt:
        return "nothing to read"
    if prompt.count("<tool_response>") == 0:
        return f"<think>\nI look first.\n</think>\n\nLet me see.\n{CALL}"
    return "there is a.txt" if "again" not in prompt else "still a.txt"


@dataclass(frozen=True)
class Traced:
    """What was recorded, and what the agent saw of it."""

    pool: Pool
    attempt: int
    messages: list[dict[str, Any]]
    """The main conversation as the agent has it."""


async def traced(serve: Serve, run: str = "r", again: bool = False) -> Traced:
    """Record a rollout through a real gateway. Its main conversation has two calls, and goes on in two ways.

    `again`: the second call is made twice, with other words.
    """
    stand: Stand = await serve(answer)
    opened = open_run(stand.pool, run, "collect", {})
    [member] = open_group(stand.pool, opened.id, TASK, 1)
    attempt, key = open_attempt(stand.pool, member.rollout_id, "mini")
    first = [SYSTEM, user("Look around.")]
    begun = await _say(stand, key, first)
    result = {"role": "tool", "tool_call_id": begun["tool_calls"][0]["id"], "content": "a.txt\n<b> \u00e9"}
    await stand.chat(user("A title for: Look around."), key=key)
    await stand.chat({"role": "system", "content": "Only read."}, user("Go."), key=key, tools=[READ])
    second = [*first, begun, result]
    said = await _say(stand, key, second)
    await _say(stand, key, [*second, said, user("Look again.")])
    await _say(stand, key, [*second, said, user("Or not?")])
    if again:
        await _say(stand, key, [*first, begun, result | {"content": "b.txt"}])
    close_attempt(stand.pool, attempt.id, Ending())
    finish_rollout(stand.pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=1.0))
    return Traced(stand.pool, attempt.id, [*second, said, user("Look again.")])


async def _say(stand: Stand, key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answered = await stand.chat(*messages, key=key, tools=[SHELL])
    assert answered["status"] == 200, answered
    message: dict[str, Any] = answered["choices"][0]["message"]
    return message
