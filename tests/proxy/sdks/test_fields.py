"""No field of a request is dropped in silence: each is served, or ignored by name, or refused by name.

The fields are those that the official SDKs declare. Lists of their names lie beside this file, so that a newer SDK
shows what is new. Not covered: fields that the SDKs send without declaring them, and what those that are served do.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.call import Call, CallError
from proxy.dialects import anthropic, chat_completions, gemini, responses, text_completions
from proxy.dialects.base import Dialect
from proxy.dialects.request_fields import camel_case
from tests.conftest import need
from tests.proxy.sdks import environments
from tests.proxy.sdks.request_types import FieldCase, cases

KNOWN = Path(__file__).parent / "fields"
DIALECTS: dict[str, Dialect] = {
    "openai-chat": chat_completions,
    "openai-completions": text_completions,
    "openai-responses": responses,
    "anthropic": anthropic,
    "anthropic-beta": anthropic,
    "google-genai": gemini,
}
SAYS_NOTHING = {
    r".*\.type": "says what the object is",
    r".*cache_control.*": "the engine caches every prefix",
    r"anthropic.*<thinking>\]\.signature": "the thinking is beside it, in the clear",
    r"openai-responses: input\[.*\]\.(id|status)": "says nothing about what was said",
    r"openai-responses: input\[.*<output_text>\]\.(annotations|logprobs).*": "what stood beside an answer's text",
    r"openai-responses: input\[<reasoning>\]\.content.*": "is the summary again, as these cases are made",
    r"openai-chat: (modalities\[\]|response_format<text>)": "is what happens without it",
    r"openai-responses: (text\.format<text>|tools\[<custom>\]\.format<text>|store)": "is what happens without it",
    r"openai-.*: parallel_tool_calls|anthropic.*: tool_choice<auto>": "is what happens without it",
    r"openai-responses: tools\[<custom>\]\.format<grammar>\.syntax": "the model reads the grammar itself",
    r"google-genai: system_instruction\.(role|thought_signature)": "is always the system's, without reasoning",
}
"""Fields without effect that need no name in the header, and why: patterns of `SDK: field`."""


@cache
def declared(sdk: str) -> tuple[FieldCase, ...]:
    """The fields that an SDK declares."""
    if sdk == "google-genai":
        return tuple(_googles())
    package = sdk.split("-")[0]
    need(f"{package}'s SDK (make install)", find_spec(package) is not None)
    return tuple(map(_whole, _typed(sdk)))


def _typed(sdk: str) -> Iterator[FieldCase]:
    if sdk == "openai-chat":
        from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat

        return cases(Chat, "", lambda body: body)
    if sdk == "openai-completions":
        from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completion

        return cases(Completion, "", lambda body: body)
    if sdk == "openai-responses":
        from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Response

        return cases(Response, "", lambda body: {"input": "a text", **body})
    if sdk == "anthropic":
        from anthropic.types.message_create_params import MessageCreateParamsStreaming as Message

        return cases(Message, "", lambda body: body)
    from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as BetaMessage

    return (case for case in cases(BetaMessage, "", lambda body: body) if case.name != "betas[]")  # sent as a header


def _googles() -> Iterator[FieldCase]:
    python = environments.made("google_genai")
    need("google-genai (python -m tests.proxy.sdks.environments google_genai)", python is not None)
    printed = subprocess.run([str(python), str(Path(__file__).with_name("google_requests.py"))], capture_output=True)
    assert printed.returncode == 0, printed.stderr.decode()
    for line in printed.stdout.splitlines():
        yield FieldCase(**json.loads(line))


def _whole(case: FieldCase) -> FieldCase:
    """The case with what its fields need beside them: tools for a choice of tools, a question after an answer."""
    added: dict[str, Any] = {}
    if "tool_choice" in case.body:
        function = {"name": "name", "parameters": {}, "input_schema": {}}
        added["tools"] = [
            function if "max_tokens" in case.body else {"type": "function", "function": function, **function}
        ]
    return replace(case, without=_asked(added | case.without), body=_asked(added | case.body))


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    """The body; after an answer of the model, a question. Some blocks are only in answers."""
    messages = body.get("messages")
    if "max_tokens" not in body or not messages:
        return body
    last = messages[-1]
    if (
        isinstance(last.get("content"), list)
        and last.get("role")
        and last["content"][0].get("type") in ("thinking", "tool_use")
    ):
        last = {**last, "role": "assistant"}
    after = [{"role": "user", "content": "text"}] if last.get("role") == "assistant" else []
    return {**body, "messages": [last, *after]}


def what_happens(dialect: Dialect, case: FieldCase) -> str:
    """served | ignored | refused, or what is wrong."""
    places = set(_differences(case.without, case.body, ""))
    try:
        call = _read(dialect, case.body)
    except CallError as error:
        if _named(_places_in(error), places) or _refused(dialect, case.without):
            return "refused"
        return f"refused without its name: {error}"
    if _named(call.ignored, places):
        return "ignored"
    if _refused(dialect, case.without):
        return "served"  # it is required
    return "served" if _effect(_read(dialect, case.without)) != _effect(call) else "dropped in silence"


def _effect(call: Call) -> Call:
    """The call without what is new in each, and without the tools that only the response object repeats."""
    passing = ("id", "created_at", "tools")
    return replace(call, ignored=(), echo={name: value for name, value in call.echo.items() if name not in passing})


def _refused(dialect: Dialect, body: dict[str, Any]) -> bool:
    try:
        _read(dialect, body)
    except CallError:
        return True
    return False


def _read(dialect: Dialect, body: dict[str, Any]) -> Call:
    return dialect.read(msgspec.json.encode(body), "/v1beta/models/tiny:generateContent")


def _differences(one: Any, other: Any, place: str) -> Iterator[str]:
    """Where two bodies differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            if one.get(name) != other.get(name):
                yield from _differences(one.get(name), other.get(name), f"{place}.{camel_case(name)}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            yield from _differences(left, right, f"{place}[]")
    else:
        yield place


def _places_in(error: CallError) -> Iterable[str]:
    """The places that an error names."""
    yield error.param or ""
    yield from re.findall(r"`\$\.?([^`]*)`", str(error))
    yield from (
        f"{place}.{name}"
        for name in re.findall(r"field `(\w+)`", str(error))
        for place in re.findall(r"\$\.?([^`]*)`", str(error)) or [""]
    )


def _named(names: Iterable[str], places: set[str]) -> bool:
    """Whether one of the names is one of the places, or holds it, or is in it."""
    bare = {re.sub(r"\[[^]]*\]", "[]", camel_case(name)).strip(".") for name in names} - {""}
    return any(
        f"{a}.".startswith(f"{b}.") or f"{a}[".startswith(f"{b}[")
        for x in bare
        for y in places
        for a, b in ((x, y), (y, x))
    )


@cache
def wrong(sdk: str) -> dict[str, str]:
    """What happens to the fields that are neither served nor ignored nor refused by their names."""
    fields = {f"{sdk}: {case.name}": what_happens(DIALECTS[sdk], case) for case in declared(sdk)}
    return {name: status for name, status in fields.items() if status not in ("served", "ignored", "refused")}


@pytest.mark.parametrize("sdk", DIALECTS)
def test_no_field_of_an_sdk_is_dropped_in_silence(sdk: str) -> None:
    assert {name: why for name, why in wrong(sdk).items() if not re.fullmatch("|".join(SAYS_NOTHING), name)} == {}


def test_every_excuse_excuses_a_field() -> None:
    names = [name for sdk in DIALECTS for name in wrong(sdk)]
    assert [excuse for excuse in SAYS_NOTHING if not any(re.fullmatch(excuse, name) for name in names)] == []


@pytest.mark.parametrize("sdk", DIALECTS)
def test_a_newer_sdk_shows_what_is_new(sdk: str) -> None:
    """If it fails, see what the first test says of the new fields, and then write them down."""
    known = (KNOWN / f"{sdk}.txt").read_text().splitlines()
    assert sorted({short(case.name) for case in declared(sdk)}) == known


def short(name: str) -> str:
    """A field's name with that of the object that it is in: the same objects stand in many places."""
    return ".".join(name.split(".")[-2:])
