r"""Whether two mathematical answers are the same, by math-verify: as numbers, expressions, sets, intervals, matrices.

An answer is one value with its own unit. `5\%` is 0.05. Where both sides name a unit, it must be the same one; where
only one does, the values decide. Of `x = 3 + 4 = 7` each side but a name must be the right value, so `1 = 2 = 42` is
not 42. math-verify alone leaves out units and all that stands before the last `=`.

The policy writes the text, and no parser of mathematics is safe from `10^{10^{10}}`. So each comparison runs in a child
process of its own with limited CPU time and memory. What goes beyond these limits is a wrong answer, or an answer could
escape its verdict by being expensive. Anything else that goes wrong with the child is no verdict.
"""

import asyncio
import logging
import multiprocessing
import re
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

from harness.failure import AttemptFailed
from proxy.pool.processes.limits import limit_this_process

MAX_LENGTH = 1000
"""Characters of an answer that are parsed; longer ones are compared as text only."""
CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
WALL_SECONDS = 120.0
DECIMALS = 12
"""math-verify rounds both sides to this before it compares them. Its default of 6 takes 0.3333333 for 1/3."""
TOO_EXPENSIVE = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)
"""Exit codes of a child that outgrew its CPU time, its stack or its memory."""
_SPELLINGS = {
    "m": "meter metre", "km": "kilometer kilometre", "cm": "centimeter centimetre", "mm": "millimeter millimetre",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "", "month": "", "year": "yr",
    "g": "gram gm", "kg": "kilogram", "lb": "pound", "l": "liter litre", "gallon": "gal", "acre": "", "mph": "",
    "ft": "foot feet", "in": "inch inches", "yard": "yd", "mile": "", "degree": "deg", "dollar": "usd", "euro": "",
    "cent": "", "rupee": "", "unit": "", "student": "", "apple": "", "coin": "", "digit": "",
    "2": "square sq squared", "3": "cubic cubed", "/": "per", "%": "percent", "": "of the",
}  # fmt: skip
"""Unit -> other spellings, both also with an s. Words that are units without `\text{}` around them."""
_CANONICAL = {
    spelling: unit
    for unit, others in _SPELLINGS.items()
    for word in (unit, *others.split())
    for spelling in (word, f"{word}s" if len(word) > 1 else word)
} | {"circ": "degree", "°": "degree"}
_POWERS_BEFORE = ("square", "sq", "cubic")
"""Powers that stand before their unit. All others stand behind it."""
_WORD = re.compile(r"[^\W\d_]+|[°%/]|-?\d")
_COMMAND = re.compile(r"\\[a-z]+")
_POWER = r"(?:\^-?\d|\^\{-?\d\})?"
_BARE = rf"(?:{'|'.join(sorted((w for w in _CANONICAL if w.isalpha()), key=len, reverse=True))})(?![^\W\d_]){_POWER}"
_NO_UNIT = r"(?![^{}]*\b(?:or|and|not)\b)"
_TEXT = rf"\\(?:text|mbox|textrm|mathrm|rm)\s?\{{{_NO_UNIT}[^{{}}\d\\]*(?:\^?[23])?\s?\}}{_POWER}"
_UNIT = re.compile(
    rf"(?:(?<=[\d\s}}).])|(?=[\\^°%]))(?:\\[,;:! ]|[\s~])*+"
    rf"(?P<unit>{_TEXT}|\^\s?\{{?\\circ\s?\}}?|\\degree|°|{_BARE}(?:\s?(?:/|per|\s)\s?{_BARE}){{0,3}})\Z"
)
_PERCENT = re.compile(r"\\?%")
_NAME = re.compile(r"(?:[^\W\d_]|\\[a-zA-Z]++|_\w|_\{\w+\}|\([^()=]*\)|[\s{}|+*/'-])++")
"""What may stand before an `=` without being a value: no digits but in subscripts and in parentheses."""
_SCIENTIFIC = re.compile(r"(\d)[eE]([+-]?\d+)\b")
_PROCESSES = multiprocessing.get_context("forkserver")
# importing sympy takes a second: the server does it once, and each comparison is a fork of it
_PROCESSES.set_forkserver_preload(["math_verify", __name__])


