"""A gateway that plays a recorded attempt instead of asking an engine.

A request is rendered as always. The recorded completion with the same prompt is then played token by token, with its
own tool-call ids, so that the agent's next request can be the recorded one, too. What is played is recorded in a pool
of its own, never in the recorded attempt.
"""

import asyncio
from functools import partial
from typing import Any

from proxy.commands.recorded_attempt import AttemptRecording
from proxy.config import ProxyConfig
from proxy.engine.replicas.fleet import Fleet
from proxy.handler import Handler
from proxy.recording.ongoing import OngoingAnswer
from proxy.server import Gateway

TOKENS_AT_ONCE = 256
"""Tokens that are played before other calls get their turn on the event loop."""


class ReplayHandler(Handler):
    """A handler whose answers come from a recording."""

    def __init__(self, recording: AttemptRecording, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._recording = recording

    async def _sample(self, answer: OngoingAnswer) -> None:
        turn = answer.turn
        recorded = self._recording.next(answer.recorder.session.attempt.id, turn)
        turn.call_ids = tuple(call["id"] for call in recorded.reply.get("tool_calls", ()))
        sampling = turn.sampling
        sampling.given = recorded.given
        for number, token in enumerate(recorded.sampled):
            sampling.ids.append(token)
            await answer.send(turn.take([token]))
            if number % TOKENS_AT_ONCE == 0:
                await asyncio.sleep(0)
        sampling.logprobs, sampling.versions = recorded.logprobs, recorded.versions
        sampling.finish = "length" if recorded.finish_reason == "length" else "stop"
        await answer.send(turn.close())


class _EmptyFleet(Fleet):
    """A fleet without engines, since a replay asks none."""

    def __init__(self) -> None:
        super().__init__(())

    async def healthy(self) -> bool:
        return True


class ReplayGateway(Gateway):
    """A gateway that plays a recording, and records what it plays in `config.pool`."""

    def __init__(self, config: ProxyConfig, recording: AttemptRecording):
        super().__init__(config, "http://recorded", partial(ReplayHandler, recording))
        self.engines = (f"attempt {recording.attempt_id}",)
        self.recording = recording
        self.clock = recording.opened_at

    def fleet(self) -> Fleet:
        return _EmptyFleet()
