"""Checks an answer against the JSON schema that its request prescribes, where no grammar has enforced it.

The schema comes from the agent: nothing is fetched, no pattern is matched, and the work is bounded by the answer's
length. Left out, and taken for kept: `pattern`, `format`, `uniqueItems`, conditions (`if`, `dependentRequired`, ...),
and what counts only what other keywords left over (`unevaluatedProperties`, ...).
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any
from urllib.parse import unquote

import msgspec

BASE_STEPS, STEPS_PER_CHARACTER = 1000, 20
"""How many rules are applied at most, so that a schema that refers to itself many times over comes to an end."""
UNCHECKABLE = "the schema cannot be checked"
"""How a verdict begins that is about the schema and not about the answer."""

TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and value == int(value),
}


class _UncheckableError(Exception):
    """The schema cannot be checked; the message says why."""


def misfit(text: str, schema: Any) -> str:
    """Say what keeps a text from being JSON that fits the schema; empty where nothing does."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError) as error:
        return f"the answer is not JSON ({error})"
    try:
        return _Checker(schema, BASE_STEPS + STEPS_PER_CHARACTER * len(text)).check(value, schema, "the answer")
    except RecursionError:
        return f"{UNCHECKABLE}: it refers to itself without end"
    except (_UncheckableError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        return f"{UNCHECKABLE}: {error}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Checker:
    """The check of one answer. Each rule returns what is wrong, empty where nothing is."""

    def __init__(self, root: Any, steps: int):
        self._root = root
        self._steps = steps

    def check(self, value: Any, schema: Any, where: str) -> str:
        """Say what is wrong with a value, which stands at `where`."""
        self._spend(1)
        if isinstance(schema, bool):
            return "" if schema else f"{where} must not be there"
        if not isinstance(schema, dict):
            raise _UncheckableError(f"{where} has a schema that is no object")
        if value is None and schema.get("nullable") is True:  # Google's word
            return ""
        for rule in (self._reference, self._type, self._choice, self._combination):
            if wrong := rule(value, schema, where):
                return wrong
        if _is_number(value):
            return _number(value, schema, where)
        if isinstance(value, str):
            return _size(len(value), schema, where, "Length", "characters")
        if isinstance(value, list):
            return _size(len(value), schema, where, "Items", "entries") or self._items(value, schema, where)
        if isinstance(value, dict):
            return _size(len(value), schema, where, "Properties", "fields") or self._fields(value, schema, where)
        return ""

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _UncheckableError("it asks for more steps than its answer is worth")

    def _reference(self, value: Any, schema: dict[str, Any], where: str) -> str:
        if "$ref" not in schema:
            return ""
        target, path = self._root, schema["$ref"]
        if path != "#" and not path.startswith("#/"):
            raise _UncheckableError(f"it refers to {path!r}, which is not in it")
        for name in unquote(path).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            target = target[int(name)] if isinstance(target, list) else target[name]
        return self.check(value, target, where)

    def _type(self, value: Any, schema: dict[str, Any], where: str) -> str:
        if "type" not in schema:
            return ""
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        self._spend(len(names))
        if unknown := [name for name in names if name not in TYPES]:
            raise _UncheckableError(f"it has the type {unknown[0]!r}")
        return "" if any(TYPES[name](value) for name in names) else f"{where} is not of type {' or '.join(names)}"

    def _choice(self, value: Any, schema: dict[str, Any], where: str) -> str:
        choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
        self._spend(len(choices))
        allowed = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices)
        return "" if allowed or not choices else f"{where} is none of the values that it may have"

    def _combination(self, value: Any, schema: dict[str, Any], where: str) -> str:
        for part in schema.get("allOf", ()):
            if wrong := self.check(value, part, where):
                return wrong
        for name, most in (("anyOf", None), ("oneOf", 2)):
            if name in schema:
                fitting = (1 for part in schema[name] if not self.check(value, part, where))
                count = sum(islice(fitting, most or 1))
                if count != 1:
                    return f"{where} fits {'several' if count else 'none'} of the schemas of {name}"
        if "not" in schema and not self.check(value, schema["not"], where):
            return f"{where} fits what it must not"
        return ""

    def _items(self, value: list[Any], schema: dict[str, Any], where: str) -> str:
        first = schema.get("prefixItems", ())
        schemas = [*islice(first, len(value)), *[schema.get("items", True)] * (len(value) - len(first))]
        return self._first_wrong(zip(value, schemas, (f"{where}[{i}]" for i in range(len(value))), strict=True))

    def _fields(self, value: dict[str, Any], schema: dict[str, Any], where: str) -> str:
        self._spend(len(schema.get("required", ())))
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{where} lacks {missing[0]!r}"
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
        return self._first_wrong((value[name], known.get(name, more), f"{where}.{name}") for name in value)

    def _first_wrong(self, parts: Any) -> str:
        return next(filter(None, (self.check(*part) for part in parts)), "")


def _number(value: float, schema: dict[str, Any], where: str) -> str:
    kept = {
        "minimum": lambda limit: value >= limit,
        "maximum": lambda limit: value <= limit,
        "exclusiveMinimum": lambda limit: value > limit,
        "exclusiveMaximum": lambda limit: value < limit,
        "multipleOf": lambda unit: value / unit == int(value / unit),
    }
    broken: Sequence[str] = [name for name, keeps in kept.items() if name in schema and not keeps(schema[name])]
    return f"{where} breaks {broken[0]} {schema[broken[0]]}" if broken else ""


def _size(size: int, schema: dict[str, Any], where: str, what: str, unit: str) -> str:
    if size < int(schema.get(f"min{what}", 0)):
        return f"{where} has less than {schema[f'min{what}']} {unit}"
    most = schema.get(f"max{what}")
    return f"{where} has more than {most} {unit}" if most is not None and size > int(most) else ""
