"""A pool, a run directory and a checkpoint that an earlier blackforge wrote are read, and both runs go on from them.

The data is tests/stored/before.tar.xz; tests/stored/make.sh makes it with the tree of a named commit.
"""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from harness.cli import main
from harness.run_dir import RunDir
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import groups
from proxy.pool.training.steps import latest, metrics
from proxy.pool.untrained import UntrainedReason

if TYPE_CHECKING:
    from trainer.megatron.parallel import Ranks

ROOT = Path(__file__).parents[1]
OLD_TREE, OLD_DATA = "/tmp/blackforge-before", "/tmp/blackforge-stored"
"""Where the tree and the data were when the data was written."""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The stored data, as if it had always been in this directory."""
    data = tmp_path / "stored"
    with tarfile.open(ROOT / "tests" / "stored" / "before.tar.xz") as archive:
        archive.extractall(data, filter="data")
    for file in (data / "run").glob("*.json"):
        file.write_text(file.read_text().replace(OLD_TREE, str(ROOT)).replace(OLD_DATA, str(data)))
    with closing(sqlite3.connect(data / "pool.db")) as connection, connection:
        connection.execute("update runs set config = replace(config, ?, ?)", (OLD_TREE, str(ROOT)))
        for column in ("checkpoint", "hf_dir"):
            statement = f"update policy_versions set {column} = replace({column}, ?, ?)"
            connection.execute(statement, (OLD_DATA, str(data)))
    return data


def attempt_reasons(pool: Pool, attempt_ids: range) -> list[str | None]:
    items = [item for attempt_id in attempt_ids for item in of_attempt(pool, attempt_id)]
    return [None if item.untrainable is None else str(item.untrainable) for item in items]


def test_a_pool_is_read_with_the_reasons_that_were_texts(stored: Path) -> None:
    pool = open_pool(str(stored / "pool.db"))
    report = verify(pool)
    assert report.damages == [] and report.completions == report.trainable + 2
    assert attempt_reasons(pool, range(3, 7)) == [None, "abandoned", "sampling_parameters: {'temperature': 0.2}", None]
    with pool.read() as connection:
        query = select(groups.c.reason, groups.c.detail).where(groups.c.state == "TOMBSTONE").order_by(groups.c.id)
        buried = [tuple(row) for row in connection.execute(query)]
    assert buried == [
        (UntrainedReason.TOO_FEW_VALID, "2 of 4 rollouts are usable"),
        (UntrainedReason.GROUP_FILTERED, "hung"),
    ]
    steps = metrics(pool, find_run(pool, "demo").id)
    assert [step.get("excluded_tokens") for step in steps] == [None, {"label: side": 8}, {}]
    pool.close()


def test_a_run_directory_is_resumed_by_its_name(stored: Path) -> None:
    directory = RunDir(stored / "run")
    verb, settings = directory.begun_with()
    assert (verb, settings.seed, directory.whereabouts().expected, directory.sandbox()) == ("run", 0, 3, "process")
    assert main(["resume", str(directory.path)]) == 0
    rows = [json.loads(line) for line in (directory.path / "results.jsonl").read_text().splitlines()]
    ended = [(row["task"], row["reward"], row["attempts"]) for row in rows]
    assert ended == [("b", 1.0, 1), ("a", 1.0, 2), ("c", 1.0, 1)]  # the second was running when the first start died


def test_a_training_run_goes_on_from_its_checkpoint(stored: Path, ranks: "Ranks") -> None:
    from tests.trainer.make import make_config  # loads torch, which only this test needs
    from trainer.loop import train
    from trainer.report.view import view

    config = make_config(stored, steps=3)
    train(config, ranks)
    pool = open_pool(config.pool)
    run_id = find_run(pool, config.run).id
    version = latest(pool, run_id)
    assert version is not None and (version.step, version.name) == (3, "v4")
    expected = json.loads((stored / "third_step.json").read_text())
    third = metrics(pool, run_id)[3]
    assert {name: third[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    shown = [view(config, step) for step in (1, 2, 3)]  # with the records of the steps that were trained before
    assert all(not each.notes[1:] and list(each.rollouts) for each in shown) and "8 (label: side)" in shown[0].title
    pool.close()
