"""`proxy pool verify`, `show` and `export` through the console script."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from sqlalchemy import update

from proxy.commands.main import main
from proxy.pool.completions.records import NewCompletion, float_bytes, int_bytes
from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.conftest import need
from tests.pool.make import TASK, new_completion, record

Command = Callable[..., str]


def followed(attempt_id: int, first: int, words: str, ids: Sequence[int]) -> NewCompletion:
    """A turn on top of a first one of the path 1 2 3 4."""
    item = new_completion(attempt_id, ids[:-1], ids[-1:])
    return replace(
        item, prefix_of=first, prefix_length=4, follows=first, path_crc=crc32(int_bytes([1, 2, 3, 4, *ids])),
        reply={"role": "assistant", "content": words},
    )  # fmt: skip


@pytest.fixture
def attempt(pool: Pool) -> int:
    """An attempt of run r with two turns that follow a first one, the second of them untrainable."""
    [rollout] = open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 1)
    opened, _ = open_attempt(pool, rollout.rollout_id, "command")
    call = {"function": {"name": "shell", "arguments": '{"command": "ls"}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    [first] = record(pool, [replace(new_completion(opened.id), reply=reply)])
    second = followed(opened.id, first, "done \x1b[31mred", [5, 6])
    third = replace(
        followed(opened.id, first, "other", [7, 8]),
        untrainable=Untrained(UntrainedReason.ABANDONED, "detail"),
        logprobs=array("f"),
    )
    record(pool, [second, third])
    close_attempt(pool, opened.id, Ending())
    finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=opened.id, reward=0.5, reward_parts={"verifier": 0.5}))
    return opened.id


@pytest.fixture
def output_of(pool: Pool, capsys: pytest.CaptureFixture[str]) -> Command:
    """What `proxy pool` says on the pool, with the exit status that is expected."""

    def run(verb: str, *more: object, status: int = 0) -> str:
        assert main(["pool", verb, pool.url, *map(str, more)]) == status
        out = capsys.readouterr()
        return out.err if status == 2 else out.out

    return run


def test_verify_counts_what_is_whole(attempt: int, output_of: Command) -> None:
    assert "1 attempts, 3 completions (2 trainable), 4 sampled tokens, no damages" in output_of("verify")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"path_crc": 5}, "its path of 6 tokens does not match checksum 5"),
        ({"sampled": b"12345"}, "its sampled is no array of 4-byte numbers"),
        ({"logprobs": b""}, "it is trainable with 0 logprobs for 1 sampled tokens"),
        ({"logprobs": b"\0\0\xc0\x7f"}, "it is trainable with a logprob that is no number"),
        ({"versions": []}, "it is trainable with versions for 0 of 1 sampled tokens"),
        ({"versions": [["v1", 0, 2]]}, "overlap or leave its 1 sampled tokens"),
        ({"versions": [["v1"]]}, "its versions are no list of spans"),
        ({"given": [[0, 2]]}, "its given spans [(0, 2)] overlap or leave its 1 tokens"),
        ({"given": [[0, 1]]}, "name weights for given tokens [(0, 1)]"),
        ({"given": [[0, 1]], "versions": []}, "it has 1 logprobs for 0 sampled tokens"),
        ({"given": "all"}, "its given tokens are no list of spans"),
        ({"prefix_length": 7}, "it shares 7 tokens with completion 1, which has 4"),
        ({"prefix_of": 3}, "its prefix is of completion 3, which is no earlier one of its attempt"),
        ({"follows": 2}, "it follows completion 2, which is no earlier one of its attempt"),
        ({"ordinal": 9}, "its ordinal is 9 instead of 1"),
        ({"reply": "text"}, "its reply is no JSON object"),
        ({"shape": {"tools": 1}}, "its shape cannot be read"),
        ({"untrainable": "bored"}, "its reason 'bored' is none of abandoned, engine_failed"),
        ({"label": "chief"}, "its label 'chief' is none of main, subagent, side, compaction"),
    ],
)
def test_verify_names_every_damaged_row(
    pool: Pool, attempt: int, output_of: Command, values: dict[str, Any], sentence: str
) -> None:
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.id == 2).values(values))
    *damages, counts = output_of("verify", status=1).splitlines()
    assert sentence in "\n".join(damages) and "3 completions" in counts
    assert all(line.startswith(f"attempt {attempt}, completion 2: ") for line in damages)


def test_verify_names_an_answer_that_cannot_be_unpacked(pool: Pool, attempt: int, output_of: Command) -> None:
    if pool.dialect == "sqlite":
        with pool.write() as connection:
            connection.exec_driver_sql("update completions set reply = ? where id = 2", (b"not packed",))
        assert "completion 2: its reply is no JSON object" in output_of("verify", status=1)


def test_a_turn_on_a_path_that_cannot_be_read_is_damaged_too(pool: Pool, attempt: int, output_of: Command) -> None:
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.id == 1).values(prompt_tail=b"1"))
    damages = output_of("verify", status=1)
    assert damages.count("its prefix is of completion 1, whose path cannot be read") == 2 and "3 damages" in damages


def test_show_prints_the_tree(attempt: int, output_of: Command) -> None:
    lines = output_of("show", attempt).splitlines()
    assert lines[0].startswith(f"attempt {attempt}: command, ended after ")
    assert lines[1:] == [
        "run r, task t, group 0, member 0, try 0",
        "reward 0.5",
        "its tokens: queued",
        '#1, shared 0, new 2, sampled 2, stop, v1: shell({"command": "ls"})',
        "  result of shell is not known",
        "    #2 follows #1, shared 4 of #1, new 1, sampled 1, stop, v1: done  [31mred",
        "    #3 follows #1, shared 4 of #1, new 1, sampled 1, stop, v1, untrainable (abandoned: detail): other",
        "main: 2 segments, prompts of 12 tokens, at least 1 saved",
        "    segment 1: 2 calls from #1, 2 to 6 tokens",
        "    segment 2: 1 call from #3, 5 to 6 tokens, begins 1 tokens shorter",
    ]


EXPECTED = {
    "tokens": [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]],
    "mask": [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0] * 6],
    "given": [[], [], []],
    "logprobs": [[-0.5, -0.5], [-0.5], []],
    "reward": [0.5] * 3,
    "untrainable": [None, None, "abandoned"],
    "untrainable_detail": [None, None, "detail"],
    "follows": [None, 1, 1],
}


def test_export_as_jsonl(attempt: int, output_of: Command, tmp_path: Path) -> None:
    assert output_of("export", "r", "--output", tmp_path / "r.jsonl") == f"3 completions: {tmp_path / 'r.jsonl'}\n"
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {name: [row[name] for row in rows] for name in EXPECTED} == EXPECTED
    assert rows[1]["message"]["content"] == "done \x1b[31mred" and rows[1]["final"] is True
    assert rows[1]["versions"] == [{"version": "v1", "start": 0, "end": 1}]


def test_given_tokens_are_neither_masked_in_nor_have_logprobs(
    pool: Pool, attempt: int, output_of: Command, tmp_path: Path
) -> None:
    given = {"given": [[0, 1]], "logprobs": float_bytes([-0.5]), "versions": [["v1", 1, 2]]}
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.id == 1).values(given))
    assert "3 sampled tokens, no damages" in output_of("verify")
    assert "#1, shared 0, new 2, sampled 1, given 1, stop, v1:" in output_of("show", attempt)
    output_of("export", "r", "--output", tmp_path / "r.jsonl")
    row = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert (row["mask"], row["given"], row["logprobs"]) == ([0, 0, 0, 1], [[2, 3]], [-0.5])


def test_export_as_parquet_holds_the_same(attempt: int, output_of: Command, tmp_path: Path) -> None:
    need("pyarrow", find_spec("pyarrow") is not None)
    from pyarrow import parquet

    output_of("export", "r", "--format", "jsonl", "--output", tmp_path / "r.jsonl")
    output_of("export", "r", "--format", "parquet", "--output", tmp_path / "r.parquet")
    rows = parquet.read_table(tmp_path / "r.parquet").to_pylist()
    for row in rows:
        row |= {name: json.loads(row[name]) for name in ("message", "reward_parts")}
    assert rows == [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert sorted(file.suffix for file in tmp_path.glob("r.*")) == [".jsonl", ".parquet"]


def test_a_damaged_run_is_not_exported(pool: Pool, attempt: int, output_of: Command, tmp_path: Path) -> None:
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.id == 3).values(path_crc=1))
    assert "is damaged (completion 3: its stored" in output_of(
        "export", "r", "--output", tmp_path / "r.jsonl", status=2
    )
    assert list(tmp_path.glob("r.*")) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "99"], "attempt 99 is not in the pool"),
        (["show", "first"], "'first' is not the number of an attempt"),
        (["export", "s", "--output", "x"], "run 's' is not in the pool"),
        (["export", "r", "--output", "/nowhere/x"], "/nowhere/x cannot be written (No such file or directory)"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    attempt: int, output_of: Command, arguments: list[str], sentence: str
) -> None:
    error = output_of(*arguments, status=2)
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "verb", [["verify"], ["show", "1"], ["export", "r", "--output", "x"]], ids=lambda words: words[0]
)
def test_reading_makes_no_pool(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", verb[0], str(tmp_path / "p.db"), *verb[1:]]) == 2
    assert "p.db holds no pool; name the SQLite file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
