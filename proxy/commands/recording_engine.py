"""Serves a recorded attempt again, without an engine: the same request gets the recorded answer, in any dialect.

A request is rendered as ever; the recorded completion with the same prompt tokens is played, token by token, with its
own call ids, so that the agent's next request can be the recorded one too. Where a prompt was sampled several times,
its answers come in the order of their commits, for each key anew. A request that is not in the recording is refused
with the place of its first difference, which is kept in a report. Compared is what the model sees: not sampling
parameters, limits or stop strings. What is played is recorded in a pool of its own, never in the recorded attempt.
Left out: calls that failed or whose client had gone, and other providers' answers, which have no tokens.
"""

import asyncio
import logging
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from proxy.call import CallError, meaning
from proxy.config import ProxyConfig
from proxy.engine.fleet import Fleet
from proxy.handler import Handler
from proxy.http.response import AnswerWriter
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_id
from proxy.prompt.template import ChatTemplate
from proxy.recording.recorder import Record
from proxy.recording.turn import Turn
from proxy.server import Gateway

log = logging.getLogger(__name__)
SHOWN_CHARS = 60
"""Characters of each side that a difference shows."""
CONTEXT_CHARS = 20
"""Characters before a difference that are shown with it."""
REST_TOKENS = 256
"""Tokens that are played before other calls get their turn."""


class ReplayDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a request differs from the recorded one that it is nearest to; a line of the report."""

    attempt: int
    request: int
    """The number of the request among those of its key, from 0."""
    nearest: int
    """The completion whose prompt has the longest common beginning; one that was not played goes first."""
    where: str
    token: int
    """How many tokens are the same."""
    expected: str
    got: str

    def sentence(self) -> str:
        return (
            f"this request is not in the recording of attempt {self.attempt}: it differs from completion "
            f"{self.nearest} {self.where}, where {self.expected!r} was recorded and {self.got!r} came"
        )


class AttemptRecording:
    """What of an attempt can be played, and what has been.

    `report`: where differences go, a JSON line each. `ignored`: what of the prompts' texts is not compared; prompts are
    compared by their tokens where it is empty.
    """

    def __init__(
        self, pool: Pool, attempt_id: int, template: ChatTemplate, report: Path, *,
        ignored: Sequence[re.Pattern[str]] = (),
    ):  # fmt: skip
        attempt, chain = by_id(pool, attempt_id), of_attempt(pool, attempt_id)
        try:
            found = paths(chain)
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
            raise UserError(f"the pool {pool.name} has no answer to play again of attempt {attempt_id}")
        self.attempt_id = attempt_id
        self.opened_at = attempt.opened_at
        """When the attempt began, which dates in its prompts tell."""
        self.answers = len(served)
        self.differences: list[ReplayDifference] = []
        self._template = template
        self._ignored = ignored
        self.report = report
        self._prompts = {item.id: found[item.id][: item.prompt_length] for item in served}
        self._by_prompt: dict[bytes | str, list[Completion]] = defaultdict(list)
        for item in served:
            self._by_prompt[self._compared(self._prompts[item.id])].append(item)
        self._asked: Counter[int] = Counter()
        self._played: dict[int, list[int]] = defaultdict(list)

    @property
    def played(self) -> int:
        """How many of the answers at least one key has had."""
        return len(set().union(*self._played.values()))

    def next(self, key: int, turn: Turn) -> Completion:
        """The recorded answer to a turn's prompt that this key has not had; CallError 400 where there is none."""
        number, played = self._asked[key], self._played[key]
        self._asked[key] += 1
        left = (item for item in self._by_prompt[self._compared(turn.prompt.ids)] if item.id not in played)
        item = next(left, None)
        if item is None:
            raise self._differs(number, turn, played)
        played.append(item.id)
        return item

    def _differs(self, number: int, turn: Turn, played: Sequence[int]) -> CallError:
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
        at = _common_length(expected, got)
        if self._compared(self._prompts[nearest]) == self._compared(turn.prompt.ids):
            where = "in how often it came"
            expected, got = (f"{count} times" for count in (self._times(nearest), self._times(nearest) + 1))
        else:
            where = _place(turn.call.messages, got, at) if expected != got else f"in its tokens from {same} on"
            start = max(0, at - CONTEXT_CHARS)
            expected, got = expected[start : at + SHOWN_CHARS], got[start : at + SHOWN_CHARS]
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
        return len(self._by_prompt[self._compared(self._prompts[id])])

    def _compared(self, ids: "array[int]") -> bytes | str:
        """What makes two prompts the same."""
        return self._text(ids) if self._ignored else ids.tobytes()

    def _text(self, ids: "array[int]") -> str:
        text = self._template.decode(ids)
        for pattern in self._ignored:
            text = pattern.sub("...", text)
        return text


class ReplayHandler(Handler):
    """A handler whose turns come from a recording."""

    def __init__(self, recording: AttemptRecording, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._recording = recording

    async def _sample(self, record: Record, turn: Turn, writer: AnswerWriter) -> None:
        item = self._recording.next(record.session.attempt.id, turn)
        turn.call_ids = tuple(call["id"] for call in item.reply.get("tool_calls", ()))
        sampling = turn.sampling
        for number, token in enumerate(item.sampled):
            sampling.ids.append(token)
            await writer.send(turn.take([token]))
            if number % REST_TOKENS == 0:
                await asyncio.sleep(0)
        sampling.logprobs, sampling.versions = item.logprobs, item.versions
        sampling.finish = "length" if item.finish_reason == "length" else "stop"
        await writer.send(turn.close())


class _EmptyFleet(Fleet):
    """No engine, which nothing needs."""

    def __init__(self) -> None:
        super().__init__(())

    async def healthy(self) -> bool:
        return True


class ReplayGateway(Gateway):
    """A gateway that plays a recording. `config.pool` is where what it plays is recorded."""

    def __init__(self, config: ProxyConfig, recording: AttemptRecording):
        super().__init__(config, "http://recorded", partial(ReplayHandler, recording))
        self.engines = (f"attempt {recording.attempt_id}",)
        self.recording = recording
        self.clock = recording.opened_at

    def fleet(self) -> Fleet:
        return _EmptyFleet()


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _place(messages: Sequence[dict[str, Any]], text: str, at: int) -> str:
    """Which message a character of the rendered text belongs to; messages without a text of their own are passed."""
    for index, role, start, end in _spans(messages, text):
        if at < end or (at == end and start < end):
            inside = f"{at - start} characters into its text" if at >= start else "before its text"
            return f"in messages[{index}] ({role}), {inside}"
    return "behind its last message" if messages else f"{at} characters into its prompt"


def _spans(messages: Sequence[dict[str, Any]], text: str) -> Iterator[tuple[int, str, int, int]]:
    """Where the messages' contents stand in the rendered text, in order."""
    end = 0
    for index, message in enumerate(messages):
        content = (message.get("content") or "").strip()
        start = text.find(content, end)
        if content and start >= 0:
            end = start + len(content)
            yield index, message["role"], start, end
