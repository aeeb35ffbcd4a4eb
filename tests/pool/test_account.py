"""The account of a run: whatever happens, every sampled token is in one place, and the kept counts say which."""

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, update

from proxy.commands.main import main
from proxy.pool.completions.records import NewCompletion, VersionSpan
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row, open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.account import WAITING, account, account_lines, shares_by_length
from proxy.pool.inspect.show import show
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import GroupOptions, OpenRollout, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts, completions, fates, groups, policy_versions, rollouts, train_steps
from proxy.pool.training.interventions import Cause, discard_after, drop_tasks
from proxy.pool.training.settled import settle_untrained
from proxy.pool.training.steps import Published, Version, add_metrics, drop_batch, latest, publish, reopen_after
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, finished_group, new_completion, older_pool
from trainer.config.credit import Credit
from trainer.config.step import StepOptions
from trainer.data.assemble import TokenFate, assemble
from trainer.report.left_out import left_out, left_out_by_length

RULE = LeaseRule(groups=2, window=8, max_staleness=1, stale="member")
STEP = Published(step=0, checkpoint="c", hf_dir="h", metrics={})
MOVES = (
    *["open"] * 4,
    *["attempt"] * 12,
    *["sample"] * 20,
    "retry",
    *["finish"] * 20,
    *["train"] * 24,
    "drop",
    "rollback",
    "discard",
    "drop_task",
)


