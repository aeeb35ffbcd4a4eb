"""Rollouts as ATIF, chat messages and session traces: validated by the formats' own tools, and read back."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.main import main
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool
from proxy.pool.read import RolloutFilter, rollouts
from proxy.pool.read.records import RolloutRecord
from proxy.prompt.template import ChatTemplate
from tests.conftest import need
from tests.pool.told import tell_at_once
from tests.proxy.conftest import SHELL, Serve
from tests.proxy.sdks import environments
from tests.proxy.traced import READ, Traced, traced

Document = dict[str, Any]


def exported(pool: Pool, kind: str, target: Path, model: Path, run: str = "r", status: int = 0) -> Path:
    words = ["pool", "export", pool.url, run, "--format", kind, "--output", str(target), "--model", str(model)]
    assert main(words) == status
    return target


def chat_lines(pool: Pool, target: Path, model: Path, run: str = "r") -> list[Document]:
    """The lines of a run, each validated by the types that the package `openai` has for a request's messages."""
    lines = [json.loads(line) for line in exported(pool, "chat", target, model, run).read_text().splitlines()]
    for line in lines:
        demand_openai(line)
    return lines


def demand_openai(line: Document) -> None:
    """Raise pydantic's ValidationError for messages or tools that OpenAI's API would not take."""
    need("openai", find_spec("openai") is not None)
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
    from pydantic import TypeAdapter

    # strict: else a text passes for a list of parts. The adapters stay, since pydantic reads an Iterable only later.
    adapters = TypeAdapter(list[ChatCompletionMessageParam]), TypeAdapter(list[ChatCompletionToolUnionParam])
    messages = adapters[0].validate_python(line["messages"], strict=True)
    read_whole([messages, adapters[1].validate_python(json.loads(line.get("tools", "[]")))])
    added = {key for message, known in zip(line["messages"], messages, strict=True) for key in message.keys() - known}
    assert added <= {"reasoning_content"}


