"""Traces on each database: imported demonstrations as rows, and an attempt as a document."""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from proxy.pool.completions.records import int_bytes
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.verify import verify
from proxy.pool.read import RolloutFilter, rollouts
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.traces.atif_reading import ReadTrajectory, documents
from proxy.pool.traces.branches import PromptReading, branches
from proxy.pool.traces.demonstrations import Demonstration, ImportCounts, find_documents, store_documents
from proxy.pool.traces.files import write_traces
from proxy.pool.traces.spans import call_attributes
from proxy.pool.training.finished_rollouts import finished_rollouts, tokenizers
from tests.pool.make import TASK, new_completion, record


def numbered(trajectory: ReadTrajectory) -> Iterator[Demonstration]:
    """Two answers; the second prompt begins with the path of the first one."""
    for prompt, answer in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])):
        yield Demonstration(
            prompt=array("i", prompt),
            answer=array("i", answer),
            logprobs=array("f"),
            reply=trajectory.turns[-1].message,
            label=None,
            finish_reason="stop",
            made_of="rendered",
        )


def write(file: Path, sessions: list[str], task: str) -> Path:
    steps = [{"step_id": 1, "source": "agent", "message": "said"}]
    lines = [
        {
            "schema_version": "ATIF-v1.8",
            "session_id": session,
            "agent": {"name": "other", "version": "1"},
            "steps": steps,
            "extra": {"blackforge": {"task": task, "reward": 0.5}},
        }
        for session in sessions
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def import_atif(pool: Pool, name: str, paths: Sequence[Path], tokenizer: str | None) -> ImportCounts:
    return store_documents(pool, name, find_documents(paths, numbered), numbered, tokenizer)


def test_sessions_are_rollouts_and_tasks_are_groups(pool: Pool, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "two", "one"], "t")
    other = write(tmp_path / "b.jsonl", ["three"], "u")
    (tmp_path / "notes.txt").touch()
    counts = import_atif(pool, "d", [tmp_path], "fingerprint")
    assert (counts.documents, counts.groups, counts.rollouts, counts.by_origin) == (4, 2, 3, {"rendered": 8})
    one, two, three = found = list(rollouts(pool, RolloutFilter(run="d")))
    assert [(each.task, each.agent, each.reward) for each in found] == [
        ("t", "other", 0.5), ("t", "other", 0.5), ("u", "other", 0.5),
    ]  # fmt: skip
    assert [len(each.completions) for each in found] == [4, 2, 2]
    first, second = two.completions
    assert second.tokens.tolist() == [1, 2, 3, 4, 5, 6] and (second.prefix_of, second.prefix_length) == (first.id, 4)
    assert verify(pool).damages == [] and len(finished_rollouts(pool, 1)) == 3
    assert tokenizers(pool, [three.attempt or 0]) == {"fingerprint"}
    with pytest.raises(UserError, match="has a run 'd' already; choose another name"):
        import_atif(pool, "d", [other], None)


class Numbers:
    """Reads prompts of numbers as one user's message; 4 ends a turn."""

    ends = frozenset({4})

    def whole(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        return PromptReading([{"role": "user", "content": " ".join(map(str, tokens))}], [])

    added = whole


def test_a_file_that_changes_between_its_two_readings_is_told(pool: Pool, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ["one", "two"], "t")
    found = find_documents([file], numbered)
    write(file, ["one", "six"], "t")
    with pytest.raises(UserError, match=r"session 'two' is no longer in .*a\.jsonl, which changed while it was"):
        store_documents(pool, "d", found, numbered, None)


def test_documents_that_name_no_session_are_rollouts_of_their_own(pool: Pool, tmp_path: Path) -> None:
    agent, steps = {"name": "other", "version": "1"}, [{"step_id": 1, "source": "agent", "message": "said"}]
    document = json.dumps({"schema_version": "ATIF-v1.8", "agent": agent, "steps": steps})
    (tmp_path / "lines.jsonl").write_text(f"{document}\n\n{document}\n")
    (tmp_path / "one.json").write_text(document)
    counts = import_atif(pool, "d", [tmp_path], None)
    assert (counts.documents, counts.groups, counts.rollouts) == (3, 3, 3)
    assert [len(each.completions) for each in rollouts(pool, RolloutFilter(run="d"))] == [2, 2, 2]


def nested(levels: int) -> dict[str, Any]:
    """A document with this many sub-agents, each in the one before."""
    document: dict[str, Any] = {}
    for level in range(levels, -1, -1):
        inner = [document] if document else []
        document = {"schema_version": "ATIF-v1.8", "session_id": f"s{level}", "agent": {"name": "a", "version": "1"}}
        document["steps"] = [{"step_id": 1, "source": "agent", "message": f"said {level}"}]
        document["subagent_trajectories"] = [*inner, *inner[: level == 0]]
    return document


def test_embedded_sub_agents_are_read_up_to_a_depth(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(nested(2)))
    read = list(documents(file))
    assert [each.turns[0].message["content"][5:] for each in read] == ["0", "1", "2", "1", "2"]
    assert {each.session for each in read} == {"s0"} and read[2].place.count("a sub-agent of it") == 2
    file.write_text(json.dumps(nested(64)))
    assert len(list(documents(file))) == 129
    for levels in (65, 400, 3000):
        file.write_text(serialised(levels))
        with pytest.raises(UserError, match=r"a\.json .*(more than 64 levels deep; leave|is no ATIF document)"):
            list(documents(file))


def serialised(levels: int) -> str:
    """The text of `nested`; json.dumps cannot write a deep one."""
    document = json.dumps(nested(0))
    for _ in range(levels):
        document = json.dumps(nested(0))[:-3] + f"[{document}]}}"
    return document


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_document_that_is_too_large_is_not_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / name, ["one"], "t")
    monkeypatch.setattr("proxy.pool.traces.atif_reading.DOCUMENT_BYTES", file.stat().st_size)
    assert len(list(documents(file))) == 1
    file.write_text(file.read_text().rstrip() + "  \n")
    with pytest.raises(UserError, match=r"a\.jsonl?(:1)? has more than \d+ bytes, which is the limit"):
        list(documents(file))


