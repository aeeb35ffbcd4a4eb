"""Required and named calls that the proxy begins: the given tokens, what the model adds, and what becomes of both."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from proxy.call import Call, Constraint
from proxy.dialects.structured_output import call_constraint
from proxy.engine.scripted import Fault, ScriptedReply
from proxy.engine.sglang import Sglang
from proxy.pool.completions.records import Completion
from proxy.pool.inspect.verify import verify
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.prefill import stages
from proxy.prompt.splice import PromptBuilder
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Serve, Stand, user
from tests.proxy.written import ONE, TOOLS, WRITERS
from tests.proxy.zoo import FAMILIES, make_zoo

THINKS_NOT = {"enable_thinking": False}
NAMED = {"type": "function", "function": {"name": "shell"}}
CALLED = [("shell", {"command": "ls -la"})]
OTHER_STYLE = ("llama3", "mistral, compact")
"""Ways of writing calls that a model of the format may choose, and that are not begun."""
WAYS = [way for way in WRITERS if way not in OTHER_STYLE]


def shell_call(command: str) -> str:
    return WRITERS["qwen"][1]([("shell", {"command": command})])


class Player:
    """Plays a model that says `turn` as its next turn: from where the prompt has begun it, to its end.

    It keeps what the engine saw and sampled, in the order of the calls.
    """

    def __init__(self, turn: str, template: ChatTemplate):
        self.turn, self._template = turn, template
        self.prompts: list[list[int]] = []

    def __call__(self, prompt: str, ids: Sequence[int]) -> ScriptedReply:
        self.prompts.append(list(ids))
        begun = prompt.rpartition("<|im_start|>assistant\n")[2]
        if "<tool_response>" in prompt:
            return ScriptedReply("done")
        assert self.turn.startswith(begun), f"the turn was begun otherwise: {begun!r}"
        return ScriptedReply(self.turn[len(begun) :])


def not_thinking(turn: str) -> str:
    return f"<think>\n\n</think>\n\n{turn}"


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def given_texts(item: Completion, template: ChatTemplate) -> list[str]:
    return [template.decode(item.sampled[start:end]) for start, end in item.given]


async def check_continued(stand: Stand, answer: dict[str, Any], **fields: Any) -> None:
    """The next turn must go on with exactly the recorded tokens."""
    message = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
    last = len(stand.recorded()) - 1
    await stand.chat(user("go"), message, *results, **fields)
    assert stand.recorded()[-1].follows == stand.recorded()[last].id
    assert stand.path(-1)[: len(stand.path(last))] == stand.path(last)


@pytest.mark.parametrize("way", WAYS)
async def test_a_named_call_is_begun_in_every_format(serve: Serve, template: ChatTemplate, way: str) -> None:
    form, writer = WRITERS[way]
    player = Player(f"<think>\nhm\n</think>\n\n{writer([*ONE, ('edit_file', {'text': 'x'})])}", template)
    stand = await serve(player, tool_format=form)
    answer = await stand.chat(user("go"), tools=TOOLS, tool_choice=NAMED)
    assert calls_of(answer) == CALLED and answer["choices"][0]["finish_reason"] == "tool_calls"
    [row] = stand.recorded()
    opener, given = given_texts(row, template)
    assert opener == "<think>" and f"\n\n{writer(ONE)}".startswith(given) and len(given) > 3
    assert "edit_file" not in template.decode(row.sampled)
    assert row.untrainable is None and len(row.logprobs) == row.sampled_count == len(row.sampled) - row.given_count
    assert all(ids == stand.path()[: len(ids)] for ids in player.prompts) and len(player.prompts) == 2
    assert len(player.prompts[1]) == row.prompt_length + row.given[1][1]
    assert verify(stand.pool).damages == []
    await check_continued(stand, answer, tools=TOOLS)


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return make_zoo(tiny_model, tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls and not family.real])
async def test_calls_are_begun_as_the_model_s_own_template_writes_them(
    serve: Serve, zoo: dict[str, ChatTemplate], name: str
) -> None:
    family, template, prompts = FAMILIES[name], zoo[name], list[str]()

    def script(prompt: str, ids: Sequence[int]) -> str:
        prompts.append(prompt)
        thinking = prompt.rstrip().endswith("<think>")
        return "hm</think>" if thinking else WRITERS[family.way][1](ONE).split("shell", 1)[1]

    stand = await serve(script, model=template.directory)
    fields: dict[str, Any] = {"tools": [TOOLS[0]], "chat_template_kwargs": family.options}
    answer = await stand.chat(user("go"), tool_choice=NAMED, **fields)
    assert calls_of(answer) == CALLED
    [row] = stand.recorded()
    assert row.untrainable is None and verify(stand.pool).damages == []
    assert given_texts(row, template)[-1].endswith("shell")
    reasons = family.thinks != "no" and family.file != "qwen2.5"  # whose template shows no reasoning
    assert bool(answer["choices"][0]["message"].get("reasoning_content")) == reasons
    assert len(prompts) == 1 + reasons


async def test_a_required_call_is_begun_without_a_name_and_more_may_follow(
    serve: Serve, template: ChatTemplate
) -> None:
    turn = not_thinking(WRITERS["qwen"][1]([*ONE, ("edit_file", {"text": "x"})]))
    stand = await serve(Player(turn, template))
    answer = await stand.chat(user("go"), tools=TOOLS, tool_choice="required", chat_template_kwargs=THINKS_NOT)
    assert calls_of(answer) == [*CALLED, ("edit_file", {"text": "x"})]
    [row] = stand.recorded()
    assert given_texts(row, template) == ['<tool_call>\n{"name": "'] and row.untrainable is None


async def test_the_only_tool_is_named_where_one_is_required(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(Player(not_thinking(shell_call("ls")), template))
    await stand.chat(user("go"), tools=[SHELL], tool_choice="required", chat_template_kwargs=THINKS_NOT)
    assert given_texts(stand.recorded()[0], template) == ['<tool_call>\n{"name": "shell']


async def test_reasoning_is_sampled_before_the_call_in_one_row(serve: Serve, template: ChatTemplate) -> None:
    player = Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template)
    stand = await serve(player)
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED)
    assert calls_of(answer) == [("shell", {"command": "ls"})]
    assert answer["choices"][0]["message"]["reasoning_content"] == "What is here?"
    [row] = stand.recorded()
    assert given_texts(row, template) == ["<think>", '\n\n<tool_call>\n{"name": "shell']
    assert len(player.prompts) == 2 and stand.path()[: len(player.prompts[1])] == player.prompts[1]
    spans = sorted([*row.given, *((span.start, span.end) for span in row.versions)])
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == len(row.sampled)
    assert answer["usage"]["completion_tokens"] == len(row.sampled) and row.untrainable is None
    assert verify(stand.pool).damages == []
    await check_continued(stand, answer, tools=[SHELL])


async def test_a_stream_has_the_same_answer(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template))
    events = await stand.stream(user("go"), tools=[SHELL], tool_choice=NAMED)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "What is here?"
    assert not any(delta.get("content") for delta in deltas)
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ())] == ["shell"]


async def test_the_end_of_a_call_inside_of_its_arguments_ends_nothing(serve: Serve, template: ChatTemplate) -> None:
    command = "echo '</tool_call>' '}}' && ls"
    player = Player(not_thinking(f"{shell_call(command)}\n{shell_call('pwd')}"), template)
    stand = await serve(player)
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED, chat_template_kwargs=THINKS_NOT)
    assert calls_of(answer) == [("shell", {"command": command})]
    assert verify(stand.pool).damages == []


@pytest.mark.parametrize(("limit", "sampled"), [(1, 1), (3, 1), (7, 1), (40, 2)])
async def test_the_limit_counts_given_tokens_and_leaves_one_to_the_model(
    serve: Serve, template: ChatTemplate, limit: int, sampled: int
) -> None:
    stand = await serve(Player(not_thinking(shell_call("ls" * 99)), template))
    answer = await stand.chat(
        user("go"), tools=[SHELL], tool_choice=NAMED, chat_template_kwargs=THINKS_NOT, max_tokens=limit
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    [row] = stand.recorded()
    assert len(row.sampled) == limit and row.sampled_count >= sampled and row.untrainable is None
    assert verify(stand.pool).damages == []


async def test_an_answer_without_a_call_is_served_as_it_is_and_counted(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: " I had rather not.")
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED, chat_template_kwargs=THINKS_NOT)
    assert answer["choices"][0]["message"]["content"] == '<tool_call>\n{"name": "shell I had rather not.'
    assert answer["choices"][0]["finish_reason"] == "stop" and stand.recorded()[0].untrainable is None
    async with stand.http.get(f"{stand.url}/metrics") as metrics:
        assert 'blackforge_unfit_answers_total{form="call"} 1' in await metrics.text()


async def test_reasoning_that_ends_the_turn_is_served_without_a_call(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "I never stop.")
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED)
    assert answer["choices"][0]["message"]["reasoning_content"] == "I never stop."
    assert given_texts(stand.recorded()[0], template) == ["<think>"]


async def test_stop_strings_do_not_count_in_what_is_given(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(Player(not_thinking(shell_call("ls")), template))
    fields: dict[str, Any] = {"tools": [SHELL], "chat_template_kwargs": THINKS_NOT, "stop": ["name", "command"]}
    answer = await stand.chat(user("go"), tool_choice=NAMED, **fields)
    assert answer["choices"][0]["message"]["content"] == '<tool_call>\n{"name": "shell", "arguments": {"'


@pytest.mark.parametrize("stage", [0, 1])
async def test_another_replica_repeats_all_of_it(serve: Serve, template: ChatTemplate, stage: int) -> None:
    player = Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template)
    faults = [Fault(text="x", after=0)]

    def script(prompt: str, ids: Sequence[int]) -> ScriptedReply | Fault:
        reply = player(prompt, ids)
        failing = prompt.endswith("shell") == bool(stage) and faults
        return faults.pop() if failing else reply

    stand = await serve(script, replicas=2)
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED)
    assert calls_of(answer) == [("shell", {"command": "ls"})]
    assert sorted(engine.calls for engine in stand.replicas) == ([1, 2] if stage == 0 else [2, 2])
    *broken, whole = stand.recorded()
    assert whole.untrainable is None and len(whole.given) == 2 and len(broken) == stage
    assert all(str(row.untrainable).startswith("engine_failed") for row in broken)
    assert verify(stand.pool).damages == []


async def test_another_replica_repeats_all_of_it_where_the_call_waits_at_an_engine_whose_update_failed(
    serve: Serve, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reasoning has come, but nothing of its second engine call, which no abort reaches."""
    monkeypatch.setattr("proxy.engine.replicas.fleet.CHECK_SECONDS", 0.2)
    player = Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template)

    def script(prompt: str, ids: Sequence[int]) -> ScriptedReply:
        if len(player.prompts) == 1:
            for engine in stand.replicas:
                engine.running.clear()
        return player(prompt, ids)

    stand = await serve(script, replicas=2)
    asking = asyncio.create_task(stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED))
    while len(player.prompts) < 2:
        await asyncio.sleep(0.01)
    ahead, failed = sorted(stand.replicas, key=lambda engine: engine.calls)
    ahead.version, failed.version = "v1", "v1-loading"
    ahead.running.set()
    answer = await asyncio.wait_for(asking, 30)  # far below engine.silence_seconds
    assert calls_of(answer) == [("shell", {"command": "ls"})] and (ahead.calls, failed.calls) == (2, 2)
    broken, whole = stand.recorded()
    assert str(broken.untrainable).startswith("engine_failed") and whole.untrainable is None
    reasoning = [(span.version, span.end - span.start) for span in broken.versions]
    assert reasoning == [("scripted", broken.sampled_count)] and {span.version for span in whole.versions} == {"v1"}
    assert verify(stand.pool).damages == []