def read_whole(value: Any) -> None:
    """Read a validated value to its end."""
    if not isinstance(value, str | int | float | None):
        for each in value.values() if isinstance(value, dict) else value:
            read_whole(each)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "owner", "content": "hi"},
        {"role": "user"},
        {"role": "tool", "content": "there is a.txt"},
        {"role": "user", "content": [{"type": "text"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
    ],
)
def test_the_validation_refuses_what_openai_would(message: Document) -> None:
    need("openai", find_spec("openai") is not None)
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        demand_openai({"messages": [message]})


def atif_documents(pool: Pool, target: Path, model: Path) -> list[Document]:
    """The documents of a run, each validated by the package that implements the format."""
    need("atif", find_spec("atif") is not None)
    from atif import Trajectory

    files = sorted(exported(pool, "atif", target, model).iterdir())
    read = [json.loads(file.read_text()) for file in files]
    assert [Trajectory.model_validate(each).schema_version for each in read] == ["ATIF-v1.8"] * len(read)
    return read


def steps_of(documents: list[Document]) -> list[Document]:
    """The steps that a model wrote here, of all documents."""
    steps = [step for each in documents for step in each["steps"]]
    return [step for step in steps if step["source"] == "agent" and not step.get("is_copied_context")]


def imported(pool: Pool, run: str, source: Path, model: Path, status: int = 0) -> None:
    assert main(["pool", "import", pool.url, run, str(source), "--model", str(model)]) == status


def plain(messages: list[Document]) -> list[Document]:
    """Messages without what chat clients add: empty fields and the place of a call in its answer."""
    return [{key: value for key, value in each.items() if value is not None and key != "refusal"} for each in messages]


async def test_each_answer_is_in_one_document_with_its_tokens(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    recorded = await traced(serve)
    documents = atif_documents(recorded.pool, tmp_path / "atif", tiny_model)
    whole = paths(stored := of_attempt(recorded.pool, recorded.attempt))
    own = {step["extra"]["blackforge"]["completion"]: step["metrics"] for step in steps_of(documents)}
    assert len(steps_of(documents)) == len(own) == len(stored) == 6
    for item in stored:
        ids = own[item.id]["prompt_token_ids"] + own[item.id]["completion_token_ids"]
        assert ids == whole[item.id].tolist() and own[item.id]["logprobs"] == item.logprobs.tolist()
        assert own[item.id]["prompt_tokens"] == item.prompt_length
        assert own[item.id]["extra"]["blackforge"]["label"] == item.label
    labels = [each["extra"]["blackforge"]["label"] for each in documents]
    assert labels == ["main", "side", "subagent", "main", "main"]
    assert [each["agent"].get("tool_definitions") for each in documents] == [[SHELL], None, [READ], [SHELL], [SHELL]]
    assert {(each["session_id"], each["extra"]["blackforge"]["reward"]) for each in documents} == {
        (f"r-attempt-{recorded.attempt:06}", 1.0)
    }


async def test_the_messages_are_those_of_the_agent(
    serve: Serve, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history of the third call lacks the first one's reasoning, because the template drops it there."""
    recorded = await traced(serve)
    first, side, sub, last, other = chat_lines(recorded.pool, tmp_path / "chat.jsonl", tiny_model)
    assert capsys.readouterr().out == f"5 branches of 1 rollouts: {tmp_path}/chat.jsonl\n"
    seen = plain(recorded.messages)
    assert plain(first["messages"]) == seen[:-1] and first["blackforge"]["copied"] == []
    assert last["messages"][2].pop("reasoning_content", None) is None and seen[2].pop("reasoning_content")
    assert plain(last["messages"])[:-1] == seen and last["blackforge"]["copied"] == [0, 1, 2, 3, 4]
    assert other["messages"][-2] == {"role": "user", "content": "Or not?"}
    assert json.loads(first["tools"]) == [SHELL] and "tools" not in side and json.loads(sub["tools"]) == [READ]
    assert [each["role"] for each in sub["messages"]] == ["system", "user", "assistant"]


async def test_a_second_answer_to_a_prompt_is_a_branch_with_copies(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    """The turns before it are the first branch's own, with their reasoning: its prompt begins with their path."""
    recorded = await traced(serve, again=True)
    *_, fork = documents = atif_documents(recorded.pool, tmp_path / "atif", tiny_model)
    assert fork["extra"]["blackforge"]["forked_from"] == 0
    assert [step.get("is_copied_context", False) for step in fork["steps"]] == [True, True, True, False]
    assert fork["steps"][2]["reasoning_content"] == "I look first." and "metrics" not in fork["steps"][2]
    assert len(steps_of(documents)) == len(of_attempt(recorded.pool, recorded.attempt)) == 7


async def test_session_traces_have_the_hubs_fields(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    """The Hub has no validator; this is its page on the Session Trace Simple Format as code."""
    recorded = await traced(serve)
    files = sorted(exported(recorded.pool, "hf-traces", tmp_path / "traces", tiny_model).iterdir())
    assert len(files) == 5
    for file in files:
        header, *lines = map(json.loads, file.read_text().splitlines())
        assert (header["type"], header["harness"], header["id"]) == ("session", "blackforge", file.stem)
        calls: set[str] = set()
        assert {line["type"] for line in lines} == {"message"}
        assert any("timestamp" in line["message"] for line in lines)
        for message in (line["message"] for line in lines):
            assert message["role"] in ("user", "assistant", "system", "tool") and isinstance(message["content"], str)
            known = {"role", "content", "reasoningContent", "toolCalls", "toolCallId", "timestamp", "model"}
            assert message.keys() <= known and type(message.get("timestamp", 0)) is int
            calls |= {call["id"] for call in message.get("toolCalls", ()) if json.loads(call["function"]["arguments"])}
            assert message.get("toolCallId") is None or message["toolCallId"] in calls
    assert "I look first." in files[0].read_text()


async def test_atif_comes_back_with_the_same_tokens_and_messages(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    recorded = await traced(serve)
    before = chat_lines(recorded.pool, tmp_path / "before.jsonl", tiny_model)
    atif_documents(recorded.pool, tmp_path / "atif", tiny_model)
    imported(recorded.pool, "again", tmp_path / "atif", tiny_model)
    after = chat_lines(recorded.pool, tmp_path / "after.jsonl", tiny_model, "again")
    assert [(one["messages"], one.get("tools")) for one in after] == [
        (one["messages"], one.get("tools")) for one in before
    ]
    assert [each["blackforge"]["label"] for each in after] == [each["blackforge"]["label"] for each in before]
    [old], [new] = both = [list(rollouts(recorded.pool, RolloutFilter(run=run))) for run in ("r", "again")]
    assert outcomes(old) == outcomes(new) and any(item.logprobs for item in new.completions)
    assert both and tokens(old) == tokens(new) and new.reward == old.reward == 1.0 and new.task == old.task
    assert {str(item.untrained) for item in new.completions} == {"imported: ids"}
    assert main(["pool", "verify", recorded.pool.url]) == 0


async def test_text_alone_is_rendered_as_the_model_would_have_read_and_written_it(
    serve: Serve, tiny_model: Path, template: ChatTemplate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = await traced(serve)
    documents = atif_documents(recorded.pool, tmp_path / "atif", tiny_model)
    for step in steps_of(documents):
        del step["metrics"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    capsys.readouterr()
    imported(recorded.pool, "text", tmp_path / "text.jsonl", tiny_model)
    said = "5 documents: 1 groups with 1 rollouts; 0 answers of recorded token ids, 6 rendered by the chat template of"
    assert capsys.readouterr().out == f"{said} {tiny_model}\n"
    [old], [new] = [list(rollouts(recorded.pool, RolloutFilter(run=run))) for run in ("r", "text")]
    assert sorted(template.decode(path) for path in tokens(new)) == sorted(
        template.decode(path) for path in tokens(old)
    )
    assert {str(item.untrained) for item in new.completions} == {"imported: rendered, without seconds"}
    assert all(item.message["role"] == "assistant" and not item.logprobs for item in new.completions)


def outcomes(rollout: RolloutRecord) -> list[Any]:
    """Logprobs, finish reason, label and seconds of the calls; ATIF has microseconds."""
    return sorted(
        (item.tokens.tolist(), item.logprobs.tolist(), item.finish_reason, item.label, round(item.started_at, 3))
        for item in rollout.completions
    )


def tokens(rollout: RolloutRecord) -> list[list[int]]:
    return sorted(item.tokens.tolist() for item in rollout.completions)


STEPS: list[Document] = [
    {"step_id": 1, "source": "user", "message": "Look around."},
    {"step_id": 2, "source": "agent", "message": "there is a.txt"},
]
WORDS: list[int] = [1, 2, 3]


def document(**changes: Any) -> Document:
    agent = {"name": "other", "version": "2", "model_name": "teacher"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": STEPS} | changes


def with_answer(**changes: Any) -> Document:
    return document(steps=[STEPS[0], STEPS[1] | changes])


IMAGE = [{"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
CALL = [{"tool_call_id": "c", "function_name": "ask", "arguments": {}}]


def ours(**fields: Any) -> Document:
    return {"extra": {"blackforge": fields}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "is no ATIF document"),
        (document(schema_version="ATIF-v2.0"), "is 'ATIF-v2.0', and documents of ATIF-v1 are read"),
        (document(steps=STEPS[1:]), "the step_ids of"),
        (document(steps=STEPS[:1]), "the 1 documents have no agent's step that is not a copy"),
        (with_answer(is_copied_context=True), "have no agent's step that is not a copy"),
        (with_answer(llm_call_count=0), "have no agent's step that is not a copy"),
        (with_answer(message=IMAGE), "step 2 holds image, and only text can be imitated"),
        (b'{"schema_version": "\xff"}', "is no ATIF document ('utf-8' codec"),
        (document(**ours(reward="high")), "Expected `float | null`, got `str`"),
        (document(**ours(reward=1.5e308)), "is no ATIF document (Expected `float` <= "),
        (document(**ours(task="a\0b")), "has a zero character in its task"),
        (document(extra={"blackforge": [1]}), "is no ATIF document"),
        (with_answer(metrics=ours(given=[1])), "Expected `array`, got `int`"),
        (with_answer(metrics=ours(given=[[0, 1]])), "step 2 has given = [(0, 1)], no spans of its 0 tokens"),
        (
            with_answer(metrics={"completion_token_ids": WORDS} | ours(given=[[1, 3], [2, 3]])),
            "no spans of its 3 tokens",
        ),
        (with_answer(metrics=ours(logprobs=["a"])), "Expected `float | null`, got `str`"),
        (with_answer(metrics=ours(seconds=-1.0)), "Expected `float` >= 0"),
        (with_answer(metrics=ours(finish_reason="done")), "Invalid enum value 'done'"),
        (with_answer(tool_calls=CALL, observation={"results": [{"source_call_id": "c"}]}), "a result without content"),
    ],
)
def test_what_cannot_be_imitated_is_refused_in_one_sentence(
    wrong: Any, said: str, pool: Pool, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    text = json.dumps(wrong) if isinstance(wrong, dict) else wrong
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    imported(pool, "d", file, tiny_model, status=2)
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert main(["pool", "account", pool.url, "d"]) == 2  # it left no run


@pytest.mark.parametrize("ids", [{"prompt_token_ids": WORDS, "completion_token_ids": WORDS}, {}])
def test_ids_of_another_tokenizer_are_not_taken_for_this_models(
    ids: dict[str, list[int]], pool: Pool, tiny_model: Path, template: ChatTemplate, tmp_path: Path
) -> None:
    """They do not spell the message, so its text is rendered; a sub-agent's document inside is a demonstration too."""
    inner = document(trajectory_id="inner", session_id=None)
    file = tmp_path / "other.json"
    file.write_text(json.dumps(with_answer(metrics=ids) | {"subagent_trajectories": [inner]}))
    imported(pool, "d", file, tiny_model)
    [rollout] = rollouts(pool, RolloutFilter(run="d"))
    prompt, answer = "<|im_start|>user\nLook around.<|im_end|>\n<|im_start|>assistant\n", "there is a.txt<|im_end|>"
    assert [template.decode(item.tokens) for item in rollout.completions] == [prompt + answer] * 2
    assert (rollout.reward, rollout.agent, rollout.task) == (None, "other", "s")


def recorded_metrics(template: ChatTemplate, prompt: str, answer: str) -> Document:
    return {"prompt_token_ids": template.encode(prompt), "completion_token_ids": template.encode(answer)}


SPELLED = ("<|im_start|>user\nLook around.<|im_end|>\n<|im_start|>assistant\n", "there is a.txt<|im_end|>")
CALLED = '<tool_call>\n{"name": "ask", "arguments": {"who": "me"}}\n</tool_call><|im_end|>'
ASKED = {"tool_calls": [CALL[0] | {"arguments": {"who": "you"}}], "message": ""}


@pytest.mark.parametrize(
    ("ids", "changes", "origin"),
    [
        (SPELLED, {}, "ids"),
        (("x" + SPELLED[1], SPELLED[1]), {}, "rendered"),  # the prompt does not hold what the user says
        (SPELLED, {"message": ""}, "rendered"),  # nothing is there to compare
        (SPELLED, {"reasoning_content": "I look first."}, "rendered"),
        ((SPELLED[0], CALLED), ASKED, "rendered"),
        ((SPELLED[0], CALLED.replace("me", "you")), ASKED, "ids"),
    ],
)
def test_ids_count_only_where_they_spell_the_prompt_and_the_whole_answer(
    ids: tuple[str, str],
    changes: Document,
    origin: str,
    pool: Pool,
    tiny_model: Path,
    template: ChatTemplate,
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(with_answer(metrics=recorded_metrics(template, *ids), **changes)))
    imported(pool, "d", tmp_path / "a.json", tiny_model)
    [rollout] = rollouts(pool, RolloutFilter(run="d"))
    assert [str(item.untrained) for item in rollout.completions] == [f"imported: {origin}, without times"]


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_step_keeps_its_own_label_and_finish_reason(
    with_ids: bool, pool: Pool, tiny_model: Path, template: ChatTemplate, tmp_path: Path
) -> None:
    """A branch may hold a compaction among calls of main, and an answer that was cut."""
    own = {"extra": {"blackforge": {"label": "compaction", "finish_reason": "length"}}}
    ids = recorded_metrics(template, *SPELLED) if with_ids else {}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(with_answer(metrics=own | ids) | {"extra": {"blackforge": {"label": "main"}}}))
    imported(pool, "d", file, tiny_model)
    [rollout] = rollouts(pool, RolloutFilter(run="d"))
    [item] = rollout.completions
    assert (item.label, item.finish_reason) == ("compaction", "length")


@pytest.mark.parametrize(("logprob", "kept"), [(-0.5, [-0.5]), (0.0, [0.0]), (5.0, []), (-1e300, []), (1e300, [])])
@pytest.mark.parametrize("own", [True, False])
def test_logprobs_are_kept_only_if_all_can_be_some(
    own: bool,
    logprob: float,
    kept: list[float],
    pool: Pool,
    tiny_model: Path,
    template: ChatTemplate,
    tmp_path: Path,
) -> None:
    """As float32, in which they are stored."""
    ids = recorded_metrics(template, *SPELLED)
    values = [logprob] * len(ids["completion_token_ids"])
    (tmp_path / "a.json").write_text(
        json.dumps(with_answer(metrics=ids | (ours(logprobs=values) if own else {"logprobs": values})))
    )
    imported(pool, "d", tmp_path / "a.json", tiny_model)
    [rollout] = rollouts(pool, RolloutFilter(run="d"))
    assert [item.logprobs.tolist() for item in rollout.completions] == [kept * len(values)]


LATER = "2126-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("timestamp", "seconds", "said"),
    [
        ("2025-01-01T00:00:00Z", 2.5, ""),
        ("2025-01-01T00:00:00+00:00", None, ", without seconds"),
        (None, 2.5, ", without times"),
        ("2025-01-01T00:00:00", 2.5, ", without times"),
        ("yesterday", 2.5, ", without times"),
        (LATER, 2.5, ", without times"),
        ("2025-01-01T00:00:00Z", 1e300, ", without seconds"),
    ],
)
def test_a_call_has_the_documents_times_or_none(
    timestamp: str | None, seconds: float | None, said: str, pool: Pool, tiny_model: Path, tmp_path: Path
) -> None:
    """What a document does not say is marked in the row and left out of later exports."""
    own = {} if seconds is None else {"metrics": ours(seconds=seconds)}
    (tmp_path / "a.json").write_text(json.dumps(with_answer(timestamp=timestamp, **own)))
    imported(pool, "d", tmp_path / "a.json", tiny_model)
    [rollout] = rollouts(pool, RolloutFilter(run="d"))
    assert [str(item.untrained) for item in rollout.completions] == [f"imported: rendered{said}"]
    [file] = exported(pool, "atif", tmp_path / "atif", tiny_model, "d").iterdir()
    step = json.loads(file.read_text())["steps"][-1]
    dated = said != ", without times"
    assert step.get("timestamp") == ("2025-01-01T00:00:00+00:00" if dated else None)
    assert step["metrics"]["extra"]["blackforge"].get("seconds") == (None if said else seconds)
    [file] = exported(pool, "hf-traces", tmp_path / "hub", tiny_model, "d").iterdir()
    *_, last = map(json.loads, file.read_text().splitlines())
    assert last["message"].get("timestamp") == (1_735_689_600_000 if dated else None)


def test_other_files_are_passed_over_and_one_named_twice_counts_once(
    pool: Pool, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document()))
    for name in ("a.json.gz", "a.jsonl.bak"):
        (tmp_path / name).write_bytes(b"\x1f\x8b")
    words = ["pool", "import", pool.url, "d", str(tmp_path), str(tmp_path / "a.json"), "--model", str(tiny_model)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("1 documents: 1 groups with 1 rollouts; 0 answers of")


def test_an_import_shows_how_many_documents_are_left(
    pool: Pool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(document(session_id=f"s{number}")) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "b.json").write_text(json.dumps(document(subagent_trajectories=[document()])))
    tell_at_once(monkeypatch)
    imported(pool, "d", tmp_path, tiny_model)
    printed = capsys.readouterr()
    assert printed.out.startswith("42 documents: 41 groups with 41 rollouts; ")
    for what in ("reading demonstrations", "storing demonstrations as d"):
        some = [line for line in printed.err.splitlines() if line.startswith(f"{what}: ")]
        assert some and all(" of 41 documents" in line for line in some)
        assert re.fullmatch(rf"{what}: \d+ of 41 documents, \S+/s, \d+ s left", some[-1])


async def test_a_directory_with_files_and_a_model_of_another_tokenizer_are_refused(
    serve: Serve, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = await traced(serve)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.json").touch()
    exported(recorded.pool, "atif", tmp_path / "full", tiny_model, status=2)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        text = (tiny_model / name).read_text()
        (other / name).write_text(text.replace('"<think>"', '"<thunk>"'))
    exported(recorded.pool, "chat", tmp_path / "c.jsonl", other, status=2)
    assert main(["pool", "export", recorded.pool.url, "r", "--format", "chat", "--output", "c"]) == 2
    assert main(["pool", "export", recorded.pool.url, "r", "--format", "atif"]) == 2
    errors = capsys.readouterr().err.splitlines()
    said = ("is not empty", "was recorded with the tokenizer", "name the directory of the proxy's", "needs --output")
    assert len(errors) == len(said) and all(words in line for words, line in zip(said, errors, strict=True))


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("jsonl", "--endpoint"),
        ("atif", "--endpoint"),
        ("otel", "--output"),
        ("parquet", "--model"),
        ("slime", "--model"),
    ],
)
def test_options_that_do_nothing_are_refused(
    kind: str, option: str, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = ["--endpoint", "http://127.0.0.1:1"] if kind == "otel" else ["--output", str(tmp_path / "a")]
    assert main(["pool", "export", pool.url, "r", "--format", kind, *used, option, "b"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{option} does nothing with --format {kind}; leave it out" in line


def test_a_refused_import_leaves_no_new_pool(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{")
    (tmp_path / "right.json").write_text(json.dumps(document()))
    for file, model in (("wrong.json", tiny_model), ("right.json", tmp_path / "none")):
        words = [str(tmp_path / "new.db"), "d", str(tmp_path / file), "--model", str(model)]
        assert main(["pool", "import", *words]) == 2
    assert not list(tmp_path.glob("new.db*"))


LOAD = """
import json, sys
from datasets import load_dataset
rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
print(json.dumps([[m["role"] for m in row["messages"]] for row in rows]), type(rows[0]["tools"]).__name__)
"""


@pytest.mark.long
async def test_the_datasets_library_loads_chat_lines(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    recorded: Traced = await traced(serve)
    file = exported(recorded.pool, "chat", tmp_path / "chat.jsonl", tiny_model)
    beside = {"PYTHONPATH": str(environments.packages_beside_ours("datasets")), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", LOAD, str(file), str(tmp_path / "cache")]
    done = subprocess.run(words, env=os.environ | beside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    roles, kind = done.stdout.rsplit(" ", 1)
    assert json.loads(roles)[0] == ["system", "user", "assistant", "tool", "assistant"] and kind == "str\n"
