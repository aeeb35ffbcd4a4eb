"""The value of an argument that the model wrote as bare text: the tool's JSON schema decides its type.

Where several types are allowed, the text becomes the most specific one that fits, a string last. Nothing is repaired:
text that fits none of the types is passed on unchanged. Left out: conditions between parameters, remote references.
"""

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

MAX_DEPTH = 8
"""References and combinations that are followed within one schema."""

ANY = {"string", "object", "array", "number", "boolean", "null"}

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NOTHING = object()


class ToolSchemas:
    """The parameter schemas of one request's tools, by tool name."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()):
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            self._parameters[function["name"]] = function.get("parameters")

    def knows(self, tool: str) -> bool:
        return tool in self._parameters

    def value(self, tool: str, parameter: str, text: str, guess: bool) -> Any:
        """The value of an argument's text. Without a schema it is a string, or if `guess` whatever JSON it is."""
        root = self._parameters.get(tool)
        schema = _properties(root, 0).get(parameter)
        types = _types(schema, root, 0)
        if not types:
            types = ANY if guess else {"string"}
        return typed(text, types)


class RecordedSchemas(ToolSchemas):
    """The same for a recorded turn: values come from its recorded arguments, so its schemas are not needed.

    Arguments that are no object have no values: earlier versions recorded calls in which a provider had broken off.
    """

    def __init__(self, calls: Iterable[Mapping[str, Any]]):
        self._values: dict[tuple[str, str], list[Any]] = {}
        for function in (call["function"] for call in calls):
            for name, value in _recorded(function["arguments"]).items():
                self._values.setdefault((function["name"], name), []).append(value)
        super().__init__(calls)

    def value(self, tool: str, parameter: str, text: str, guess: bool) -> Any:
        return next((v for v in self._values.get((tool, parameter), ()) if _stands_for(text, v)), text)


def _recorded(arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def typed(text: str, types: set[str]) -> Any:
    """The text as a value of one of these JSON types where it fits one; else the text."""
    if types == {"string"}:
        return text
    value = _literal(text.strip())
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if value is not _NOTHING and (_json_type(value) in types or (_json_type(value) == "integer" and "number" in types)):
        return value
    return text if value is _NOTHING or "string" in types else value


def _stands_for(text: str, value: Any) -> bool:
    if isinstance(value, str):
        return text == value or _literal(text.strip()) == value
    literal = _literal(text.strip())
    return literal == value and isinstance(literal, bool) == isinstance(value, bool)


def _literal(text: str) -> Any:
    """The value of JSON, or of a Python literal, which Jinja templates render; _NOTHING for other text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):
        pass
    if text[:1] not in ("[", "{"):
        return _WORDS.get(text.lower(), _NOTHING)
    try:
        written = json.dumps(ast.literal_eval(text), allow_nan=False, ensure_ascii=False)
        return json.loads(written.encode())  # ValueError for half of a surrogate pair
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NOTHING


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _properties(schema: Any, depth: int) -> dict[str, Any]:
    """The parameters of a schema; those of its alternatives where it declares none itself."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return {}
    if isinstance(schema.get("properties"), dict):
        return dict(schema["properties"])
    properties: dict[str, Any] = {}
    for part in _parts(schema):
        properties = {**_properties(part, depth + 1), **properties}
    return properties


def _parts(schema: dict[str, Any]) -> list[Any]:
    alternatives = [schema.get(word) for word in ("anyOf", "oneOf", "allOf")]
    return [part for parts in alternatives if isinstance(parts, list) for part in parts]


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    named = schema.get("type")
    if named:
        return {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return {_json_type(value) for value in values}
    parts = [_referred(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else _parts(schema)
    types = {name for part in parts for name in _types(part, root, depth + 1)}
    return types or ({"object"} if "properties" in schema else {"array"} if "items" in schema else set())


def _referred(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        target = target.get(part) if isinstance(target, dict) else None
    return target
