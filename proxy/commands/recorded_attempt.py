"""A recorded attempt as a source of answers: the same request gets the recorded answer, in any dialect.

Where a prompt was sampled several times, each key gets the answers in the order of their commits. A request that is not
in the recording is refused with the place of its first difference.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proxy.call import CallError
from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn
from proxy.replay.recorded_answers import RecordedAnswers, ReplayDifference

log = logging.getLogger(__name__)


class AttemptRecording:
    """The answers of an attempt, of which each key gets each one once.

    Differences are appended to the file `report`, one JSON line each. `ignored`: see RecordedAnswers. UserError when
    the attempt has no answers.
    """

    def __init__(
        self, pool: Pool, attempt_id: int, template: ChatTemplate, report: Path, *,
        ignored: Sequence[re.Pattern[str]] = (),
    ):  # fmt: skip
        self._recorded = RecordedAnswers(pool, attempt_id, template, ignored=ignored)
        self.attempt_id = attempt_id
        self.dated_at = self._recorded.dated_at
        """Unix time of the dates in its prompts."""
        self.variation = self._recorded.variation
        """What its model was shown otherwise than its agent wrote it."""
        self.answers = len(self._recorded.all)
        self.differences: list[ReplayDifference] = []
        self.report = report
        self._asked: Counter[int] = Counter()
        self._played: dict[int, list[int]] = defaultdict(list)

    @property
    def played(self) -> int:
        """How many of the answers at least one key got."""
        return len(set().union(*self._played.values()))

    def next(self, key: int, turn: Turn) -> Completion:
        """Return the next recorded answer to a turn's prompt that this key has not had; CallError 400 without one."""
        number, played = self._asked[key], self._played[key]
        self._asked[key] += 1
        answer = next((item for item in self._recorded.to(turn.prompt.ids) if item.id not in played), None)
        if answer is None:
            raise self._not_recorded(self._recorded.difference(number, turn, played))
        played.append(answer.id)
        return answer

    def _not_recorded(self, difference: ReplayDifference) -> CallError:
        self.differences.append(difference)
        log.warning("%s", difference.sentence())
        with self.report.open("ab") as lines:
            lines.write(msgspec.json.encode(difference) + b"\n")
        return CallError(400, "not_recorded", difference.sentence())
