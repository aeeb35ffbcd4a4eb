"""What is watched is away from when it goes until a later look finds it back, and not once more for one absence."""

import asyncio
from asyncio import Future

import pytest

from sandboxes.clocks import Presence


class Watched(Presence):
    """Something that tells when it has gone, as Docker's stream of events does. The test answers the looks."""

    def __init__(self) -> None:
        super().__init__("it")
        self.looks: list[Future[bool]] = []
        self.gone = asyncio.Event()

    @property
    def patience(self) -> float:
        return 60.0

    async def ask(self) -> bool:
        self.looks.append(Future())
        return await self.looks[-1]

    async def listen(self) -> None:
        await self.gone.wait()
        self.gone.clear()


async def test_what_has_returned_before_the_watcher_looked_is_not_away_once_more() -> None:
    watched = Watched()
    watched.watch()
    (slow,) = await begun(watched, 1)  # the watcher's own, which takes its time
    watched.gone.set()
    asked = asyncio.create_task(watched.answers())
    _, fails = await begun(watched, 2)
    fails.set_result(False)
    assert not await asked and watched.away
    asked = asyncio.create_task(watched.answers())
    *_, finds = await begun(watched, 3)
    finds.set_result(True)
    assert await asked and watched.away == ""
    lost = watched.away_seconds
    slow.set_result(True)
    while len(watched.looks) < 6:  # the watcher looks again and listens anew
        assert watched.away == "" and watched.away_seconds == lost > 0
        if not watched.looks[-1].done():
            watched.looks[-1].set_result(True)
        await asyncio.sleep(0.01)
    await watched.close()


async def test_an_answer_to_a_look_from_before_it_went_is_no_return() -> None:
    watched = Watched()
    watched.watch()
    (slow,) = await begun(watched, 1)
    slow.set_result(True)
    asked = asyncio.create_task(watched.answers())
    _, before = await begun(watched, 2)
    watched.gone.set()
    while not watched.away:
        await asyncio.sleep(0)
    before.set_result(True)
    assert not await asked and watched.away
    *_, after = await begun(watched, 3)  # the watcher's
    after.set_result(True)
    while watched.away:
        await asyncio.sleep(0)
    await watched.close()


@pytest.mark.parametrize("there", [True, False])
async def test_a_look_from_before_its_return_that_fails_after_it_looks_once_more(there: bool) -> None:
    watched = Watched()
    asked = asyncio.create_task(watched.answers())
    (fails,) = await begun(watched, 1)
    fails.set_result(False)
    assert not await asked and watched.away
    overtaken, asked = asyncio.create_task(watched.answers()), asyncio.create_task(watched.answers())
    _, slow, finds = await begun(watched, 3)
    finds.set_result(True)
    assert await asked and watched.away == ""
    lost = watched.away_seconds
    slow.set_result(False)
    *_, last = await begun(watched, 4)
    assert watched.away == "" and watched.away_seconds == lost > 0
    last.set_result(there)
    assert await overtaken is there
    assert (watched.away == "") is there
    assert (watched.away_seconds == lost) is there


async def begun(watched: Watched, count: int) -> list[Future[bool]]:
    """The looks, as soon as there are so many."""
    async with asyncio.timeout(30):
        while len(watched.looks) < count:
            await asyncio.sleep(0.01)
    return watched.looks
