"""`trainer rollback --discard` on a real pool with a small model: what was trained since is never trained again."""

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from proxy.pool.inspect.account import account
from proxy.pool.rollouts import runs
from proxy.pool.schema import groups
from proxy.pool.training import steps
from tests.trainer.make import fill
from tests.trainer.test_reporter import noted, prepare, shown
from trainer.commands.main import main
from trainer.commands.rollback import roll_back
from trainer.loop import train
from trainer.megatron.parallel import Ranks


def test_discarded_batches_are_never_trained_again(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pool = prepare(tmp_path, 3, keep_checkpoints=9)
    (tmp_path / "trainer.toml").write_text(
        f'pool = "pool.db"\nrun = "{config.run}"\nmodel = "model"\noutput = "trainer"\nkeep_checkpoints = 9\n'
    )
    run = runs.find_run(pool, config.run)
    train(config, ranks)
    fill(pool, run.id, 1, "v4")  # sampled by weights that go
    assert main(["rollback", str(tmp_path / "trainer.toml"), "--to", "1", "--discard"]) == 0
    assert "at step 1 (v2); no engine is configured; 4 groups are discarded" in capsys.readouterr().out
    assert noted(pool, "rollback") == ["to step 1, v2; 4 groups are discarded"]
    fill(pool, run.id, 4, "v2")
    train(config, ranks)
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.state, groups.c.step, groups.c.reason)).all()
    assert Counter(map(tuple, rows)) == {
        ("CONSUMED", 1, None): 2,
        ("TOMBSTONE", None, "discarded"): 4,
        ("TOMBSTONE", None, "rolled_back"): 1,
        ("CONSUMED", 2, None): 2,
        ("CONSUMED", 3, None): 2,
    }
    now = account(pool, run.id)
    assert (now.unaccounted, now.trained.tokens, now.waiting) == (0, 3 * 64, {})
    assert {why: tally.tokens for why, tally in now.left_out.items()} == {"discarded: rollback": 128, "rolled_back": 32}
    [*_, second, _] = steps.metrics(pool, run.id)
    assert second["unused_groups"] == {"discarded": 4, "rolled_back": 1}
    assert second["left_out_tokens"] == {"discarded: rollback": 128, "rolled_back": 32}
    assert [step for step, _ in shown(config, "loss/loss")] == [1, 2, 3]


def test_the_scales_of_domains_are_kept_with_each_step_and_go_back_with_a_rollback(
    ranks: Ranks, tmp_path: Path
) -> None:
    config, pool = prepare(tmp_path, 3, keep_checkpoints=9, credit={"returns": "turns", "scale": "domain"})
    run = runs.find_run(pool, config.run)
    train(config, ranks)
    first = [steps.scales_before(pool, run.id, step) for step in range(1, 5)]
    assert [kept and kept["agent"]["steps"] for kept in first] == [None, 1, 2, 3]
    assert first[3] is not None and first[3]["agent"]["groups"] == 6
    roll_back(config, 1)
    assert [steps.scales_before(pool, run.id, step) for step in (2, 3)] == [first[1], None]
    train(config, ranks)  # on the same groups
    assert [steps.scales_before(pool, run.id, step) for step in range(1, 5)] == first
