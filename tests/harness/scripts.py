"""Scripts for the scripted engine: models that obey. `proxy engine CONFIG --scripted tests/harness/scripts.py:NAME`.

`hello` plays whoever asks: the agent at its task, its sub-agents, who summarises its history, who finds a title. Who it
is follows from the prompt: the tools on offer, the user's words, the turns so far.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.scripted import Fault, ScriptedReply

HELLO = "Write hello.txt"
CHECKED = "Write hello.txt and check it"
SHARED = "Write hello.txt with two helpers"
LONG = "Write hello.txt after reading much"
TOLD = "Write what the word server tells into hello.txt"
TOO_LONG = "Write hello.txt after reading too much"
MISTAKEN = "Write hello.txt after two mistakes"
"""Instructions of tasks, each with turns of its own."""

WRITE_HELLO = "echo hello > hello.txt"
HALVES = {"Write the first half": "printf hel > half-1", "Write the second half": "echo lo > half-2"}
"""Instructions of sub-agents -> what they run."""
READ = "seq -s ' '"
"""Fills the context: each digit is a token, so are the spaces."""
SUMMARY = "A lot was read; hello.txt is to be written."
SHELLS = {
    "shell": "command",
    "execute": "command",
    "run_commands": "commands",
    "bash": "command",
    "Bash": "command",
    "run_shell_command": "command",
    "exec_command": "cmd",
}
"""Shell tools of the agents -> the argument that holds the command."""
TELL = "the-word-is"
"""What the tool of an MCP server is asked, and begins its answer with."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent ends."""
FINAL = "final_answer"
"""How smolagents ends."""
FILE_LISTING = "*file listing*"
"""What aider's instructions call the text that holds a whole file."""
WHOLE_FILE = "hello.txt\n```\nhello\n```\n"
ANSWERS = {
    "What is 6 * 7?": "Six times seven, so the answer is $\\boxed{42}$.",
    "Write a function double": "Here:\n```python\ndef double(number):\n    return 2 * number\n```\n",
    "Write a function that nobody can call": "Here:\n```python\nimport os\nos._exit(3)\n```\n",
}
"""Questions of the domains without a sandbox."""
GRADE = "You grade the work of an AI agent"
"""How judges of a run are asked."""
SUSPECT = "Write hello.txt honestly"
"""A task on which judges find everybody dishonest."""
COUNT, LONG_COUNT = "Count", ScriptedReply("one " * 5000, seconds_per_token=0.05)
"""What takes minutes to answer."""
OPENCODES_HELPER, CODEXS_HELPER, CODEXS_WAIT = "task", "multi_agent_v1__spawn_agent", "multi_agent_v1__wait_agent"
PATIENCE_MS = 200_000


@dataclass(frozen=True)
class Asked:
    """A prompt, read."""

    text: str
    tools: tuple[str, ...]
    users: str
    """All that the user said, without the results of tools."""

    @classmethod
    def of(cls, prompt: str) -> "Asked":
        texts = re.findall(r"<\|im_start\|>user\n(?!<tool_response>)(.*?)<\|im_end\|>", prompt, re.DOTALL)
        tools = re.findall(r'^\{"type": "function", "function": \{"name": "(\w+)"', prompt, re.MULTILINE)
        return cls(prompt, tuple(tools), "\n".join(texts))

    def turns_since(self, words: str) -> int:
        """How often the assistant has spoken since then; some agents put words into its mouth before the task."""
        return self.text.rpartition(words)[2].count("<|im_start|>assistant\n") - 1

    def run(self, *commands: str) -> str:
        """Calls of the one shell tool on offer, written as no serialiser would."""
        if len(self.tools) == 1:  # whatever it and its argument are called
            return "\n".join(call(self.tools[0], **{self.first_argument(): one}) for one in commands)
        tool = next((name for name in SHELLS if name in self.tools), None)
        if tool is None:
            return f"There is no shell among {', '.join(self.tools)}."
        more = {"description": "Runs a command"} if "edit" in self.tools else {}
        name = SHELLS[tool]
        return "\n".join(call(tool, **{name: [one] if name == "commands" else one}, **more) for one in commands)

    def first_argument(self) -> str:
        """The name of the first argument of the first tool."""
        found = re.search(r'"properties": \{"(\w+)"', self.text)
        return found[1] if found else ""

    def end(self, words: str) -> str:
        """The last turn."""
        if FINAL in self.tools:
            return call(FINAL, answer=words)
        return self.run(SUBMIT) if SUBMIT in self.text else words


def call(tool: str, **arguments: object) -> str:
    body = json.dumps(arguments, separators=(" , ", ":  "))  # ä stays \u00e4: what is sampled is seldom canonical
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {body}}}\n</tool_call>'


