"""Asks a language model for an opinion on a task's tests: whether they are weak.

Tests are weak when work that does not do what the instruction asks could pass them. Any OpenAI-compatible endpoint will
do. An answer that cannot be read counts as no opinion, and the report says so. Left out: what the tests import from the
task's image, which the judge does not see.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.tasks import Task, Verifier, parts_of
from harness.verdict.chat_client import ChatModel, NoAnswer, complete
from harness.verdict.task_texts import texts_of
from proxy.pool.schema import storable

TRIES = 3
SECONDS = 300.0
PAUSE_SECONDS = 2.0
MAX_FILE = 20_000
MAX_TESTS = 60_000
"""Characters of one test file, and of all of them, that are shown to the judge at most."""
SYSTEM = """You review tasks on which an AI agent is trained. An agent gets the instruction; afterwards the tests \
decide its reward. Find out whether the tests are weak: whether work that does not do what the instruction asks, or \
does only a part of it, could pass them. Hard-coded outputs, empty files with the right name, and checks of words \
instead of behaviour are typical. Do not object to style, nor to tests that are stricter than the instruction.
Answer with one JSON object and nothing else: {"weak": true or false, "reasons": ["one short sentence each"]}"""
_BACKSLASH = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
"""A backslash, with what it escapes in JSON if it does."""
_BEGIN = re.compile(r'\{\s*+"(?:[^"\\]|\\.)*+"\s*+:', re.DOTALL)
"""A brace, a key and a colon: other braces begin no object."""
_DECODER = json.JSONDecoder(parse_int=float, strict=False)
"""Takes integers of any length, and line breaks in strings."""


@dataclass(frozen=True)
class Judge:
    """The endpoint of a language model that grades."""

    url: str
    """Base URL, ending in /v1 as a rule."""
    model: str
    key: str = ""
    pause_seconds: float = PAUSE_SECONDS
    """Seconds before the second try; each further pause is four times as long."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge thinks of a task's tests."""

    weak: bool | None
    """None: no opinion."""
    reasons: list[str] = []
    trouble: str = ""
    """Why there is no opinion."""


async def opinion(judge: Judge, task: Task) -> Opinion:
    """Ask the judge about a task. Trouble of any kind makes an Opinion with `weak` None; nothing is raised."""
    model = ChatModel(judge.url, judge.model, judge.key)
    question = await asyncio.to_thread(described, task)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    trouble = ""
    for number in range(TRIES):
        if number:
            await asyncio.sleep(judge.pause_seconds * 4 ** (number - 1))
        try:
            text = await complete(model, messages, SECONDS, temperature=0)
        except NoAnswer as error:
            trouble = str(error)
            continue
        except TimeoutError:
            trouble = f"{judge.url} gives no answer within {SECONDS:g} s"
            continue
        if (parsed := read(text)) is not None:
            return parsed
        trouble = f"the answer holds no object with `weak`: {text[-200:]!r}"
    return Opinion(weak=None, trouble=trouble)


def read(text: str) -> Opinion | None:
    """Read the last JSON object in a reply that says whether the tests are weak. Text around it is skipped."""
    last = None
    for value in objects_in(text):
        if isinstance(value.get("weak"), bool):
            reasons = value.get("reasons", [])
            listed = reasons if isinstance(reasons, list) else [reasons]
            last = Opinion(weak=value["weak"], reasons=[storable(str(reason)) for reason in listed])
    return last


def objects_in(reply: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects of a judge's reply, in order. Text around them is skipped.

    Backslashes that escape nothing, as in LaTeX, stand for themselves. Where an object breaks, reading goes on behind
    what was read of it: no text is parsed twice. It ends at an object that is nested too deeply for Python.
    """
    text = _BACKSLASH.sub(lambda found: found[0] if len(found[0]) > 1 else r"\\", reply)
    begin = _BEGIN.search(text)
    while begin is not None:
        try:
            value, end = _DECODER.raw_decode(text, begin.start())
            yield value
        except json.JSONDecodeError as error:
            end = error.pos
        except RecursionError:
            return
        begin = _BEGIN.search(text, end)


def described(task: Task) -> str:
    """The task's instruction and tests as text for the judge."""
    sections = []
    for part in parts_of(task):
        title = f" of step {part.name}" if part.name else ""
        sections.append(f"# Instruction{title}\n\n{part.task.instruction}\n\n# Tests{title}\n")
        sections.append(_tests(part.task.verifier, task.digest))
    return "\n".join(sections)


def _tests(verifier: Verifier, digest: str) -> str:
    rule = {
        "exit": "Exit code 0 is reward 1 and exit code 1 is reward 0, unless a number is written to $REWARD_FILE.",
        "logs": "The reward is what is written to /logs/verifier/reward.json or reward.txt.",
    }[verifier.rewards]
    text = f"Command: {verifier.command}\n{rule}\n"
    if verifier.cases:
        text = f"Cases, each run in a process of its own: {msgspec.json.encode(verifier.cases).decode()}\n"
    for path, content in texts_of(verifier.files, verifier.directories, digest):
        shown = content if len(content) <= MAX_FILE else f"{content[:MAX_FILE]}\n[the rest of this file is left out]"
        text += f"\n## {path}\n\n{shown}\n"
        if len(text) > MAX_TESTS:
            break
    return text if len(text) <= MAX_TESTS else f"{text[:MAX_TESTS]}\n[the rest is left out]"
