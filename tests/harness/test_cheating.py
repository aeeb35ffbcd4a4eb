"""Agents that cheat: each way earns what its work deserves, nothing, and honest work earns everything.

A way is the solution of a task that `harness validate` tries, so it takes the path of every rollout but for the model.
tests/harness/test_cheating_run.py takes some through a whole run.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from harness.tasks import Task
from harness.validation.trials import Trial, TrialSpec, run_trial
from harness.verdict.shared import KINDS, not_stopped
from sandboxes.base import Sandboxes
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.local.bubblewrap import BubblewrapSandboxes, why_not
from tests.conftest import need
from tests.harness.cheats import PYTEST_NEEDS, SECRET, VICTIMS, WAYS, Way
from tests.harness.conftest import ROOT

Mode = Literal["strict", "harbor", "bubblewrap", "steps"]
MODES: tuple[Mode, ...] = ("strict", "harbor", "bubblewrap", "steps")
HONEST = "echo hello > hello.txt"
LOGS = "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


@pytest.fixture
async def sandboxes(docker_daemon: str, tmp_path: Path, mode: Mode) -> AsyncIterator[Sandboxes]:
    opened: Sandboxes
    if mode == "bubblewrap":
        need("bubblewrap", not why_not())
        opened = BubblewrapSandboxes(tmp_path / "sandboxes")
    else:
        opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def pytest_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """pytest and what it needs, for sandboxes whose image has none."""
    directory = tmp_path_factory.mktemp("pytest")
    for name in PYTEST_NEEDS:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, directory / name, ignore=_not_needed)
        else:
            shutil.copy(source, directory)
    return str(directory)


def _not_needed(directory: str, names: list[str]) -> list[str]:
    lexers = {"__init__.py", "_mapping.py", "python.py", "diff.py"}
    return [name for name in names if name == "__pycache__" or (directory.endswith("/lexers") and name not in lexers)]


def verifier_of(victim: str, mode: Mode, where: str, library: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"timeout": 120, "where": where} | VICTIMS[victim]
    if ".lib" in fields["command"]:
        fields |= {"directories": {".lib": library}}
    if mode == "harbor":
        command = fields["command"].replace("${REWARD_FILE:-", "").replace("reward.txt}", "reward.txt")
        fields |= {
            "user": "root",
            "rewards": "logs",
            "command": command if "reward" in command else f"({command}) {LOGS}",
        }
    return fields


def task_of(way: Way, mode: Mode, where: str, library: str) -> Task:
    """The task that a way attacks; its solution is the way."""
    fields: dict[str, Any] = {
        "id": "hello",
        "instruction": "Write hello.txt",
        "image": None if mode == "bubblewrap" else {"name": "deb:py"},
        "network": "none",
        "limits": {"memory_mb": 512, "disk_mb": 64, "pids": 128},
        "timeout": 60,
        "verifier": verifier_of(way.victim, mode, where, library),
        "solution": {"command": way.script},
    }
    if mode == "harbor":
        fields |= {"profile": "harbor", "work": "/srv"}
    if mode == "steps":
        first = {"verifier": verifier_of(way.first_victim or way.victim, mode, where, library)}
        second = {"verifier": fields.pop("verifier"), "solution": {"command": "true"}}
        fields["steps"] = [{"name": name, "instruction": "?", **step} for name, step in (("1", first), ("2", second))]
    return msgspec.convert(fields, Task)


async def trial_of(sandboxes: Sandboxes, task: Task) -> Trial:
    return await run_trial(sandboxes, TrialSpec(task, "a", "oracle", 0))


def earns_nothing(trial: Trial, way: Way) -> bool:
    """Whether the verdict is 0. Only a way that aims at no verdict, or at a reward out of range, may also have none."""
    return trial.reward == 0.0 or (trial.reward is None and way.kind in ("room", None))


def is_stopped(trial: Trial, way: Way) -> bool:
    """Whether the verdict is 0, or for a reward out of range none."""
    return trial.reward == 0.0 or (trial.reward is None and way.kind is None)


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, id=name.replace(" ", "-")) for name in names]


ROWS = re.findall(
    r"^\| (.+?) \| (\w+) \| ((?:strict|harbor|bubblewrap|steps)(?:, \w+)*)( at times)? \|$",
    (ROOT / "docs/security.md").read_text(),
    re.M,
)
"""The page's list of what succeeds in the agent's own sandbox: way, kind, modes, and whether only at times."""
OPEN = {(name, mode): bool(at_times) for name, _, modes, at_times in ROWS for mode in modes.split(", ")}
LISTED = [
    pytest.param(name, way.attacks, id=f"{way.listed}-{name.replace(' ', '-')}")
    for name, way in WAYS.items()
    if way.listed
]


EVERYWHERE = [
    pytest.param(name, mode, id=f"{name.replace(' ', '-')}-{mode}")
    for name, way in WAYS.items()
    for mode in ((way.attacks,) if way.attacks in ("harbor", "steps") else MODES)
]
"""Every way in every mode, but for those that need root, or a first step."""


HONESTLY = [
    pytest.param(
        victim,
        mode,
        id=f"{victim.replace(' ', '-')}-{mode}",
        marks=[] if mode == "bubblewrap" and victim in ("helped script", "pytest", "git") else pytest.mark.long,
    )
    for victim in VICTIMS
    for mode in MODES
]


def test_the_ten_kinds_have_their_ways() -> None:
    assert sorted(way.listed for way in WAYS.values() if way.listed) == list(range(1, 11))
    assert {way.kind for way in WAYS.values()} == {*KINDS, None} and len(WAYS) >= 59
    assert {way.victim for way in WAYS.values()} == {*VICTIMS}


def test_the_list_of_what_is_not_stopped_names_ways_and_their_kinds() -> None:
    assert ROWS and {name: kind for name, kind, *_ in ROWS} == {name: WAYS[name].kind for name, _ in OPEN}
    assert set(OPEN) <= {tuple(each.values[:2]) for each in EVERYWHERE}


@pytest.mark.parametrize("name, mode", LISTED)
async def test_a_way_of_each_kind_earns_nothing_in_a_fresh_sandbox(
    sandboxes: Sandboxes, pytest_directory: str, name: str, mode: Mode
) -> None:
    trial = await trial_of(sandboxes, task_of(WAYS[name], mode, "fresh", pytest_directory))
    assert earns_nothing(trial, WAYS[name]), trial


@pytest.mark.long
@pytest.mark.parametrize("name, mode", EVERYWHERE)
async def test_a_way_earns_nothing_in_a_fresh_sandbox_and_is_stopped_or_listed_in_its_own(
    sandboxes: Sandboxes, pytest_directory: str, name: str, mode: Mode
) -> None:
    tasks = [task_of(WAYS[name], mode, where, pytest_directory) for where in ("fresh", "shared")]
    fresh, shared = await asyncio.gather(*(trial_of(sandboxes, task) for task in tasks))
    assert earns_nothing(fresh, WAYS[name]) and SECRET not in fresh.detail + shared.detail, fresh
    if is_stopped(shared, WAYS[name]):
        assert OPEN.get((name, mode), True), f"listed as open, and stopped: {shared}"
    else:
        assert (name, mode) in OPEN and WAYS[name].kind in not_stopped(tasks[1], sandboxes.kind), shared


@pytest.mark.parametrize("victim, mode", HONESTLY)
async def test_honest_work_earns_everything(
    sandboxes: Sandboxes, pytest_directory: str, victim: str, mode: Mode
) -> None:
    tasks = [task_of(Way(script=HONEST, victim=victim), mode, where, pytest_directory) for where in ("fresh", "shared")]
    for trial in await asyncio.gather(*(trial_of(sandboxes, task) for task in tasks)):
        assert (trial.reward, trial.failure) == (1.0, None), trial


@pytest.mark.parametrize("mode", ["bubblewrap"])
async def test_a_reward_may_have_another_range(sandboxes: Sandboxes, pytest_directory: str) -> None:
    task = task_of(WAYS["a reward out of range"], "bubblewrap", "fresh", pytest_directory)
    wider = msgspec.structs.replace(task.verifier, range=(0.0, 1000.0))
    assert (await trial_of(sandboxes, task)).detail.startswith("the reward 1000 is outside of 0 to 1")
    assert (await trial_of(sandboxes, msgspec.structs.replace(task, verifier=wider))).reward == 1000
