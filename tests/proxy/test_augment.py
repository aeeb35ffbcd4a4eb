"""What the model is shown otherwise than its agent writes it: names, orders, words and results, in every dialect.

Held: the agent gets its own names back, a conversation goes on from its exact tokens, and whoever repeats a request, or
serves it from another proxy, comes to the same prompt.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.augment import wordings
from proxy.augment.names import Pairs
from proxy.augment.prompt_view import PromptView
from proxy.call import Call, Constraint, Reply, ToolCall
from proxy.dialects.base import GRAMMAR
from proxy.pool.behaviour.actions import Action
from proxy.pool.behaviour.actions import called as called_words
from proxy.pool.behaviour.results import failure
from proxy.pool.completions.observed import Observed, ToldCall, ToolResult, pack, unpack
from proxy.pool.completions.records import Completion
from proxy.pool.database import open_pool
from proxy.pool.rollouts.attempts import by_key, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.prompt_variations import PROMPT_KINDS, TOOLS_IN_USER, PromptVariation, drawn
from proxy.pool.rollouts.runs import open_run
from proxy.prompt.template import ChatTemplate
from tests.conftest import need
from tests.proxy.conftest import Seen, Serve, Stand, user
from tests.proxy.zoo import make_zoo

READ: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a file.\n\nLong files are cut.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "start_line": {"type": "integer"}},
        "required": ["path"],
    },
}
RUN: dict[str, Any] = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}},
}
TOOLS = tuple({"type": "function", "function": each} for each in (READ, RUN))
ANSWER = Reply(
    content="",
    reasoning="",
    tool_calls=(),
    finish_reason="tool_calls",
    stop_sequence=None,
    prompt_tokens=1,
    sampled_tokens=1,
    cached_tokens=0,
)


def view(*kinds: str, seed: int = 1) -> PromptView:
    return PromptView(PromptVariation(kinds or PROMPT_KINDS, seed))  # type: ignore[arg-type]


def request(*messages: dict[str, Any], **more: Any) -> Call:
    return Call(model="m", messages=messages, tools=TOOLS, **more)


def names(call: Call) -> list[str]:
    return [tool["function"]["name"] for tool in call.tools]


def test_a_view_of_nothing_is_the_request_itself() -> None:
    call = request(user("hi"))
    assert PromptView(None).shown(call) is call and PromptView(None).told(ANSWER) is ANSWER


@given(seed=st.integers(0, 1 << 31), names=st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)))
def test_each_name_has_at_most_one_other_and_that_one_has_it(seed: int, names: list[str]) -> None:
    pairs = Pairs(names, seed, "tool")
    others = [pairs[name] for name in dict.fromkeys(names)]
    assert len(set(others)) == len(others)
    assert all(pairs[pairs[name]] == name for name in [*names, *others])


@given(seed=st.integers(0, 1 << 31))
def test_what_the_model_calls_comes_to_the_agent_and_back_as_it_was(seed: int) -> None:
    """Also a name that it was not offered: it comes to the agent as one that the agent does not know."""
    seen = view(seed=seed)
    shown = seen.shown(request(user("hi")))
    tool = shown.tools[0]["function"]
    arguments = dict.fromkeys(tool["parameters"]["properties"], "x") | {"unknown": 1}
    for name in (tool["name"], "read_file", "nothing"):
        said = ToolCall("c", name, msgspec.json.encode(arguments).decode())
        (told,) = seen.told(replace(ANSWER, tool_calls=(said,))).tool_calls
        kept = seen.words(replace(ANSWER, tool_calls=(said,))) or [ToldCall(name)]
        assert [(words.name, words.arguments(said.arguments)) for words in kept] == [(told.name, told.arguments)]
        if name == tool["name"]:
            own = msgspec.json.decode(told.arguments)
            assert told.name == "read_file" and set(own) == {"path", "start_line", "unknown"}
        elif tool["name"] != "read_file" and name == "read_file":
            assert told.name not in ("read_file", "bash")
        call = {"id": "c", "function": {"name": told.name, "arguments": msgspec.json.decode(told.arguments)}}
        history = view(seed=seed).shown(request({"role": "assistant", "content": "", "tool_calls": [call]}))
        (back,) = history.messages[0]["tool_calls"]
        assert (back["function"]["name"], back["function"]["arguments"]) == (name, arguments)
        assert list(back["function"]["arguments"]) == list(arguments)  # tokens are those of this order


def test_only_what_differs_is_kept_of_a_calls_words() -> None:
    said = ToolCall("c", "bash", '{"command": "ls"}')
    reply = replace(ANSWER, tool_calls=(said,))
    assert PromptView(None).words(reply) == view("observations").words(reply) == ()
    seen = view("tool_names", "argument_names")
    assert seen.words(reply) == ()  # no request has offered any tool
    lone = Observed(told=(ToldCall("b\ud83d", {"c\ud83d": "command"}),))
    assert unpack(pack(lone)).told == (ToldCall("b?", {"c?": "command"}),)
    assert unpack(b'[[],[],"",[]]').told == ()  # as rows of before have it
    words = ToldCall("bash", {"cmd": "command"})
    assert [words.arguments(text) for text in ('{"cmd": 1, "x": {"cmd": 2}}', "[1]", '{"cmd')] == [
        '{"command":1,"x":{"cmd":2}}', "[1]", '{"cmd',
    ]  # fmt: skip


def test_a_result_comes_back_from_its_frame_in_the_agents_words() -> None:
    for seed in range(20):
        seen = view("tool_names", "observations", seed=seed)
        for text in ("", "out", "```\nout\n```", "Output:\nout", "<output>\n\n</output>"):
            message = {"role": "tool", "tool_call_id": "c", "name": "bash", "content": text}
            shown = seen.shown(request(user("go"), message)).messages[1]
            assert shown["content"] != text and seen.result(shown) == ("bash", text)
    assert seen.result(user("Output:\nx")) == ("", "Output:\nx")


def test_tools_that_are_offered_at_the_same_time_are_all_known() -> None:
    """A main agent and its sub-agent ask at once, with tools of their own; one of them has fewer arguments."""
    seen = view("tool_names", "argument_names", seed=3)
    offered = [{"type": "function", "function": {**READ, "name": f"read_file_{number}"}} for number in range(60)]
    calls = [Call(model="m", messages=(user("hi"),), tools=(tool,)) for tool in offered]
    with ThreadPoolExecutor(8) as threads:
        shown = list(threads.map(seen.shown, calls))
    fewer = {**READ, "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    seen.shown(Call(model="m", messages=(user("hi"),), tools=({"function": {**fewer, "name": "read_file_0"}},)))
    for number, call in enumerate(shown):
        function = call.tools[0]["function"]
        arguments = msgspec.json.encode(dict.fromkeys(function["parameters"]["properties"], "x")).decode()
        (told,) = seen.told(replace(ANSWER, tool_calls=(ToolCall("c", function["name"], arguments),))).tool_calls
        assert told.name == f"read_file_{number}"
        assert set(msgspec.json.decode(told.arguments)) == {"path", "start_line"}


def test_each_kind_changes_what_it_says_and_nothing_else() -> None:
    messages = (
        {"role": "system", "content": "You are an agent. Do not guess. You must read, for example `do not` as it is."},
        {"role": "tool", "content": "x" * 9000},
    )
    call = request(*messages, constraint=Constraint("tool_choice", calls=("bash",)))
    changed: dict[str, set[str]] = {}
    for kind in PROMPT_KINDS:
        for seed in range(40):
            shown = view(kind, seed=seed).shown(call)
            parts = {
                "names": names(shown) != ["read_file", "bash"],
                "keys": set(shown.tools[0]["function"]["parameters"]["properties"]) != {"path", "start_line"},
                "order": list(shown.tools[1]["function"]["parameters"]["properties"])[-1] == "command",
                "description": shown.tools[0]["function"]["description"] != READ["description"],
                "system": shown.messages[0] != messages[0],
                "result": shown.messages[1] != messages[1],
            }
            changed.setdefault(kind, set()).update(name for name, is_so in parts.items() if is_so)
            assert shown.constraint is not None and shown.constraint.calls == (names(shown)[1],)
            required = shown.tools[0]["function"]["parameters"]["required"]
            assert set(required) <= set(shown.tools[0]["function"]["parameters"]["properties"])
            assert "`do not`" in shown.messages[0]["content"]
    assert changed == {
        "tool_names": {"names"},
        "argument_names": {"keys"},
        "argument_order": {"order"},
        "descriptions": {"description"},
        "system_prompt": {"system"},
        "observations": {"result"},
        "truncation": {"result"},
        "tool_format": set(),
    }


LLAMA = "Llama-4, real"


def llama(tiny_model: Path, directory: Path) -> Path:
    """A model directory with Llama's own chat template, which offers tools in two ways."""
    made = make_zoo(tiny_model, directory)
    need("transformers, which has a template of Llama's", LLAMA in made)
    return directory / LLAMA


