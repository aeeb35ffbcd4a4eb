"""Calls and results of a history without ids, over templates that write ids into the prompt: Kimi's and Mistral's.

Google's Python client sends results without ids, litellm sends Gemini calls without them, too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import Seen, Serve, Stand
from tests.proxy.test_gemini import PATH, body, content, responses
from tests.proxy.test_gemini import ask as answered
from tests.proxy.written import WRITERS, Calls
from tests.proxy.zoo import FAMILIES, make_zoo

Parts = list[dict[str, Any]]
RESULTS = {"Kimi-K2": "## Return of {}\n", "Mistral": '"call_id": "{}"'}
"""How each family's prompt names the call of a result."""
LASTING = {"Kimi-K2": ["functions.shell:0", "functions.shell:1"], "Mistral": ["call00000", "call00001"]}
TWO: Calls = [("shell", {"command": "ls"}), ("shell", {"command": "pwd"})]


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return make_zoo(tiny_model, tmp_path_factory.mktemp("zoo"))


@pytest.fixture
async def start(serve: Serve, zoo: dict[str, ChatTemplate]) -> Callable[..., Any]:
    """Return a function that starts a gateway whose model of a family makes two calls, and then one more."""

    async def start(name: str) -> tuple[Stand, Seen]:
        write = WRITERS[FAMILIES[name].way][1]

        def script(prompt: str, ids: Any) -> str:
            results = prompt.count("file")
            return write(TWO) if results == 0 else write(TWO[:1]) if results == 2 else "done"

        seen = Seen(script)
        return await serve(seen, model=zoo[name].directory), seen

    return start


def without(parts: Parts, ids: bool) -> dict[str, Any]:
    """The turn as a client sends it back, with the ids of its calls or without them."""
    calls = [{key: v for key, v in part["functionCall"].items() if key != "id"} for part in parts]
    return {"role": "model", "parts": parts if ids else [{"functionCall": call} for call in calls]}


def results(parts: Parts) -> dict[str, Any]:
    """The results as Google's Python client makes them: they name the function alone."""
    named = responses(parts)["parts"]
    for part in named:
        part["functionResponse"] = {key: part["functionResponse"][key] for key in ("name", "response")}
    return {"role": "user", "parts": named}


async def taken(stand: Stand, history: list[dict[str, Any]], ids: bool) -> None:
    """Ask, and add the turn and its results to the history."""
    parts = await answered(stand, *history)
    history += [without(parts, ids), results(parts)]


def follow(stand: Stand, *rows: int) -> bool:
    """Whether each of these rows begins with the tokens of the one before it."""
    recorded, before = stand.recorded(), rows[0]
    for row in rows[1:]:
        path = stand.path(before)
        if recorded[row].follows != recorded[before].id or stand.path(row)[: len(path)] != path:
            return False
        before = row
    return True


@pytest.mark.parametrize("ids", [True, False], ids=["calls with ids", "calls without ids"])
@pytest.mark.parametrize("name", RESULTS)
async def test_turns_go_on_and_results_name_their_calls(start: Any, name: str, ids: bool) -> None:
    stand, seen = await start(name)
    history = [content("list")]
    await taken(stand, history, ids)
    await taken(stand, history, ids)
    answer = await stand.ask(PATH, body(*history))
    assert answer["status"] == 200 and follow(stand, 0, 1, 2)
    called = [call["id"] for row in stand.recorded()[:2] for call in row.reply["tool_calls"]]
    places = [seen.prompts[2].find(RESULTS[name].format(id)) for id in called]
    assert len(set(called)) == 3 and places == sorted(places) and min(places) > 0
    assert name == "Mistral" or called[:2] == LASTING[name]


@pytest.mark.parametrize("name", RESULTS)
async def test_calls_of_another_system_get_the_same_ids_each_time(start: Any, name: str) -> None:
    stand, seen = await start(name)
    parts = [{"functionCall": {"name": "shell", "args": arguments}} for _, arguments in TWO]
    other = [content("look"), {"role": "model", "parts": parts}, results(parts)]
    await taken(stand, other, ids=False)
    await answered(stand, *other)
    assert follow(stand, 0, 1)
    assert all(RESULTS[name].format(id) in seen.prompts[0] for id in LASTING[name])


async def test_a_conversation_that_began_alike_changes_no_ids(start: Any) -> None:
    stand, _ = await start("Mistral")
    history = [content("list")]
    await taken(stand, history, ids=False)
    await taken(stand, history, ids=False)
    await answered(stand, content("list"))
    await answered(stand, *history)
    assert follow(stand, 0, 1, 3)
