"""JSON answers, and what a request asks for in its address."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from proxy.pool.errors import UserError

LARGEST = 2**31 - 1
"""The largest id: databases hold them as integers of 32 bits."""
MOST_TEXT = 200
"""Characters of a parameter."""
NOT_KEPT = {"Cache-Control": "no-store"}


def answer(value: Any, status: int = 200) -> web.Response:
    """Return a value as JSON. Numbers that are not finite become null."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=NOT_KEPT
    )


def number(given: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """Return a whole number of a request; `default` where it is left out. UserError for anything else."""
    text = given.get(name)
    if text is None or text == "":
        return default
    if not text.isdecimal() or not text.isascii() or len(text) > 10 or int(text) > LARGEST:
        raise UserError(f"{name} is a whole number up to {LARGEST}, not {text[:MOST_TEXT]!r}")
    return int(text)


def real(given: Mapping[str, str], name: str) -> float | None:
    """Return a number of a request; None where it is left out. UserError for anything else."""
    text = given.get(name)
    if text is None or text == "":
        return None
    try:
        value = float(text) if len(text) < 40 else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} is a number, not {text[:MOST_TEXT]!r}")
    return value


def required(given: Mapping[str, str], name: str) -> int:
    """Return a whole number that a request must have. UserError for anything else."""
    value = number(given, name)
    if value is None:
        raise UserError(f"{name} is missing; name it in the address")
    return value


def chosen(given: Mapping[str, str], name: str) -> str | None:
    """Return a text of a request; None where it is left out. UserError when it is too long."""
    text = given.get(name)
    if text is not None and len(text) > MOST_TEXT:
        raise UserError(f"{name} has {len(text)} characters, and {MOST_TEXT} is the limit")
    return text or None
