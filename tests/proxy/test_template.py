"""Our rendering and tokenising against transformers', which runs in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import pytest
from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.engine.sglang import CPU_PATH
from proxy.prompt.template import ChatTemplate, TemplateError, TemplateSandbox
from tests.conftest import need
from tests.proxy.conftest import SHELL, user

CALL = {"type": "function", "id": "1", "function": {"name": "shell", "arguments": {"command": "echo <é> & 'x'"}}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("hi")], "tools": []},
    {"messages": [{"role": "system", "content": "Be brief."}, user("süß 😀 <|im_end|>")], "tools": [SHELL]},
    {
        "messages": [
            user("list"),
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
            {"role": "tool", "content": "", "tool_call_id": "1"},
        ],
        "tools": [SHELL],
    },
    {"messages": [user("a"), {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"}, user("c")], "tools": []},
]
ORACLE = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for c in json.load(sys.stdin):
    arguments = dict(tools=c["tools"] or None, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(c["messages"], tokenize=False, **arguments)
    print(json.dumps([text, tokenizer(text, add_special_tokens=False)["input_ids"]]))
"""


def test_text_and_tokens_are_those_of_transformers(tiny_model: Path, template: ChatTemplate) -> None:
    need("transformers", find_spec("transformers") is not None)
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", ORACLE, str(tiny_model)]
    given = msgspec.json.encode(CONVERSATIONS)
    output = subprocess.run(words, input=given, env=environment, capture_output=True, check=True).stdout
    for line, conversation in zip(output.splitlines(), CONVERSATIONS, strict=True):
        text = template.render(conversation["messages"], conversation["tools"])
        assert msgspec.json.decode(line) == [text, template.encode(text)]


def test_decoding_gives_the_rendered_text_back(template: ChatTemplate) -> None:
    text = template.render(CONVERSATIONS[2]["messages"], [SHELL])
    assert template.decode(template.encode(text)) == text


def model_with(directory: Path, source: str, tiny_model: Path) -> ChatTemplate:
    (directory / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    (directory / "chat_template.jinja").write_text(source)
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "add_bos_token": true}')
    return ChatTemplate(directory)


def test_what_templates_may_use(tmp_path: Path, tiny_model: Path) -> None:
    source = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    source += (
        "{% generation %}{{ tools | tojson }}{% endgeneration %}{{ eos_token }}{{ bos_token }}{{ strftime_now('%%') }}"
    )
    text = model_with(tmp_path, source, tiny_model).render([user("a"), user("b")], [{"x": "<é>"}])
    assert text == 'a[{"x": "<é>"}]<|im_end|>%'


class Sneaky(dict[str, Any]):
    """A dict with an attribute of its own."""

    hidden = "an attribute"


NAMES = (*dir(dict), "role", "missing", "hidden", "_private", "mro", "format")
MESSAGES: tuple[Any, ...] = (
    {}, {name: f"the item {name}" for name in NAMES}, Sneaky(role="user"), ["role"], "role", None
)  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_attributes_are_what_jinjas_own_sandbox_gives(message: Any) -> None:
    for name in NAMES:
        ours, jinjas = (kind().getattr(message, name) for kind in (TemplateSandbox, ImmutableSandboxedEnvironment))
        assert type(ours) is type(jinjas), name
        if isinstance(jinjas, Undefined):  # what a template that uses it is told
            assert str(ours._undefined_message) == str(jinjas._undefined_message), name
            assert ours._undefined_exception is jinjas._undefined_exception, name
        elif not isinstance(jinjas, FunctionType):  # the sandbox makes one for str.format each time
            assert ours == jinjas, name


@pytest.mark.parametrize(
    ("written", "expected"),
    [("call.arguments | tojson", '{"command": "ls"}'), ("'=' + call.arguments", '={"command": "ls"}')],
)
def test_arguments_come_as_the_template_takes_them(
    tmp_path: Path, tiny_model: Path, written: str, expected: str
) -> None:
    calls = "{% for c in m.tool_calls %}{% set call = c.function %}{{ " + written + " }}{% endfor %}"
    template = model_with(tmp_path, "{% for m in messages if m.tool_calls %}" + calls + "{% endfor %}", tiny_model)
    call = {"id": "1", "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    assert template.render([{"role": "assistant", "content": "", "tool_calls": [call]}], []) == expected
    assert call["function"] == {"name": "shell", "arguments": {"command": "ls"}}


def test_calls_come_without_content_where_the_template_asks_for_that(tmp_path: Path, tiny_model: Path) -> None:
    """DeepSeek-V3's template does: it writes calls only if a turn's content is none, and their arguments as text."""
    shown = (
        "{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '!' }}{% else %}{{ m.content }}{% endif %}"
    )
    template = model_with(tmp_path, "{% for m in messages %}" + shown + "{% endfor %}", tiny_model)
    call = {"id": "1", "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("")]
    assert template.render(messages, []) == 'a{"command": "ls"}!'


@pytest.mark.parametrize("source", ["{{ raise_exception('no system') }}", "{{ messages[9].content.x }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses(tmp_path: Path, tiny_model: Path, source: str) -> None:
    with pytest.raises(TemplateError, match="template refuses these messages"):
        model_with(tmp_path, source, tiny_model).render([user("a")], [])
