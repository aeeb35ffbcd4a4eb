"""Plays a recorded answer to the client of a call, token by token, as if it were sampled now."""

import asyncio

from proxy.pool.completions.records import CUT_FINISH_REASONS, Completion
from proxy.recording.ongoing import OngoingAnswer

TOKENS_AT_ONCE = 256
"""Tokens that are played before other calls get their turn on the event loop."""


async def play(answer: OngoingAnswer, recorded: Completion) -> None:
    """Play a recorded answer, with the ids of its tool calls, so that the client's next request can be the recorded
    one, too. Its logprobs and versions are left out."""
    turn, sampling = answer.turn, answer.turn.sampling
    turn.call_ids = tuple(call["id"] for call in recorded.reply.get("tool_calls", ()))
    sampling.given = recorded.prescribed
    for number, token in enumerate(recorded.sampled):
        sampling.ids.append(token)
        await answer.send(turn.take([token]))
        if number % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
    sampling.finish = recorded.finish_reason if recorded.finish_reason in CUT_FINISH_REASONS else "stop"
    await answer.send(turn.close())
