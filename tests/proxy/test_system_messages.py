"""System messages that are not the first, over templates that refuse them, drop them, or show only the last of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.prompt.conversations.separators import Separators
from proxy.prompt.system_messages import AS_USER, JOINED, KEPT, WAYS, SystemWay, arranged
from proxy.prompt.template import ChatTemplate
from tests.conftest import need
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, user
from tests.proxy.written import WRITERS
from tests.proxy.zoo import CARRIER, FAMILIES, make_zoo

SHOWN_LATER = "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}"
REFUSED_LATER = (
    "{%- if message.role == 'system' and not loop.first -%}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}{%- if message.role == 'user' -%}"
)
"""As Qwen's templates since Qwen3.5, in the place of what the zoo's has of Qwen3."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Gemma's."""
QWEN = FAMILIES["Qwen3"]
FUNCTION: dict[str, Any] = SHELL["function"]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    root = tmp_path_factory.mktemp("zoo")
    zoo = make_zoo(tiny_model, root)
    strict = (QWEN.source or "").replace(SHOWN_LATER, REFUSED_LATER)
    assert "raise_exception" in strict
    return zoo | {"strict": variant(root, zoo, "strict", strict), "no system": variant(root, zoo, "none", NO_SYSTEM)}


def variant(root: Path, zoo: dict[str, ChatTemplate], name: str, source: str) -> ChatTemplate:
    """A directory like that of Qwen3, with another template."""
    directory = root / name
    directory.mkdir()
    for file in zoo["Qwen3"].directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(source)
    return ChatTemplate(directory)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


Start = Callable[[str], Any]


@pytest.fixture
def start(serve: Serve, zoo: dict[str, ChatTemplate]) -> Start:
    """Return a function that starts a gateway whose model thinks and calls once, and then is done."""

    async def start(name: str) -> tuple[Stand, Seen]:
        need(CARRIER, name in zoo)
        family = FAMILIES.get(name, QWEN)

        def script(prompt: str, ids: Any) -> str:
            thought = "" if family.thinks == "no" else "hm\n</think>\n\n"
            call = WRITERS[family.way][1]([("shell", {"command": "ls"})])
            opened = "" if prompt.endswith("<think>\n") else thought and "<think>\n"
            return f"{opened}{thought}" + ("done" if "a file" in prompt else call)

        seen = Seen(script)
        return await serve(seen, model=zoo[name].directory), seen

    return start


BROKEN = pytest.mark.parametrize("name", ["strict", "MiniMax-M2", "Mistral", "DeepSeek-R1, real"])


def begins_with_the_first(stand: Stand) -> bool:
    """Whether the second recorded path begins with the first one, as far as that goes without its end of turn."""
    first, second = stand.recorded()
    return second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def shown(stand: Stand, path: str, body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """What an answer that succeeds has under a key."""
    answer = await stand.ask(path, body)
    assert answer["status"] == 200, answer
    parts: list[dict[str, Any]] = answer[key]
    return parts


async def of_codex(stand: Stand, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The output for a request as codex sends it: instructions, and a developer's message before the user's."""
    said = [{"role": "developer", "content": "Stay in the sandbox."}, {"role": "user", "content": "list"}]
    tool = {"type": "function", **FUNCTION}
    body = {"model": "m", "instructions": "You are codex.", "input": [*said, *more], "tools": [tool]}
    return await shown(stand, "/v1/responses", body, "output")


@BROKEN
async def test_two_at_the_beginning_are_shown(name: str, start: Start) -> None:
    stand, seen = await start(name)
    output = await of_codex(stand)
    assert "You are codex.\n\nStay in the sandbox." in seen.prompts[0]
    if FAMILIES.get(name, QWEN).calls:
        await of_codex(
            stand, *output, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "a"}
        )
        assert begins_with_the_first(stand)


async def of_claude(stand: Stand, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The content for a request as claude-code sends it: a system message behind the user's."""
    messages = [user("list"), system("Agents: none."), *more]
    tool = {"name": "shell", "input_schema": FUNCTION["parameters"]}
    body = {"model": "m", "max_tokens": 99, "system": "You are claude.", "messages": messages, "tools": [tool]}
    return await shown(stand, "/v1/messages", body, "content")


@BROKEN
async def test_one_behind_the_users_message_is_shown(name: str, start: Start) -> None:
    stand, seen = await start(name)
    content = await of_claude(stand)
    assert "You are claude." in seen.prompts[0]
    assert seen.prompts[0].index("list") < seen.prompts[0].rindex("Agents: none.")
    if FAMILIES.get(name, QWEN).calls:
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "a"}
        await of_claude(stand, {"role": "assistant", "content": content}, {"role": "user", "content": [result]})
        assert begins_with_the_first(stand)


@pytest.mark.parametrize("name", ["strict", "MiniMax-M2", "Mistral"])
async def test_one_behind_a_result_is_shown(name: str, start: Start) -> None:
    """Qwen's template drops the reasoning before it, as before a user's message, so it may begin a branch."""
    stand, seen = await start(name)
    content = await of_claude(stand)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "a"}]}
    await of_claude(stand, {"role": "assistant", "content": content}, result, system("Go on."))
    assert "Go on." in seen.prompts[1] and stand.recorded()[1].follows == stand.recorded()[0].id


