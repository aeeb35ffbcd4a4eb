"""Segments of conversations: where a context was rewritten, and what that saved, by links alone."""

from array import array
from dataclasses import replace
from typing import Any

from proxy.pool.completions.observed import Observed, ToolResult
from proxy.pool.completions.records import Completion, RequestShape
from proxy.pool.completions.store import token_paths
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


OPEN, CLOSE, ASK = [9, 9], [8, 8], [7, 6]
"""What a template puts before results and behind them, and before the answer."""


def shown(id: int, prompt: list[int], *heads: str, turns: int = 1, label: str = "main", **more: Any) -> Completion:
    """A completion that stores its whole prompt, answers with its id, and has seen these results behind the turn."""
    results = tuple(ToolResult("c", "", head, size=len(head)) for head in heads)
    kept = Observed(results=results) if heads else None
    item = call(id, None, 0, label, observed=kept, shape=RequestShape(turns=turns), **more)
    return replace(item, prompt_tail=array("i", [*prompt, *ASK]), sampled=array("i", [100 + id, 100 + id]))


def result(*tokens: int) -> list[int]:
    return [*OPEN, *tokens, *CLOSE]


def turn(id: int, *tokens: int) -> list[int]:
    """A turn of the model, and the result of its call."""
    return [*ASK, 100 + id, 100 + id, *result(*tokens)]


def grown(*items: Completion) -> list[Completion]:
    """The same completions, each stored as what it adds to the one before."""
    whole, found = token_paths(items), []
    for before, item in zip((None, *items), items, strict=False):
        path = whole[before.id] if before else array("i")
        goes_on = item.prompt_tail[: len(path)] == path
        prefix = (before.id, len(path)) if before and goes_on else (None, 0)
        found.append(
            replace(item, prefix_of=prefix[0], prefix_length=prefix[1], prompt_tail=item.prompt_tail[prefix[1] :])
        )
    return found


def test_a_compaction_drops_all_results_and_a_discard_those_that_it_marks() -> None:
    task = [1, 2, 3, 4]
    discarded = grown(
        shown(1, task, turns=0),
        shown(2, [*task, *turn(1, 5, 5)], "five", follows=1),
        shown(3, [*task, *turn(1, 5, 5), *turn(2, 5, 5)], "five", follows=2),
        shown(4, [*task, *turn(1, 5, 5), *turn(2, 5, 5), *turn(3, 20)], "twenty\n" * 20, follows=3),
        shown(5, [*task, *turn(1, 0), *turn(2, 5, 5), *turn(3, 20), *turn(4, 30)], "thirty", follows=4),
        shown(6, [*task, *turn(1, 0), *turn(2, 0), *turn(3, 0), *turn(4, 0), *turn(5, 40)], "forty", follows=5),
    )
    _, first, second, third = lines(discarded)
    assert "results" not in first
    assert second.endswith("without the results of 1 turn: 'five'")
    assert third.endswith("of 3 turns: 'five', 'twenty twenty twenty twenty twenty twent...', 'thirty'")
    compacted = grown(
        shown(1, task, turns=0),
        shown(2, [*task, *turn(1, 5)], "\x1b[31mfive", follows=1),
        shown(3, [*task, *turn(1, 5), *turn(2, 6), 50], "six", label="compaction", follows=2),
        shown(4, [*task, 60, *result(5)], turns=0),
    )
    _, first, second = lines(compacted)
    assert second.endswith("""without the results of 2 turns: '\\x1b[31mfive', 'six'""")


def test_results_that_cannot_be_told_are_not_counted() -> None:
    task = [1, 2, 3, 4]
    chain = grown(
        shown(1, task, turns=0),
        shown(2, [*task, *ASK, 55, *result(5)], "five", follows=1),  # the turn came back in other words
        shown(3, [*task, *ASK, 55, *result(5), *turn(2, 6), 50], "six", label="compaction", follows=2),
        shown(4, [*task, *turn(2, 6)]),  # what only the request for the summary showed, and other turns stay
    )
    assert not any("results" in line for line in lines(chain)) and len(list(lines(chain))) > 2


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