def test_tools_are_offered_in_each_way_that_the_template_has(tiny_model: Path, tmp_path: Path) -> None:
    template = ChatTemplate(llama(tiny_model, tmp_path / "llama"))
    assert template.tool_formats == 2 and ChatTemplate(tiny_model).tool_formats == 1
    messages = ({"role": "system", "content": "Be brief."}, user("go"))
    prompts = set()
    for seed in range(20):
        call = view("tool_format", seed=seed).shown(request(*messages))
        prompt = template.render(call.messages, call.tools, date_string="today", **call.options)
        assert prompt.count('"name": "read_file"') == 1 and call.messages == messages
        prompts.add(prompt)
    assert len(prompts) == 2 and {prompt.index("read_file") < prompt.index("Be brief.") for prompt in prompts} == {
        True,
        False,
    }


def test_tools_stay_where_the_messages_have_no_other_place_for_them() -> None:
    seen = [view("tool_format", seed=seed) for seed in range(20)]
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "go"}]}
    system: dict[str, Any] = {"role": "system", "content": "Be brief."}
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    for messages in ((user("go"),), (system,), (system, call), (system, parts), (user("go"), user("go"))):
        assert all(one.shown(request(*messages)).options == {} for one in seen)
    own = request(system, user("go"), options={TOOLS_IN_USER: True, "x": 1})
    assert all(one.shown(own).options == own.options for one in seen)  # as the agent has asked for it


CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bash", {"command": "rm -rf build; cat tests/test_a.py"}),
    ("shell", {"cmd": "git log"}),
    ("run_command", {"command": "make test", "timeout": 3}),
    ("execute_bash", {"script": "ls"}),
    ("read_file", {"path": "a.py", "start_line": 3}),
    ("view", {"filePath": "a.py"}),
    ("write_file", {"file_path": "a.py", "content": "x = 1"}),
    ("create_file", {"path": "a.py", "file_text": "x = 1"}),
    ("edit_file", {"path": "a.py", "old_string": "x = 1", "new_string": "x = 2"}),
    ("str_replace_editor", {"command": "view", "path": "a.py"}),
    ("todo_write", {"content": "later"}),
    ("write_stdin", {"input": "y"}),
    ("grep", {"pattern": "x"}),
    ("list_dir", {"path": "."}),
    ("web_fetch", {"url": "http://x"}),
)


def test_behaviour_is_read_from_the_models_words_as_from_the_agents() -> None:
    for seed in range(200):
        seen = view("tool_names", "argument_names", seed=seed)
        for name, arguments in CALLS:
            parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
            function = {"name": name, "parameters": parameters}
            shown = seen.shown(Call(model="m", messages=(user("hi"),), tools=({"function": function},)))
            other = shown.tools[0]["function"]
            keys = list(other["parameters"]["properties"])
            said = dict(zip(keys, arguments.values(), strict=True))
            one, two = (
                Action(1, 0, tool, msgspec.json.encode(given).decode())
                for tool, given in ((name, arguments), (other["name"], said))
            )
            for what in ("sort", "script", "path", "written_files"):
                assert getattr(two, what) == getattr(one, what), (seed, name, other["name"], said, what)


def test_a_failure_is_seen_in_every_frame() -> None:
    first = ("Exit code: 1\nboom", '{"returncode": 1, "output": ""}')
    for text in (*first, "Error: no such tool", "x\n[exit code: 2]"):
        action = Action(1, 0, "bash", '{"command": "frob"}', frames_first=text in first)
        plain = ToolResult(call="c", name="", head=text, size=len(text))
        why = failure(replace(action, results=(plain,)))
        assert why
        for seed in range(20):
            framed = wordings.observation(text, seed)
            result = ToolResult(call="c", name="", head=framed, size=len(framed))
            assert failure(replace(action, results=(result,))) == why
        long = wordings.observation("y" * 400 + text, 3)
        cut = ToolResult(call="c", name="", head=long[:300], tail=long[-200:], size=len(long))
        raw = "y" * 400 + text
        bare = ToolResult("c", "", raw[:300], raw[-200:], len(raw))
        assert failure(replace(action, results=(cut,))) == failure(replace(action, results=(bare,)))


