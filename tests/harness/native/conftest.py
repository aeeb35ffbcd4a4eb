"""The agent as a process, before a scripted engine and behind the real proxy, and what it left in the pool."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.agents.native_agent import SOURCE
from proxy.engine.scripted import Fault, ScriptedReply
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import labelled
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from tests.proxy.conftest import Serve, Stand, serve, template, tiny_model
from trainer.config.step import StepOptions
from trainer.data.assemble import TrainingBatch, assemble

__all__ = ["serve", "template", "tiny_model"]
TASK = "Find the word of the house and write it down."
Reply = str | ScriptedReply | Fault


def called(tool: str, **arguments: Any) -> str:
    """A tool call as the model would write it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


class Model:
    """Gives its replies in turn, and keeps the prompts."""

    def __init__(self, replies: Sequence[Reply]):
        self.prompts: list[str] = []
        self._replies = list(replies)

    def __call__(self, prompt: str, ids: Sequence[int]) -> Reply:
        self.prompts.append(prompt)
        return self._replies[len(self.prompts) - 1]

    def behind_system(self, number: int) -> str:
        """A prompt without its system prompt, which holds the tools."""
        return self.prompts[number].split("<|im_start|>user\n", 1)[1]


@dataclass
class Session:
    """One rollout of the agent."""

    status: int
    output: str
    model: Model
    stand: Stand

    @property
    def calls(self) -> list[Completion]:
        return labelled(self.stand.recorded())

    @property
    def labels(self) -> list[str | None]:
        return [item.label for item in self.calls]

    @property
    def log(self) -> list[dict[str, Any]]:
        lines = self.output.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def dropped(self) -> list[tuple[str, list[str]]]:
        """What left the context, as the log tells."""
        return [(line["context"], line["results"]) for line in self.log if "context" in line]

    def goes_on(self, number: int) -> bool:
        """Whether a call's prompt begins with the whole path of the call before."""
        before = self.stand.path(number - 1)
        return self.stand.path(number)[: len(before)] == before


class Agent:
    """Runs the agent in a directory of its own."""

    def __init__(self, serve: Serve, directory: Path):
        self.directory = directory
        self._serve = serve

    async def __call__(
        self, *replies: Reply, policy: str = "free", context: int = 4096, task: str = TASK, family: Path | None = None,
        **settings: Any,
    ) -> Session:  # fmt: skip
        """`family`: the directory of the model that is played. Default: the tiny one."""
        model = Model(replies)
        stand = await self._serve(model, context_length=context, **({"model": family} if family else {}))
        (self.directory / "settings.json").write_text(json.dumps(settings))
        options = ["--policy", policy, "--context", str(context), "--settings", "settings.json", "--", task]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-m", SOURCE.name, *options),
            cwd=self.directory,
            env={
                "PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE.parent), "OPENAI_BASE_URL": f"{stand.url}/v1",
                "OPENAI_API_KEY": "agent", "MODEL": "tiny",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return Session(process.returncode or 0, output.decode(), model, stand)


@pytest.fixture
def agent(serve: Serve, tmp_path: Path) -> Agent:
    directory = tmp_path / "work"
    directory.mkdir()
    return Agent(serve, directory)


def training_batch(calls: Sequence[Completion]) -> TrainingBatch:
    """What a step trains of these completions as a rollout with reward 1, beside one with reward 0."""
    members = [LeasedRollout(number, number, reward, None, list(calls)) for number, reward in enumerate((1.0, 0.0))]
    return assemble([LeasedGroup(1, 0, {"domain": "agent"}, 0, members)], StepOptions())


def check_trained(calls: Sequence[Completion]) -> None:
    """Every sampled token is trained, in the context that it was sampled in, with the rollout's advantage."""
    batch = training_batch(calls)
    fates = batch.fates[0].completions
    assert {item.id: fates[item.id].trained for item in calls} == {item.id: item.sampled_count for item in calls}
    rows = batch.rows[: len(batch.rows) // 2]
    assert sorted(id for row in rows for id in row.completions) == sorted(item.id for item in calls)
    advantages = {float(value) for row in rows for value in row.advantage[row.trained]}
    assert len(advantages) == 1 and advantages.pop() > 0
