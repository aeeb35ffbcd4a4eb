"""What there is to look at in a pool of real runs: places for pictures, and every page of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from proxy.pool.browse.attempts.acts import attempt_events
from proxy.pool.browse.attempts.attempt import calls_page
from proxy.pool.browse.groups import GroupEntry, Member, group_view, groups_page
from proxy.pool.browse.runs import RunEntry, runs_page
from proxy.pool.browse.sessions import sessions_page
from proxy.pool.database import Pool
from proxy.pool.errors import UserError

LOOKED_AT = 16
"""Newest groups among whose rollouts one with many events is looked for."""


@dataclass(frozen=True)
class Places:
    """Parts of addresses. None: the pool has no such thing."""

    run: str
    """The run that has trained the most steps; of several the first."""
    over: str | None
    """The next one."""
    group: int
    rollout: int
    call: int
    eventful: int
    """A rollout with as many events as possible."""
    session: int | None
    runs: tuple[str, ...]
    """All runs of the pool."""


def places(pool: Pool) -> Places:
    """Choose what to look at. UserError where no run of the pool has trained."""
    runs = list(_all_runs(pool))
    trained = [run.name for run in sorted(runs, key=lambda run: (-(run.step or 0), run.id)) if run.step]
    if not trained:
        raise UserError(f"no run of {pool.name} has trained a step; make one with: make demo")
    groups = groups_page(pool, trained[0], state="CONSUMED").groups
    group = max(groups, key=_spread)
    members = _tried(pool, group)
    best = max(members, key=lambda member: (member.reward or 0.0, member.rollout_id))
    calls = calls_page(pool, best.attempt_id or 0).calls
    others = [member for each in groups[:LOOKED_AT] for member in _tried(pool, each)]
    sessions = sessions_page(pool)
    return Places(
        run=quote(trained[0], safe=""),
        over=quote(trained[1], safe="") if len(trained) > 1 else None,
        group=group.id,
        rollout=best.rollout_id,
        call=max(calls, key=lambda call: call.ordinal).id,
        eventful=max(others, key=lambda member: _events(pool, member)).rollout_id,
        session=sessions[0].id if sessions else None,
        runs=tuple(quote(run.name, safe="") for run in runs),
    )


def pages(found: Places) -> list[str]:
    """Return the address of every page, and of every view of a rollout."""
    rollout = f"/rollout/{found.rollout}?call={found.call}"
    runs = [f"/run/{name}" for name in found.runs]
    if found.over is not None:
        runs.append(f"/run/{found.run}?with={found.over}")
    views = [rollout, *(f"{rollout}&view={view}" for view in ("tokens", "events", "log"))]
    views += [f"/rollout/{found.eventful}?view=events", f"/group/{found.group}"]
    views += [] if found.session is None else [f"/attempt/{found.session}"]
    rest = [
        f"/behaviour/{found.run}",
        "/machines",
        "/search",
        "/search?q=shell",
        f"/search?run={found.run}&most_reward=0",
    ]
    return ["/", *runs, *views, *rest]


def _all_runs(pool: Pool) -> Iterator[RunEntry]:
    page = runs_page(pool)
    while page:
        yield from page
        page = runs_page(pool, before=page[-1].id)


def _spread(group: GroupEntry) -> tuple[int, int]:
    """Order groups by how many different rewards they have; the newest first."""
    return len(set(group.rewards)), group.queue_index


def _tried(pool: Pool, group: GroupEntry) -> list[Member]:
    return [member for member in group_view(pool, group.id).members if member.attempt_id is not None]


def _events(pool: Pool, member: Member) -> int:
    return sum(event.kind != "tool_called" for event in attempt_events(pool, member.attempt_id or 0).events)