def test_a_pair_stays_whatever_is_offered_later() -> None:
    for seed in range(200):
        pairs = Pairs(["read_file"], seed, "tool")
        before = pairs["read_file"]
        pairs.learn([before, "view_file", "readFile", "bash", "shell"])
        assert pairs["read_file"] == before and pairs[before] == "read_file"
        names = ["read_file", before, "view_file", "readFile", "bash", "shell"]
        assert len({pairs[name] for name in names}) == len(set(names))
    long = Pairs(["x" * 65, *(f"tool_{number}" for number in range(3000))], 1, "tool")
    assert long["x" * 65] == "x" * 65 and long["tool_2999"] == "tool_2999"


def test_names_stay_where_a_schema_speaks_of_them_elsewhere() -> None:
    either = {**READ["parameters"], "anyOf": [{"required": ["path"]}, {"required": ["start_line"]}]}
    tool = {"type": "function", "function": {**READ, "parameters": either}}
    for seed in range(20):
        shown = view("argument_names", seed=seed).shown(Call(model="m", messages=(user("hi"),), tools=(tool,)))
        assert shown.tools[0]["function"]["parameters"] == either


def test_the_grammar_of_a_custom_tool_is_kept() -> None:
    whole = f"Apply a patch.\n\nMore.\n\n{GRAMMAR}\nstart: x\n\nx: y"
    assert wordings.shorter(whole) == f"Apply a patch.\n\n{GRAMMAR}\nstart: x\n\nx: y"
    assert wordings.shorter("One.\n\nTwo.") == "One."


def test_a_long_system_prompt_stays_as_it_is() -> None:
    long = "do not " * 40_000
    assert wordings.paraphrase(long, 1) == long


def test_a_cut_result_says_how_much_is_missing() -> None:
    whole = "".join(f"{number:05}" for number in range(4000))
    for seed in range(20):
        cut = wordings.cut(whole, seed)
        first, said, last = cut.partition("\n[")[0], cut.partition("\n[")[2].partition(" ")[0], cut.rpartition("]\n")[2]
        assert whole.startswith(first) and whole.endswith(last) and len(first) + int(said) + len(last) == len(whole)
    assert wordings.cut("short", 1) == "short"


def test_a_group_draws_its_kinds_by_its_seed() -> None:
    draws = [drawn(PROMPT_KINDS, 0, "task", group) for group in range(200)]
    assert draws == [drawn(PROMPT_KINDS, 0, "task", group) for group in range(200)]
    for kind in PROMPT_KINDS:
        assert 70 < sum(kind in draw.kinds for draw in draws if draw) < 130
    assert len({draw.seed for draw in draws if draw}) > 150
    some = [drawn(("truncation",), 0, "task", group) for group in range(200)]
    assert {draw.kinds for draw in some if draw} == {("truncation",)} and some.count(None) > 70


# ---- through the proxy


PATH: dict[str, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/tiny:generateContent",
}


def body(dialect: str, turns: list[Any]) -> dict[str, Any]:
    """The request of a dialect with both tools and a system prompt; `turns` is its history."""
    system = "You are an agent. Do not guess."
    if dialect == "chat":
        return {"model": "tiny", "messages": [{"role": "system", "content": system}, *turns], "tools": TOOLS}
    if dialect == "responses":
        tools = [{"type": "function", **each} for each in (READ, RUN)]
        return {"model": "tiny", "instructions": system, "input": turns, "tools": tools, "store": False}
    if dialect == "messages":
        tools = [{**each, "input_schema": each["parameters"]} for each in (READ, RUN)]
        for tool in tools:
            del tool["parameters"]
        return {"model": "tiny", "max_tokens": 900, "system": system, "messages": turns, "tools": tools}
    return {
        "systemInstruction": {"parts": [{"text": system}]},
        "contents": turns,
        "tools": [{"functionDeclarations": [READ, RUN]}],
    }


def first_turn(dialect: str) -> list[Any]:
    return [{"role": "user", "parts": [{"text": "go"}]}] if dialect == "gemini" else [user("go")]


