"""A recorded attempt as a source of answers: the same request gets the recorded answer, in any dialect.

Requests are compared by what the model sees, not by sampling parameters, limits or stop strings. Where a prompt was
sampled several times, each key gets the answers in the order of their commits. A request that is not in the recording
is refused with the place of its first difference. Left out: calls that failed or whose client left, and answers of
providers, which have no tokens.
"""

import logging
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy.call import CallError
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_id
from proxy.prompt.continuation.meaning import meaning
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn

log = logging.getLogger(__name__)
SHOWN_CHARS = 60
"""Characters that a difference shows of each prompt, from the first difference on."""
CONTEXT_CHARS = 20
"""Characters that it shows before that."""


class ReplayDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between a request and the recorded one that is most like it; a line of the report."""

    attempt: int
    request: int
    """The position of the request among those of its key, from 0."""
    nearest: int
    """The completion whose prompt has the longest common beginning; of equal ones, one that was not played yet."""
    where: str
    token: int
    """How many tokens the two prompts have in common."""
    expected: str
    got: str

    def sentence(self) -> str:
        """The difference as an error message."""
        return (
            f"this request is not in the recording of attempt {self.attempt}: it differs from completion "
            f"{self.nearest} {self.where}, where {self.expected!r} was recorded and {self.got!r} was sent; repeat the "
            "recorded requests, or name what may differ by --ignore"
        )


class AttemptRecording:
    """The answers of an attempt, of which each key gets each one once.

    Differences are appended to the file `report`, one JSON line each. With `ignored`, prompts are compared by their
    texts without what matches these patterns; without, by their tokens. UserError when the attempt has no answers.
    """

    def __init__(
        self, pool: Pool, attempt_id: int, template: ChatTemplate, report: Path, *,
        ignored: Sequence[re.Pattern[str]] = (),
    ):  # fmt: skip
        attempt, chain = by_id(pool, attempt_id), of_attempt(pool, attempt_id)
        try:
            tokens = paths(chain)
        except (ValueError, KeyError) as error:
            raise UserError(f"attempt {attempt_id} is damaged ({error}); see `proxy pool verify`") from error
        served = [item for item in chain if item.finish_reason in SERVED_FINISH_REASONS]
        if any(not item.sampled and meaning(item.reply) != meaning({}) for item in served):
            raise UserError(
                f"attempt {attempt_id} was answered by a provider, as text without token ids; "
                "name an attempt whose tokens an engine sampled"
            )
        served = [item for item in served if item.sampled]
        if attempt is None or not served:
            raise UserError(
                f"the pool {pool.name} has no answers of attempt {attempt_id} to play; check --pool and the number"
            )
        self.attempt_id = attempt_id
        self.opened_at = attempt.opened_at
        """When the attempt began, in unix time. Its prompts may contain this date."""
        self.answers = len(served)
        self.differences: list[ReplayDifference] = []
        self._template = template
        self._ignored = ignored
        self.report = report
        self._prompts = {item.id: tokens[item.id][: item.prompt_length] for item in served}
        self._by_prompt: dict[bytes | str, list[Completion]] = defaultdict(list)
        for item in served:
            self._by_prompt[self._comparable(self._prompts[item.id])].append(item)
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
        answers = self._by_prompt[self._comparable(turn.prompt.ids)]
        answer = next((item for item in answers if item.id not in played), None)
        if answer is None:
            raise self._not_recorded(number, turn, played)
        played.append(answer.id)
        return answer

    def _not_recorded(self, number: int, turn: Turn, played: Sequence[int]) -> CallError:
        ids = turn.prompt.ids
        asked = self._text(ids) if self._ignored else ids
        known = {id: self._text(prompt) if self._ignored else prompt for id, prompt in self._prompts.items()}
        common = {id: _common_length(asked, prompt) for id, prompt in known.items()}
        nearest = max(common, key=lambda id: (common[id], id not in played, -id))
        difference = self._difference(number, turn, nearest)
        self.differences.append(difference)
        log.warning("%s", difference.sentence())
        with self.report.open("ab") as lines:
            lines.write(msgspec.json.encode(difference) + b"\n")
        return CallError(400, "not_recorded", difference.sentence())

    def _difference(self, number: int, turn: Turn, nearest: int) -> ReplayDifference:
        same = _common_length(self._prompts[nearest], turn.prompt.ids)
        expected, got = (self._text(ids) for ids in (self._prompts[nearest], turn.prompt.ids))
        position = _common_length(expected, got)
        if self._comparable(self._prompts[nearest]) == self._comparable(turn.prompt.ids):
            where = "in how often it came"
            expected, got = (f"{count} times" for count in (self._times(nearest), self._times(nearest) + 1))
        else:
            where = _place(turn.call.messages, got, position) if expected != got else f"in its tokens from {same} on"
            start = max(0, position - CONTEXT_CHARS)
            expected, got = expected[start : position + SHOWN_CHARS], got[start : position + SHOWN_CHARS]
        return ReplayDifference(
            attempt=self.attempt_id,
            request=number,
            nearest=nearest,
            where=where,
            token=same,
            expected=expected,
            got=got,
        )

    def _times(self, id: int) -> int:
        return len(self._by_prompt[self._comparable(self._prompts[id])])

    def _comparable(self, ids: "array[int]") -> bytes | str:
        """Two prompts count as the same when this is equal."""
        return self._text(ids) if self._ignored else ids.tobytes()

    def _text(self, ids: "array[int]") -> str:
        text = self._template.decode(ids)
        for pattern in self._ignored:
            text = pattern.sub("...", text)
        return text


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items are the same. A binary search, since comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _place(messages: Sequence[dict[str, Any]], text: str, position: int) -> str:
    """Name the message that a character of the rendered text belongs to. Messages without text are skipped."""
    for index, role, start, end in _spans(messages, text):
        if position < end or (position == end and start < end):
            inside = f"{position - start} characters into its text" if position >= start else "before its text"
            return f"in messages[{index}] ({role}), {inside}"
    return "behind its last message" if messages else f"{position} characters into its prompt"


def _spans(messages: Sequence[dict[str, Any]], text: str) -> Iterator[tuple[int, str, int, int]]:
    """Yield index, role, start and end of each message's content in the rendered text, in order."""
    end = 0
    for index, message in enumerate(messages):
        content = (message.get("content") or "").strip()
        start = text.find(content, end)
        if content and start >= 0:
            end = start + len(content)
            yield index, message["role"], start, end