class Play:
    """A run that is driven at random through the pool's own functions, and what its steps did with each completion."""

    def __init__(self, pool: Pool, seed: int):
        self.pool, self.random = pool, random.Random(seed)
        self.run_id = open_run(pool, f"run {seed}", "train", {}).id
        self.version: Version = publish(pool, self.run_id, STEP)
        self.task = TASK
        self.waiting: list[OpenRollout] = []
        self.running: list[tuple[OpenRollout, int]] = []
        self.ordinals = Counter[int]()
        self.fates: dict[int, tuple[int, TokenFate]] = {}
        """Completion -> the last step that published it, and what that did."""

    def move(self, kind: str) -> None:
        getattr(self, kind)()

    def open(self) -> None:
        while len(self.waiting) + len(self.running) < 9:
            options = GroupOptions(redundant=self.random.randint(0, 1), held_out=self.random.random() < 0.1)
            self.waiting += open_group(self.pool, self.run_id, self.task, self.random.randint(2, 3), options)

    def attempt(self) -> None:
        if self.waiting:
            rollout = self.waiting.pop(self.random.randrange(min(4, len(self.waiting))))
            try:
                attempt, _ = open_attempt(self.pool, rollout.rollout_id, "command")
            except UserError:  # it was cancelled before it began
                return
            self.running.append((rollout, attempt.id))

    def sample(self) -> None:
        if self.running:
            self.answer(self.random.choice(self.running)[1])

    def answer(self, attempt_id: int) -> None:
        """Store a completion, most often a trainable one."""
        size = self.random.randint(1, 9)
        row = to_row(self.completion(attempt_id, size)) | {"ordinal": self.ordinals[attempt_id]}
        self.ordinals[attempt_id] += 1
        with self.pool.write() as connection:
            insert_row(connection, completions, row)

    def completion(self, attempt_id: int, size: int) -> NewCompletion:
        item = new_completion(attempt_id, [1, 2], list(range(size)))
        draw = self.random.random()
        given = ((0, 1),) if draw < 0.1 and size > 1 else ()
        odd = [float("nan") if 0.1 < draw < 0.2 else -0.5] if draw > 0.05 else []  # the last may be missing
        failed = Untrained(UntrainedReason.ENGINE_FAILED, f"at {draw}") if 0.2 < draw < 0.3 else None
        return replace(
            item,
            given=given,
            logprobs=array("f", [-0.5] * (size - len(given) - 1) + odd),
            versions=(VersionSpan(self.version.name, len(given), size),),
            untrainable=failed,
            finish_reason="length" if draw > 0.85 else "stop",
        )

    def end(self, failure: str | None = None) -> tuple[OpenRollout, int] | None:
        if not self.running:
            return None
        rollout, attempt_id = self.running.pop(self.random.randrange(len(self.running)))
        if not self.ordinals[attempt_id] and self.random.random() < 0.9:
            self.answer(attempt_id)
        close_attempt(self.pool, attempt_id, Ending(failure=failure))
        return rollout, attempt_id

    def retry(self) -> None:
        ended = self.end(self.random.choice(("engine", "interrupted")))
        if ended is not None:
            self.waiting.insert(0, ended[0])

    def finish(self) -> None:
        ended = self.end()
        if ended is not None:
            failure = self.random.choice((*[None] * 12, "verifier", "hung", "hung"))
            reward = None if failure else self.random.choice((0.0, 1.0))
            outcome = Outcome(attempt_id=ended[1], reward=reward, failure=failure)
            finish_rollout(self.pool, ended[0].rollout_id, outcome)  # of a cancelled one only the attempt is kept

    def train(self) -> None:
        step = self.version.step + 1
        leased = lease(self.pool, self.run_id, step, RULE)
        if leased is not None and self.random.random() < 0.8:
            options = StepOptions(step=step, max_staleness=0, credit=Credit(mask=("truncated",)))
            batch = assemble(leased.groups, options)
            for fate in batch.fates:
                self.fates |= {id: (step, tokens) for id, tokens in fate.completions.items()}
            stored = [fate.to_pool() for fate in batch.fates]
            self.version = publish(
                self.pool, self.run_id, replace(STEP, step=step, parent=self.version.id, fates=stored)
            )

    def drop(self) -> None:
        drop_batch(self.pool, self.run_id, self.version.step + 1, UntrainedReason.GRADIENT_NOT_FINITE)

    def rollback(self) -> None:
        reopen_after(self.pool, self.run_id, max(0, self.version.step - self.random.randint(1, 2)))
        newest = latest(self.pool, self.run_id)
        assert newest is not None
        self.version = newest

    def discard(self) -> None:
        """Most often nothing: it takes all that the newest steps did with it."""
        if self.random.random() < 0.4:
            discard_after(self.pool, self.run_id, max(0, self.version.step - 1), Cause("collapse", "again"))
            newest = latest(self.pool, self.run_id)
            assert newest is not None
            self.version = newest

    def drop_task(self) -> None:
        """Drop the task of all groups, and go on with another one."""
        if self.random.random() < 0.1:
            drop_tasks(self.pool, self.run_id, [self.task["id"]], Cause("cheated", "by all"))
            self.task = TASK | {"id": f"task {self.random.random()}"}

    def expected(self) -> Counter[str]:
        """Count the tokens of every completion in its place."""
        columns = (groups.c.state, groups.c.purpose, groups.c.reason, groups.c.detail, rollouts.c.failure)
        of_rollout = (rollouts.c.finished_at, rollouts.c.attempt_id.label("final"), rollouts.c.id.label("rollout"))
        interrupted = (attempts.c.failure == "interrupted").label("interrupted")
        query = (
            select(
                *columns,
                *of_rollout,
                interrupted,
                completions.c.id,
                completions.c.attempt_id,
                completions.c.sampled,
                completions.c.given,
            )
            .join_from(completions, attempts)
            .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
            .join(groups, groups.c.id == rollouts.c.group_id)
            .where(groups.c.run_id == self.run_id)
        )
        with self.pool.read() as connection:
            rows = connection.execute(query).all()
            last = {row.rollout_id: row.id for row in connection.execute(select(attempts).order_by(attempts.c.id))}
        places = Counter[str]()
        for row in rows:
            step, fate = self.fates.get(row.id, (self.version.step + 1, None))
            if row.purpose == "eval":
                place = "held_out"
            elif row.failure in ("redundant", "filtered"):
                place = f"rollout_failed: {row.failure}"
            elif row.attempt_id != (row.final or last[row.rollout]) or (row.interrupted and not row.finished_at):
                place = "retried"
            elif row.state == "TOMBSTONE":
                place = f"{row.reason}: {row.detail}" if row.reason in ("group_filtered", "discarded") else row.reason
            elif fate is not None and step <= self.version.step:
                assert row.state == "CONSUMED"
                places["trained"] += fate.trained
                for why, tokens in (fate.excluded + fate.masked).items():
                    named = why.reason in (UntrainedReason.LABEL, UntrainedReason.ROLLOUT_FAILED)
                    places[str(why) if named else str(why.reason)] += tokens if why.reason != "given" else 0
                continue
            elif fate is not None:
                place = "reopened"
            elif row.state == "LEASED":
                place = "leased"
            else:
                place = "queued" if row.finished_at else "sampling"
            places[place] += len(row.sampled) // 4 - sum(end - start for start, end in row.given or ())
        return +places