def called(dialect: str, answer: dict[str, Any]) -> tuple[str, dict[str, Any], list[Any]]:
    """The call of an answer, and the turns that a client adds to its history: the answer, and the tool's result."""
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "out"}
        return call["function"]["name"], msgspec.json.decode(call["function"]["arguments"]), [message, result]
    if dialect == "responses":
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "out"}
        return call["name"], msgspec.json.decode(call["arguments"]), [*answer["output"], result]
    if dialect == "messages":
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "out"}
        turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        return call["name"], call["input"], turns
    content = answer["candidates"][0]["content"]
    (call,) = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
    result = {"functionResponse": {"name": call["name"], "response": {"result": "out"}}}
    return call["name"], call["args"], [content, {"role": "user", "parts": [result]}]


def varied_key(stand: Stand, *kinds: str, seed: int = 5) -> str:
    run = open_run(stand.pool, "varied", "train", {})
    (rollout,) = open_group(stand.pool, run.id, {"id": "t", "domain": "agent"}, 1)
    variation = PromptVariation(kinds or PROMPT_KINDS, seed)  # type: ignore[arg-type]
    return open_attempt(stand.pool, rollout.rollout_id, "command", variation=variation)[1]


def obey(prompt: str, ids: Any) -> str:
    """Call the second tool with its first argument, under the names that the prompt has; then end."""
    if "tool_response" in prompt:
        return "Done."
    tools = [msgspec.json.decode(line) for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    function = tools[1]["function"]
    key = next(name for name, kind in function["parameters"]["properties"].items() if kind["type"] == "string")
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {{"{key}": "ls"}}}}\n</tool_call>'


async def two_turns(stand: Stand, dialect: str, key: str) -> tuple[str, dict[str, Any], list[Completion]]:
    headers = {"x-api-key": key} if dialect == "messages" else {"Authorization": f"Bearer {key}"}
    headers |= {"x-goog-api-key": key} if dialect == "gemini" else {}
    turns = first_turn(dialect)
    answer = await stand.ask(PATH[dialect], body(dialect, turns), **headers)
    assert answer["status"] == 200, answer
    name, arguments, more = called(dialect, answer)
    last = await stand.ask(PATH[dialect], body(dialect, [*turns, *more]), **headers)
    assert last["status"] == 200, last
    return name, arguments, stand.recorded(key)


@pytest.mark.parametrize("dialect", PATH)
async def test_the_agent_gets_its_own_words_and_its_conversation_goes_on(dialect: str, serve: Serve) -> None:
    script = Seen(obey)
    stand = await serve(script)
    key = varied_key(stand)
    name, arguments, (first, second) = await two_turns(stand, dialect, key)
    assert (name, arguments) == ("bash", {"command": "ls"})
    (said,) = first.reply["tool_calls"]
    assert said["function"]["name"] != "bash" and '"name": "bash"' not in script.prompts[0]
    assert f'"name": "{said["function"]["name"]}"' in script.prompts[0]
    assert "You are an agent. Do not guess." not in script.prompts[0] and "Read a file.\n" not in script.prompts[0]
    assert second.follows == first.id and stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)
    assert first.untrainable is None and second.untrainable is None
    assert first.observed is not None and not first.observed.broken  # its calls fit the schemas that it saw
    assert called_words(first) == [("bash", '{"command":"ls"}')]
    assert second.observed is not None and [each.head for each in second.observed.results] == [
        '{"result":"out"}' if dialect == "gemini" else "out"
    ]
    assert "out" not in script.prompts[1].split("<tool_response>")[1].splitlines()[1]  # the model saw it in a frame


@pytest.mark.parametrize("seed", [4, 5])
async def test_a_conversation_goes_on_from_its_tokens_in_each_tool_format(
    seed: int, serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    def answer(prompt: str, ids: Any) -> str:
        return "Done." if '"out"' in prompt else '{"name": "bash", "parameters": {"command": "ls"}}'

    script = Seen(answer)
    stand = await serve(script, model=llama(tiny_model, tmp_path / "llama"), tool_format="llama3")
    key = varied_key(stand, "tool_format", seed=seed)
    name, arguments, (first, second) = await two_turns(stand, "chat", key)
    assert (name, arguments) == ("bash", {"command": "ls"}) and second.follows == first.id
    assert stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)
    assert all(prompt.count('"name": "read_file"') == 1 for prompt in script.prompts)
    in_user = script.prompts[0].index("read_file") > script.prompts[0].index("You are an agent")
    assert in_user == (seed == 4)


