"""Scripts for the scripted engine: models that obey. `proxy engine CONFIG --scripted tests/harness/scripts.py:NAME`."""

import json
import re
from collections.abc import Sequence

WRITE_HELLO = "echo hello > hello.txt"
SHELLS = {
    "shell": "command",
    "bash": "command",
    "Bash": "command",
    "run_shell_command": "command",
    "exec_command": "cmd",
}
"""Shell tools of the agents -> the argument that holds the command."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(tool: str, **arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def hello(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Writes hello.txt with the one shell tool that is offered, then stops as that agent's protocol wants it."""
    tools = re.findall(r'"name": ?"(\w+)"', prompt_text.split("<|im_end|>", 1)[0])
    tool = next((name for name in SHELLS if name in tools), None)
    if tool is None:
        return "A title"
    more = {"description": "Writes the file"} if "edit" in tools else {}
    if prompt_text.count("<tool_response>") == 0:
        return call(tool, **{SHELLS[tool]: WRITE_HELLO}, **more)
    return call(tool, **{SHELLS[tool]: SUBMIT}) if SUBMIT in prompt_text else "Done."


def silent(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Says nothing useful."""
    return "No."