def hello(prompt_text: str, prompt_ids: Sequence[int]) -> str | ScriptedReply:
    """The next turn of the agent that asks. All turns differ, so that a conversation can be told by its texts."""
    asked = Asked.of(prompt_text)
    if not asked.tools:
        return aside(asked)
    scene = SUMMARY if SUMMARY in asked.text else next((words for words in SCENES if words in asked.users), HELLO)
    turns = SCENES[scene](asked)
    return rest(prompt_text, turns[min(asked.turns_since(scene), len(turns) - 1)])


def rest(prompt: str, turn: str) -> str:
    """What remains of a turn whose call the proxy has begun, as the client requires one."""
    begun = prompt.rpartition("<|im_start|>assistant\n")[2]
    if not begun:
        return turn
    called = turn[max(turn.find("<tool_call>"), 0) :]
    if begun.endswith("<think>"):
        return f"\n\n</think>\n\n{called}"
    return called[next((size for size in range(len(called), 0, -1) if begun.endswith(called[:size])), 0) :]


def aside(asked: Asked) -> str | ScriptedReply:
    """What is asked without tools."""
    if asked.users == COUNT:
        return LONG_COUNT
    if answer := next((ANSWERS[question] for question in ANSWERS if question in asked.users), None):
        return answer
    if FILE_LISTING in asked.text:
        return WHOLE_FILE
    if GRADE in asked.text and SUSPECT in asked.text:
        return '{"score": 0.0, "reason": "it was not honest"}'
    if GRADE in asked.text:
        return '{"score": 0.75, "reason": "it did what was asked"}'
    return SUMMARY if READ in asked.text else "A title"


def plain(asked: Asked) -> list[str]:
    return [asked.run(WRITE_HELLO), asked.end("Done.")]


def checked(asked: Asked) -> list[str]:
    return [f"I write it.\n{asked.run(WRITE_HELLO)}", asked.run("cat hello.txt", "ls"), asked.end("Done and checked.")]


def mistaken(asked: Asked) -> list[str]:
    """Two calls of a tool that nobody has offered."""
    wrong = [call("frobnicate", text=str(number)) for number in range(2)]
    return [*wrong, asked.run(WRITE_HELLO), asked.end("Done after all.")]


def long(asked: Asked) -> list[str]:
    """Two thirds of the context are full after the second turn."""
    return [asked.run(f"{READ} 1 2500"), asked.run(f"{READ} 2501 5000"), asked.run("ls"), "Nothing is written."]


def too_long(asked: Asked) -> list[str]:
    """What is read does not fit into the context."""
    return [asked.run(f"{READ} 1 8000"), "Nothing is written."]


def shared(asked: Asked) -> list[str]:
    """Sub-agents at work beside each other; their parent joins what they wrote."""
    join = [asked.run("cat half-1 half-2 > hello.txt"), "Done with helpers."]
    if OPENCODES_HELPER in asked.tools:
        calls = [{"description": half, "prompt": half, "subagent_type": "general"} for half in HALVES]
        return ["\n".join(call(OPENCODES_HELPER, **words) for words in calls), *join]
    spawned = re.findall(r'"agent_id": ?"([\w-]+)"', asked.text)
    waits = [call(CODEXS_WAIT, targets=[agent], timeout_ms=PATIENCE_MS) for agent in spawned]
    return ["\n".join(call(CODEXS_HELPER, message=half) for half in HALVES), *waits, *join]


def told(asked: Asked) -> list[str]:
    """What the tool of an MCP server says is in no prompt before. Agents name such tools differently."""
    tool = next((name for name in asked.tools if name.endswith("tell")), None)
    said = re.search(rf"{TELL} (\w+)", asked.text)
    first = call(tool, text=TELL) if tool else f"There is no such tool among {', '.join(asked.tools)}."
    return [first, asked.run(f"echo {said[1] if said else ''} > hello.txt"), asked.end("Done as told.")]


def half(asked: Asked) -> list[str]:
    command = next(command for instruction, command in HALVES.items() if instruction in asked.users)
    return [asked.run(command), f"Done: {command}"]


def summarised(asked: Asked) -> list[str]:
    return [asked.run(WRITE_HELLO), "Done after the summary."]


SCENES = {
    SUMMARY: summarised,
    **dict.fromkeys(HALVES, half),
    CHECKED: checked,
    SHARED: shared,
    LONG: long,
    MISTAKEN: mistaken,
    TOLD: told,
    TOO_LONG: too_long,
    HELLO: plain,
}
"""Instruction -> the turns of the agent that got it; the last turn is repeated."""


def silent(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Says nothing useful."""
    return "No."


def failing(prompt_text: str, prompt_ids: Sequence[int]) -> str | Fault | ScriptedReply:
    """As hello, but the engine breaks off in the middle of every turn when it is asked for the first time."""
    if Asked.of(prompt_text).tools and (prompt := tuple(prompt_ids)) not in BROKEN_OFF:
        BROKEN_OFF.add(prompt)
        return Fault(text="This will break off soon, in the middle of a sentence.", after=6)
    return hello(prompt_text, prompt_ids)


BROKEN_OFF: set[tuple[int, ...]] = set()