async def test_a_call_to_trained_rows(serve: Serve, template: ChatTemplate) -> None:
    from trainer.data.assemble import merge, why_not_trainable

    stand = await serve(Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template))
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED)
    await check_continued(stand, answer, tools=[SHELL])
    excluded = Counter[Untrained]()
    first, second = stand.recorded()
    [row] = merge([first, second], 1.0, excluded, why_not_trainable)
    assert excluded == {Untrained(UntrainedReason.GIVEN): first.given_count}
    assert row.tokens.tolist() == stand.path(1)
    given = {first.prompt_length + place for start, end in first.given for place in range(start, end)}
    answered = set(range(first.prompt_length, first.prompt_length + len(first.sampled)))
    assert set(row.places[row.segment[row.places] == 0].tolist()) == answered - given
    assert int(row.trained.sum()) == first.sampled_count + second.sampled_count


async def test_a_retry_gets_the_begun_answer(serve: Serve, template: ChatTemplate) -> None:
    player = Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template)
    stand = await serve(lambda prompt, ids: ScriptedReply(player(prompt, ids).text, seconds_per_token=0.01))
    asking = asyncio.create_task(stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED))
    assert stand.engine is not None
    while stand.engine.calls < 1:
        await asyncio.sleep(0.01)
    asking.cancel()
    answer = await stand.chat(user("go"), tools=[SHELL], tool_choice=NAMED)
    assert calls_of(answer) == [("shell", {"command": "ls"})]
    assert answer["choices"][0]["message"]["reasoning_content"] == "What is here?"
    assert verify(stand.pool).damages == []


