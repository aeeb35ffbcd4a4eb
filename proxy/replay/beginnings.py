"""The turns of a recorded attempt with which an attempt begins (IPA's chunk-initialised resampling).

The first turns of the recorded attempt are answered from the recording, so that the agent itself brings its sandbox to
where the recorded one was then. What comes next is sampled. Until then each request must be a recorded one, or follow
an answer that was sampled: the first other one ends the attempt for the trainer, and no further call is served. What
was replayed stands in the attempt's rows, with the recorded completion that each has its answer from, so any proxy goes
on where a killed one was. Left out: which attempt and how many turns (harness/anchors.py).
"""

import asyncio
import logging
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from proxy.call import CallError
from proxy.http.admission import FairThreads
from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Attempt
from proxy.pool.rollouts.starts import Replayed, is_turn, is_whole, note_differed, replayed
from proxy.prompt.splice import PromptBuilder
from proxy.prompt.template import ChatTemplate
from proxy.recording.ongoing import OngoingAnswer
from proxy.recording.turn import Turn
from proxy.replay.play import play
from proxy.replay.recorded_answers import RecordedAnswers

log = logging.getLogger(__name__)


class Beginnings:
    """What the attempts of this proxy replay. It has no lock: only one event loop may use it."""

    def __init__(self, template: ChatTemplate, work: FairThreads):
        self._template = template
        self._work = work
        self._known: WeakKeyDictionary[PromptBuilder, Beginning] = WeakKeyDictionary()
        """Keyed by the session's prompt builder: a beginning is dropped with its session, and rebuilt from the pool."""

    async def play(self, answer: OngoingAnswer) -> bool:
        """Play the recorded answer to a call; False where it is to be sampled. CallError 403 where the attempt has left
        the recorded one."""
        session, turn = answer.recorder.session, answer.turn
        if session.attempt.start is None or not session.attempt.start.turns or turn.route is None:
            return False  # turns without a route are a provider's, whose rows have no tokens
        beginning = self._known.get(session.prompts)
        if beginning is None:
            beginning = self._known[session.prompts] = Beginning(session.pool, session.attempt, self._template)
        recorded = await beginning.next(turn, self._work)
        if recorded is None:
            return False
        turn.replayed = recorded.id
        await play(answer, recorded)
        return True


class Beginning:
    """The recorded turns of one attempt, and which of them it has had."""

    def __init__(self, pool: Pool, attempt: Attempt, template: ChatTemplate):
        assert attempt.start is not None, "only an attempt with a start replays"
        self._pool = pool
        self._attempt = attempt
        self._start = attempt.start
        self._template = template
        # A thread looks into the pool: two calls at once would both read the recording, and choose by an old state.
        self._choosing = asyncio.Lock()
        self._recorded: RecordedAnswers | None = None
        self._mine: Mapping[int, Completion] = {}
        """The answers that are replayed, by their recorded completion."""
        self._turns: frozenset[int] = frozenset()
        """Those of them that are turns."""
        self._played: set[int] = set()

    async def next(self, turn: Turn, work: FairThreads) -> Completion | None:
        """Return the recorded answer to a turn; None where it is to be sampled. CallError 403 for a request that
        differs."""
        async with self._choosing:
            rows: Mapping[int, int] = {}
            if self._recorded is None or not self._over:
                now = await work.run(self._attempt, self._look)
                if now.differed is not None:
                    raise _refused(now.differed)
                rows = now.completions
                self._played.update(rows.values())
            assert self._recorded is not None
            answers = [item for item in self._recorded.to(turn.prompt.ids) if is_whole(item)]
            own = [item for item in answers if item.id in self._mine]
            if fresh := next((item for item in own if item.id not in self._played), None):
                self._played.add(fresh.id)
                return fresh
            if len(answers) > len(own):  # recorded, but behind the turns that are replayed
                return None
            if own:  # it is asked again, as the connection broke, or another proxy was killed
                return own[-1]
            if self._over or (turn.prompt.follows is not None and turn.prompt.follows not in rows):
                return None
            raise await work.run(self._attempt, self._differed, turn, len(rows))

    @property
    def _over(self) -> bool:
        """Whether all turns were replayed."""
        return self._played >= self._turns

    def _look(self) -> Replayed:
        """Read the recording, if that was not done yet, and how far the attempt is."""
        now = replayed(self._pool, self._attempt.id)
        if self._recorded is None and now.differed is None:
            try:
                recorded = RecordedAnswers(self._pool, self._start.attempt_id, self._template)
            except UserError as error:
                raise self._left(str(error)) from error
            turns = [item for item in recorded.all if is_turn(item)]
            if len(turns) < self._start.turns:
                raise self._left(f"the pool has only {len(turns)} of its turns")
            first, rest = turns[: self._start.turns], turns[self._start.turns :]
            ends = rest[0].started_at if rest else float("inf")
            beside = [i for i in recorded.all if is_whole(i) and not is_turn(i) and i.started_at < ends]
            self._mine = {item.id: item for item in first + beside}
            self._turns = frozenset(item.id for item in first)
            self._recorded = recorded
        return now

    def _differed(self, turn: Turn, number: int) -> CallError:
        assert self._recorded is not None
        return self._left(self._recorded.difference(number, turn, self._played).place())

    def _left(self, how: str) -> CallError:
        """Note in the attempt's row that it has left the recorded one, and return the error for its client."""
        start = self._start
        begins = f"the rollout begins with {start.turns} turns of attempt {start.attempt_id}"
        text = f"{begins}, and this request is none of them: {how}"
        log.warning("attempt %d: %s", self._attempt.id, text)
        note_differed(self._pool, self._attempt.id, text)
        return _refused(text)


def _refused(how: str) -> CallError:
    return CallError(403, "replay_differed", f"{how}; it is not trained, so no further call is served")
