"""Agents' behaviour as sequences of requests, each with its purpose: how titles, sub-agents and compactions look.

The requests are shaped as the agents shape them, in words of our own. Left out: dialects, tokens and the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.call import Call, Constraint
from proxy.dialects.base import tool_call, tool_definition
from proxy.pool.completions.labels import labels
from proxy.pool.completions.records import RequestShape
from proxy.prompt.continuation.request_shape import RequestShapes

Message = dict[str, Any]
SYSTEM = "You work on the user's files with the tools that you have. Look before you write."
TASK = "Write the word hello into hello.txt in the working directory, then print the file."
SUMMARY = "## Goal\nThe file hello.txt shall hold the word hello.\n## Done\nThe directory was listed; it is empty.\n"


@dataclass(frozen=True)
class Row:
    """A recorded call, as far as labels look at it."""

    id: int
    finish_reason: str
    shape: RequestShape | None
    reply: Message


class Story:
    """The calls of one attempt as they happen. `rows` and `truth` grow together."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.truth: list[str] = []
        self._shapes = RequestShapes()

    def ask(self, kind: str, messages: Sequence[Message], reply: Message, tools: int = 0, **more: Any) -> Message:
        """Make a call that is committed at once, and return its reply."""
        return self.end(self.begin(kind, messages, tools, **more), reply)

    def begin(self, kind: str, messages: Sequence[Message], tools: int = 0, constrained: bool = False) -> "Open":
        """Make a call that stays in flight until `end`."""
        offered = tuple(tool_definition(f"tool{i}", None, {}) for i in range(tools))
        constraint = Constraint("response_format", True) if constrained else None
        call = Call(model="m", messages=tuple(messages), tools=offered, constraint=constraint)
        return Open(kind, self._shapes.of(call, None))

    def end(self, call: "Open", reply: Message) -> Message:
        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        row = Row(len(self.rows) + 1, finish, call.shape, reply)
        self._shapes.add(row.id, row)
        self.rows.append(row)
        self.truth.append(call.kind)
        return reply

    def told(self) -> list[str]:
        return list(labels(self.rows).values())


@dataclass(frozen=True)
class Open:
    kind: str
    shape: RequestShape | None


def system(text: str = SYSTEM) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, *commands: str) -> Message:
    """A reply with tool calls; each has an id of its own."""
    calls = [tool_call(f"{text}{i}", "tool0", f'{{"argument": "{command}"}}') for i, command in enumerate(commands)]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


def work(story: Story, messages: list[Message], tools: int, *, kind: str = "main", steps: int = 2) -> list[Message]:
    """Some turns with tool calls. Returns the history after them."""
    for step in range(steps):
        start = f"{kind} {len(story.rows)}: step {step} of the work"
        messages = [*messages, story.ask(kind, messages, says(start, f"ls -la directory{step} | sort"), tools)]
        messages.append(result("a line of output\n" * 30))
    return messages


def finish(story: Story, messages: list[Message], tools: int, kind: str = "main") -> list[Message]:
    return [*messages, story.ask(kind, messages, says("All is done, the file holds the word."), tools)]


def transcript(messages: Sequence[Message]) -> str:
    """A history in one text, results cut, as some agents give it to be summarised."""
    return "\n".join(f"[{m['role']}]: {str(m['content'])[:40]} {m.get('tool_calls', '')}" for m in messages[1:])


def title(text: str = TASK) -> list[Message]:
    return [system("Name the conversation."), user("Name this conversation:"), user(f'"{text}"')]


# ---- one story per agent


def opencode(story: Story) -> None:
    """A title beside the first call; sub-agents in parallel under the same system prompt; a serialised history."""
    naming = story.begin("side", title())
    start = [system(), user(TASK)]
    first = story.ask("main", start, says("I ask two helpers.", "look into the one half", "look into the other"), 10)
    story.end(naming, says("Write the word hello"))
    helpers = [[system(), user("look into the one half")], [system(), user("look into the other")]]
    helpers = [work(story, helper, 9, kind="subagent", steps=1) for helper in helpers]
    helpers = [finish(story, helper, 9, "subagent") for helper in helpers]
    history = work(story, [*start, first, result("empty"), result("empty")], 10)
    asked = [system("Summarise."), user(f"The conversation:\n{transcript(history)}\nSummarise it.")]
    summary = story.ask("compaction", asked, says(SUMMARY))
    again = [system(), user("What did we do so far?"), summary, user("Go on.")]
    finish(story, work(story, again, 10), 10)