# ---- the clients


async def say_shell(serve: Serve, template: ChatTemplate) -> Stand:
    return await serve(Player(f"<think>\nWhat is here?\n</think>\n\n{shell_call('ls')}", template))


def check_trained(stand: Stand) -> None:
    rows = stand.recorded()
    assert rows and all(row.untrainable is None and row.given for row in rows)


async def test_the_openai_client_forces_chat_calls(serve: Serve, template: ChatTemplate) -> None:
    stand = await say_shell(serve, template)
    tools: Any = [SHELL]
    choices: list[Any] = ["required", NAMED]
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        for choice in choices:
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "go"}], tools=tools, tool_choice=choice
            )
            calls = answer.choices[0].message.tool_calls or []
            assert [call.function.name for call in calls if call.type == "function"] == ["shell"]
    check_trained(stand)


async def test_the_openai_client_forces_calls_in_responses(serve: Serve, template: ChatTemplate) -> None:
    stand = await say_shell(serve, template)
    function: Any = {**SHELL["function"], "type": "function", "strict": False}  # type: ignore[dict-item]
    choices: list[Any] = ["required", {"type": "function", "name": "shell"}]
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        for choice in choices:
            answer = await client.responses.create(model="tiny", input="go", tools=[function], tool_choice=choice)
            assert [item.name for item in answer.output if item.type == "function_call"] == ["shell"]
    check_trained(stand)


