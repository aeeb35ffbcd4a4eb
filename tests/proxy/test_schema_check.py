"""The check of answers against schemas: as the library jsonschema decides, and in bounded time for hostile schemas."""

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from proxy.parsing.schema_check import misfit

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 2.0, "", "a", "ab"]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)
NAMES = st.sampled_from(["null", "boolean", "string", "array", "object", "number", "integer"])
FEW = st.integers(0, 2)


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(NAMES, st.lists(NAMES, min_size=1, max_size=2)),
        "enum": st.lists(SCALARS, min_size=1, max_size=3),
        "const": SCALARS,
        "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        "required": st.lists(st.sampled_from("ab"), max_size=2),
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": several,
        "not": inner,
        "$ref": st.just("#/$defs/a~1b"),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), several),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), FEW),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), st.integers(-2, 2)),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


SCHEMAS: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), schemas, max_leaves=6)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, SCHEMAS, VALUES)
def test_it_decides_as_jsonschema_does(schema: Any, other: Any, value: Any) -> None:
    # `other` is what "$ref" names; inside of itself the reference would have no end
    other = msgspec.json.decode(msgspec.json.encode(other).replace(b'"$ref"', b'"x-ref"'))
    whole = {"allOf": [schema], "$defs": {"a/b": other}}
    reason = misfit(msgspec.json.encode(value).decode(), whole)
    assert "cannot be checked" not in reason
    assert (reason == "") == Draft202012Validator(whole).is_valid(value), reason


@pytest.mark.parametrize(
    ("text", "schema", "reason"),
    [
        ("", {}, "the answer is not JSON (Input data was truncated)"),
        ("{} then", {}, "the answer is not JSON"),
        (" 5\n", {"type": "string"}, "the answer is not of type string"),
        ("null", {"type": "string", "nullable": True}, ""),
        ('{"a": [1, "x"]}', {"properties": {"a": {"items": {"type": "integer"}}}}, "the answer.a[1] is not of type"),
        ("1", {"type": "nothing"}, "the schema cannot be checked: it has the type 'nothing'"),
        ("1", {"$ref": "http://x/y"}, "the schema cannot be checked: it refers to 'http://x/y', which is not in it"),
        ("1", {"$ref": "#"}, "the schema cannot be checked: it refers to itself without end"),
        ("{}", {"required": 5}, "the schema cannot be checked: "),
        ("1", {"minimum": "a"}, "the schema cannot be checked: "),
    ],
)
def test_the_reason(text: str, schema: Any, reason: str) -> None:
    said = misfit(text, schema)
    assert said.startswith(reason) if reason else said == ""


def test_a_schema_that_doubles_at_every_level_comes_to_an_end() -> None:
    names = [f"d{level}" for level in range(60)]
    doubled = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in zip(names, names[1:], strict=False)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**doubled, "d59": False}}
    started = time.process_time()
    assert misfit("1", schema) == "the schema cannot be checked: it asks for more steps than its answer is worth"
    assert time.process_time() - started < 5
