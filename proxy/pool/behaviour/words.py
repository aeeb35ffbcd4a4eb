"""Events in what a reply says: mixed languages, endless repetition, nothing at all, giving up."""

import re
import zlib
from collections.abc import Collection, Iterator

from proxy.pool.behaviour.actions import Readable
from proxy.pool.behaviour.event import Event, Kind, quoted
from proxy.pool.behaviour.scripts import usual
from proxy.pool.completions.records import CUT_FINISH_REASONS, REPETITION

MIXED = 8
"""Letters of a strange script from which a text counts as mixed."""
WINDOW = 1200
"""Characters that are looked at together for repetition."""
REPETITIVE = 0.12
"""Length of a repeating window after compression, against its own."""
TIMES, PERIOD_WORDS = 6, 60
"""How often a passage stands in a row to be endless, and how many words it has at most."""
_CANNOT = (
    r"(?:simply )?(?:cannot|can't|can not|could not|couldn't|am unable to|was unable to|unable to|not able to"
    r"|wasn't able to|haven't been able to)"
)
_GIVING_UP = re.compile(
    r"\bI(?:'m| am| was| have been|'ve been)? (?:give up|giving up|gave up|(?:will|have to|must) (?:stop|give up) here"
    rf"|{_CANNOT} (?:complete|solve|finish|resolve|accomplish|fix|do|perform|carry out) (?:this|the|your) "
    r"(?:task|problem|issue|request|bug|assignment|work))"
    r"|\b(?:this|the) (?:task|problem|request) (?:is impossible|cannot be (?:completed|done|solved))",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w")


def speech_events(item: Readable, seen: Collection[str], last: bool) -> Iterator[Event]:
    """Yield the events of one reply's texts. `seen`: the scripts of those who asked. `last`: it ends the work."""
    reasoning, content = item.reply.get("reasoning_content") or "", item.reply.get("content") or ""
    for script, words in item.observed.foreign if item.observed is not None else ():
        if len(words.replace(" ", "")) >= MIXED and script not in usual(seen):
            yield Event(Kind.LANGUAGE_MIXING, item.id, name=script, quote=quoted(words))
    passage, end = repeated_passage(reasoning) or repeated_passage(content), (content or reasoning)[-200:]
    if passage or item.finish_reason == REPETITION:
        yield Event(Kind.REPETITION, item.id, quote=quoted(passage or end))
    acting = bool(item.reply.get("tool_calls"))
    if item.finish_reason in CUT_FINISH_REASONS:
        yield Event(Kind.TRUNCATED, item.id, quote=quoted(end))
    elif item.finish_reason == "stop" and not content.strip() and not acting:
        yield Event(Kind.EMPTY_TURN, item.id, quote=quoted(reasoning))
    if last and not acting and (match := _GIVING_UP.search(content)):
        yield Event(Kind.GIVING_UP, item.id, quote=quoted(content[max(0, match.start() - 40) : match.end() + 80]))


def repeated_passage(text: str) -> str:
    """Return a passage that stands at least `TIMES` times in a row and fills a window of the text; empty: none does."""
    for start in range(0, max(1, len(text) - WINDOW // 2), WINDOW // 2):
        window = text[start : start + WINDOW]
        if len(window) < WINDOW // 2:
            break
        data = window.encode(errors="replace")
        if len(zlib.compress(data, 1)) < REPETITIVE * len(data) and (passage := _period(window.split())):
            return passage
    return ""


def _period(parts: list[str]) -> str:
    """The shortest passage that repeats in a list of words."""
    for length in range(1, min(PERIOD_WORDS, len(parts) // TIMES) + 1):
        run = longest = end = 0
        for i in range(length, len(parts)):
            run = run + 1 if parts[i] == parts[i - length] else 0
            if run > longest:
                longest, end = run, i + 1
        passage = " ".join(parts[end - length : end])
        if longest >= length * (TIMES - 1) and 2 * (longest + length) >= len(parts) and _WORD.search(passage):
            return passage
    return ""
