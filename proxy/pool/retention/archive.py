"""Archives consumed groups and drops their completions from the pool. A kill at any moment loses nothing.

First the file is written and synced; then one transaction says which groups it holds. Dropping compares each group in
the file with the pool and deletes its completions, a group to a transaction, so that the proxies' commits wait little.
An attempt goes whole, so no token path is cut. Groups, rollouts, rewards and attempts stay in the pool, and the stored
inputs of Responses calls, which only open attempts can name, are deleted. Not here: the size of a SQLite file, which
shrinks by `vacuum` alone; the free space is used again.
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, select, update

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import IDS_PER_QUERY, of_attempts, to_row
from proxy.pool.database import Pool, insert_row, retried
from proxy.pool.errors import UserError
from proxy.pool.files import InUse, lock_directory, replacing
from proxy.pool.read.archive_file import ArchiveFile, archive_writer
from proxy.pool.retention.horizon import Horizon, may_be_dropped, may_leave
from proxy.pool.rollouts.runs import Run, lock_run
from proxy.pool.schema import archives, attempts, completions, fates, groups, responses, rollouts, tasks, undelivered
from proxy.pool.terminal.progress import progress

PAGE = 32
"""Groups per query."""


@dataclass(frozen=True)
class Archived:
    """What a new archive file holds."""

    file: Path
    groups: int
    completions: int


def archive(pool: Pool, run: Run, limits: Horizon, directory: Path) -> Archived | None:
    """Write the groups that may leave and are in no archive to a new file; None when there are none."""
    try:
        lock = lock_directory(directory)  # two commands would write to one partial file
    except InUse as error:
        raise UserError(f"{error}; wait until that command has ended") from error
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}); name a writable directory") from error
    try:
        return _archive(pool, run, limits, directory)
    finally:
        os.close(lock)


def _archive(pool: Pool, run: Run, limits: Horizon, directory: Path) -> Archived | None:
    waiting = may_leave(run.id, limits.last) & groups.c.archive_id.is_(None)
    file = _new_file(pool, run, waiting, directory)
    if file is None:
        return None
    written: list[int] = []
    try:
        with replacing(file, private=True, durable=True) as partial:
            shown = progress(f"writing {file.name}", _count(pool, waiting), "groups")
            with archive_writer(partial) as writer, shown as advance:
                for group in _pages(pool, waiting):
                    for rows in _rows(pool, run, group):
                        writer.add(rows)
                    written.append(group.id)
                    advance(1)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); free space there") from error
    _remember(pool, run, file, written)
    return Archived(file, len(written), writer.completions)


def _new_file(pool: Pool, run: Run, waiting: Any, directory: Path) -> Path | None:
    """Return a name that no archive has. What a killed command left under it is replaced."""
    with pool.read() as connection:
        first, last = connection.execute(select(func.min(groups.c.step), func.max(groups.c.step)).where(waiting)).one()
        taken = set(connection.scalars(select(archives.c.file)))
    if first is None:
        return None
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run.name)}-{run.id}-steps-{first}-{last}"
    names = (f"{name}{more}.parquet" for more in ("", *(f"-{number}" for number in range(2, len(taken) + 3))))
    return next(file for file in (directory.absolute() / each for each in names) if str(file) not in taken)


def _count(pool: Pool, wanted: Any) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count()).select_from(groups).where(wanted)) or 0


def _pages(pool: Pool, wanted: Any) -> Iterator[Row[Any]]:
    """Yield groups in queue order."""
    columns = (groups.c.id, groups.c.queue_index, groups.c.step, tasks.c.name.label("task"), tasks.c.domain)
    query = select(*columns, groups.c.archive_id).join_from(groups, tasks, tasks.c.id == groups.c.task_id).where(wanted)
    last = -1
    while True:
        with pool.read() as connection:
            following = query.where(groups.c.queue_index > last).order_by(groups.c.queue_index).limit(PAGE)
            page: list[Row[Any]] = list(connection.execute(following))
        if not page:
            return
        yield from page
        last = page[-1].queue_index


def _rows(pool: Pool, run: Run, group: Row[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each attempt of a group."""
    query = (
        select(rollouts, attempts.c.id.label("attempt"))
        .join_from(rollouts, attempts, attempts.c.rollout_id == rollouts.c.id)
        .where(rollouts.c.group_id == group.id)
        .order_by(rollouts.c.member, attempts.c.id)
    )
    with pool.read() as connection:
        tried = connection.execute(query).all()
        for row in tried:
            final = row.attempt_id == row.attempt
            place = {
                "run": run.name,
                "task": group.task,
                "domain": group.domain,
                "queue_index": group.queue_index,
                "step": group.step,
                "rollout_id": row.id,
                "member": row.member,
                "final": final,
                "reward": row.reward if final else None,
                "reward_parts": row.reward_parts if final else None,
                "failure": row.failure if final else None,
                "weight": row.weight if final else None,
                "set_aside": row.set_aside if final else None,
                "hacked": row.hacked if final else None,
            }
            fate = (fates.c.version_id.label("fate_version"), fates.c.trained, fates.c.left_out)
            own = (
                select(completions, *fate)
                .outerjoin(fates)
                .where(completions.c.attempt_id == row.attempt)
                .order_by(completions.c.id)
            )
            yield [place | item._asdict() for item in connection.execute(own)]


