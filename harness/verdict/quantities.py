r"""Whether two mathematical answers are the same: by value where both are numbers, else by their normalised text.

Numbers are compared exactly, as fractions: `0.5`, `1/2`, `\frac{1}{2}`, `50\%`, `5 \times 10^{-1}` and `$\dfrac12$` are
equal. Tuples and lists are compared member by member, `x = 5` by its right side. What it does not do: algebra. `2x + 2`
and `2(x + 1)`, `\sqrt{8}` and `2\sqrt{2}`, sets in another order, and roundings (`0.33` for `1/3`) are different here.
"""

import re
from fractions import Fraction

MAX_LENGTH = 1000
MAX_DIGITS = 100
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_GROUPED = re.compile(r"([+-]?\d{1,3})((?:,\d{3})+)(\.\d+)?")
_SCIENTIFIC = re.compile(rf"({_NUMBER})(?:e|\*10\^)\{{?\(?([+-]?\d{{1,3}})\)?\}}?", re.IGNORECASE)
_FRACTION = re.compile(rf"([+-]?)\\frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}|({_NUMBER})/({_NUMBER})")
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,!;: ])|\\?\$|\\[()\[\]]|\^\{?\\circ\}?|[\s~]")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}")


def same(answer: str, right: str) -> bool:
    """Whether an answer is the right one."""
    if max(len(answer), len(right)) > MAX_LENGTH:
        return answer == right
    return _same(normalised(answer), normalised(right))


def _same(answer: str, right: str) -> bool:
    if answer == right:
        return True
    number, wanted = value(answer), value(right)
    if number is not None and wanted is not None:
        return number == wanted
    members, wanted_members = _members(answer), _members(right)
    if len(members) < 2 or len(members) != len(wanted_members) or _ends(answer) != _ends(right):
        return False
    return all(_same(*pair) for pair in zip(members, wanted_members, strict=True))


def normalised(text: str) -> str:
    """Without what only lays it out."""
    text = _WORDS.sub(r"\1", text.strip().rstrip(".")).replace("−", "-").replace("\\%", "%").replace("{,}", ",")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cdot", "*").replace("\\times", "*")
    text = _DROPPED.sub("", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    return re.sub(r"^[a-zA-Z]\w*=", "", text)


def value(text: str) -> Fraction | None:
    """The number that a normalised text is; None when it is none, or too long to be worth it."""
    if len(text) > MAX_DIGITS:
        return None
    if text.endswith("%"):
        part = value(text[:-1])
        return None if part is None else part / 100
    if grouped := _GROUPED.fullmatch(text):
        text = grouped[0].replace(",", "")
    if re.fullmatch(_NUMBER, text):
        return Fraction(text)
    if scientific := _SCIENTIFIC.fullmatch(text):
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2])
    if found := _FRACTION.fullmatch(text):
        sign, above, below, over, under = found.groups()
        if not Fraction(below or under):
            return None
        return Fraction(f"{sign or ''}1") * Fraction(above or over) / Fraction(below or under)
    return None


def _members(text: str) -> list[str]:
    """The parts of a tuple or list, split at its outer commas."""
    inner = text[1:-1] if _ends(text) else text
    parts, depth = [""], 0
    for letter in inner:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _ends(text: str) -> str:
    return text[0] + text[-1] if len(text) > 1 and text[0] in "([" and text[-1] in ")]" else ""
