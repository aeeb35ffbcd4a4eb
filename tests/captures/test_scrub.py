"""Scrubbed recordings: nothing is left of the texts, everything of how agents treat them."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.captures.recorded import Exchange, rows, sessions
from tests.captures.replies import reply_of
from tests.captures.scrub import Scrubber, check, main, scrub, scrubbed

PROMPT = "Please write the file hello.txt with the line hello from here, and print it when all of that is done."
RAW = '{ "cmd": "printf \'caf\\u00e9 ok\\\\n\'; cat a\\/b" }'
ECHO = '{"cmd":"printf \'café ok\\\\n\'; cat a/b"}'


def chunk(**delta: Any) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"


def row(seq: int, messages: list[dict[str, Any]], events: list[str]) -> dict[str, Any]:
    times = {"t": float(seq), "t_end": seq + 0.5, "conn": 1, "inflight": 1}
    where = {"method": "POST", "path": "/v1/chat/completions", "query": "", "body_bytes": 1, "api": "chat"}
    headers = [["Host", "here"], ["x-session-id", "ses_0123456789abcdef"]]
    answer = {"status": 200, "stream": True, "events": events}
    known = {"agent": "a", "run": "r", "seq": seq, "kind": "main", "headers": headers}
    return {**known, **times, **where, "body": {"model": "m", "messages": messages}, "resp": answer}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two calls: the second one echoes the first reply, with its arguments serialised again."""
    user = {"role": "user", "content": PROMPT}
    call = {"index": 0, "id": "call_1", "function": {"name": "sh", "arguments": RAW[:30]}}
    rest = {"index": 0, "function": {"arguments": RAW[30:]}}
    events = [
        chunk(content="\n I will do "),
        chunk(content="it now.  \n"),
        chunk(tool_calls=[call]),
        chunk(tool_calls=[rest]),
    ]
    echoed = {"id": "call_1", "type": "function", "function": {"name": "sh", "arguments": ECHO}}
    turn = {"role": "assistant", "content": "\n I will do it now.  \n", "tool_calls": [echoed]}
    report = {"role": "user", "content": "You have said: I will do it now. Please go on from there as you think best."}
    longer = {"role": "user", "content": PROMPT + " And then stop."}
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wt") as out:
        for each in (row(1, [user], events), row(2, [user, turn, report, longer], [chunk(content="done")])):
            out.write(json.dumps(each) + "\n")
    return file


@pytest.fixture
def pair(source: Path, tmp_path: Path) -> tuple[Exchange, Exchange]:
    target = tmp_path / "scrubbed"
    target.mkdir()
    scrub(source, target / source.name, b"key")
    ((first, second),) = (session.exchanges for session in sessions(target))
    return first, second


def test_an_echo_is_still_the_echo_of_its_reply(pair: tuple[Exchange, Exchange]) -> None:
    reply, echo = pair[0].reply, pair[1].body["messages"][1]
    assert reply is not None and reply["content"] == echo["content"] != "\n I will do it now.  \n"
    assert echo["content"].startswith("\n ") and echo["content"].endswith(".  \n")
    raw, again = reply["calls"][0]["arguments"], echo["tool_calls"][0]["function"]["arguments"]
    assert raw != again and json.loads(raw) == json.loads(again)
    assert raw.startswith('{ "cmd": "') and "\\u00e9" in raw and "\\/" in raw and "é" in again


def test_texts_still_begin_with_and_contain_each_other(pair: tuple[Exchange, Exchange]) -> None:
    (prompt,) = pair[0].body["messages"]
    same, turn, report, longer = pair[1].body["messages"]
    assert same == prompt
    assert longer["content"].startswith(prompt["content"].rstrip("."))
    assert turn["content"].strip() in report["content"]


def test_nothing_is_left_of_the_texts(pair: tuple[Exchange, Exchange]) -> None:
    text = json.dumps([each.body for each in pair]) + json.dumps([each.reply for each in pair])
    assert not [word for word in ("hello", "write", "printf", "said", "done") if word in text]
    assert "ses_0123456789abcdef" not in pair[0].headers["x-session-id"]
    assert pair[0].headers == pair[1].headers


def test_what_is_left_of_a_text_is_noticed(source: Path) -> None:
    scrubber = Scrubber(b"key")
    (first, _) = rows(source)
    scrubbed(first, scrubber, scrubber.see, scrubber.see_reply)
    scrubber.settle()
    scrubber.write(PROMPT)
    with pytest.raises(ValueError, match="4 words are left"):
        check(scrubber, [{"body": "xx from here and print yy"}])


def test_a_cut_stream_is_read_as_far_as_it_came() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n"}
    events = [{"type": "response.output_item.added", "item": call}]
    events += [{"type": "response.function_call_arguments.delta", "delta": text} for text in ('{"a"', ": ")]
    reply = reply_of("responses", {"status": 200, "events": [f"data: {json.dumps(event)}\n\n" for event in events]})
    assert reply is not None and reply["finish"] is None
    assert reply["calls"] == [{"id": "c", "name": "f", "namespace": "n", "arguments": '{"a": '}]


def test_the_recordings_hold_every_agent_and_behaviour() -> None:
    recordings = sessions()
    assert Counter(session.agent for session in recordings) == {"codex": 17, "mini": 14, "opencode": 20, "qwen": 15}
    calls = [exchange for session in recordings for exchange in session.exchanges]
    kinds = Counter(call.kind for call in calls)
    assert kinds == {"main": 282, "sub": 18, "side": 20, "compaction": 8, "fault": 35}
    assert {call.api for call in calls} == {"chat", "responses", "anthropic"}


def test_the_command_scrubs_a_folder(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "scrubbed"
    main([str(source.parent), str(target)])
    assert [file.name for file in target.iterdir()] == ["a.jsonl.gz"]
