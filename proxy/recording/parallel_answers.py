"""The answers to one request, most often one: sampled side by side, stored one after the other, delivered together.

All of them have the same prompt, which the first committed row holds; the others are stored against it. When one fails,
the others are ended: what is whole waits for a retry, as if the client had gone. Left out: how one answer is sampled
(proxy/handler.py) and stored (proxy/recording/recorder.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from proxy.call import CallError, Reply
from proxy.engine.client import EngineError
from proxy.http.response import AnswerWriter
from proxy.recording.recorder import Record
from proxy.recording.redelivery.service import RetriedAnswer
from proxy.recording.turn import Turn


@dataclass
class Choice:
    """One answer on its way. `sent` is what its delivery settles: its own row, or a recorded answer once more."""

    record: Record
    turn: Turn
    lane: AnswerWriter
    sent: Record | RetriedAnswer
    error: EngineError | CallError | None = None


async def answered(choices: Sequence[Choice], answer: Callable[[Choice], Awaitable[Reply]]) -> list[Reply]:
    """The replies of all, in order; the first error when one fails, and then none is being sampled any more."""
    if len(choices) == 1:
        return [await _one(choices[0], answer)]
    tasks = [asyncio.create_task(_one(choice, answer)) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        ending = asyncio.ensure_future(asyncio.wait(tasks))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # what they still get must be in their rows
            await ending
            raise


async def _one(choice: Choice, answer: Callable[[Choice], Awaitable[Reply]]) -> Reply:
    try:
        return await answer(choice)
    except (EngineError, CallError) as error:
        choice.error = error
        raise


async def failed(choices: Sequence[Choice]) -> CallError:
    """Keep what the engine sent of each, and return what the client is told of the first that failed."""
    problems = [await choice.record.fail(choice.error) for choice in choices if choice.error is not None]
    others = [choice for choice in choices if choice.error is None]
    await abandoned([choice for choice in others if choice.turn.begun or choice.sent is not choice.record])
    return problems[0]


async def arrived(choices: Sequence[Choice]) -> None:
    """The client has all of them."""
    for choice in choices:
        await choice.sent.delivered()


async def abandoned(choices: Sequence[Choice]) -> None:
    """Nobody got these answers."""
    for choice in choices:
        await choice.sent.abandon()
