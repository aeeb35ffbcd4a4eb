"""The limited process that calls a user's function: `python -m proxy.pool.functions.child PURPOSE MODULE:NAME`.

It reads length-prefixed msgpack from standard input, the arguments of one call at a time, and answers each with a line
of JSON. The first line says whether the function was imported. What the function prints goes to standard error.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from proxy.pool.processes.limits import limit_this_process

MEMORY_BYTES = 4 << 30
"""Address space of the process. Enough for numpy and a tokenizer, and no danger to the trainer beside it."""
LARGEST = 1000.0
"""A larger weight would make one rollout the whole batch, so it is taken for a mistake."""


LARGEST_REWARD = 1e6
"""A larger reward, or part of one, is taken for a mistake."""


def main(purpose: str, name: str) -> None:
    answers, calls = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limit_this_process(MEMORY_BYTES)
    module, _, attribute = name.partition(":")
    answer: dict[str, Any] = {}
    try:
        function = getattr(importlib.import_module(module), attribute)
        if not callable(function):
            answer = {"error": f"it is of type {type(function).__name__}, which cannot be called"}
    except BaseException as error:  # whatever a user's module does while it is imported
        answer = {"error": f"{type(error).__name__}: {error}"}
    while True:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
        size = calls.read(4)
        if not size:
            return
        arguments = msgspec.msgpack.decode(calls.read(int.from_bytes(size, "big")))
        try:
            answer = PURPOSES[purpose](function(*arguments))
        except BaseException as error:  # SystemExit too: the function failed on this rollout alone
            answer = {"error": f"raised {type(error).__name__}", "detail": str(error)[:500]}


def _weight(value: Any) -> dict[str, Any]:
    """A number, or an object with `weight`, `leave_out` or both: ids of completions that are not trained."""
    left_out: Any = []
    if isinstance(value, Mapping):
        if not value or not value.keys() <= {"weight", "leave_out"}:
            return {"error": f"returned {sorted(map(str, value))[:10]} and not 'weight' or 'leave_out'"}
        value, left_out = value.get("weight", 1.0), value.get("leave_out", [])
    if not isinstance(value, int | float):
        return {"error": f"returned a {type(value).__name__}, not a number"}
    if not (math.isfinite(value) and 0 <= value <= LARGEST):
        return {"error": "returned a number that is no weight", "detail": f"{value} is not from 0 to {LARGEST:g}"}
    ids = list(left_out) if isinstance(left_out, Iterable) else [None]
    if not all(type(id) is int for id in ids):
        return {"error": "returned a leave_out that is no list of ids"}
    return {"weight": float(value), "leave_out": ids}


def _reward(value: Any) -> dict[str, Any]:
    """A number, an object of names and numbers with `reward`, an object with the fields `reward` and `parts`, or None.

    `parts` is None where the function names none.
    """
    if value is None or isinstance(value, int | float):
        reward, parts = value, None
    elif isinstance(value, Mapping):
        if "reward" not in value:
            return {"error": f"returned {sorted(map(str, value))[:10]} and no 'reward'"}
        reward, parts = value["reward"], {str(name): part for name, part in value.items() if name != "reward"}
    elif hasattr(value, "reward") and isinstance(getattr(value, "parts", None), Mapping):
        reward, parts = value.reward, {str(name): part for name, part in value.parts.items()}
    else:
        return {"error": f"returned a {type(value).__name__}, not a reward"}
    numbers = {**(parts or {}), **({} if reward is None else {"reward": reward})}
    for name, number in numbers.items():
        if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:  # so NaN is none either
            return {"error": "returned what is no reward", "detail": f"{name}: {number!r}"[:200]}
    return {
        "reward": None if reward is None else float(reward),
        "parts": None if parts is None else {name: float(part) for name, part in parts.items()},
    }


PURPOSES: dict[str, Callable[[Any], dict[str, Any]]] = {"weight": _weight, "reward": _reward}
"""What the function is asked for -> how its value becomes an answer."""

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
