"""Requests that repeat parts of earlier ones are read as if all of it were new."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.prompt.continuation import history
from proxy.prompt.continuation.history import KEPT, HistoryReader

VALUES: list[Any] = [1, 1.0, True, "1", -0.0, 0.0, {"a": 1, "b": 2}, {"b": 2, "a": 1}]


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


def called(value: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"value": value}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


MESSAGE = st.one_of(
    st.builds(asked, st.sampled_from(["x", "y"])),
    st.builds(result, st.sampled_from(["x", "y"])),
    st.builds(called, st.sampled_from(VALUES)),
)
REQUESTS = st.lists(st.tuples(st.integers(0, 8), st.lists(MESSAGE, min_size=1, max_size=3)), max_size=9)


@given(REQUESTS)
@settings(deadline=None)
def test_reading_again_changes_nothing(requests: list[tuple[int, list[dict[str, Any]]]]) -> None:
    kept, before = HistoryReader(), list[dict[str, Any]]()
    for repeated, further in requests:
        messages = msgspec.json.decode(msgspec.json.encode(before[:repeated] + further))
        read, afresh = kept.read(messages), HistoryReader().read(messages)
        assert (read.turns, read.history) == (afresh.turns, afresh.history)
        assert repr(read.messages) == repr(tuple(messages))
        before = messages


def test_a_message_that_was_there_before_is_the_same_object() -> None:
    histories = HistoryReader()
    first = histories.read([asked("x"), called({"a": 1}), result("y")])
    again = histories.read([asked("x"), called({"a": 1}), result("z"), asked("y")])
    assert [a is b for a, b in zip(first.messages, again.messages, strict=False)] == [True, True, False]


def test_a_request_that_is_only_counted_is_not_kept() -> None:
    histories = HistoryReader()
    kept = histories.read([asked("x")])
    size = histories.size
    counted = histories.read([asked("x"), called([{}] * 1000), result("y" * 5000)], remember=False)
    assert histories.size == size > 0 and counted.messages[0] is kept.messages[0]
    histories.read([asked("x"), called([{}] * 1000), result("y" * 5000)])
    assert histories.size > size + 1000 * 64 + 5000


def test_what_is_kept_stays_under_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that requests share count once; the oldest requests go first, and a longer one is not kept at all."""
    monkeypatch.setattr(history, "MOST_BYTES", 100_000)
    histories, begin = HistoryReader(), asked("x" * 40_000)
    for number in range(20):
        histories.read([begin, asked(f"{number}{'y' * 20_000}")])
        assert histories.size <= 100_000
    newest = histories.read([begin, asked(f"19{'y' * 20_000}"), asked("z")])
    assert 1 < len(histories._kept.requests) < KEPT and newest.messages[0] is begin
    histories.read([asked("x" * 200_000)])
    assert histories.size == 0
