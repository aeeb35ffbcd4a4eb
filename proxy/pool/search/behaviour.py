"""What the newest rollouts of a run did, added up from the index: each kind of event with the rewards beside it."""

import sqlite3
from dataclasses import dataclass

NEWEST_ROLLOUTS = 2000


@dataclass(frozen=True)
class EventFigures:
    """One kind of event."""

    kind: str
    rollouts: int
    """Rollouts in which it happened."""
    count: int
    reward: float | None
    """Their mean reward; None: none of them has one."""
    reward_without: float | None
    """That of the other rollouts."""


@dataclass(frozen=True)
class GroupFigures:
    """The rollouts of one agent or domain."""

    name: str
    rollouts: int
    rewards: int
    reward: float | None
    failed: int
    calls: float | None
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True)
class RunBehaviour:
    """The newest rollouts of a run."""

    rollouts: int
    events: list[EventFigures]
    agents: list[GroupFigures]
    domains: list[GroupFigures]
    failures: dict[str, int]


def run_behaviour(index: sqlite3.Connection, run_id: int) -> RunBehaviour:
    """Add up what the newest rollouts of a run did."""
    newest = f"(select * from outcomes where run_id = :run order by rollout_id desc limit {NEWEST_ROLLOUTS})"
    given = {"run": run_id}
    total, rewards, reward_sum = index.execute(
        f"select count(*), count(reward), coalesce(sum(reward), 0) from {newest}", given
    ).fetchone()
    rows = index.execute(
        f"select kind, count(*) as rollouts, sum(count) as count, count(reward) as rewards, sum(reward) as reward_sum "
        f"from {newest} o join events on events.rollout_id = o.rollout_id group by kind order by 2 desc",
        given,
    ).fetchall()
    events = [
        EventFigures(
            row["kind"],
            row["rollouts"],
            row["count"],
            row["reward_sum"] / row["rewards"] if row["rewards"] else None,
            (reward_sum - (row["reward_sum"] or 0.0)) / (rewards - row["rewards"])
            if rewards > row["rewards"]
            else None,
        )
        for row in rows
    ]
    failures = dict(
        index.execute(
            f"select failure, count(*) from {newest} where failure is not null group by failure order by 2 desc", given
        ).fetchall()
    )
    return RunBehaviour(
        total, events, _by(index, newest, given, "agent"), _by(index, newest, given, "domain"), failures
    )


def _by(index: sqlite3.Connection, newest: str, given: dict[str, int], column: str) -> list[GroupFigures]:
    query = (
        f"select coalesce({column}, '-') as name, count(*) as rollouts, count(reward) as rewards, "
        f"avg(reward) as reward, count(failure) as failed, avg(calls) as calls, avg(tokens) as tokens, "
        f"avg(seconds) as seconds from {newest} "
        "group by 1 order by 2 desc limit 64"
    )
    return [GroupFigures(**dict(row)) for row in index.execute(query, given)]
