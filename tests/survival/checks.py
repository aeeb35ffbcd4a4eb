"""What must hold of a pool at the end, whatever was killed meanwhile."""

import json
from collections import Counter
from pathlib import Path

from sqlalchemy import func, select

from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import by_key
from proxy.pool.rollouts.runs import find_run, version_name
from proxy.pool.schema import attempts, completions, groups, policy_versions, proxies, rollouts
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.steps import metrics
from tests.survival.stage import GROUPS, Stage, step

COLUMNS = (completions.c.sampled, completions.c.untrainable)
FINAL = rollouts.c.attempt_id == completions.c.attempt_id


def check_versions(pool: Pool) -> None:
    """Each step's weights reached the engine: what the last step trained on was sampled by new ones."""
    of_last = (groups.c.state == "CONSUMED") & (groups.c.step == step(pool))
    query = select(completions.c.versions).join_from(completions, rollouts, FINAL).join(groups).where(of_last)
    with pool.read() as connection:
        names = {name for versions in connection.scalars(query) for name, _, _ in versions}
    assert max(int(name.removeprefix("v")) for name in names) > step(pool) - 4


def check_sampled_by_the_run(pool: Pool) -> None:
    """No engine that was restarted has sampled anything before it had weights of the run again."""
    with pool.read() as connection:
        spans = [span for versions in connection.scalars(select(completions.c.versions)) for span in versions or ()]
        known = {version_name(version_id) for version_id in connection.scalars(select(policy_versions.c.id))}
    assert {name for name, begin, end in spans if end > begin} <= known


def check_tokenizer(pool: Pool, model: Path) -> None:
    """The pool knows whose tokens it holds."""
    with pool.read() as connection:
        assert set(connection.scalars(select(proxies.c.tokenizer))) == {fingerprint(model)} != {None}


def check_acknowledged(pool: Pool, notes: Path) -> None:
    """Every answer that an agent got stands in the pool, with the tokens that it was made of."""
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(noted) >= step(pool) * GROUPS
    delivered: dict[str, Counter[str]] = {}
    for note in noted:
        delivered.setdefault(note["key"], Counter())[note["content"]] += 1
    for key, contents in delivered.items():
        attempt = by_key(pool, key)
        assert attempt is not None
        recorded = of_attempt(pool, attempt.id)
        paths(recorded)  # raises when a checksum is off
        assert contents <= Counter(item.reply["content"] for item in recorded)


def check_trained_once(pool: Pool) -> None:
    """Each step consumed its own groups, and the tokens that the trainer says it trained are theirs."""
    run_id = find_run(pool, "run").id
    with pool.read() as connection:
        query = select(groups.c.step, func.count()).where(groups.c.state == "CONSUMED").group_by(groups.c.step)
        consumed = {number: count for number, count in connection.execute(query)}
    assert consumed == {number: GROUPS for number in range(1, step(pool) + 1)}
    steps = metrics(pool, run_id)
    assert [row["step"] for row in steps] == list(range(step(pool) + 1))
    for row in steps[1:]:
        trained, sampled = expected_tokens(pool, row["step"])
        assert row["trained_tokens"] == trained
        assert row["trained_tokens"] + sum(row["excluded_tokens"].values()) == sampled


def expected_tokens(pool: Pool, number: int) -> tuple[int, int]:
    """Of a step's groups: tokens to train, and all sampled tokens.

    A group whose rewards are all equal is not trained.
    """
    query = (
        select(groups.c.id.label("group"), rollouts.c.id.label("rollout"), rollouts.c.reward, *COLUMNS)
        .join_from(completions, attempts)
        .join(rollouts, rollouts.c.attempt_id == attempts.c.id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(groups.c.step == number)
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
    valid = [row for row in rows if row.reward is not None]
    rewards: dict[int, set[float]] = {}
    for row in valid:
        rewards.setdefault(row.group, set()).add(row.reward)
    counted = [row for row in valid if row.untrainable is None and len(rewards[row.group]) > 1]
    return sum(len(row.sampled) // 4 for row in counted), sum(len(row.sampled) // 4 for row in rows)


def check_nothing_left(stage: Stage, pool: Pool) -> None:
    """No open attempt, and no sandbox of this run."""
    with pool.read() as connection:
        assert connection.scalar(select(func.count()).where(attempts.c.closed_at.is_(None))) == 0
    stage.start("ls", "sandboxes", "ls", *(["--docker", stage.docker] if stage.docker else []))
    assert stage.running.pop("ls").wait() == 0
    assert str(stage.directory) not in (stage.directory / "ls.log").read_text()