@retried
def _remember(pool: Pool, run: Run, file: Path, group_ids: list[int]) -> None:
    with pool.write() as connection:
        lock_run(connection, run.id)
        values = {"run_id": run.id, "file": str(file), "created_at": time.time()}
        archive_id = insert_row(connection, archives, values)
        for start in range(0, len(group_ids), IDS_PER_QUERY):
            some = group_ids[start : start + IDS_PER_QUERY]
            free = groups.c.id.in_(some) & (groups.c.state == "CONSUMED") & groups.c.archive_id.is_(None)
            if connection.execute(update(groups).where(free).values(archive_id=archive_id)).rowcount != len(some):
                raise UserError(
                    f"run {run.name!r} was archived or taken back by another command meanwhile; repeat this one"
                )


def drop(pool: Pool, run: Run, limits: Horizon) -> int:
    """Delete the completions of the archived groups that may be dropped; return the number of groups.

    UserError, and the group stays, when its archive does not hold what the pool does.
    """
    waiting = may_be_dropped(run.id, limits.last)
    opened: tuple[int, ArchiveFile] | None = None
    count = 0
    with progress("dropping what is archived", _count(pool, waiting), "groups") as advance:
        for group in _pages(pool, waiting):
            if opened is None or opened[0] != group.archive_id:
                opened = group.archive_id, _opened(pool, group.archive_id)
            count += _drop_group(pool, waiting & (groups.c.id == group.id), _verified(pool, group.id, opened[1]))
            advance(1)
    return count


def _opened(pool: Pool, archive_id: int) -> ArchiveFile:
    with pool.read() as connection:
        file = connection.scalars(select(archives.c.file).where(archives.c.id == archive_id)).one()
    return ArchiveFile(Path(file), experts=True)


def _verified(pool: Pool, group_id: int, file: ArchiveFile) -> list[int]:
    """Return the attempts of a group. UserError unless the archive has all their completions, equal to the pool's."""
    query = select(attempts.c.id).join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
    with pool.read() as connection:
        ids = list(connection.scalars(query.where(rollouts.c.group_id == group_id)))
        for attempt_id, chain in of_attempts(connection, ids).items():
            if list(map(_stored, chain)) != list(map(_stored, file.of_attempt(attempt_id))):
                raise UserError(
                    f"the archive does not hold attempt {attempt_id} as the pool does, so nothing of it is dropped; "
                    "put the right file back"
                )
    return ids


def _stored(item: Completion) -> dict[str, Any]:
    """Return what a database stores. Numbers are bytes in it: a logprob that is no number is equal to itself."""
    return to_row(item) | {"id": item.id, "ordinal": item.ordinal, "label": item.label}


@retried
def _drop_group(pool: Pool, waiting: ColumnElement[bool], attempt_ids: list[int]) -> bool:
    """Delete the completions of a group; False, and it stays, when it may not leave any more."""
    with pool.write() as connection:
        group_id = connection.scalar(select(groups.c.id).where(waiting))
        if group_id is None:  # an open group begins with it since the pages were read
            return False
        own = select(completions.c.id).where(completions.c.attempt_id.in_(attempt_ids))
        connection.execute(delete(fates).where(fates.c.completion_id.in_(own)))
        for table in (undelivered, responses, completions):
            _delete(connection, table, attempt_ids)
        connection.execute(update(groups).where(groups.c.id == group_id).values(dropped_at=time.time()))
        return True


def _delete(connection: Connection, table: Any, attempt_ids: list[int]) -> None:
    for start in range(0, len(attempt_ids), IDS_PER_QUERY):
        connection.execute(delete(table).where(table.c.attempt_id.in_(attempt_ids[start : start + IDS_PER_QUERY])))
