"""Run in google-genai's environment: prints every field of its request as cases, with the bodies that its client sends.

Each case is a line of JSON: name, the body without the field, the body with it. Fields that the client does not send to
the Gemini API are left out.
"""

import enum
import json
import types as python_types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

import httpx2 as httpx  # what the client is built on
import pydantic
from google import genai
from google.genai import types

LEAST: dict[Any, Any] = {
    types.FunctionDeclaration: {"name": "text"},
    types.FunctionCall: {"name": "text"},
    types.FunctionResponse: {"name": "text", "response": {"output": "text"}},
    types.Content: {"role": "user", "parts": [{"text": "text"}]},
    types.Tool: {"function_declarations": [{"name": "text"}]},
    types.FunctionCallingConfig: {"mode": "ANY"},
    types.Blob: {"data": b"", "mime_type": "image/png"},
}
VALUES: dict[Any, Any] = {str: "text", int: 2, float: 0.5, bool: True, bytes: b"text", Any: {"type": "string"}}
OTHERS = {"http_options": "changes how requests are sent", "automatic_function_calling": "is the client's own"}
"""Fields of the configuration that are no part of the request."""
TOOL = {"function_declarations": [{"name": "text"}, {"name": "other"}]}
ANNOTATIONS: dict[str, Any] = {"tools": list[types.Tool]}
"""Of fields whose own annotation does not say what is in them."""
sent: list[Any] = []


def variants(hint: Any) -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    """The values that a field may have, the model of the object in each, and what puts such an object there."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, python_types.UnionType):
        for each in inner:
            yield from variants(each)
    elif origin is list:
        for value, kind, around in variants(inner[0]):
            yield [value], kind, partial(in_list, around)
    elif origin is dict:
        yield {"text": next(variants(inner[1]), ("text",))[0]}, None, lambda value: value
    elif origin is Literal:
        yield inner[0], None, lambda value: value
    elif hint in VALUES:
        yield VALUES[hint], None, lambda value: value
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield [each.value for each in hint if "UNSPECIFIED" not in each.value][:2][-1], None, lambda value: value
    elif isinstance(hint, type) and issubclass(hint, pydantic.BaseModel) and hint.__module__ == types.__name__:
        yield LEAST.get(hint, {}), hint, lambda value: value


def in_list(around: Callable[[Any], Any], value: Any) -> list[Any]:
    return [around(value)]


def fields(kind: Any, name: str, put: Callable[[Any], dict[str, Any]], within: tuple[Any, ...]) -> Iterator[Any]:
    """Name, request without and request with each field of a model and of what is in it."""
    least = LEAST.get(kind, {})
    for field, info in kind.model_fields.items():
        if field in OTHERS and not name:
            continue
        without = {key: value for key, value in least.items() if key != field}
        for value, inner, around in variants(ANNOTATIONS.get(field, info.annotation)):
            place = f"{name}.{field}".removeprefix(".")
            if value != {}:
                yield place, put(without), put({**least, field: value})
            if inner is not None and inner not in within:

                def inside(item: Any, field: str = field, around: Any = around, least: Any = least) -> dict[str, Any]:
                    return put({**least, field: around(item)})

                yield from fields(inner, place, inside, (*within, inner))


def answer(request: httpx.Request) -> httpx.Response:
    sent.append(json.loads(request.content))
    return httpx.Response(200, json={"candidates": [{"content": {"role": "model", "parts": [{"text": "text"}]}}]})


def body(client: genai.Client, request: dict[str, Any]) -> Any:
    """What the client sends for a request; None where it refuses to send it."""
    sent.clear()
    config = request.get("config", {})
    if "tool_config" in config:
        config = {"tools": [TOOL], **config}
    if {"response_schema", "response_json_schema"} & config.keys():
        config = {"response_mime_type": "application/json", **config}
    try:
        contents = [types.Content.model_validate(content) for content in request["contents"]]
        client.models.generate_content(
            model="tiny", contents=contents, config=types.GenerateContentConfig.model_validate(config)
        )
    except Exception:  # the client's own refusals have many types
        return None
    return sent[0] if sent else None


def main() -> None:
    options = types.HttpOptions(base_url="http://proxy", client_args={"transport": httpx.MockTransport(answer)})
    client = genai.Client(api_key="agent", http_options=options)
    question = {"role": "user", "parts": [{"text": "text"}]}
    found = [
        *fields(types.GenerateContentConfig, "", lambda it: {"contents": [question], "config": it}, ()),
        *fields(types.Part, "contents.parts", lambda it: {"contents": [question, {"role": "user", "parts": [it]}]}, ()),
        *fields(
            types.Part,
            "contents<model>.parts",
            lambda it: {"contents": [{"role": "model", "parts": [it]}, question]},
            (),
        ),
    ]
    for name, without, request in found:
        with_field, plain = body(client, request), body(client, without)
        if with_field is not None and with_field != plain:
            print(json.dumps({"name": name, "without": plain or {}, "body": with_field}))


main()
