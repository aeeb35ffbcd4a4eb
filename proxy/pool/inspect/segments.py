"""The segments of an attempt's conversations: where a context was compacted or otherwise rewritten, and what it saved.

A segment is a row of calls of which each prompt begins with the whole context of the one before. All of it follows from
the recorded links, so it is known of any agent. Which results were dropped follows from the tokens
(dropped_results.py). Left out: side calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.pool.completions.labels import COMPACTION, SIDE, SUBAGENT
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import token_paths
from proxy.pool.inspect.dropped_results import described, dropped


@dataclass
class Segment:
    """Calls whose context only grew. Lengths are in tokens."""

    calls: list[Completion]
    shorter: int = 0
    """How much shorter its first prompt is than the context before: what was dropped, less what was new."""

    @property
    def start(self) -> int:
        """Length of its first prompt."""
        return self.calls[0].prompt_length

    @property
    def end(self) -> int:
        """Length of its longest context."""
        return max(_length(item) for item in self.calls)


@dataclass
class Conversation:
    """The main work, or a sub-agent's."""

    label: str
    segments: list[Segment] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """The sum of all prompts' lengths."""
        return sum(item.prompt_length for segment in self.segments for item in segment.calls)

    @property
    def saved_tokens(self) -> int:
        """The least by which that sum would be longer if nothing had been dropped."""
        saved = total = 0
        for segment in self.segments:
            saved += segment.shorter
            total += saved * len(segment.calls)
        return total


def conversations(chain: Sequence[Completion]) -> list[Conversation]:
    """The conversations of an attempt by their first calls. `chain`: labelled completions in commit order."""
    by_id = {item.id: item for item in chain}
    found: list[Conversation] = []
    places: dict[int, Conversation] = {}
    for item in chain:
        if item.label == SIDE:
            continue
        conversation = _place(item, places, found)
        if conversation is None:
            conversation = Conversation(item.label or "main")
            found.append(conversation)
        if _add(conversation, item, by_id):
            places[item.id] = conversation
    return [conversation for conversation in found if conversation.segments]


def _place(item: Completion, places: Mapping[int, Conversation], found: Sequence[Conversation]) -> Conversation | None:
    """The conversation that a call belongs to; None: a new one."""
    before = places.get(item.follows or 0) or places.get((item.shape and item.shape.quotes) or 0)
    if before is not None and (item.label == COMPACTION or before.label == (item.label or "main")):
        return before
    if item.label == SUBAGENT:
        return None
    return next((one for one in found if one.label != SUBAGENT), None)


def _add(conversation: Conversation, item: Completion, by_id: Mapping[int, Completion]) -> bool:
    """Add a call. False for a summary with a prompt of its own, which is no part of the conversation's context."""
    last = conversation.segments[-1].calls[-1] if conversation.segments else None
    if last is not None and (_extends(item, last, by_id) or _again(item, last)):
        conversation.segments[-1].calls.append(item)
        return True
    if item.label == COMPACTION:
        return False
    shorter = 0 if last is None else max(0, _length(last) - item.prompt_length)
    conversation.segments.append(Segment([item], shorter))
    return True


def _length(item: Completion) -> int:
    return item.prompt_length + len(item.sampled)


def _extends(item: Completion, last: Completion, by_id: Mapping[int, Completion]) -> bool:
    """Whether a prompt begins with the whole path of `last`, with which or through which its prefix is stored."""
    length = _length(last)
    while item.prefix_of is not None and item.prefix_length >= length:
        if item.prefix_of == last.id:
            return True
        item = by_id[item.prefix_of]
    return False


def _again(item: Completion, last: Completion) -> bool:
    """Whether a call is another answer to the prompt of the last one."""
    return item.prefix_of == last.id and item.prefix_length == last.prompt_length == item.prompt_length


def lines(chain: Sequence[Completion]) -> Iterator[str]:
    """Yield a line for each conversation whose context was rewritten, and one for each of its segments."""
    rewritten = [conversation for conversation in conversations(chain) if len(conversation.segments) > 1]
    whole = token_paths(chain) if rewritten else {}
    for conversation in rewritten:
        count, tokens, saved = len(conversation.segments), conversation.prompt_tokens, conversation.saved_tokens
        yield f"{conversation.label}: {count} segments, prompts of {tokens} tokens, at least {saved} saved"
        gone = dropped([segment.calls for segment in conversation.segments], whole)
        for number, (segment, results) in enumerate(zip(conversation.segments, gone, strict=True), 1):
            calls = f"{len(segment.calls)} call{'s' * (len(segment.calls) > 1)} from #{segment.calls[0].id}"
            begins = f"begins {segment.shorter} tokens shorter" if segment.shorter else ""
            said = [calls, f"{segment.start} to {segment.end} tokens", begins, described(results)]
            yield f"    segment {number}: {', '.join(filter(None, said))}"
