"""kill -9 at every stage of a step and anywhere between: what follows is the undisturbed run, bit for bit.

Held after each: weights and losses of every step, which groups it consumed, and that each group was trained once.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from proxy.pool.inspect.rule_states import STATES
from tests.trainer.lives import End, Lives
from tests.trainer.sglang_double import Double, Start
from tests.trainer.test_loop import metrics, prepare, query
from tests.trainer.test_weights import same_files

KILLED = -9
STAGES = [  # of trainer/loop.py, in order; those behind a publication are reached one step further on each
    End("return", "Policy.write_hf", rank=1),  # step 0 is written, but not under its name
    End("call", "commit", 2),
    End("return", "lease"),
    End("return", "Policy.update", rank=1),
    End("return", "Policy.update"),
    End("call", "FileSystemWriterAsync.write_preloaded_data", rank=1),  # in the middle of the checkpoint
    End("c_call", "fsync", 2),
    End("return", "commit"),  # one of checkpoint and model has its name
    End("call", "commit", 2),
    End("return", "Checkpoints.save", rank=1),
    End("return", "save"),
    End("return", "publish"),
    End("call", "mark_pushed", 2),  # the first is of the push that resuming repeats
    End("return", "RunState.push", 2, rank=1),
    End("c_call", "rmdir"),  # in the middle of what is deleted
]
STEPS = 6
TIMED = {"seconds", "tokens_per_second", "mfu", "pause_seconds", "engine_wait_seconds"}
"""Metrics of what a step took, not of what it learned."""
TIMED_RULES = {"waiting", "slow_phase"}
"""Rules of the monitor over such metrics."""
ANYWHERE = (150_000, 500_000)
"""Calls and returns after which a life is ended at random: from the loading of weights to the second step."""


@pytest.fixture(scope="module")
def smooth(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """An undisturbed run of so many ranks."""

    @cache
    def run(ranks: int) -> Path:
        directory = prepare(tmp_path_factory.mktemp("smooth"), groups=2 * STEPS)
        assert lives.live(*launch(directory, ranks), ranks=ranks) == [0] * ranks, lives.log_end()
        return directory

    return run


def launch(directory: Path, ranks: int) -> list[str]:
    settings = ["--steps", str(STEPS), "--set", "keep_checkpoints=3", "--nproc", str(ranks)]
    return ["launch", str(directory / "trainer.toml"), *settings]


def check_same(rough: Path, smooth: Path) -> None:
    every = "select queue_index, state, step from groups order by queue_index"
    assert query(rough, every) == query(smooth, every) == [(i, "CONSUMED", 1 + i // 2) for i in range(2 * STEPS)]
    assert query(rough, "select step from policy_versions order by id") == [(step,) for step in range(STEPS + 1)]
    assert query(rough, "select count(*) from policy_versions where pushed_at is null") == [(0,)]
    for step in range(STEPS - 2, STEPS + 1):
        name = f"out/models/step-{step:06d}"
        assert same_files(smooth / name, rough / name), step
    left = [sorted(str(path.relative_to(where)) for path in where.glob("out/*s/step-*")) for where in (smooth, rough)]
    assert left[0] == left[1]
    for one, other in zip(map(learned, metrics(smooth)), map(learned, metrics(rough)), strict=True):
        names = one.keys() | other.keys()
        assert {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)} == {}


def learned(step: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step that do not say what it took."""
    kept = {name: value for name, value in step.items() if name not in TIMED}
    for name in ("monitor", STATES):
        kept[name] = {rule: state for rule, state in kept.get(name, {}).items() if rule not in TIMED_RULES}
    return kept


def killed(statuses: list[int], end: End) -> bool:
    """Whether the life ended there; the other ranks may have failed of the loss before they were killed too."""
    return statuses[end.rank] == KILLED and all(statuses)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_at_every_stage_changes_nothing(
    ranks: int, lives: Lives, smooth: Callable[[int], Path], tmp_path: Path
) -> None:
    rough = prepare(tmp_path / "rough", groups=2 * STEPS)
    for end in STAGES:
        here = msgspec.structs.replace(end, rank=min(end.rank, ranks - 1))
        statuses = lives.live(*launch(rough, ranks), ranks=ranks, end=here)
        assert killed(statuses, here), (end, statuses, lives.log_end())
    assert lives.live(*launch(rough, ranks), ranks=ranks) == [0] * ranks, lives.log_end()
    check_same(rough, smooth(ranks))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_anywhere_changes_nothing(
    ranks: int, seed: int, lives: Lives, smooth: Callable[[int], Path], tmp_path: Path
) -> None:
    rough, generator, count = prepare(tmp_path / "rough", groups=2 * STEPS), random.Random(seed), 0
    statuses: list[int] = []
    while statuses != [0] * ranks:
        count_at = generator.randint(*ANYWHERE) + 50_000 * count  # later and later, so that the run comes to its end
        end = End(count=count_at, rank=generator.randrange(ranks))
        statuses = lives.live(*launch(rough, ranks), ranks=ranks, end=end)
        assert statuses == [0] * ranks or killed(statuses, end), (end, statuses, lives.log_end())
        count += KILLED in statuses
    assert count >= 3
    check_same(rough, smooth(ranks))


@dataclass
class Deadly(Double):
    """An engine whose `deadly` path is the end of the trainer that asks for it, after the engine has obeyed."""

    deadly: str = ""
    kill: Callable[[], None] = print

    async def answer(self, request: web.Request) -> web.Response:
        response = await super().answer(request)
        if request.path == self.deadly:
            self.deadly = ""
            self.kill()
        return response


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/pause_generation", marks=pytest.mark.long),
        pytest.param("/update_weights_from_disk", marks=pytest.mark.long),
        "/continue_generation",
    ],
)
async def test_a_kill_in_the_middle_of_a_push_is_made_good(
    path: str, start: Start, lives: Lives, tmp_path: Path
) -> None:
    directory, engines = prepare(tmp_path), [Deadly(kill=lives.kill), Deadly(kill=lives.kill)]
    urls = msgspec.json.encode(await start(*engines)).decode()
    arguments = ["launch", str(directory / "trainer.toml"), "--set", f"push.engines={urls}", "--steps"]
    assert await asyncio.to_thread(lives.live, *arguments, "1") == [0], lives.log_end()
    for engine in engines:  # the first to die dies of the push that resuming repeats
        engine.deadly = path
        assert await asyncio.to_thread(lives.live, *arguments, "2") == [KILLED], lives.log_end()
    assert await asyncio.to_thread(lives.live, *arguments, "2") == [0], lives.log_end()
    newest = query(directory, "select 'v' || max(id), count(*), sum(pushed_at is null) from policy_versions")
    assert newest == [(engines[0].version, 3, 0)] and engines[1].version == engines[0].version
    assert not engines[0].paused and not engines[1].paused
    assert query(directory, "select state, count(*) from groups group by state") == [("CONSUMED", 4), ("DONE", 2)]