async def test_another_proxy_and_a_later_one_show_the_same(serve: Serve) -> None:
    """Both read the variation from the pool; the second turn goes to a proxy that has not seen the first."""
    stand = await serve(obey)
    key = varied_key(stand)
    turns = first_turn("chat")
    answer = await stand.ask(PATH["chat"], body("chat", turns), Authorization=f"Bearer {key}")
    _, _, more = called("chat", answer)
    later = await serve(obey)
    last = await later.ask(PATH["chat"], body("chat", [*turns, *more]), Authorization=f"Bearer {key}")
    assert last["status"] == 200
    first, second = stand.recorded(key)
    assert second.follows == first.id and stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)


@pytest.mark.parametrize("restarted", [False, True], ids=["one proxy", "a new proxy for each request"])
async def test_a_stored_response_has_the_agents_words(restarted: bool, serve: Serve) -> None:
    """A new proxy has not seen the tools: it knows their names from what was stored of the request."""
    stand = await serve(obey)
    key = varied_key(stand)
    agent = {"Authorization": f"Bearer {key}"}
    asked = body("responses", first_turn("responses")) | {"store": True}
    answer = await stand.ask(PATH["responses"], asked, **agent)
    name, arguments, (*_, result) = called("responses", answer)
    assert (name, arguments) == ("bash", {"command": "ls"})
    reader = await serve(obey) if restarted else stand
    async with reader.http.get(f"{reader.url}/v1/responses/{answer['id']}", headers=agent) as again:
        assert (await again.json())["output"] == answer["output"]
    asker = await serve(obey) if restarted else stand
    more = asked | {"input": [result], "previous_response_id": answer["id"]}
    assert (await asker.ask(PATH["responses"], more, **agent))["status"] == 200
    assert stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)


async def test_a_required_call_is_begun_under_the_name_that_the_model_is_shown(serve: Serve) -> None:
    script = Seen(
        lambda prompt, ids: "hm\n</think>\n\n" if prompt.endswith("<think>") else '", "arguments": {}}\n</tool_call>'
    )
    stand = await serve(script)
    key = varied_key(stand, "tool_names")
    asked = body("chat", first_turn("chat")) | {"tool_choice": {"type": "function", "function": {"name": "bash"}}}
    answer = await stand.ask(PATH["chat"], asked, Authorization=f"Bearer {key}")
    shown = names(view("tool_names", seed=5).shown(request(user("go"))))[1]
    begun = script.prompts[-1].rpartition("<|im_start|>assistant\n")[2]
    assert shown != "bash" and begun.endswith(f'<tool_call>\n{{"name": "{shown}')
    assert called("chat", answer)[:2] == ("bash", {})


@pytest.mark.parametrize(("key", "value"), [("name", 5), ("name", ["a"]), ("description", 5), ("description", ["x"])])
async def test_a_tool_of_odd_shape_is_refused(key: str, value: Any, serve: Serve) -> None:
    stand = await serve(obey)
    tools = [{"type": "function", "function": {**RUN, key: value}}]
    asked = {"model": "tiny", "messages": [user("go")], "tools": tools}
    answer = await stand.ask(PATH["chat"], asked, Authorization=f"Bearer {varied_key(stand)}")
    assert answer["status"] == 400 and answer["error"]["param"] == f"tools[0].function.{key}"


async def test_a_stream_has_the_agents_words(serve: Serve) -> None:
    stand = await serve(obey)
    key = varied_key(stand)
    async with stand.post(body("chat", first_turn("chat")) | {"stream": True}, key) as answer:
        text = (await answer.read()).decode()
    assert '"name":"bash"' in text and '{\\"command\\":\\"ls\\"}' in text


def test_an_attempt_without_a_variation_has_none(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    run = open_run(pool, "plain", "train", {})
    (rollout,) = open_group(pool, run.id, {"id": "t", "domain": "agent"}, 1)
    attempt, key = open_attempt(pool, rollout.rollout_id, "command")
    stored = by_key(pool, key)
    assert attempt.variation is None and stored is not None and stored.variation is None
