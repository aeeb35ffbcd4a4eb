"""The answers of a recorded attempt by their prompts, and where a request differs from all of these.

Requests are compared by what the model sees, not by sampling parameters, limits or stop strings. Left out: calls that
failed or whose client left, and answers of providers, which have no tokens.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from proxy.pool.completions.common_prefix import common_length
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion
from proxy.pool.completions.store import labelled, of_attempts, paths
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_id
from proxy.prompt.continuation.meaning import meaning
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn

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

    def place(self) -> str:
        """The difference as a part of a sentence about the request."""
        return (
            f"it differs from completion {self.nearest} {self.where}, where {self.expected!r} was recorded and "
            f"{self.got!r} was sent"
        )

    def sentence(self) -> str:
        """The difference as the error message of a replay."""
        return (
            f"this request is not in the recording of attempt {self.attempt}: {self.place()}; repeat the "
            "recorded requests, or name what may differ by --ignore"
        )


class RecordedAnswers:
    """The whole answers of an attempt.

    With `ignored`, prompts are compared by their texts without what matches these patterns; without, by their tokens.
    UserError when the attempt has no answers, or damaged ones.
    """

    def __init__(self, pool: Pool, attempt_id: int, template: ChatTemplate, *, ignored: Sequence[re.Pattern[str]] = ()):
        attempt = by_id(pool, attempt_id)
        with pool.read() as connection:
            self._chain = chain = of_attempts(connection, [attempt_id], experts=False)[attempt_id]
        try:
            tokens = paths(chain)
        except (ValueError, KeyError) as error:
            raise UserError(f"attempt {attempt_id} is damaged ({error}); see `proxy pool verify`") from error
        served = [item for item in labelled(chain) if item.finish_reason in SERVED_FINISH_REASONS]
        if any(not item.sampled and meaning(item.reply) != meaning({}) for item in served):
            raise UserError(
                f"attempt {attempt_id} was answered by a provider, as text without token ids; "
                "name an attempt whose tokens an engine sampled"
            )
        self.all = [item for item in served if item.sampled]
        """In the order of their commits."""
        if attempt is None or not self.all:
            raise UserError(
                f"the pool {pool.name} has no answers of attempt {attempt_id} to play; check --pool and the number"
            )
        self.attempt_id = attempt_id
        self.dated_at = attempt.dated_at
        """Unix time of the dates in its prompts."""
        self.variation = attempt.variation
        """What its model was shown otherwise than its agent wrote it."""
        self._template = template
        self._ignored = ignored
        self._by_prompt: dict[bytes, list[Completion]] = defaultdict(list)
        for item in self.all:
            self._by_prompt[self._comparable(tokens[item.id][: item.prompt_length])].append(item)

    def to(self, prompt: "array[int]") -> Sequence[Completion]:
        """The answers to a prompt, in the order of their commits."""
        return self._by_prompt.get(self._comparable(prompt), ())

    def difference(self, number: int, turn: Turn, played: Collection[int]) -> ReplayDifference:
        """Where the prompt of a turn, the request with this number, differs from the one that is most like it."""
        ids, tokens = turn.prompt.ids, paths(self._chain)
        prompts = {item.id: tokens[item.id][: item.prompt_length] for item in self.all}
        asked = self._text(ids) if self._ignored else ids
        known = {id: self._text(prompt) if self._ignored else prompt for id, prompt in prompts.items()}
        common = {id: common_length(asked, prompt) for id, prompt in known.items()}
        nearest = max(common, key=lambda id: (common[id], id not in played, -id))
        return self._difference(number, turn, nearest, prompts[nearest])

    def _difference(self, number: int, turn: Turn, nearest: int, prompt: "array[int]") -> ReplayDifference:
        same = common_length(prompt, turn.prompt.ids)
        expected, got = (self._text(ids) for ids in (prompt, turn.prompt.ids))
        position = common_length(expected, got)
        if self._comparable(prompt) == self._comparable(turn.prompt.ids):
            where, times = "in how often it came", len(self.to(prompt))
            expected, got = (f"{count} times" for count in (times, times + 1))
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

    def _comparable(self, ids: "array[int]") -> bytes:
        """A digest of a prompt. Two prompts count as the same when it is equal."""
        return blake2b(self._text(ids).encode() if self._ignored else ids.tobytes()).digest()

    def _text(self, ids: "array[int]") -> str:
        text = self._template.decode(ids)
        for pattern in self._ignored:
            text = pattern.sub("...", text)
        return text


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