async def test_the_anthropic_client_forces_calls(serve: Serve, template: ChatTemplate) -> None:
    stand = await say_shell(serve, template)
    tool: Any = {"name": "shell", "input_schema": SHELL["function"]["parameters"]}  # type: ignore[index]
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "shell"}]
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        for choice in choices:
            answer = await client.messages.create(
                model="tiny", max_tokens=500, messages=[{"role": "user", "content": "go"}], tools=[tool],
                tool_choice=choice,
            )  # fmt: skip
            assert [block.name for block in answer.content if block.type == "tool_use"] == ["shell"]
    check_trained(stand)


@pytest.mark.parametrize("allowed", [None, ["shell"]])
async def test_gemini_forces_calls(serve: Serve, template: ChatTemplate, allowed: list[str] | None) -> None:
    stand = await say_shell(serve, template)
    calling = {"mode": "ANY"} | ({"allowedFunctionNames": allowed} if allowed else {})
    body = {
        "contents": [{"role": "user", "parts": [{"text": "go"}]}],
        "tools": [{"functionDeclarations": [{"name": "shell", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": calling},
    }
    answer = await stand.ask("/v1beta/models/tiny:generateContent", body)
    parts = answer["candidates"][0]["content"]["parts"]
    assert [part["functionCall"]["name"] for part in parts if "functionCall" in part] == ["shell"]
    check_trained(stand)


# ---- what is given


@pytest.mark.parametrize(("name", "ends"), [("shell", True), ("she.", False)])
def test_the_name_is_given_where_a_token_ends(template: ChatTemplate, name: str, ends: bool) -> None:
    tool = {"type": "function", "function": {"name": name}}
    call = Call(model="m", messages=(user("go"),), tools=(tool,), constraint=call_constraint("f", [name], (tool,)))
    call = Call(**{**vars(call), "options": THINKS_NOT})
    [stage] = stages(call, PromptBuilder(template).build(call, splice=True), template)
    whole = template.encode(f'<tool_call>\n{{"name": "{name}", "arguments": ')
    assert whole[: len(stage.given)] == list(stage.given)
    assert template.decode(stage.given).endswith(name) is ends


def test_nothing_is_given_where_the_engine_enforces_the_call(template: ChatTemplate) -> None:
    call = Call(model="m", messages=(user("go"),), constraint=Constraint("f", calls=("shell",), enforced=True))
    [stage] = stages(call, PromptBuilder(template).build(call, splice=True), template)
    assert stage.given == () and stage.ends == ()


async def test_the_real_engine_goes_on_behind_given_tokens(
    serve: Serve, sglang_engine: Sglang, template: ChatTemplate
) -> None:
    stand = await serve(url=sglang_engine.url)
    fields: dict[str, Any] = {"tools": [SHELL], "tool_choice": NAMED, "chat_template_kwargs": THINKS_NOT}
    await asyncio.gather(*(stand.chat(user(f"go {n}"), max_tokens=60, **fields) for n in range(4)))
    await stand.chat(user("think"), tools=[SHELL], tool_choice="required", max_tokens=30)
    assert verify(stand.pool).damages == []
    last = json.loads((template.directory / "config.json").read_text())["vocab_size"] - 1
    for index, row in enumerate(stand.recorded()):
        assert row.given and row.untrainable is None
        path = stand.path(index)
        body = {"input_ids": path, "return_logprob": True, "logprob_start_len": 0}
        body |= {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
        async with stand.http.post(f"{sglang_engine.url}/generate", json=body) as answer:
            scored = (await answer.json())["meta_info"]["input_token_logprobs"]
        # SGLang 0.5.23 lists the last id of a vocabulary as 0 (logprob_result_processor.py).
        assert [token for _, token, _ in scored] == [0 if token == last else token for token in path]
        again = [scored[row.prompt_length + place][0] for place in row.sampled_places()]
        assert again == pytest.approx(row.logprobs.tolist(), abs=1e-3)
