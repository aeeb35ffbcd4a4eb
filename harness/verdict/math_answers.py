r"""Whether two mathematical answers are the same, by math-verify: as numbers, expressions, sets, intervals, matrices.

The policy writes the text, and no parser of mathematics is safe from `10^{10^{10}}`. So each comparison runs in a child
process of its own with limited CPU time and memory. What goes beyond these limits is a wrong answer, or an answer could
escape its verdict by being expensive. Anything else that goes wrong with the child is no verdict.
"""

import asyncio
import logging
import multiprocessing
import re
import resource
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

from harness.failure import AttemptFailed

MAX_LENGTH = 1000
"""Characters of an answer that are parsed; longer ones are compared as text only."""
CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
WALL_SECONDS = 120.0
DECIMALS = 12
"""math-verify rounds both sides to this before it compares them. Its default of 6 takes 0.3333333 for 1/3."""
TOO_EXPENSIVE = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)
"""Exit codes of a child that outgrew its CPU time, its stack or its memory."""
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
    child = _PROCESSES.Process(target=_compare, args=(parsable, right.strip(), CPU_SECONDS, sender), daemon=True)
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


def _compare(candidates: Sequence[str], right: str, cpu_seconds: int, sender: Connection) -> None:
    """What the child does: send whether one of the candidates is right."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(
        resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5)
    )  # the hard limit is SIGKILL, which tells no cause
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()
    try:
        sender.send(any(_equal(candidate, right) for candidate in candidates))
    except (MemoryError, RecursionError):
        sender.send(False)


def _equal(answer: str, right: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # LaTeX only: math-verify hands plain expressions to sympy's parse_expr, which evaluates Python.
    # No timeouts of its own: they are by the wall clock, which a busy machine would turn into wrong answers.
    read = [
        parse(f"\\boxed{{{_latex(text)}}}", [LatexExtractionConfig()], parsing_timeout=None) for text in (right, answer)
    ]
    return bool(verify(*read, float_rounding=DECIMALS, timeout_seconds=None))


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
