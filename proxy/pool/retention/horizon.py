"""Which groups may leave the pool: consumed ones, behind every step that the run may be taken back to.

A rollback to step S leases the groups of the steps after S again, and it needs the checkpoint of S. So what no existing
checkpoint reaches is never trained again. Groups that wait, are leased or were dropped stay. So do those with an
attempt that a running group of any run begins with, since the proxy plays its completions.
"""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ColumnElement, exists, select

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import Run
from proxy.pool.schema import attempts, completions, groups, rollouts
from proxy.pool.training.steps import versions


@dataclass(frozen=True)
class Horizon:
    """The steps of a run that matter for its archive."""

    newest: int
    oldest_checkpoint: int
    """The earliest step that the run may be taken back to."""
    last: int
    """Groups of the steps up to this one may leave."""


def horizon(pool: Pool, run: Run, older_than: int) -> Horizon:
    """Return what may leave when the newest `older_than` steps stay.

    UserError for a run without steps, and where its checkpoints are not: then nobody knows how far back it may go.
    """
    published = versions(pool, run.id)
    if not published:
        raise UserError(f"run {run.name!r} has no train steps, so none of its groups is consumed; nothing is archived")
    newest = published[-1]
    if not Path(newest.checkpoint).is_dir():
        raise UserError(
            f"the newest checkpoint of run {run.name!r} is not here ({newest.checkpoint}), so it is not known how far "
            "back the run may be taken; run this command where the trainer's output is, in the trainer's directory"
        )
    oldest = min(version.step for version in published if Path(version.checkpoint).is_dir())
    return Horizon(newest.step, oldest, min(newest.step - older_than, oldest))


def may_leave(run_id: int, last: int) -> ColumnElement[bool]:
    """Select the groups that may leave: of steps up to `last`, with all attempts closed, and with none that a running
    group begins with."""
    other = groups.alias()
    beginnings = select(other.c.start_attempt_id).where(
        other.c.state == "RUNNING", other.c.start_attempt_id.is_not(None)
    )
    needed = exists(
        select(attempts.c.id)
        .join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
        .where(rollouts.c.group_id == groups.c.id, attempts.c.closed_at.is_(None) | attempts.c.id.in_(beginnings))
        .correlate(groups)
    )
    consumed = (groups.c.run_id == run_id) & (groups.c.state == "CONSUMED") & (groups.c.step <= last)
    return consumed & ~needed


def may_be_dropped(run_id: int, last: int) -> ColumnElement[bool]:
    """Select the archived groups whose completions may be deleted: all but the group of the pool's newest completion.

    SQLite would give its id to the next one, and archives, the index of the search and `imitated` name them by id.
    """
    newest = select(completions.c.attempt_id).order_by(completions.c.id.desc()).limit(1).scalar_subquery()
    holder = select(rollouts.c.group_id).join(attempts).where(attempts.c.id == newest)
    archived = groups.c.archive_id.is_not(None) & groups.c.dropped_at.is_(None)
    return may_leave(run_id, last) & archived & groups.c.id.not_in(holder)