def claude_code(story: Story) -> None:
    """A title of a prescribed form; sub-agents with fewer tools; the whole history and one request more."""
    naming = story.begin("side", [system("Name it as JSON."), user(TASK)], constrained=True)
    begun = story.begin("main", start := [system(), user(f"<reminder>Be brief.</reminder>\n{TASK}")], 25)
    story.end(naming, says('{"title": "Write the word hello"}'))
    first = story.end(begun, says("I ask a helper.", "find out where the directory is"))
    helper = [system("You help the main agent."), user("<reminder/>\nfind out where the directory is")]
    finish(story, work(story, helper, 22, kind="subagent"), 22, "subagent")
    history = work(story, [*start, first, result("here")], 25)
    asked = [*history[:-1], {**history[-1]}, user("Summarise all of the above in detail.")]
    text = f"<analysis>\nFirst I look through what was said above, and then write it down.\n</analysis>\n{SUMMARY}"
    story.ask("compaction", asked, says(text), 25)
    again = [system(), user(f"This goes on from an earlier conversation:\n{SUMMARY}"), *history[-2:]]
    finish(story, work(story, again, 25), 25)


def codex(story: Story) -> None:
    """Sub-agents beside their parent; the history without tools; the user's messages stay, the summary is the last."""
    start = [system(), user("<environment/>"), user(TASK)]
    first = story.ask("main", start, says("Two helpers.", "look into the one half", "look into the other"), 13)
    parent = story.begin("main", [*start, first, result("started"), result("started")], 13)
    for half in ("look into the one half", "look into the other"):
        finish(story, work(story, [system(), user("<environment/>"), user(half)], 12, kind="subagent"), 12, "subagent")
    waiting = story.end(parent, says("I wait for them.", "wait"))
    history = work(story, [*start, first, result("started"), result("started"), waiting, result("done")], 13)
    story.ask("compaction", [*history, user("Write a checkpoint for another model.")], says(SUMMARY))
    history = work(story, [*start, user(f"Another model wrote:\n{SUMMARY}")], 13)
    story.ask("compaction", [*history, user("Write a checkpoint for another model.")], says("short"))
    finish(story, work(story, [*start, user("Another model wrote:\nshort"), *history[-2:]], 13), 13)


def qwen_code(story: Story) -> None:
    """One helper after the other; only the oldest part is summarised, even where it holds no turn yet."""
    start = [system(), user("Today is a day."), says("Thanks for the context."), user(TASK)]
    first = story.ask("main", start, says("A helper, please.", "look into the directory"), 15)
    helper = [system("You help."), user("Today is a day."), says("Thanks."), user("look into the directory")]
    finish(story, work(story, helper, 14, kind="subagent"), 14, "subagent")
    history = work(story, [*start, first, result("nothing")], 15)
    snapshot = says(f"<snapshot>{SUMMARY}</snapshot>")
    story.ask("compaction", [system("Summarise as XML."), *start[1:], user("Now write the snapshot.")], snapshot)
    kept = [system(), user(snapshot["content"]), says("Thanks."), user("Go on."), *history[4:]]
    history = work(story, kept, 15)
    later = says(f"<snapshot>second\n{SUMMARY}</snapshot>")
    story.ask("compaction", [system("Summarise as XML."), *kept[1:6], user("Now write the snapshot.")], later)
    finish(story, [system(), user(later["content"]), says("Thanks."), *history[-4:]], 15)


