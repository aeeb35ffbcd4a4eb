"""Text completions with a scripted engine: prompts as text and as ids, continued with recorded ids."""

from typing import Any

import openai
import pytest

from proxy.engine.scripted import ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import Seen, Serve, Stand

PATH = "/v1/completions"


async def ask(stand: Stand, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The only choice of the answer."""
    answer = await stand.ask(PATH, {"model": "m", "prompt": prompt, **fields})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def test_the_prompt_is_continued_as_it_stands(serve: Serve, template: ChatTemplate) -> None:
    seen = Seen(lambda prompt, ids: "<think>\nfour</think> ")
    stand = await serve(seen)
    assert (await ask(stand, "two plus two is"))["text"] == "<think>\nfour</think> "
    assert seen.prompts == ["two plus two is"]
    assert stand.recorded()[0].prompt_tail.tolist() == template.encode("two plus two is")


@pytest.mark.parametrize("end", [True, False])
async def test_text_that_goes_on_keeps_the_recorded_ids(serve: Serve, template: ChatTemplate, end: bool) -> None:
    odd = tuple(template.encode(letter)[0] for letter in "thethe")
    assert template.encode("thethe") != list(odd)
    stand = await serve(lambda prompt, ids: ScriptedReply("", ids=odd, end=end))
    first = await ask(stand, "say: ")
    await ask(stand, "say: " + first["text"] + " and on")
    row = stand.recorded()[1]
    expected = template.encode("say: ") + list(odd)
    assert stand.path(1)[: len(expected)] == expected
    assert row.follows == row.prefix_of == stand.recorded()[0].id and row.prefix_length == len(expected)


async def test_changed_text_is_a_branch_of_its_own(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "the end")
    await ask(stand, "say: ")
    await ask(stand, "say: the End and on")
    assert stand.recorded()[1].follows is None


async def test_ids_go_in_as_they_are(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "more")
    odd = [template.encode(letter)[0] for letter in "the"]
    await ask(stand, odd)
    await ask(stand, [stand.path(0)])
    assert stand.path(0)[: len(odd)] == odd and stand.path(1)[: len(stand.path(0))] == stand.path(0)
    assert stand.recorded()[1].follows == stand.recorded()[0].id


async def test_openais_client_reads_both_alike(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "one two three")
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        whole = await client.completions.create(model="m", prompt="count", max_tokens=50)
        stream = await client.completions.create(model="m", prompt="count", max_tokens=50, stream=True)
        pieces = [event.choices[0] async for event in stream]
    assert whole.choices[0].text == "".join(piece.text for piece in pieces) == "one two three"
    assert whole.choices[0].finish_reason == pieces[-1].finish_reason == "stop" and len(pieces) > 2


async def test_sixteen_tokens_where_nothing_is_asked(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "a b c d e f g h i j k l m n o p q r s t")
    assert (await ask(stand, "letters"))["finish_reason"] == "length"
    assert len(stand.recorded()[0].sampled) == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [10_000_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    answer = await stand.ask(PATH, {"prompt": "hi", **fields})
    assert (answer["status"], answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(param) and stand.recorded() == []
