"""Stored responses: what later requests name reads as if it had been sent, and only the same attempt can read it."""

from typing import Any

import openai
import pytest
from sqlalchemy import select

from proxy.engine.scripted import Script, ScriptedReply
from proxy.pool.completions.responses import stored_bytes
from proxy.pool.inspect.verify import verify
from proxy.pool.schema import responses
from tests.proxy.conftest import Seen, Serve, Stand, shell_call

TOOL: dict[str, Any] = {"type": "function", "strict": False, "name": "shell", "parameters": {"type": "object"}}
ASKED: dict[str, Any] = {"model": "tiny", "instructions": "be brief", "tools": [TOOL]}
THOUGHT = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls") + "\n" + shell_call("pwd")


def script(prompt: str, ids: Any) -> str:
    return "done" if prompt.rstrip().endswith("<|im_start|>assistant") and "</tool_response>" in prompt else THOUGHT


def client_of(stand: Stand, key: str = "agent") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=key, max_retries=0)


def outputs(output: list[Any]) -> list[Any]:
    ids = [item.call_id for item in output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": id, "output": "file"} for id in ids]


def rows(stand: Stand) -> list[Any]:
    with stand.pool.read() as connection:
        return list(connection.execute(select(responses).order_by(responses.c.id)).all())


async def continued(stand: Stand, how: str) -> list[list[int]]:
    """A tool loop of three requests, which name what came before in this way; the paths."""
    async with client_of(stand, how) as client:
        items: list[Any] = [{"role": "user", "content": "list"}]
        answer = await client.responses.create(input=items, **ASKED)
        now: list[Any] = [{"role": "user", "content": "and now?"}]
        for more in (outputs(answer.output), now):
            if how == "previous":
                answer = await client.responses.create(input=more, previous_response_id=answer.id, **ASKED)
                continue
            named = [{"type": "item_reference", "id": item.id} for item in answer.output]
            whole = [item.model_dump(exclude_none=True) for item in answer.output]
            items += [*(named if how == "references" else whole), *more]
            answer = await client.responses.create(input=items, **ASKED)
    return [stand.path(index, how) for index in range(3)]


async def test_what_is_named_reads_as_if_it_had_been_sent(serve: Serve) -> None:
    seen = Seen(script)
    stand = await serve(seen)
    sent = await continued(stand, "sent")
    prompts, seen.prompts = seen.prompts, []
    assert sent[1][: len(sent[0])] == sent[0]
    for how in ("previous", "references"):
        assert await continued(stand, how) == sent and seen.prompts == prompts
        assert [row.follows for row in stand.recorded(how)] == [None, *(row.id for row in stand.recorded(how)[:2])]
        seen.prompts = []


@pytest.mark.parametrize("how", ["sent", "previous", "references"])
async def test_rows_grow_with_the_new_items_only(serve: Serve, how: str) -> None:
    stand = await serve(script)
    await continued(stand, how)
    stored = rows(stand)
    assert [len(row.items) for row in stored] == [1, 2, 1]
    assert [row.prefix_of for row in stored] == [None, stored[0].response_id, stored[1].response_id]
    assert [row.fields is None for row in stored] == [False, True, True]
    assert [row.completion_id for row in stored] == [row.id for row in stand.recorded(how)]
    assert verify(stand.pool).damages == []


async def test_a_response_is_retrieved_as_it_was_sent(serve: Serve) -> None:
    stand = await serve(script)
    async with client_of(stand) as client:
        fields: Any = {**ASKED, "metadata": {"a": "b"}, "max_output_tokens": 400}
        sent = await client.responses.create(input="list", **fields)
        async with client.responses.stream(
            input=outputs(sent.output), previous_response_id=sent.id, **fields
        ) as stream:
            streamed = await stream.get_final_response()
        assert await client.responses.retrieve(sent.id) == sent
        again = await client.responses.retrieve(streamed.id)
        assert (again.output_text, again.usage, again.previous_response_id) == ("done", streamed.usage, sent.id)
        kept, shown = list[Any](again.output), list[Any](streamed.output)
        assert [item.id for item in kept] == [item.id for item in shown]
        listed = await client.responses.input_items.list(streamed.id, order="asc", limit=4)
        assert [item.type for item in listed.data] == ["message", "reasoning", "message", "function_call"]
        rest = [item async for item in client.responses.input_items.list(streamed.id, limit=2)]
        assert [item.type for item in rest[:3]] == ["function_call_output", "function_call_output", "function_call"]


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "", "9" * 5000])
async def test_a_page_of_more_items_than_are_served_is_refused(serve: Serve, limit: str) -> None:
    stand = await serve(script)
    url = f"{stand.url}/v1/responses/resp_1/input_items"
    async with stand.http.get(url, params={"limit": limit}, headers={"x-api-key": "agent"}) as answer:
        refused = (await answer.json())["error"]
    assert (answer.status, refused["param"]) == (400, "limit") and refused["message"].endswith("; use 1 to 100")