async def is_same(candidates: Sequence[str], right: str) -> bool:
    """Whether one of the candidates is the right answer. AttemptFailed when they could not be compared."""
    candidates = [candidate.strip() for candidate in candidates]
    if right.strip() in candidates:
        return True
    parsable = [candidate for candidate in candidates if candidate and len(candidate) <= MAX_LENGTH]
    if not parsable:
        return False
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    child = _PROCESSES.Process(target=compare, args=(parsable, right.strip(), CPU_SECONDS, sender), daemon=True)
    await asyncio.to_thread(child.start)  # waits for the server, which imports sympy first
    sender.close()
    answered, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(receiver.fileno(), answered.set)
    try:
        await asyncio.wait_for(answered.wait(), WALL_SECONDS)
        return bool(receiver.recv())
    except EOFError as error:  # it ended without an answer
        child.join()
        if child.exitcode in TOO_EXPENSIVE:
            return False
        raise AttemptFailed("verifier", f"comparing with {right!r} ended with exit code {child.exitcode}") from error
    except TimeoutError as error:
        raise AttemptFailed("verifier", f"comparing with {right!r} took longer than {WALL_SECONDS:g} s") from error
    finally:
        loop.remove_reader(receiver.fileno())
        child.kill()
        child.join()
        receiver.close()


def compare(candidates: Sequence[str], right: str, cpu_seconds: int, sender: Connection) -> None:
    """What the child does: limit itself, then send whether one of the candidates is right."""
    limit_this_process(MEMORY_BYTES, cpu_seconds)
    logging.disable()
    try:
        sender.send(any(equal(candidate, right) for candidate in candidates))
    except (MemoryError, RecursionError):
        sender.send(False)


def equal(answer: str, right: str) -> bool:
    """Compare in this process, without limits."""
    (answer, unit), (right, right_unit) = _split(answer), _split(right)
    if unit and right_unit and unit != right_unit:
        return False
    sides, right_sides = _sides(answer), _sides(right)
    if len(sides) == 1 or (len(sides) == len(right_sides) == 2 and _NAME.fullmatch(sides[0])):
        return _same_value(answer, right)
    if len(right_sides) > 1 and right_sides[0].strip() != sides[0].strip():
        return False
    values = [side for side in sides[:-1] if not _NAME.fullmatch(side)] + sides[-1:]
    return all(_same_value(value, right_sides[-1]) for value in values)


def _same_value(answer: str, right: str) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # LaTeX only: math-verify hands plain expressions to sympy's parse_expr, which evaluates Python.
    # No timeouts of its own: they are by the wall clock, which a busy machine would turn into wrong answers.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    target = [LatexExtractionConfig(normalization_config=rules)]
    read = [parse(f"\\boxed{{{_latex(text)}}}", target, parsing_timeout=None) for text in (right, answer)]
    return bool(verify(*read, float_rounding=DECIMALS, timeout_seconds=None))


def _split(text: str) -> tuple[str, str]:
    """The value, percent as hundredths, and the unit in a common spelling (empty: none)."""
    value, words = text.strip().strip("$").strip().removesuffix("."), list[str]()
    while (match := _UNIT.search(value)) and match.start():
        words = _WORD.findall(_COMMAND.sub("", re.sub(r"\\circ|\\degree", "°", match["unit"]))) + words
        value = value[: match.start()].rstrip()
    if value.startswith("\\$"):
        value, words = value.removeprefix("\\$").lstrip(), [*words, "dollar"]
    units = _units(words)
    if "%" in units:
        value, units = f"{value}\\%", []
    sides = " ".join(units).split("/")  # the units above and below a fraction are in any order, but not exchanged
    unit = "/".join(" ".join(sorted(side.split())) for side in sides)
    return _PERCENT.sub(r"\\times\\frac{1}{100}", value), unit


def _units(words: Sequence[str]) -> list[str]:
    """The units in a common spelling, each with its power: `cm^2` and `square centimeters` are both `cm2`."""
    names = [_CANONICAL.get(word, _CANONICAL.get(word.lower(), word.lower())) for word in words]
    if "unit" in names:  # units of whatever is asked for
        return []
    units, power = list[str](), ""
    for word, name, following in zip(words, names, [*names, ""][1:], strict=True):
        if not name.lstrip("-").isdigit():
            units += [(name.removesuffix("s") or name) + power] if name else []
            power = ""
        elif word.lower() in _POWERS_BEFORE and following.isalpha():
            power = name
        elif units:
            units[-1] += name
    return units


def _sides(text: str) -> list[str]:
    """The sides of an equation or a chain of them. A list such as `x = 1, y = 2` is one side."""
    depth, sides = 0, [""]
    for before, sign in zip(" " + text, text, strict=False):
        depth += (sign in "{([") - (sign in "])}")
        if depth == 0 and sign in ",;":
            return [text]
        if depth == 0 and sign == "=" and before not in "<>!=":
            sides.append("")
        else:
            sides[-1] += sign
    return sides


def _latex(text: str) -> str:
    r"""The text to put into a box, `1.5e3` as `1.5 \times 10^{3}`; empty if it would end the box or add another."""
    depth = 0
    for letter in re.sub(r"\\[{}]", "", text):  # escaped braces are print, not structure
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            break
    if depth or "\\boxed" in text:
        return ""
    return _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text.removesuffix("."))