def test_an_attempt_with_given_and_missing_tokens_is_exported(pool: Pool, tmp_path: Path) -> None:
    """What the proxy wrote has no logprob, so the format's list is left out; on each database."""
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    given = replace(new_completion(attempt.id, [1, 2], [3, 4]), given=((0, 1),), logprobs=array("f", [-0.5]))
    [first] = record(pool, [given])
    path = crc32(int_bytes([1, 2, 3, 4, 5, 6, 7]))
    more = replace(new_completion(attempt.id, [5], [6, 7]), prefix_of=first, prefix_length=4, path_crc=path)
    record(pool, [replace(more, logprobs=array("f", [-0.25, float("-inf")]))])
    close_attempt(pool, attempt.id, Ending())
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=None))
    counts = write_traces(pool, RolloutFilter(run="r"), "atif", tmp_path / "atif", Numbers(), None)
    assert (counts.rollouts, counts.branches, counts.raw, counts.unknown_tools) == (1, 1, 0, 0)
    [file] = (tmp_path / "atif").iterdir()
    steps = json.loads(file.read_text())["steps"]
    assert [step["message"] for step in steps] == ["1 2", "ok", "4 5", "ok"]
    one, two = (step["metrics"] for step in steps[1::2])
    assert "logprobs" not in one and "logprobs" not in two
    assert one["extra"]["blackforge"]["logprobs"] == [None, -0.5] and one["extra"]["blackforge"]["given"] == [[0, 1]]
    assert two["extra"]["blackforge"]["logprobs"] == [-0.25, None]
    assert two["prompt_token_ids"] == [1, 2, 3, 4, 5] and two["completion_token_ids"] == [6, 7]


def asked(command: str, id: str | None = None) -> dict[str, Any]:
    function = {"name": "shell", "arguments": json.dumps({"command": command})}
    call = {"type": "function", "function": function} | ({"id": id} if id else {})
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Rewritten(Numbers):
    """Reads a prompt of one number as a history of commands: 9 is that of three calls of one tool, and a repeat."""

    def whole(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        if tokens[0] != 9:
            return super().whole(tokens, dated_at)
        history = [
            each
            for command in ("ls", "cat", "rm", "ls")
            for each in (asked(command), {"role": "tool", "content": command})
        ]
        return PromptReading(history, [])


def test_calls_of_a_rewritten_history_have_the_ids_of_their_own_records(pool: Pool, tmp_path: Path) -> None:
    """Each record gives its ids once: two equal calls have those of two records, in their order."""
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    commands = {"one": "ls", "two": "cat", "three": "rm", "four": "ls"}
    for place, (id, command) in enumerate(commands.items(), 1):
        record(pool, [replace(new_completion(attempt.id, [place], [3, 4]), reply=asked(command, id))])
    record(pool, [new_completion(attempt.id, [9], [3, 4])])
    close_attempt(pool, attempt.id, Ending())
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=None))
    write_traces(pool, RolloutFilter(run="r"), "chat", tmp_path / "chat.jsonl", Rewritten(), None)
    *_, last = map(json.loads, (tmp_path / "chat.jsonl").read_text().splitlines())
    called = [message["tool_calls"][0]["id"] for message in last["messages"] if message.get("tool_calls")]
    answered = [message["tool_call_id"] for message in last["messages"] if message["role"] == "tool"]
    assert called == answered == list(commands)


def test_a_prompt_that_is_asked_again_after_an_empty_answer_is_no_later_turn(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    [empty] = record(pool, [new_completion(attempt.id, [1, 2], [4])])
    for tail, sampled, shared in (([], [3, 4], 2), ([5], [6, 4], 3)):
        new, path = new_completion(attempt.id, tail, sampled), crc32(int_bytes([1, 2, 4][:shared] + tail + sampled))
        record(pool, [replace(new, prefix_of=empty, prefix_length=shared, path_crc=path)])
    close_attempt(pool, attempt.id, Ending())
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=None))
    [rollout] = rollouts(pool, RolloutFilter(run="r"))
    first, again, after = rollout.completions
    assert [branch.own for branch in branches(rollout, Numbers())] == [[first, after], [again]]


class Unread(Numbers):
    """Cannot tell messages apart."""

    def whole(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        return replace(super().whole(tokens, dated_at), raw=True)


def test_raw_text_is_marked_in_session_traces_and_spans(pool: Pool, tmp_path: Path) -> None:
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    record(pool, [new_completion(attempt.id)])
    close_attempt(pool, attempt.id, Ending())
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=None))
    write_traces(pool, RolloutFilter(run="r"), "hf-traces", tmp_path / "hub", Unread(), None)
    [file] = (tmp_path / "hub").iterdir()
    _, *lines = map(json.loads, file.read_text().splitlines())
    assert [line.get("raw") for line in lines] == [True, None]
    [rollout] = rollouts(pool, RolloutFilter(run="r"))
    for reader, raw in ((Unread(), True), (Numbers(), None)):
        [branch] = branches(rollout, reader)
        attributes = call_attributes(branch, branch.own[0], branch.turns[:1])
        assert attributes["blackforge.raw"] is raw
