"""The states of groups, and the one function that changes them.

docs/architecture.md shows TRANSITIONS as a diagram. The database refuses other states, and a group that has a step
without being in one (proxy/pool/schema.py).
"""

from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, update

from proxy.pool.schema import groups

GroupState = Literal["RUNNING", "DONE", "LEASED", "CONSUMED", "TOMBSTONE"]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)

TRANSITIONS: dict[tuple[GroupState, GroupState], str] = {
    ("RUNNING", "DONE"): "every rollout has its outcome",
    ("RUNNING", "TOMBSTONE"): "lost to failures, or its task is dropped",
    ("DONE", "LEASED"): "a train step takes it",
    ("DONE", "TOMBSTONE"): "too stale, too few usable rollouts, equal rewards, or its task is dropped",
    ("LEASED", "CONSUMED"): "its step is published",
    ("LEASED", "TOMBSTONE"): "the gradient of its step is not finite, or a rollback discards it",
    ("CONSUMED", "LEASED"): "a rollback goes behind its step",
    ("CONSUMED", "TOMBSTONE"): "a rollback discards its step",
}
"""What a group may do, and when. A new group is RUNNING; a TOMBSTONE stays one."""


def move(
    connection: Connection, which: ColumnElement[bool], before: GroupState, after: GroupState, **values: Any
) -> int:
    """Change the state of those groups of `which` that are in state `before`; return how many there were.

    `values` are written to them too. ValueError when TRANSITIONS does not allow it.
    """
    if (before, after) not in TRANSITIONS:
        raise ValueError(f"a group never goes from {before} to {after}; see TRANSITIONS in {__name__}")
    moving = update(groups).where(which, groups.c.state == before)
    return connection.execute(moving.values(state=after, **values)).rowcount
