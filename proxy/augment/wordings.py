"""Other words for system prompts, descriptions and tool results. Each function has one result for one seed."""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from proxy.dialects.base import GRAMMAR
from proxy.pool.behaviour.frames import FRAMES

T = TypeVar("T")

LIMITS = (1000, 2000, 4000, 8000)
"""Characters of a tool result, of which one is drawn."""
SAME = (
    ("do not", "don't"),
    ("don't", "do not"),
    ("does not", "doesn't"),
    ("doesn't", "does not"),
    ("cannot", "can't"),
    ("can't", "cannot"),
    ("You must", "You have to"),
    ("you must", "you have to"),
    ("in order to", "so as to"),
    ("for example", "for instance"),
    ("for instance", "for example"),
    ("e.g.", "for example"),
    ("i.e.", "that is"),
)
"""Expressions, and what may stand in their place wherever they stand; each is drawn for itself."""
LONGEST = 200_000
"""Characters of a system prompt. A longer one stays as it is: reading it would hold up other calls."""
_ROLE = re.compile(r"\AYou are (?=(?:an?|the) )")
_ROLES = ("You are ", "You work as ", "Act as ", "Your role: ")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def paraphrase(prompt: str, seed: int) -> str:
    """The system prompt in other words of the same sense. Code in it stays as it is."""
    if len(prompt) > LONGEST:
        return prompt
    draws = random.Random(f"{seed}/system")
    role = draws.choice(_ROLES)
    swaps = {words: others for words, others in SAME if draws.random() < 0.5}
    if swaps:
        words = re.compile(
            "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(swaps, key=len, reverse=True))
        )
        parts = _CODE.split(prompt)  # every second part is code
        parts[::2] = [words.sub(lambda found: swaps[found[0]], part) for part in parts[::2]]
        prompt = "".join(parts)
    return _ROLE.sub(role, prompt)


def shorter(description: str) -> str:
    """The first paragraph of a description, and the grammar of the input where it has one."""
    text, mark, grammar = description.partition(GRAMMAR)
    first = text.strip().split("\n\n")[0]
    return f"{first}\n\n{mark}{grammar}" if mark else first


def observation(result: str, seed: int) -> str:
    """A tool result in the form of this seed."""
    begin, end = _drawn(seed, "observation", FRAMES)
    return f"{begin}{result}{end}"


def without_frame(observation: str, seed: int) -> str:
    """The tool result in the form of this seed."""
    begin, end = _drawn(seed, "observation", FRAMES)
    return observation.removeprefix(begin).removesuffix(end)


def cut(result: str, seed: int) -> str:
    """A tool result of at most as many characters as this seed allows, with a word about what is left out."""
    limit = _drawn(seed, "truncation", LIMITS)
    if len(result) <= limit:
        return result
    half = limit // 2
    return f"{result[:half]}\n[{len(result) - 2 * half} characters are left out]\n{result[-half:]}"


@lru_cache(4096)  # all threads share it, as a draw depends on its arguments alone
def _drawn(seed: int, what: str, choices: Sequence[T]) -> T:
    return random.Random(f"{seed}/{what}").choice(choices)