def gemini_cli(story: Story) -> None:
    """A helper; old results are masked in place; a check of a prescribed form after an answer without a call."""
    start = [system(), user("Today is a day."), user(TASK)]
    history = work(story, start, 15)
    helper = [system("You help."), user("Today is a day."), user("ls -la directory1 | sort")]
    finish(story, work(story, helper, 14, kind="subagent"), 14, "subagent")
    masked = [result("<masked/>") if message["role"] == "tool" else message for message in history]
    history = [*masked, story.ask("main", masked, says("I think that I go on now."), 15)]
    story.ask("side", [*history, user("Who speaks next?")], says('{"next": "model"}'), constrained=True)
    history = finish(story, [*history, user("Please continue.")], 15)
    story.ask("side", [*history, user("Who speaks next?")], says('{"next": "user"}'), constrained=True)
    history = finish(story, [system(), user("Today is another day."), user(TASK)], 15)
    story.ask("side", [*history, user("Who speaks next?")], says('{"next": "user"}'), constrained=True)


def kilo(story: Story) -> None:
    """The title comes when the work is done."""
    finish(story, work(story, [system(), user(TASK)], 16), 16)
    story.ask("side", title(), says("Write the word hello"))


def cline(story: Story) -> None:
    """Sub-agents with few tools, in parallel; a suggestion; the history is cut without asking the model."""
    start = [system(), user(TASK)]
    first = story.ask("main", start, says("Two helpers.", "look into the one half", "look into the other"), 25)
    helpers = [[system("You help."), user(half)] for half in ("look into the one half", "look into the other")]
    helpers = [work(story, helper, 7, kind="subagent") for helper in helpers]
    helpers = [finish(story, helper, 7, "subagent") for helper in helpers]
    history = work(story, [*start, first, result("a"), result("b")], 25)
    story.ask("side", [*history, user("What might the user want next?")], says("Perhaps a test for the file."))
    history = work(story, history, 25)
    finish(story, [*start, *history[-2:]], 25)


def mini_swe_agent(story: Story) -> None:
    """A turn that could not be read is dropped, and the user complains."""
    history = work(story, [system(), user(TASK)], 1)
    story.ask("main", history, says("This is no tool call."), 1)
    finish(story, [*history, user("Your last turn had no call.")], 1)


def mini_as_text(story: Story) -> None:
    """No tools at all; commands stand in the text."""
    start = [system(), user(TASK)]
    story.ask("main", start, says("I forgot the block."))
    history = [*start, user("Your last turn had no block.")]
    for step in range(3):
        history += [
            story.ask("main", history, says(f"THOUGHT: step {step}\n```\nls directory{step}\n```")),
            user("out"),
        ]


def aider(story: Story) -> None:
    """No tools; examples in the history; a commit message that is asked for with the conversation in it."""
    start = [system("Edit with blocks."), user("Add a test."), says("Here it is: ..."), user(TASK)]
    edit = story.ask("main", start, says("hello.txt\n<<<<<<< SEARCH\n=======\nhello there, world\n>>>>>>> REPLACE"))
    commit = [system("Write a commit message."), user(f"# USER: {TASK}\n# ASSISTANT: {edit['content']}\n+hello")]
    story.ask("side", commit, says("feat: write hello.txt"))
    history = [*start[:3], user(TASK), edit, user("Now in capitals.")]
    edit = story.ask("main", history, says("hello.txt\n<<<<<<< SEARCH\nhello there, world\n=======\nHELLO THERE"))
    story.ask("side", [system("Write a commit message."), user("+HELLO THERE")], says("feat: capitals"))


def architect(story: Story) -> None:
    """No tools; a plan is carried out by another role, whose words are in the commit's request."""
    plan = story.ask("main", [system("Plan."), user(TASK)], says("Write hello.txt with one line: the word hello."))
    edit = says("hello.txt\n=======\nhello, as it was planned\n>>>>>>>")
    story.ask("subagent", [system("Edit with blocks."), user(plan["content"])], edit)
    commit = [system("Write a commit message."), user(f"# ASSISTANT: {edit['content']}\n+hello")]
    story.ask("side", commit, says("feat: write hello.txt"))


