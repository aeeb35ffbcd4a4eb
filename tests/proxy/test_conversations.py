"""Prompts read back as messages, for the template of every family, and tools where a template writes them as JSON."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from proxy.prompt.conversations.reading import TemplateReader
from proxy.prompt.template import ChatTemplate, TemplateError
from tests.conftest import need
from tests.proxy.conftest import SHELL, user
from tests.proxy.zoo import CARRIER, FAMILIES, make_zoo

UNREAD = {"Mistral", "DeepSeek-R1, real", "Grok, real", "Llama-3, real", "Llama-4, real"}
"""Families whose prompts with results of tools stay text, or whose template shows no calls."""
TOOLS = {"Qwen2.5", "MiniMax-M2", "GLM-4.5", "GLM-4.5, not thinking", "Kimi-K2"}
"""Families whose tools are read. The others write them otherwise, or with nothing before them that marks them."""
DATED = 1_700_000_000.0
CALL = "functions.shell:0"


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return make_zoo(tiny_model, tmp_path_factory.mktemp("zoo"))


def conversation(text: str) -> list[dict[str, Any]]:
    call = {"id": CALL, "type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    return [
        {"role": "system", "content": "Be good."},
        user("hi\nthere"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL, "name": "shell", "content": text},
        {"role": "assistant", "content": "done"},
        user("go on"),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_read_back(family: str, zoo: dict[str, ChatTemplate]) -> None:
    need(CARRIER, family in zoo)
    template = zoo[family]
    reader, messages = TemplateReader(template), conversation('a\n"b"')
    try:
        text = template.render(messages, (), strftime_now=datetime.fromtimestamp(DATED).strftime)
    except TemplateError:
        assert family in UNREAD
        return
    read = reader.whole(template.encode(text), DATED)
    if family in UNREAD:
        assert read.raw or not any(template.any_end.search(each["content"] or "") for each in read.messages)
        return
    assert not read.raw and [each["role"] for each in read.messages] == [each["role"] for each in messages]
    assert [each["content"] or "" for each in read.messages] == [each["content"] for each in messages]
    assert [call["function"]["name"] for call in read.messages[2]["tool_calls"]] == ["shell"]


@pytest.mark.parametrize("family", sorted(TOOLS))
def test_tools_are_read_where_they_are_json(family: str, zoo: dict[str, ChatTemplate]) -> None:
    template = zoo[family]
    reader = TemplateReader(template)
    for first in (conversation("a")[:2], [user("hi")]):
        read = reader.whole(template.encode(template.render(first, [SHELL, SHELL])), None)
        assert read.tools == [SHELL, SHELL] and read.messages[-1] == first[-1] and len(read.messages) <= len(first)
        assert reader.whole(template.encode(template.render(first, ())), None).tools == []


def test_what_is_no_conversation_stays_text(template: ChatTemplate) -> None:
    reader = TemplateReader(template)
    read = reader.whole(template.encode("def f():"), DATED)
    assert read.raw and read.messages == [user("def f():")] and read.tools is None
