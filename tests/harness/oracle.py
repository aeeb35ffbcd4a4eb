"""A script for the scripted engine: a model that knows the oracle solutions of the example Harbor tasks.

It runs a task's solution with the agent's own shell tool and ends its turn; to everything else it answers as
`scripts.py:hello` does. In a file of its own, since the engine loads it by its path.
"""

from collections.abc import Sequence
from pathlib import Path

from proxy.engine.scripted import ScriptedReply
from tests.harness import scripts

HARBOR = Path(__file__).parents[2] / "examples/tasks/harbor"
SOLUTIONS = {
    path.read_text().splitlines()[0]: (path.parent / "solution/solve.sh").read_text()
    for path in sorted([*HARBOR.glob("*/instruction.md"), *HARBOR.glob("*/steps/*/instruction.md")])
}
"""The first line of an instruction, which no other has -> the solution."""


def oracle(prompt_text: str, prompt_ids: Sequence[int]) -> str | ScriptedReply:
    asked = scripts.Asked.of(prompt_text)
    instruction = next((line for line in SOLUTIONS if line in asked.users), None)
    if instruction is None or not asked.tools:
        return scripts.hello(prompt_text, prompt_ids)
    turn = asked.end("Solved.") if asked.turns_since(instruction) else asked.run(SOLUTIONS[instruction])
    return scripts.rest(prompt_text, turn)
