"""Other words for system prompts, descriptions and tool results. Each function has one result for one seed."""

import random
import re

LIMITS = (1000, 2000, 4000, 8000)
"""Characters of a tool result, of which one is drawn."""
FORMS = (
    "Output:\n{0}",
    "<output>\n{0}\n</output>",
    "```\n{0}\n```",
    "[tool result]\n{0}\n[end of tool result]",
)
"""How a tool result is written, of which one is drawn."""
SAME = (
    ("do not", "don't"),
    ("does not", "doesn't"),
    ("cannot", "can't"),
    ("You must", "You have to"),
    ("you must", "you have to"),
    ("make sure", "see to it"),
    ("in order to", "so as to"),
    ("for example", "for instance"),
    ("e.g.", "for example"),
    ("i.e.", "that is"),
    ("as well as", "and also"),
    ("whenever", "each time"),
)
"""Expressions that say the same; each pair is drawn for itself, in both directions."""
_ROLE = re.compile(r"\AYou are (?=(?:an?|the) )")
_ROLES = ("You are ", "You work as ", "Act as ", "Your role: ")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def paraphrase(prompt: str, seed: int) -> str:
    """The system prompt in other words of the same sense. Code in it stays as it is."""
    draws = random.Random(f"{seed}/system")
    role = draws.choice(_ROLES)
    swaps = {a: b for pair in SAME if draws.random() < 0.5 for a, b in (pair, pair[::-1])}
    if swaps:
        words = re.compile(
            "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(swaps, key=len, reverse=True))
        )
        parts = _CODE.split(prompt)  # every second part is code
        parts[::2] = [words.sub(lambda found: swaps[found[0]], part) for part in parts[::2]]
        prompt = "".join(parts)
    return _ROLE.sub(role, prompt)


def shorter(description: str) -> str:
    """The first paragraph of a description."""
    return description.strip().split("\n\n")[0]


def observation(result: str, seed: int) -> str:
    """A tool result in the form of this seed."""
    return random.Random(f"{seed}/observation").choice(FORMS).format(result)


def cut(result: str, seed: int) -> str:
    """A tool result of at most as many characters as this seed allows, with a word about what is left out."""
    limit = random.Random(f"{seed}/truncation").choice(LIMITS)
    if len(result) <= limit:
        return result
    half = limit // 2
    return f"{result[:half]}\n[{len(result) - 2 * half} characters are left out]\n{result[-half:]}"
