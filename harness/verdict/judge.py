"""Asks a language model for an opinion on a task's tests: whether they are weak.

Tests are weak when work that does not do what the instruction asks could pass them. Any OpenAI-compatible endpoint will
do. An answer that cannot be read counts as no opinion, and the report says so. Left out: what the tests import from the
task's image, which the judge does not see.
"""

import asyncio
import json
import re
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
MAX_OBJECTS = 1000
"""Objects of a reply that are read at most. For each one that breaks, Python counts the lines before it."""
SYSTEM = """You review tasks on which an AI agent is trained. An agent gets the instruction; afterwards the tests \
decide its reward. Find out whether the tests are weak: whether work that does not do what the instruction asks, or \
does only a part of it, could pass them. Hard-coded outputs, empty files with the right name, and checks of words \
instead of behaviour are typical. Do not object to style, nor to tests that are stricter than the instruction.
Answer with one JSON object and nothing else: {"weak": true or false, "reasons": ["one short sentence each"]}"""
_BACKSLASH = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
"""A backslash, with what it escapes in JSON if it does."""
_BEGIN = re.compile(r'\{\s*+"(?:[^"\\]|\\.)*+"\s*+:', re.DOTALL)
"""A brace, a key and a colon: other braces begin no object."""
_THOUGHTS = re.compile(r"\A\s*+<think>.*?(?:</think>|\Z)", re.DOTALL)
_GIVEN = re.compile(r'"(?:score|weak)"\s*+:\s*+"?(?:-?\d[\d.eE+-]*+|true|false)"?\s*+(?:[,}"]|\Z)')
"""A score or an opinion. The form itself, as in `"score": a number` or `"weak": true or false`, gives none."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. A key that is there twice gets None: a quotation may have ended a string and added the second."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[key] = None if key in found else value
    return found


JUDGE_JSON = json.JSONDecoder(parse_int=float, strict=False, object_pairs_hook=_object)
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
    """Read a reply's opinion, whether the tests are weak; None where it has no clear one."""
    said = verdict_in(text, "weak")
    if said is None or not isinstance(said["weak"], bool):
        return None
    reasons = said.get("reasons") or []
    listed = reasons if isinstance(reasons, list) else [reasons]
    return Opinion(weak=said["weak"], reasons=[storable(str(reason)) for reason in listed])


def verdict_in(reply: str, name: str) -> dict[str, Any] | None:
    """Return the last of the outermost JSON objects in a judge's reply that has the key `name`.

    Text around objects is skipped, and so is what stands between <think> and </think> at the beginning. None where no
    object has the key, or where the judge's own verdict may have broken, because what follows may be a quotation in it.
    That is so if an object breaks after it has given a score or an opinion, or if one is given outside of objects
    behind the last verdict.

    An object that breaks before it gave a score may be a quoted piece. Its open string then swallows the beginning of
    the verdict, so the search goes on at the last brace inside it. So each part of the text is parsed twice at most.
    """
    text = with_backslashes(_THOUGHTS.sub("", reply))
    verdict, end = None, 0
    for _ in range(MAX_OBJECTS):
        begin = _BEGIN.search(text, end)
        if verdict is not None and _GIVEN.search(text, end, begin.start() if begin else len(text)):
            return None
        if begin is None:
            return verdict
        try:
            value, end = JUDGE_JSON.raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            if _GIVEN.search(text, begin.start(), error.pos + 1):
                return None
            end = max(text.rfind("{", begin.end(), error.pos), begin.end())
        except RecursionError:
            return None
        else:
            verdict = value if name in value else verdict
    return None


def with_backslashes(reply: str) -> str:
    """Double the backslashes that escape nothing in JSON, as in LaTeX, so that they stand for themselves."""
    return _BACKSLASH.sub(lambda found: found[0] if len(found[0]) > 1 else r"\\", reply)


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
