"""Answers while they are made, each in a task of its own, which goes on for a while when the client goes away.

The first repeat of the request in that time takes the answer over, with all that was sampled before. An answer that
becomes whole without a client waits for a repeat like every other that did not arrive (proxy/recording/redelivery). One
that nobody has taken over when its time is up is ended at the engine, and its partial row is kept. An attempt that has
closed takes no row, so the harness has its answers ended before. Left out: a repeat that comes to another proxy, which
samples as long as the answer is not whole.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from proxy.call import CallError, Reply
from proxy.engine.engine_call import EngineError
from proxy.http.limits import RequestLimits
from proxy.http.response import AnswerWriter
from proxy.parsing.turn_parser import Piece
from proxy.recording.recorder import TurnRecorder
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.turn import Turn

log = logging.getLogger(__name__)
CLOSED_SECONDS = 1.0
"""How often the pool is asked whether the attempts of answers without a client have closed."""


class OngoingAnswer:
    """One answer that is sampled and recorded, whether or not a client waits for it."""

    def __init__(self, all_ongoing: "OngoingAnswers", recorder: TurnRecorder, turn: Turn, limit: int):
        """`limit`: the most tokens that it may have."""
        self.recorder = recorder
        self.turn = turn
        self.limit = limit
        self.task: asyncio.Task[Reply]
        """Makes the answer; set by `OngoingAnswers.begin`."""
        self._all_ongoing = all_ongoing
        self._writer: AnswerWriter | None = None
        self._pieces: list[Piece] = []

    @property
    def started(self) -> bool:
        """Whether the present client has some text."""
        return self._writer is not None and self._writer.started

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Add pieces, and send them to the client if there is one."""
        self._pieces += pieces
        if (writer := self._writer) is not None:
            try:
                await writer.send(pieces)
            except ConnectionError:  # whoever waits in `sent_to` learns of it, too
                if self._writer is writer:
                    self._writer = None

    async def restart(self, error: EngineError) -> None:
        """Store what was sampled before this error, and begin again."""
        # First, so that a client that comes while the row is committed gets only what is sampled from now on.
        self._pieces.clear()
        await asyncio.shield(self.recorder.store_partial(error))
        self.recorder.restart()

    async def sent_to(self, writer: AnswerWriter) -> Reply:
        """Send this client all pieces, first those that were sampled before it came. Return the reply once its row is
        committed."""
        self._writer = writer
        if self._pieces:
            await writer.send(list(self._pieces))
        return await asyncio.shield(self.task)

    def delivered(self) -> None:
        """Note that the client has the whole answer."""
        self.recorder.delivered()

    async def abandon(self) -> None:
        """The client has gone: go on without it for a while."""
        self._writer = None
        if self.task.done():
            await self.end()
        else:
            self._all_ongoing.leave_without_client(self)

    async def end(self, keep_empty: bool = True) -> None:
        """Stop, and keep what there is, also if nothing was sampled yet (`keep_empty`); a whole answer waits for a
        retry."""
        self.task.cancel()
        if not self.recorder.begun:  # else the row is being stored, and retries must wait for that from now on
            await asyncio.wait([self.task])
        if isinstance(error := self.error, EngineError):
            await self.recorder.fail(error)
        elif keep_empty or self.turn.begun or self.recorder.begun:
            await self.recorder.abandon()

    @property
    def error(self) -> BaseException | None:
        """Why the answer could not be made; None while it can."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


class OngoingAnswers:
    """All ongoing answers of a proxy. It has no lock: only one event loop may use it."""

    def __init__(self, redelivery: Redelivery, limits: RequestLimits):
        self._redelivery = redelivery
        self._limits = limits
        self._all: set[OngoingAnswer] = set()
        self._without_client: dict[int, dict[OngoingAnswer, asyncio.Future[None]]] = {}
        """Per attempt, the answers whose client has left, oldest first, each with the future that the next client
        resolves."""
        self._lingering: dict[asyncio.Task[None], int] = {}
        """What waits for the end of an answer without a client; with the attempt."""

    def begin(
        self, recorder: TurnRecorder, turn: Turn, limit: int,
        make: Callable[[OngoingAnswer], Coroutine[Any, Any, Reply]],
    ) -> OngoingAnswer:  # fmt: skip
        """Begin an answer, which `make` samples and records."""
        answer = OngoingAnswer(self, recorder, turn, limit)
        answer.task = asyncio.create_task(make(answer))
        self._all.add(answer)
        answer.task.add_done_callback(lambda _: self._all.discard(answer))
        return answer

    def take_over(self, attempt_id: int, fingerprint: bytes, limit: int) -> OngoingAnswer | None:
        """Return an answer to the same request that has no client, which is from now on this one's; None without."""
        for answer, over in self._without_client.get(attempt_id, {}).items():
            same = answer.recorder.fingerprint == fingerprint and answer.limit == limit
            if same and not over.done():  # else it was recalled, and is about to be ended
                self._forget(answer, over)
                over.set_result(None)
                return answer
        return None

    def leave_without_client(self, answer: OngoingAnswer) -> None:
        """Let an answer go on until it is whole, a repeat takes it over, its time is up or its attempt has closed."""
        attempt_id = answer.recorder.session.attempt.id
        waiting = self._without_client.setdefault(attempt_id, {})
        over = waiting[answer] = asyncio.get_running_loop().create_future()
        lingering = asyncio.create_task(self._linger(answer, over))
        self._lingering[lingering] = attempt_id
        lingering.add_done_callback(self._lingering.pop)
        if len(waiting) > self._limits.lingering_calls:
            _recall(next(iter(waiting.values())))

    async def keep_watch(self) -> None:
        """End the answers without a client whose attempts have closed, until cancelled."""
        while True:
            await asyncio.sleep(CLOSED_SECONDS)
            if self._without_client:
                for attempt_id in await self._redelivery.closed(list(self._without_client)):
                    for over in self._without_client.get(attempt_id, {}).values():
                        _recall(over)

    async def end(self, attempt_ids: Collection[int]) -> None:
        """End all answers of these attempts; return when their rows are stored."""
        without_client = [one for id in attempt_ids for one in self._without_client.get(id, {}).items()]
        for _, over in without_client:
            _recall(over)
        lingering = [task for task, attempt_id in self._lingering.items() if attempt_id in attempt_ids]
        of_attempts = {answer for answer in self._all if answer.recorder.session.attempt.id in attempt_ids}
        with_client = of_attempts - {answer for answer, _ in without_client}
        await asyncio.gather(*lingering, *(answer.end() for answer in with_client), return_exceptions=True)

    async def close(self) -> None:
        """End all answers."""
        await self.end({answer.recorder.session.attempt.id for answer in self._all} | set(self._lingering.values()))

    async def _linger(self, answer: OngoingAnswer, over: "asyncio.Future[None]") -> None:
        ends: list[asyncio.Future[Any]] = [answer.task, over]
        await asyncio.wait(ends, timeout=self._limits.linger_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._forget(answer, over):
            if not isinstance(error := answer.error, EngineError | CallError | None):
                log.error("bug in a call whose client has gone", exc_info=error)
            await answer.end()

    def _forget(self, answer: OngoingAnswer, over: "asyncio.Future[None]") -> bool:
        """Remove an answer from those without a client; False when it is not there, or there for the second time."""
        attempt_id = answer.recorder.session.attempt.id
        waiting = self._without_client.get(attempt_id, {})
        if waiting.get(answer) is not over:
            return False
        del waiting[answer]
        if not waiting:
            del self._without_client[attempt_id]
        return True


def _recall(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)
