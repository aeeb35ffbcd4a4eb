"""Labels: what each agent's calls are for, known from their structure, and kept by the gateway."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from proxy.pool.completions.store import labelled
from proxy.pool.rollouts.attempts import Ending, close_attempt
from tests.proxy.conftest import SHELL, Serve, shell_call, user
from tests.proxy.stories import STORIES, Story, says, system, work
from tests.proxy.stories import user as task


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_every_call_of_an_agent_has_its_label(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert story.told() == story.truth


def test_without_tools_the_earliest_conversation_is_the_work_whatever_comes_beside_it() -> None:
    story = Story()
    work(story, [system(), task("count")], 0)
    story.ask("side", [system("Name it."), task("count")], says("Counting"))
    assert story.told() == story.truth == ["main", "main", "side"]


def test_calls_without_a_shape_are_not_labelled_and_disturb_nothing() -> None:
    story = Story()
    work(story, [system(), task("count")], 1, steps=3)
    story.rows[1] = replace(story.rows[1], shape=None)
    assert story.told() == ["main", "main"]


async def test_the_gateway_keeps_what_labels_need_also_over_a_restart(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: shell_call("ls") if "hello" in prompt[-200:] else "A title")
    await stand.chat({"role": "system", "content": "Name it."}, user("a name for it, please"))
    first = await stand.chat(user("say hello"), tools=[SHELL])
    turn = [user("say hello"), first["choices"][0]["message"], {"role": "tool", "content": "out"}]
    await stand.chat(*turn, tools=[SHELL])
    again = await serve(lambda prompt, ids: "done")
    await again.chat(*turn, user("Write a summary."))
    await again.chat(user("You did this: done"), tools=[SHELL])
    recorded = labelled(again.recorded())
    assert [item.label for item in recorded] == ["side", "main", "main", "compaction", "main"]
    assert [item.shape and item.shape.continues for item in recorded] == [None, None, 2, 2, None]
    assert all(len(msgspec.json.encode(item.shape)) < 100 for item in recorded)
    close_attempt(again.pool, recorded[0].attempt_id, Ending())
    assert again.recorded() == recorded
