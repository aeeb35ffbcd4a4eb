"""What bare text stands for, by the tool's JSON schema."""

import json
from typing import Any

import pytest

from proxy.parsing.formats.schemas import RecordedSchemas, ToolSchemas, typed

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def value(text: str, parameter: Any, guess: bool = False, definitions: Any = None) -> Any:
    parameters = {"type": "object", "properties": {"p": parameter}, "$defs": definitions}
    schemas = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return schemas.value("f", "p", text, guess)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (STRING, "5", "5"),
        (STRING, "null", "null"),
        (STRING, '{"a":  1}', '{"a":  1}'),
        (INTEGER, " 5\n", 5),
        (INTEGER, "5.0", 5),
        (INTEGER, "five", "five"),
        (INTEGER, "null", None),
        (NUMBER, "5", 5),
        (NUMBER, "1e3", 1000.0),
        (NUMBER, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
        ({"type": "array"}, '["x", 1]', ["x", 1]),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"items": STRING}, "[]", []),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [STRING, {"type": "array"}]}, '["ls"]', ["ls"]),
        ({"anyOf": [STRING, {"type": "array"}]}, "ls [x]", "ls [x]"),
        ({"oneOf": [INTEGER, {"type": "boolean"}]}, "true", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": False}, "false", False),
        ({}, "5", "5"),
    ],
)
def test_the_schema_decides_what_text_stands_for(schema: Any, text: str, expected: Any) -> None:
    result = value(text, schema)
    assert (result, type(result)) == (expected, type(expected))


def test_references_are_followed_and_circles_end() -> None:
    definitions = {"n": INTEGER, "loop": {"$ref": "#/$defs/loop"}}
    assert value("5", {"$ref": "#/$defs/n"}, definitions=definitions) == 5
    assert value("5", {"$ref": "#/$defs/loop"}, definitions=definitions) == "5"
    assert value("5", {"$ref": "#/$defs/missing/deeper"}, definitions=definitions) == "5"


def test_where_no_schema_speaks_a_format_may_guess() -> None:
    assert (value("5", {}, guess=True), value("five", {}, guess=True), value('"5"', {}, guess=True)) == (5, "five", "5")
    assert ToolSchemas().value("unknown", "p", "5", True) == 5
    assert ToolSchemas().value("unknown", "p", "5", False) == "5"


def test_parameters_of_alternatives_count() -> None:
    branch = {"properties": {"p": INTEGER}}
    schemas = ToolSchemas(
        [{"function": {"name": "f", "parameters": {"anyOf": [branch, {"properties": {"q": STRING}}]}}}]
    )
    assert schemas.value("f", "p", "5", False) == 5


@pytest.mark.parametrize("text", ["5", "5.0", "true", "True", "null", "None", "[1]", "{'a': 1}", '"x"', "plain", ""])
def test_every_reading_of_a_text_is_recognised_in_the_record(text: str) -> None:
    for name in ("string", "integer", "number", "boolean", "array", "object", "null"):
        taken = typed(text, {name})
        recorded = RecordedSchemas([{"function": {"name": "f", "arguments": json.dumps({"p": taken})}}])
        again = recorded.value("f", "p", text, False)
        assert (again, type(again)) == (taken, type(taken))


def test_what_no_json_can_hold_stays_text() -> None:
    assert typed(r"['\ud800']", {"array"}) == r"['\ud800']"


def test_a_recorded_value_that_the_text_cannot_be_is_not_taken() -> None:
    recorded = RecordedSchemas([{"function": {"name": "f", "arguments": '{"p": 6, "b": true}'}}])
    assert (recorded.value("f", "p", "5", False), recorded.value("f", "b", "1", False)) == ("5", "1")


@pytest.mark.parametrize("arguments", ["", '{"p": "pw', "[1]"])
def test_recorded_arguments_that_are_no_object_have_no_values(arguments: str) -> None:
    recorded = RecordedSchemas([{"function": {"name": "f", "arguments": arguments}}])
    assert recorded.value("f", "p", "5", False) == "5"
