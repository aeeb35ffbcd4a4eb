"""An attempt as a tree that a person can read: what followed what, what was new, how it ended."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import labelled, of_attempts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.schema import attempts, groups, rollouts, runs, tasks

WORDS = 60
"""Characters of a reply that are shown."""


@dataclass(frozen=True)
class Branch:
    """A completion and how many forks lie above it."""

    depth: int
    completion: Completion


def tree(chain: list[Completion]) -> Iterator[Branch]:
    """The completions, each after the one that it follows. Only a fork indents: a conversation stays in its column."""
    following: dict[int | None, list[Completion]] = defaultdict(list)
    for item in chain:
        following[item.follows].append(item)
    waiting = [Branch(0, item) for item in reversed(following[None])]
    while waiting:
        branch = waiting.pop()
        yield branch
        children = following[branch.completion.id]
        depth = branch.depth + (len(children) > 1)
        waiting += [Branch(depth, child) for child in reversed(children)]


def show(pool: Pool, attempt_id: int) -> list[str]:
    """The lines that show an attempt; UserError when there is none of this number."""
    query = (
        select(attempts, runs.c.name.label("run"), tasks.c.name.label("task"), groups.c.queue_index)
        .add_columns(rollouts.c.member, rollouts.c.reward, rollouts.c.attempt_id.label("final"))
        .outerjoin(runs, runs.c.id == attempts.c.run_id)
        .outerjoin(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .outerjoin(groups, groups.c.id == rollouts.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
    )
    with pool.read() as connection:
        row = connection.execute(query.where(attempts.c.id == attempt_id)).one_or_none()
        known = connection.scalars(select(attempts.c.id).order_by(attempts.c.id.desc()).limit(5)).all()
        chain = of_attempts(connection, [attempt_id])[attempt_id]
    if row is None:
        newest = ", ".join(map(str, known))
        raise UserError(f"attempt {attempt_id} is not in the pool {pool.name}; its newest are: {newest or 'none'}")
    return [*_heading(row._mapping), *(_line(branch) for branch in tree(labelled(chain)))]


def _heading(row: Any) -> Iterator[str]:
    yield f"attempt {row['id']}: {plain(row['agent'])}, {_state(row)}"
    if row["rollout_id"] is not None:
        place = f"task {plain(row['task'])}, group {row['queue_index']}, member {row['member']}"
        yield f"run {plain(row['run'])}, {place}, try {row['number']}"
    if row["final"] == row["id"]:
        yield f"reward {'missing' if row['reward'] is None else row['reward']}"


def _state(row: Any) -> str:
    if row["closed_at"] is None:
        return "open"
    seconds = f"ended after {row['closed_at'] - row['opened_at']:.1f} s"
    return seconds if row["failure"] is None else f"{seconds} with {row['failure']}: {plain(row['detail'] or '')}"


def _line(branch: Branch) -> str:
    item = branch.completion
    shared = f"{item.prefix_length} of #{item.prefix_of}" if item.prefix_of is not None else "0"
    parts = [
        f"#{item.id}" if item.follows is None else f"#{item.id} follows #{item.follows}",
        f"shared {shared}",
        f"new {len(item.prompt_tail)}",
        f"sampled {len(item.sampled)}",
        *([] if item.label is None else [item.label]),
        item.finish_reason,
        *[span.version for span in item.versions],
    ]
    if item.untrainable is not None:
        parts.append(f"untrainable ({plain(str(item.untrainable))})")
    return f"{'    ' * branch.depth}{', '.join(parts)}: {_words(item.reply)}"


def _words(reply: dict[str, Any]) -> str:
    """The first words of a reply, whatever it consists of."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in reply.get("tool_calls") or []]
    said = " ".join([str(reply.get("content") or ""), *calls]).strip() or str(reply.get("reasoning_content") or "")
    words = plain(said)
    return words if len(words) <= WORDS else f"{words[:WORDS]}..."


def plain(text: str) -> str:
    """One line without control characters: what an agent or model wrote must not steer the terminal."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
