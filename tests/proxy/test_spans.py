"""Rollouts as OpenTelemetry spans, by the real SDK to a real receiver that decodes them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.main import main
from proxy.pool.completions.store import of_attempt
from tests.proxy.conftest import SHELL, Serve
from tests.proxy.sdks import environments
from tests.proxy.traced import Traced, traced

ROOT = Path(__file__).parents[2]


def words(recorded: Traced, model: Path) -> list[str]:
    return ["pool", "export", recorded.pool.url, "r", "--format", "otel", "--model", str(model)]


def sent(recorded: Traced, model: Path, status: int = 200) -> subprocess.CompletedProcess[str]:
    path = f"{environments.packages_beside_ours('otel')}:{ROOT}"
    command = [sys.executable, "-m", "tests.proxy.span_receiver", str(status), *words(recorded, model)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)


NAMES = """\
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
print(*(value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")))
"""


def known_names() -> set[str]:
    """The attributes that OpenTelemetry's own package of the conventions names."""
    env = os.environ | {"PYTHONPATH": str(environments.packages_beside_ours("otel"))}
    done = subprocess.run([sys.executable, "-c", NAMES], env=env, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.long
async def test_an_attempt_is_a_trace_of_its_calls(serve: Serve, tiny_model: Path) -> None:
    recorded = await traced(serve)
    done = sent(recorded, tiny_model)
    assert done.returncode == 0, done.stderr
    said, printed = done.stdout.splitlines()
    assert said.startswith("5 branches of 1 rollouts: http://127.0.0.1:")
    root, *calls = json.loads(printed)
    stored = of_attempt(recorded.pool, recorded.attempt)
    assert (root["name"], root["kind"], len(calls)) == ("invoke_agent mini", "SPAN_KIND_INTERNAL", len(stored))
    assert [event["name"] for event in root["events"]] == ["gen_ai.evaluation.result"]
    assert {call["parentSpanId"] for call in calls} == {root["spanId"]}
    assert {call["traceId"] for call in calls} == {root["traceId"]}
    assert len({span["spanId"] for span in (root, *calls)}) == len(stored) + 1
    conversations = {span["attributes"]["gen_ai.conversation.id"] for span in (root, *calls)}
    assert conversations == {f"attempt-{recorded.attempt}"}
    asked = {name for span in (root, *calls) for name in span["attributes"] if name.startswith("gen_ai.")}
    assert len(asked) > 10 and asked - known_names() == set()
    for item, call in zip(stored, calls, strict=True):
        has: dict[str, Any] = call["attributes"]
        assert (call["name"], has["gen_ai.operation.name"]) == ("chat", "chat")
        assert has["gen_ai.response.id"] == f"completion-{item.id}"
        assert int(has["gen_ai.usage.input_tokens"]) == item.prompt_length
        assert int(has["gen_ai.usage.output_tokens"]) == len(item.sampled)
        assert has["gen_ai.response.finish_reasons"] == [item.finish_reason]
        assert abs(int(call["endTimeUnixNano"]) / 1e9 - item.finished_at) < 1e-3
        [output] = json.loads(has["gen_ai.output.messages"])
        assert output["role"] == "assistant" and output["finish_reason"] == item.finish_reason
    first = calls[0]["attributes"]
    assert json.loads(first["gen_ai.system_instructions"]) == [{"type": "text", "content": "You work in a shell."}]
    assert json.loads(first["gen_ai.tool.definitions"]) == [SHELL]
    assert [part["type"] for part in json.loads(first["gen_ai.output.messages"])[0]["parts"]] == [
        "reasoning", "text", "tool_call",
    ]  # fmt: skip
    side = calls[1]["attributes"]  # it has neither tools nor a system prompt
    assert not {"gen_ai.tool.definitions", "gen_ai.system_instructions", "blackforge.forked_from"} & side.keys()
    again = json.loads(sent(recorded, tiny_model).stdout.splitlines()[1])
    assert [span["spanId"] for span in again] == [span["spanId"] for span in (root, *calls)]


@pytest.mark.long
async def test_an_endpoint_that_refuses_ends_the_export(serve: Serve, tiny_model: Path) -> None:
    done = sent(await traced(serve), tiny_model, status=400)
    assert done.returncode == 2 and "did not take the spans of attempt" in done.stderr


async def test_without_the_libraries_or_an_endpoint_it_says_what_is_missing(
    serve: Serve, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = await traced(serve)
    assert main(words(recorded, tiny_model)) == 2
    assert "needs --endpoint" in capsys.readouterr().err
    code = f"import sys; from proxy.commands.main import main; print(main({[*words(recorded, tiny_model)]!r}))"
    code += "; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n[]\n"