def counted(pool: Pool, run_id: int) -> Counter[str]:
    now = account(pool, run_id)
    assert now.unaccounted == 0
    tallies = {"trained": now.trained} | now.left_out | now.waiting
    counts = Counter({name: tally.tokens for name, tally in tallies.items()})
    assert counts.total() == now.sampled
    return +counts


def moves(pool: Pool, seed: int, every: int) -> Iterator[Counter[str]]:
    """Play 300 moves, compare the account after each `every` of them, and yield what is where."""
    play = Play(pool, seed)
    for number in range(300):
        kind = play.random.choice(MOVES)
        play.move(kind)
        if number % every == every - 1:
            expected = play.expected()
            assert counted(pool, play.run_id) == expected, (seed, number, kind)
            yield expected


def test_the_account_balances(pool: Pool) -> None:
    seen = set[str]().union(*moves(pool, seed=6, every=12))
    assert {"trained", "queued", "equal_rewards", "engine_failed", "logprobs_missing"} <= seen and len(seen) >= 10


@pytest.mark.long
def test_the_account_balances_whatever_happens(pool: Pool) -> None:
    places = {"trained", "retried", "held_out", "group_filtered: hung", "too_few_valid", "equal_rewards", "truncated"}
    places |= {"gradient_not_finite", "engine_failed", "logprob_not_finite", "logprobs_missing", "stale", *WAITING}
    places |= {f"rollout_failed: {kind}" for kind in ("verifier", "redundant", "filtered")}
    places |= {"discarded: collapse", "discarded: cheated", "rolled_back"}
    for seed in range(20):
        for expected in moves(pool, seed, every=1):
            places -= expected.keys()
        with pool.read() as connection:
            settled = connection.scalar(select(func.count(groups.c.settled)).where(groups.c.run_id == seed + 1))
        if not places and settled:
            return
    raise AssertionError(f"tokens were never in these places: {places}")