def openhands(story: Story) -> None:
    """A summary replaces all of the history, the system prompt too; a helper without a mark of its own."""
    history = work(story, [system(), user(TASK)], 6)
    asked = [user(f"Summarise these events:\n{transcript(history)}")]
    story.ask("compaction", asked, says(SUMMARY))
    history = work(story, [user(SUMMARY)], 6)
    call = story.ask("main", history, says("A helper.", "find the directory that was meant"), 6)
    helper = [system("You help."), user("find the directory that was meant")]
    finish(story, work(story, helper, 5, kind="subagent"), 5, "subagent")
    finish(story, [*history, call, result("found")], 6)


def smolagents(story: Story) -> None:
    """Every turn of the model comes back rewritten as text."""
    history = [system(), user(TASK)]
    for step in range(3):
        story.ask("main", history, says(f"Thought {step}: list the directory", "ls -la directory | sort"), 2)
        history += [says(f"Calling tools: ls {step}"), user("Observation: ran ls -la directory | sort")]
    finish(story, history, 2)


def like_helpers(story: Story) -> None:
    """Helpers that differ from their parent in their task alone, and one that talks without tools."""
    start = [system(), user(TASK)]
    first = story.ask("main", start, says("A helper.", "find the directory that was meant"), 3)
    finish(story, work(story, [system(), user("find the directory that was meant")], 3, kind="subagent"), 3, "subagent")
    doubts = [user("Is this the right one?")]
    doubts += [story.ask("subagent", doubts, says("Why should it not be?")), user("It is empty.")]
    story.ask("subagent", doubts, says("Then it is."))
    finish(story, [*start, first, result("found")], 3)


def unlucky_titles(story: Story) -> None:
    """A title for the first message. By chance, a helper's task and a shortened history hold the same words."""
    start = [system(), user("Please look into the one half, then into the other.")]
    naming = story.begin("side", [system("Name it."), start[1]])
    first = story.ask("main", start, says("A helper.", "look into the one half and say what is there"), 5)
    story.end(naming, says("look into the one half"))
    helper = [system("You help."), user("look into the one half and say what is there")]
    finish(story, helper, 4, "subagent")
    history = work(story, [*start, first, result("nothing")], 5)
    finish(story, [*start, *history[-2:]], 5)


def forks(story: Story) -> None:
    """A helper that starts with a copy of the history and other tools, while its parent goes on."""
    history = work(story, [system(), user(TASK)], 3)
    parent = story.begin("main", history, 3)
    finish(story, [*history, user("You are the helper now.")], 2, "subagent")
    story.end(parent, says("The helper was asked."))


def planner(story: Story) -> None:
    """A plan is made without tools and taken up as a turn; the answer at the limit is given without tools too."""
    start = [system(), user(TASK), user("Make a plan first.")]
    plan = story.ask("main", start, says("First I look, and then I write the file."))
    history = work(story, [*start, plan, user("Go on.")], 4)
    story.ask("main", [*history, user("No steps are left; answer now.")], says("The file could not be written."))


def one_call(story: Story) -> None:
    story.ask("main", [user(TASK)], says("hello"))


def many_calls(story: Story) -> None:
    """A program that asks one question after the other."""
    for number in range(4):
        story.ask(
            "main", [system("Answer."), user(f"Question {number}: what is twice {number}?")], says(f"{number * 2}")
        )


def two_conversations(story: Story) -> None:
    """A session of two runs, each with its title; the second speaks of what the first one said."""
    for text in (TASK, "You said: Shall I write a test for the file too? So do it."):
        story.ask("side", title(text), says("Write another file"))
        history = work(story, [system(), user(text)], 10)
        asked = story.ask("main", history, says("Shall I write a test for the file too?"), 10)
        finish(story, [*history, asked, user("Not now.")], 10)


STORIES: list[Callable[[Story], None]] = [
    opencode, claude_code, codex, qwen_code, gemini_cli, kilo, cline, mini_swe_agent, mini_as_text, aider, architect,
    openhands, smolagents, like_helpers, unlucky_titles, forks, planner, one_call, many_calls, two_conversations,
]  # fmt: skip
