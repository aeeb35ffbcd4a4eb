"""A gateway that plays a recorded attempt instead of asking an engine.

A request is rendered as always. The recorded completion with the same prompt is then played token by token, with its
own tool-call ids, so that the agent's next request can be the recorded one, too. What is played is recorded in a pool
of its own, never in the recorded attempt.
"""

from functools import partial
from typing import Any

from proxy.commands.recorded_attempt import AttemptRecording
from proxy.config import ProxyConfig
from proxy.engine.replicas.fleet import Fleet
from proxy.handler import Handler
from proxy.recording.ongoing import OngoingAnswer
from proxy.replay.play import play
from proxy.server import Gateway


class ReplayHandler(Handler):
    """A handler whose answers come from a recording."""

    def __init__(self, recording: AttemptRecording, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._recording = recording

    async def _sample(self, answer: OngoingAnswer) -> None:
        sampling = answer.turn.sampling
        recorded = self._recording.next(answer.recorder.session.attempt.id, answer.turn)
        await play(answer, recorded)
        sampling.given, sampling.logprobs, sampling.versions = recorded.given, recorded.logprobs, recorded.versions


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
        self.clock = recording.dated_at
        self.variation = recording.variation

    def fleet(self) -> Fleet:
        return _EmptyFleet()