def test_fates_and_sums_are_those_of_the_steps_that_count(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    first = publish(pool, run.id, STEP)
    for rewards in ([1.0, 0.0], [1.0, 0.0, None], [1.0, 1.0]):
        finished_group(pool, run.id, rewards)
    rule = LeaseRule(groups=3, window=4, max_staleness=9)
    versions = []
    for _ in range(2):
        leased = lease(pool, run.id, 1, rule)
        assert leased is not None
        batch = [fate.to_pool() for fate in assemble(leased.groups, StepOptions()).fates]
        reopen_after(pool, run.id, 0)
        versions.append(publish(pool, run.id, replace(STEP, step=1, parent=first.id, fates=batch)))
        now = account(pool, run.id)
        if len(versions) == 1:
            assert reopen_after(pool, run.id, 0) == 3 and account(pool, run.id).waiting["reopened"].tokens == 14
    with pool.read() as connection:
        rows = connection.execute(select(fates).order_by(fates.c.completion_id)).all()
        assert [(row.version_id, row.trained) for row in rows] == [(versions[1].id, n) for n in (2, 2, 2, 2, 0, 0, 0)]
        assert [row.left_out for row in rows[4:]] == [{"rollout_failed: verifier": 2}, *[{"equal_rewards": 2}] * 2]
    assert (now.trained.groups, now.trained.rollouts, now.trained.tokens) == (2, 4, 8) and now.unaccounted == 0
    step = left_out(pool, run.id, [])
    assert step["left_out_tokens"] == {"equal_rewards": 4, "rollout_failed: verifier": 2}
    assert step["left_out_rollouts"] == {"equal_rewards": 2, "rollout_failed: verifier": 1}
    add_metrics(pool, versions[1].id, step)
    table = [line.split() for line in account_lines(now)]
    assert ["left", "out:", "equal_rewards", "1", "2", "4", "28.6%"] in table and ["unaccounted", "0"] in table
    for _ in range(6):
        finished_group(pool, run.id, [None, None])  # these are lost
    assert "2 trained in step 1" in show(pool, 1)[-1] and "its tokens: too_few_valid" in show(pool, 8)
    new = left_out(pool, run.id, batch)  # a step that would take the same groups once more
    assert new["left_out_tokens"] == {"equal_rewards": 4, "rollout_failed: verifier": 2, "too_few_valid": 24}
    assert left_out(pool, run.id, [])["left_out_rollouts"] == {"too_few_valid": 12}
    by_length = left_out_by_length([*batch, *batch])["left_out_by_length"]
    assert (
        left_out_by_length(batch) == {}
        and {name.partition("/")[0] for name in by_length} == step["left_out_tokens"].keys()
    )
    shares = shares_by_length(pool, run.id)
    assert shares.keys() == {"trained", "equal_rewards", "rollout_failed: verifier", "too_few_valid"}
    assert [round(sum(parts), 6) for parts in zip(*shares.values(), strict=True)] == [1.0] * 10


def test_a_pool_of_before_has_an_account(database: str) -> None:
    with older_pool(database, "0020") as add:
        place = {"run_id": 1, "task_id": 1, "size": 1, "created_at": 1.0}
        add("groups", id=1, queue_index=0, position=0, state="CONSUMED", step=1, **place)
        add("groups", id=2, queue_index=1, position=1, state="RUNNING", **place)
        for number in (1, 2):
            closed = {"closed_at": 3.0} if number == 1 else {}
            add("rollouts", id=number, group_id=number, member=0, attempt_id=1 if closed else None, **_finished(closed))
            attempt = {"id": number, "run_id": 1, "rollout_id": number, "number": 0, "key_hash": str(number)}
            add("attempts", **attempt, agent="a", opened_at=1.0, **closed)
            row = to_row(new_completion(number, [1], [2] * (8 if closed else 5)))
            add("completions", id=number, ordinal=0, **{k: v for k, v in row.items() if v is not None})
        add("policy_versions", id=1, run_id=1, step=1, checkpoint="c", hf_dir="h", created_at=1.0)
        counts = {"excluded_tokens": {"engine_failed: bang": 3}, "masked_tokens": {"stale": 1}, "trained_tokens": 5}
        add("train_steps", id=1, version_id=1, metrics=counts)
    pool = open_pool(database)
    assert counted(pool, 1) == {"trained": 4, "engine_failed": 3, "stale": 1, "sampling": 5}
    with pool.read() as connection:
        kept = connection.execute(select(attempts.c.sampled_tokens).order_by(attempts.c.id)).scalars().all()
    assert list(kept) == [8, None]
    pool.close()


def _finished(closed: dict[str, float]) -> dict[str, float]:
    return {"finished_at": 3.0, "reward": 1.0} if closed else {}


@pytest.mark.parametrize(("purpose", "place"), [("eval", "held_out"), ("collect", "queued")])
def test_groups_of_a_run_that_nobody_trains_from_settle(pool: Pool, purpose: str, place: str) -> None:
    run = open_run(pool, "r", purpose, {})
    for rewards in ([1.0, 0.0], [None, None], [1.0, 1.0]):
        finished_group(pool, run.id, rewards)
    open_group(pool, run.id, TASK, 1)
    before = account(pool, run.id)
    settle_untrained(pool, run.id)
    settle_untrained(pool, run.id)
    assert account(pool, run.id) == before and before.unaccounted == 0
    assert (before.left_out | before.waiting)[place].rollouts >= 4
    train = open_run(pool, "t", "train", {})
    finished_group(pool, train.id, [1.0, 0.0])
    settle_untrained(pool, train.id)
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.state, groups.c.settled).order_by(groups.c.id)).all()
    assert rows == [("DONE", 1), ("TOMBSTONE", 1), ("DONE", 1), ("RUNNING", None), ("DONE", None)]


def test_the_command_fails_when_the_account_does_not_balance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.db"
    pool = open_pool(str(file))
    run = open_run(pool, "r", "train", {})
    for _ in range(5):
        finished_group(pool, run.id, [None, None])
    command = ["pool", "account", str(file), "r"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "too_few_valid" in printed and "shortest tenth" in printed and "unaccounted" in printed
    with pool.write() as connection:  # a step that says nothing of its groups
        connection.execute(update(groups).where(groups.c.id == 1).values(state="CONSUMED", step=1))
        version = {"run_id": run.id, "step": 1, "checkpoint": "c", "hf_dir": "h", "created_at": 1.0}
        version_id = insert_row(connection, policy_versions, version)
        connection.execute(insert(train_steps).values(version_id=version_id, metrics={}))
    pool.close()
    assert main(command) == 1 and "unaccounted 4 " in " ".join(capsys.readouterr().out.split())
    assert main([*command[:-1], "x"]) == 2 and "x" in capsys.readouterr().err
