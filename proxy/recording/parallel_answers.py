"""The answers to one request, most often one: sampled side by side, stored one after the other, delivered together.

All of them have the same prompt, which the first committed row holds; the others are stored against it. When one fails,
the others are stopped, and those that are whole wait for a retry, as if the client had gone. Left out: how one answer
is sampled (proxy/handler.py) and stored (proxy/recording/recorder.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from proxy.call import CallError, Reply
from proxy.engine.engine_call import EngineError
from proxy.http.bodies import HeldBody
from proxy.http.response import AnswerWriter
from proxy.recording.ongoing import OngoingAnswer
from proxy.recording.recorder import TurnRecorder
from proxy.recording.redelivery.service import RetriedAnswer
from proxy.recording.turn import Turn


@dataclass
class ParallelAnswer:
    """One of the answers, on its way to the client."""

    recorder: TurnRecorder
    turn: Turn
    writer: AnswerWriter
    body: HeldBody
    """The request's body, which counts as long as the answer is being made."""
    sent: OngoingAnswer | RetriedAnswer | None = None
    """What is sent: an answer while it is made, its own or that of a client that has gone, or a recorded one."""
    error: EngineError | CallError | None = None


async def answer_all(
    answers: Sequence[ParallelAnswer], answer_one: Callable[[ParallelAnswer], Awaitable[Reply]]
) -> list[Reply]:
    """Return all replies, in order; when one fails, raise its error once no other is being sampled any more."""
    if len(answers) == 1:
        return [await _keeping_error(answers[0], answer_one)]
    tasks = [asyncio.create_task(_keeping_error(answer, answer_one)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        ending = asyncio.ensure_future(asyncio.wait(tasks))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # wait all the same: what they still get must be in their rows
            await ending
            raise


async def _keeping_error(answer: ParallelAnswer, answer_one: Callable[[ParallelAnswer], Awaitable[Reply]]) -> Reply:
    try:
        return await answer_one(answer)
    except (EngineError, CallError) as error:
        answer.error = error
        raise


async def fail_all(answers: Sequence[ParallelAnswer]) -> CallError:
    """Keep what the engine sent of each answer, and return the client's error for the first that failed."""
    problems = []
    for answer in answers:
        if answer.error is not None:
            assert isinstance(answer.sent, OngoingAnswer), "only an answer that is being made can fail"
            problems.append(await answer.sent.recorder.fail(answer.error))
    for answer in answers:
        if answer.error is None and isinstance(answer.sent, OngoingAnswer):
            await answer.sent.end(keep_empty=False)
        elif answer.error is None and answer.sent is not None:
            await answer.sent.abandon()
    return problems[0]


async def all_delivered(answers: Sequence[ParallelAnswer]) -> None:
    """Note that the client has all of them, also if it disconnects meanwhile, as it may once it has the end."""
    late = []
    for answer in answers:
        if isinstance(answer.sent, OngoingAnswer):
            answer.sent.delivered()
        elif answer.sent is not None:
            late.append(answer.sent.delivered())
    if late:
        await asyncio.shield(asyncio.gather(*late))


async def abandon_all(answers: Sequence[ParallelAnswer]) -> None:
    """Note that the client left without them."""
    for answer in answers:
        if answer.sent is not None:
            await answer.sent.abandon()
