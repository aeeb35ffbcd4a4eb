"""Reads tasks that earlier versions stored, and digests tasks as those versions did, so that their runs are resumed."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from harness.tasks.schema import Task, TaskLimits, Verifier

LATER: Mapping[type, frozenset[str]] = {
    Task: frozenset({"reach", "mcp"}),
    TaskLimits: frozenset({"system_calls"}),
    Verifier: frozenset({"cases", "range", "where", "artifacts", "carry", "collect", "environment"}),
}
"""Fields that runs from before them lack. One that has its default leaves the digest as it was."""
_fields = cache(msgspec.structs.fields)
"""The fields of a class. Uncached, msgspec evaluates the annotations again for every task."""


def stored_task(spec: Mapping[str, Any]) -> Task:
    """Read the task of a rollout. A run from before `verifier.where` goes on as it began, in the agent's sandbox."""
    spec = {**spec, "verifier": _verifier(spec.get("verifier", {}))}
    spec["steps"] = [{**step, "verifier": _verifier(step["verifier"])} for step in spec.get("steps", ())]
    return msgspec.convert(spec, Task)


def _verifier(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    if "fresh" not in spec:
        return spec
    rest = {name: value for name, value in spec.items() if name != "fresh"}
    return rest | {"where": "fresh" if spec["fresh"] else "shared"}


def digest_of_tasks(tasks: Sequence[Task]) -> str:
    """A digest of tasks' fields, the same as before the fields of LATER where these have their defaults."""
    return hashlib.sha256(msgspec.json.encode(_plain(tasks))).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        later, plain = LATER.get(type(value), frozenset()), {}
        for one in _fields(type(value)):
            field = getattr(value, one.name)
            if one.name == "where" and isinstance(value, Verifier):
                plain["fresh"] = field == "fresh"
            default = one.default_factory() if one.default is msgspec.NODEFAULT and one.name in later else one.default
            if one.name not in later or field != default:
                plain[one.name] = _plain(field)
        return plain
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
