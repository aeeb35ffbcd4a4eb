"""What of a request has no effect is named in the answer's header.

Fields that nothing reads, arguments that the template does not read, and sampling parameters that a run does not take.
tests/proxy/sdks holds this for every field of the official SDKs.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.http.response import MOST_NAMES
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, user
from tests.proxy.test_purposes import COLD, issued_key

CHAT = "/v1/chat/completions"


async def ignored(stand: Stand, path: str, body: dict[str, Any], key: str = "agent") -> list[str]:
    async with stand.send(path, body, **{"x-api-key": key}) as answer:
        assert answer.status == 200, await answer.text()
        named = answer.headers.get("X-Blackforge-Ignored")
    return named.split(", ") if named else []


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [user("hi")], **fields}


async def test_what_nothing_reads_is_named_with_its_place(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "weight": 1}
    fields = {"seed": 1, "user": None, "stream_options": {"include_usage": True, "other": 0}}
    named = await ignored(stand, CHAT, {"messages": [message, message], **fields})
    assert named == ["messages[].content[].cache_control", "messages[].weight", "seed", "stream_options.other"]
    assert await ignored(stand, CHAT, asked(stream=True, tools=[SHELL], temperature=0.5)) == []
    assert await ignored(stand, CHAT, asked(stream=True, seed=1)) == ["seed"]


async def test_names_that_clients_make_up_break_no_header(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    made_up = {f"field {i}\r\nSet-Cookie: ü{'x' * 9000}": 1 for i in range(300)}
    *named, last = await ignored(stand, CHAT, asked(**made_up))
    assert len(named) == MOST_NAMES and last == f"and {300 - MOST_NAMES} more"
    assert all(name.startswith("field?") and len(name) == 100 and name.isascii() for name in named)


NO_THINKING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"enable_thinking": False}),
    (CHAT, {"thinking": {"type": "disabled"}}),
    (CHAT, {"thinking": False}),
    (CHAT, {"reasoning": {"effort": "none"}}),
    (CHAT, {"reasoning": {"enabled": False}}),
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "fields"), NO_THINKING)
async def test_every_way_to_turn_thinking_off_is_the_templates_argument(
    serve: Serve, path: str, fields: dict[str, Any]
) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    assert await ignored(await serve(seen), path, asked(**fields)) == []
    assert seen.prompts[0].endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (CHAT, {"chat_template_kwargs": {"style": "plain"}}, "chat_template_kwargs.style"),
        ("/v1/messages", {"output_config": {"effort": "low"}, "max_tokens": 9}, "output_config.effort"),
    ],
)
async def test_what_the_template_does_not_read_is_named(
    serve: Serve, path: str, fields: dict[str, Any], name: str
) -> None:
    assert await ignored(await serve(lambda prompt, ids: "ok"), path, asked(**fields)) == [name]


FAMILIES = Path(__file__).parent / "families"


@pytest.mark.parametrize(
    ("family", "argument", "written"),
    [("deepseek-v3.1", "enable_thinking", "<｜Assistant｜></think>"), ("glm-4.5", "enable_thinking", "</think>")],
)
def test_whether_to_think_has_the_name_that_the_template_reads(
    tiny_model: Path, tmp_path: Path, family: str, argument: str, written: str
) -> None:
    for file in tiny_model.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text((FAMILIES / f"{family}.jinja").read_text())
    template = ChatTemplate(tmp_path)
    thinks, silent = (template.render([user("hi")], [], **{argument: value}) for value in (True, False))
    assert template.reads(argument) and not template.reads("reasoning_effort")
    assert silent != thinks and silent.rstrip().endswith(written)


async def test_runs_name_the_sampling_parameters_that_they_do_not_take(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    key = issued_key(stand, "train")
    assert set(await ignored(stand, CHAT, asked(**COLD, presence_penalty=0), key)) == COLD.keys()
    config = {"generationConfig": {"topP": 0.5, "temperature": 1}, "contents": [{"parts": [{"text": "hi"}]}]}
    assert await ignored(stand, "/v1beta/models/tiny:generateContent", config, key) == ["generationConfig.topP"]
    assert await ignored(stand, CHAT, asked(**COLD)) == []  # a session takes them


async def test_calls_that_gemini_would_validate_are_served_as_they_come(serve: Serve) -> None:
    """As Pydantic AI's Google model asks for them."""
    stand = await serve(lambda prompt, ids: "ok")
    config = {"functionCallingConfig": {"mode": "VALIDATED"}}
    body = {"contents": [{"parts": [{"text": "hi"}]}], "toolConfig": config}
    mode = "toolConfig.functionCallingConfig.mode"
    assert await ignored(stand, "/v1beta/models/tiny:generateContent", body) == [mode]


async def test_geminis_fields_in_snake_case_are_the_same_request(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: "<think>\nhm\n</think>\n\nok")
    stand = await serve(seen)
    schema = {"type": "OBJECT", "properties": {"any_of": {"any_of": [{"type": "STRING"}, {"type": "INTEGER"}]}}}
    plain = {"type": "object", "properties": {"a_b": {"type": "string"}}}
    call, result = {"name": "f", "args": {"any_of": 1}}, {"name": "f", "response": {"output": "x"}}
    config = {"thinking_config": {"include_thoughts": True, "thinking_budget": 0}, "max_output_tokens": 40}
    snake = {
        "system_instruction": {"parts": [{"text": "be brief"}]},
        "contents": [
            {"parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"function_call": call}]},
            {"parts": [{"function_response": result}]},
        ],
        "tools": [{"function_declarations": [
            {"name": "f", "parameters": schema}, {"name": "g", "parameters_json_schema": plain}]}],
        "tool_config": {"function_calling_config": {"mode": "AUTO"}},
        "generation_config": config,
    }  # fmt: skip
    camel = {
        "systemInstruction": snake["system_instruction"],
        "contents": [
            {"parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"functionCall": call}]},
            {"parts": [{"functionResponse": result}]},
        ],
        "tools": [{"functionDeclarations": [
            {"name": "f", "parameters": schema}, {"name": "g", "parametersJsonSchema": plain}]}],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0}, "maxOutputTokens": 40},
    }  # fmt: skip
    for body in (snake, camel):
        assert await ignored(stand, "/v1beta/models/tiny:generateContent", body) == []
    assert seen.prompts[0] == seen.prompts[1] and seen.prompts[0].endswith("</think>\n\n")
    assert '"any_of": {"anyOf":' in seen.prompts[0] and '"any_of": 1' in seen.prompts[0] and '"a_b"' in seen.prompts[0]


FIRST_CALLS = """
import sys, threading
import msgspec
from proxy.dialects.request_fields import RequestReader

sys.setswitchinterval(1e-6)
body = msgspec.json.encode({f"part{part}": [{"field0": 1}] for part in range(6)})
for _ in range(100):
    types = [msgspec.defstruct("Part", [(f"field{n}", int | None, None) for n in range(8)]) for _ in range(6)]
    request = msgspec.defstruct("Request", [(f"part{n}", list[kind] | None, None) for n, kind in enumerate(types)])
    reader, together = RequestReader(request, "a request"), threading.Barrier(3)
    threads = [threading.Thread(target=lambda: (together.wait(), reader.read(body))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_requests_may_be_read_by_several_threads() -> None:
    """In a process of its own, which would crash."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
