"""What a live agent left in the pool: its tree, in a form that a test can spell out, and a table of such runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import paths


@dataclass(frozen=True, order=True)
class Conversation:
    """Calls of which each one's prompt begins with the whole path, prompt and reply, of the one before."""

    label: str
    says: tuple[str, ...]
    """Of each reply the tools that it calls, or else its text."""
    after: str = ""
    """What the reply says that the first call continues by its meaning, though not by its tokens."""

    def __str__(self) -> str:
        return f"{self.label}: {' → '.join(self.says)}{f' (after {self.after})' if self.after else ''}"


def tree(chain: Sequence[Completion]) -> list[Conversation]:
    """The conversations of an attempt, sorted: those beside each other begin in any order.

    A fork is a conversation more, a join one less, so that either shows.
    """
    whole, by_id = paths(chain), {item.id: item for item in chain}
    conversations: list[list[Completion]] = []
    for item in chain:
        prompt = whole[item.id][: item.prompt_length]
        for conversation in conversations:
            last = conversation[-1]
            if last.id == item.follows and prompt[: len(whole[last.id])] == whole[last.id]:
                conversation.append(item)
                break
        else:
            conversations.append([item])
    return sorted(_conversation(items, by_id) for items in conversations)


def _conversation(items: Sequence[Completion], by_id: dict[int, Completion]) -> Conversation:
    follows = items[0].follows
    label = ", ".join(sorted({str(item.label) for item in items}))
    return Conversation(label, tuple(map(_words, items)), "" if follows is None else _words(by_id[follows]))


def _words(item: Completion) -> str:
    calls = [call["function"]["name"] for call in item.reply.get("tool_calls", ())]
    return ", ".join(calls) or " ".join(str(item.reply["content"]).split())


@dataclass(frozen=True, order=True)
class Line:
    """A live run, for the table."""

    agent: str
    version: str
    task: str
    seconds: float
    calls: int
    tree: tuple[Conversation, ...]

    def __str__(self) -> str:
        conversations = "<br>".join(map(str, self.tree))
        return f"| {self.agent} {self.version} | {self.task} | {self.seconds:.1f} | {self.calls} | {conversations} |"


def write_table(file: Path, lines: Sequence[Line]) -> None:
    """The live runs as Markdown, before the sections of others."""
    others = file.read_text().partition("\n## ") if file.exists() else ("", "", "")
    file.write_text("\n".join([HEAD, *map(str, sorted(lines)), ""]) + "".join(others[1:]))


def write_section(file: Path, section: str) -> None:
    """Put a section, which begins with its title, at the end of the file in place of the present one."""
    title = section.split("\n")[0]
    file.write_text(f"{file.read_text().partition(title)[0].rstrip()}\n\n{section}")


HEAD = """# Live agents

Written by `make agents-table`: the unmodified agents at their tasks, through the proxy, before a scripted engine
(`tests/harness/test_agents.py` says what is expected of each). Every run ended with reward 1, every call is trainable.
A line of the last column is a conversation: each of its calls begins with the exact tokens, prompt and reply, of the
one before. Tool calls are shown by the tools' names. Seconds are those of the whole attempt, on two shared cores.

| agent | task | seconds | calls | conversations |
| --- | --- | ---: | ---: | --- |"""