async def test_the_system_prompt_is_the_users_where_the_template_has_none(start: Start) -> None:
    stand, seen = await start("no system")
    said = [system("You help."), user("list"), system("Be brief.")]
    message = (await stand.chat(*said))["choices"][0]["message"]
    assert seen.prompts[0].startswith("<|im_start|>user\nYou help.\n\nlist\n\nBe brief.<|im_end|>\n")
    await stand.chat(*said, message, system("Be kind."), user("and?"))
    assert "<|im_start|>user\nBe kind.\n\nand?<|im_end|>" in seen.prompts[1]


S, L, T = system("s"), system("l"), {"role": "tool", "tool_call_id": "1", "content": "t"}
U, A = user("u"), {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("way", "messages", "expected"),
    [
        (SystemWay(JOINED, KEPT), [S, L, U, L], [system("s\n\nl"), U, L]),
        (SystemWay(KEPT, AS_USER), [S, L, U, L, A, L], [S, L, U, user("l"), A, user("l")]),
        (SystemWay(JOINED, AS_USER), [U, S], [U, user("s")]),
        (SystemWay(JOINED, JOINED), [S, U, L, L], [S, user("u\n\nl\n\nl")]),
        (SystemWay(JOINED, JOINED), [S, U, A, T, L], [S, U, A, {**T, "content": "t\n\nl"}]),
        (SystemWay(JOINED, JOINED), [U, A, S, L, U], [U, A, user("s\n\nl\n\nu")]),
        (SystemWay(JOINED, JOINED), [U, A, L, A, L], [U, A, user("l"), A, user("l")]),
        (SystemWay(AS_USER, JOINED), [S, L, U, A], [user("s\n\nl\n\nu"), A]),
    ],
)
def test_where_system_messages_stand(way: SystemWay, messages: list[Any], expected: list[Any]) -> None:
    before = [dict(message) for message in messages]
    assert arranged(messages, way) == expected and messages == before


@pytest.mark.parametrize("way", WAYS)
def test_what_follows_an_answer_changes_nothing_before_it(way: SystemWay) -> None:
    opening, answered = [S, L, U, L, A, T, L], [L, U, L]
    first = arranged(opening, way)
    assert list(arranged([*opening, A, *answered], way))[: len(first) + 1] == [*first, A]


KEEPING = set(FAMILIES) - {"MiniMax-M2", "Mistral", "DeepSeek-R1, real"}


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_prompts_stay_where_the_template_shows_all(name: str, zoo: dict[str, ChatTemplate]) -> None:
    need(CARRIER, name in zoo)
    messages = [S, L, U, L, A, L, U]
    assert zoo[name]._system == WAYS[0] and arranged(messages, zoo[name]._system) is messages


def test_a_blank_line_in_a_result_is_no_separator(zoo: dict[str, ChatTemplate]) -> None:
    """Where a system message goes to the end of a result, prompts are read back as before."""
    separators = Separators(zoo["Mistral"], {})
    assert "\n\n" not in separators._behind["tool"]