async def test_only_the_same_attempt_reads_it(serve: Serve) -> None:
    stand = await serve(script)
    async with client_of(stand) as mine, client_of(stand, "other") as other:
        answer = await mine.responses.create(input="list", **ASKED)
        await other.responses.create(input="hello", **ASKED)
        refused = []
        for client in (other, client_of(stand, "unknown")):
            for id in (answer.id, "resp_" + "0" * 32):
                with pytest.raises(openai.NotFoundError) as error:
                    await client.responses.retrieve(id)
                refused.append(error.value.message.replace(id, "ID"))
                with pytest.raises(openai.NotFoundError):
                    await client.responses.delete(id)
        assert len(set(refused)) == 1
        with pytest.raises(openai.BadRequestError, match="Previous response with id") as previous:
            await other.responses.create(input="go on", previous_response_id=answer.id, **ASKED)
        assert previous.value.code == "previous_response_not_found"
        reference: Any = {"type": "item_reference", "id": answer.output[0].id}
        with pytest.raises(openai.NotFoundError, match="Item with id"):
            await other.responses.create(input=[reference], **ASKED)
        assert (await mine.responses.retrieve(answer.id)).id == answer.id
    assert len(stand.recorded("other")) == 1 and stand.recorded("unknown") == []


async def test_store_false_stores_nothing(serve: Serve) -> None:
    stand = await serve(script)
    async with client_of(stand) as client:
        answer = await client.responses.create(input="list", store=False, **ASKED)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="Previous response with id"):
            await client.responses.create(input="go on", previous_response_id=answer.id, **ASKED)
    assert rows(stand) == [] and len(stand.recorded()) == 1


async def test_a_deleted_response_is_gone_and_later_ones_stay(serve: Serve) -> None:
    stand = await serve(script)
    async with client_of(stand) as client:
        first = await client.responses.create(input="list", **ASKED)
        second = await client.responses.create(input=outputs(first.output), previous_response_id=first.id, **ASKED)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(input=[reference], **ASKED)
        await client.responses.create(input="and now?", previous_response_id=second.id, **ASKED)
    assert [row.follows for row in stand.recorded()] == [None, *(row.id for row in stand.recorded()[:2])]


async def test_another_proxy_serves_what_this_one_stored(serve: Serve) -> None:
    stand, other = await serve(script), await serve(script)
    async with client_of(stand) as one, client_of(other) as two:
        first = await one.responses.create(input="list", **ASKED)
        second = await two.responses.create(input=outputs(first.output), previous_response_id=first.id, **ASKED)
        await one.responses.create(input="and now?", previous_response_id=second.id, **ASKED)
        whole: Any = [{"role": "user", "content": "list"}, *[item.model_dump() for item in first.output]]
    async with client_of(await serve(script)) as third:  # knows nothing yet
        await third.responses.create(input=[*whole, *outputs(first.output)], **ASKED)
    assert [len(row.items) for row in rows(stand)] == [1, 2, 1, 0]
    assert stand.recorded()[2].follows == stand.recorded()[1].id
    assert stand.path(3)[: len(stand.path(0))] == stand.path(0)


async def test_a_request_that_names_too_much_is_refused(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("word " * 2000))
    async with client_of(stand) as client:
        answer = await client.responses.create(input="go", model="tiny")
        reference = b'{"type":"item_reference","id":"%b"}' % str(answer.output[0].id).encode()
    body = b'{"model":"tiny","input":[' + b",".join([reference] * 4000) + b"]}"
    refused = await stand.ask("/v1/responses", body)
    assert (refused["status"], refused["error"]["param"]) == (413, "input") and len(stand.recorded()) == 1


async def test_an_attempt_that_has_stored_too_much_stores_no_more(serve: Serve) -> None:
    stand = await serve(script, limits={"stored_bytes": 3000})
    async with client_of(stand) as client:
        await client.responses.create(input="a" * 3000, **ASKED)
        with pytest.raises(openai.BadRequestError, match="limit of 3000 bytes; send the whole input with store: false"):
            await client.responses.create(input="go", **ASKED)
        await client.responses.create(input="go", store=False, **ASKED)
        again = await serve(script, limits={"stored_bytes": stored_bytes(stand.pool, stand.recorded()[0].attempt_id)})
        async with client_of(again) as other:  # it counts what another proxy has stored
            with pytest.raises(openai.BadRequestError, match="send the whole input with store: false"):
                await other.responses.create(input="go", **ASKED)
    assert len(rows(stand)) == 1 and len(stand.recorded()) == 2


async def test_a_retry_can_name_the_answer_that_it_got(serve: Serve) -> None:
    answered: Script = lambda prompt, ids: ScriptedReply("yes no", seconds_per_token=0.3)  # noqa: E731
    stand = await serve(answered)
    body = {"model": "tiny", "input": "sure?"}
    async with stand.send("/v1/responses", {**body, "stream": True}) as cut:
        async for line in cut.content:
            if b"output_text.delta" in line:
                break
    async with client_of(stand) as client:
        again = await client.responses.create(model="tiny", input="sure?")
        assert again.output_text == "yes no" and len(stand.recorded()) == 1
        assert (await client.responses.retrieve(again.id)).output_text == "yes no"
        await client.responses.create(model="tiny", input="really?", previous_response_id=again.id)
    first, second = stand.recorded()
    assert second.follows == first.id
