"""Stores demonstrations as a run that `trainer sft` imitates: a group for each task, a rollout for each session.

No step trains them: their completions are `imported`.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from sqlalchemy import select

from proxy.pool.completions.common_prefix import common_length
from proxy.pool.completions.records import GivenSpan, NewCompletion, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row, retried
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import this_process
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions, proxies, runs
from proxy.pool.terminal.progress import progress
from proxy.pool.traces.atif_reading import ReadTrajectory, count_documents, documents
from proxy.pool.traces.times import row_times
from proxy.pool.untrained import Untrained, UntrainedReason


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One answer to imitate, with its whole prompt. Token arrays are array('i'), logprobs array('f')."""

    prompt: "array[int]"
    answer: "array[int]"
    logprobs: "array[float]"
    """Logprobs of the tokens that are not given; empty where they are not known."""
    given: tuple[GivenSpan, ...] = ()
    reply: dict[str, Any]
    label: str | None
    finish_reason: str
    made_of: str
    """ids: the document's token ids; rendered: its text, by the model's chat template."""
    started_at: float | None = None
    """Unix time of the call; None: not known."""
    seconds: float | None = None
    """How long it took; None: not known."""


@dataclass
class ImportCounts:
    """What was imported."""

    documents: int = 0
    rollouts: int = 0
    groups: int = 0
    by_origin: dict[str, int] = field(default_factory=dict)
    """Completions by what they were made of."""


Place = tuple[Path, int]
"""A file, and the byte in it."""
Make = Callable[[ReadTrajectory], Iterable[Demonstration]]


@dataclass
class FoundDocuments:
    """Documents that were read, and none of which was refused."""

    counts: ImportCounts = field(default_factory=ImportCounts)
    sessions: dict[str, dict[str, dict[Place, None]]] = field(default_factory=dict)
    """Task -> session -> where its documents are, in order."""


def find_documents(paths: Sequence[Path], make: Make) -> FoundDocuments:
    """Read ATIF documents, and show how many. UserError when one is refused, or when none demonstrates anything."""
    found = FoundDocuments()
    files = {file.resolve(): file for path in paths for file in _files(path)}  # one that is named twice counts once
    with progress("reading demonstrations", sum(map(count_documents, files.values())), "documents") as advance:
        for file in files.values():
            for offset, of_one in groupby(documents(file), attrgetter("offset")):  # one with its sub-agents
                for read in of_one:
                    _note(found, read, (file, offset), make)
                advance(1)
    if not found.sessions:
        raise UserError(f"the {found.counts.documents} documents have no agent's step that is not a copy; name others")
    return found


def _note(found: FoundDocuments, read: ReadTrajectory, place: Place, make: Make) -> None:
    made = list(make(read))
    found.counts.documents += 1
    for item in made:
        found.counts.by_origin[item.made_of] = found.counts.by_origin.get(item.made_of, 0) + 1
    if made:
        found.sessions.setdefault(read.task, {}).setdefault(read.session, {})[place] = None


def store_documents(pool: Pool, name: str, found: FoundDocuments, make: Make, tokenizer: str | None) -> ImportCounts:
    """Store the demonstrations of documents as the new run `name`; UserError when the pool has it.

    `tokenizer`: the fingerprint of the one whose ids `make` returns. Documents are read again, a session at a time.
    """
    _demand_new(pool, name)
    counts = found.counts
    run = open_run(pool, name, "collect", {})
    proxy_id = _recorder(pool, tokenizer)
    total = sum(len(places) for of_task in found.sessions.values() for places in of_task.values())
    with progress(f"storing demonstrations as {name}", total, "documents") as advance:
        for task, of_task in found.sessions.items():
            members = open_group(pool, run.id, {"id": task, "instruction": "", "domain": "imported"}, len(of_task))
            counts.groups += 1
            for member, (session, places) in zip(members, of_task.items(), strict=True):
                read_again = [read for place in places for read in documents(*place) if read.session == session]
                if not read_again:
                    raise UserError(
                        f"session {session!r} is no longer in {next(iter(places))[0]}, which changed while it was "
                        f"imported; {name} is incomplete: import the file again under another name"
                    )
                _store(pool, member.rollout_id, read_again, make, proxy_id)
                counts.rollouts += 1
                advance(len(places))
    return counts


def _demand_new(pool: Pool, name: str) -> None:
    with pool.read() as connection:
        if connection.scalar(select(runs.c.id).where(runs.c.name == name)) is not None:
            raise UserError(f"the pool {pool.name} has a run {name!r} already; choose another name")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.rglob("*") if each.suffix in (".json", ".jsonl") and each.is_file())
    if not files:
        raise UserError(f"the directory {path} holds no .json or .jsonl file; name ATIF documents")
    return files


def _store(pool: Pool, rollout_id: int, read: Sequence[ReadTrajectory], make: Make, proxy_id: int) -> None:
    """Store the documents of a session as an attempt that has ended."""
    attempt, _ = open_attempt(pool, rollout_id, read[0].agent)
    ordinal = 0
    for trajectory in read:
        before: tuple[int, array[int]] | None = None
        for item in make(trajectory):
            before = _add(pool, attempt.id, ordinal, item, before, proxy_id)
            ordinal += 1
    close_attempt(pool, attempt.id, Ending())
    reward = next((each.reward for each in read if each.reward is not None), None)
    finish_rollout(pool, rollout_id, Outcome(attempt_id=attempt.id, reward=reward))


@retried
def _add(
    pool: Pool,
    attempt_id: int,
    ordinal: int,
    item: Demonstration,
    before: "tuple[int, array[int]] | None",
    proxy_id: int,
) -> "tuple[int, array[int]]":
    """Store a completion, without what its prompt shares with the path `before`; return its id and path."""
    shared = 0 if before is None else common_length(before[1], item.prompt)
    path = item.prompt + item.answer
    started_at, finished_at, missing = row_times(item.started_at, item.seconds)
    new = NewCompletion(
        attempt_id=attempt_id,
        prefix_of=before[0] if before is not None and shared else None,
        prefix_length=shared,
        follows=before[0] if before is not None else None,
        prompt_tail=item.prompt[shared:],
        sampled=item.answer,
        given=item.given,
        logprobs=item.logprobs,
        versions=(),
        finish_reason=item.finish_reason,
        untrainable=Untrained(UntrainedReason.IMPORTED, item.made_of + missing),
        reply=item.reply,
        path_crc=crc32(int_bytes(path)),
        started_at=started_at,
        finished_at=finished_at,
    )
    place = {"ordinal": ordinal, "proxy_id": proxy_id, "label": item.label}
    with pool.write() as connection:
        id = insert_row(connection, completions, to_row(new) | place)
    return id, path


@retried
def _recorder(pool: Pool, tokenizer: str | None) -> int:
    """Return the id of a recorder of these ids that has ended, so that trainers can compare its tokenizer."""
    now = time.time()
    values = {"owner": msgspec.to_builtins(this_process()), "seen_at": now, "ended_at": now}
    with pool.write() as connection:
        return insert_row(connection, proxies, values | {"confirmed": 0, "on_the_way": [], "tokenizer": tokenizer})
