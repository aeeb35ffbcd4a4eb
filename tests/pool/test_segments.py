"""Segments of conversations: where a context was rewritten, and what that saved, by links alone."""

from array import array
from typing import Any

from proxy.pool.completions.records import Completion, RequestShape
from proxy.pool.inspect.segments import conversations, lines


def call(id: int, prefix: tuple[int, int] | None, new: int, label: str = "main", **more: Any) -> Completion:
    """A completion with 10 sampled tokens. `prefix`: the completion that its prompt begins with, and how far."""
    return Completion(
        attempt_id=1, prefix_of=prefix and prefix[0], prefix_length=prefix[1] if prefix else 0,
        prompt_tail=array("i", [1] * new), sampled=array("i", [2] * 10), logprobs=array("f", [-1] * 10), versions=(),
        finish_reason="stop", reply={}, path_crc=0, started_at=0, finished_at=1, id=id, ordinal=id - 1, label=label,
        **more,
    )  # fmt: skip


def test_a_compaction_begins_a_segment_and_later_prompts_are_shorter_by_what_was_dropped() -> None:
    chain = [
        call(1, None, 100),
        call(2, (1, 110), 20, follows=1),
        call(3, (2, 140), 10, "compaction", follows=2),  # 160 tokens with the notes
        call(4, (1, 60), 40),
        call(5, (4, 110), 20, follows=4),
    ]
    [main] = conversations(chain)
    assert [[item.id for item in segment.calls] for segment in main.segments] == [[1, 2, 3], [4, 5]]
    assert [(segment.start, segment.end, segment.shorter) for segment in main.segments] == [
        (100, 160, 0),
        (100, 140, 60),
    ]
    assert (main.prompt_tokens, main.saved_tokens) == (100 + 130 + 150 + 100 + 130, 2 * 60)
    assert list(lines(chain)) == [
        "main: 2 segments, prompts of 610 tokens, at least 120 saved",
        "    segment 1: 3 calls from #1, 100 to 160 tokens",
        "    segment 2: 2 calls from #4, 100 to 140 tokens, begins 60 tokens shorter",
    ]


def test_side_calls_and_further_answers_begin_no_segment() -> None:
    chain = [
        call(1, None, 100),
        call(2, (1, 100), 0),  # another answer to the same prompt
        call(3, None, 30, "side"),
        call(4, (2, 110), 50, "compaction", follows=2),  # is stored first, and shares more with the next one
        call(5, (4, 130), 20, follows=2),
    ]
    [main] = conversations(chain)
    assert [[item.id for item in segment.calls] for segment in main.segments] == [[1, 2, 4], [5]]
    unlabelled = [call(1, None, 100, label=None), call(2, (1, 110), 10, label=None, follows=1)]  # type: ignore[arg-type]
    assert list(lines(unlabelled)) == [] and len(conversations(unlabelled)) == 1


def test_a_summary_with_a_prompt_of_its_own_is_no_part_of_the_context() -> None:
    shape = RequestShape(quotes=1)
    chain = [call(1, None, 100), call(2, None, 300, "compaction", shape=shape), call(3, (1, 50), 40, follows=2)]
    [main] = conversations(chain)
    assert [[item.id for item in segment.calls] for segment in main.segments] == [[1], [3]]


def test_sub_agents_have_conversations_of_their_own() -> None:
    chain = [
        call(1, None, 100),
        call(2, (1, 50), 20, "subagent", shape=RequestShape(quotes=1)),
        call(3, (1, 50), 30, "subagent", shape=RequestShape(quotes=1)),
        call(4, (2, 80), 5, "subagent", follows=2),
        call(5, (1, 110), 9, follows=1),
    ]
    told = [
        (one.label, [item.id for segment in one.segments for item in segment.calls]) for one in conversations(chain)
    ]
    assert told == [("main", [1, 5]), ("subagent", [2, 4]), ("subagent", [3])]
