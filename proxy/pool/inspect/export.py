"""Export of a run, one record per completion: JSONL for reading, Parquet for tables.

`tokens` is the whole path. `mask` marks the tokens that this completion sampled and that may be trained, so every such
token is marked once over all records of a run. The answer's tokens are the last of the path; `given` holds the spans
[start, end) of the path that the proxy wrote, and `logprobs` belong to the others, which the model sampled.
Only the attempt that gave a rollout its outcome is `final` and has the reward. Left out: requests, which a pool does
not keep, and routed experts, of which a token has hundreds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import select

from proxy.pool.completions.records import Completion, GivenSpan, VersionSpan
from proxy.pool.completions.store import labelled, of_attempt, paths
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import replacing
from proxy.pool.inspect.parquet import Write, parquet_writer
from proxy.pool.rollouts.runs import Run
from proxy.pool.schema import attempts, groups, rollouts, tasks

COMMON = ("task", "domain", "group", "group_state", "step", "member", "attempt", "agent")
"""Fields that all completions of an attempt share."""
ROWS = 256
"""Records per write."""


class ExportedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion with its place in the run and its result."""

    run: str
    task: str
    domain: str
    group: int
    group_state: str
    step: int | None
    """The train step that leased the group."""
    member: int
    attempt: int
    agent: str
    final: bool
    completion: int
    ordinal: int
    follows: int | None
    message: dict[str, Any]
    label: str | None
    """main | subagent | side | compaction; provisional while the attempt is open."""
    finish_reason: str
    untrainable: str | None
    """Why it is not trained (proxy/pool/untrained.py); None: it may be trained."""
    untrainable_detail: str | None
    misfit: str | None
    """How it misses the form that its request prescribed; empty: it does not; None: it was free, or enforced."""
    tokens: list[int]
    prompt_length: int
    mask: list[int]
    given: list[GivenSpan]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    reward: float | None
    reward_parts: dict[str, float] | None
    failure: str | None


def records(pool: Pool, run: Run) -> Iterator[ExportedCompletion]:
    """Yield the completions of a run in queue order; UserError when stored tokens do not match their checksum."""
    query = (
        select(attempts.c.id.label("attempt"), attempts.c.agent, rollouts, groups.c.queue_index.label("group"))
        .add_columns(groups.c.state.label("group_state"), groups.c.step, tasks.c.name.label("task"), tasks.c.domain)
        .join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(attempts.c.run_id == run.id)
        .order_by(groups.c.queue_index, rollouts.c.member, attempts.c.id)
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
    for row in rows:
        chain = labelled(of_attempt(pool, row.attempt))
        try:
            whole = paths(chain)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"attempt {row.attempt} of run {run.name!r} is damaged ({error}); run `proxy pool verify`"
            ) from error
        for item in chain:
            yield _record(run, row._mapping, item, whole[item.id].tolist())


def _record(run: Run, row: Any, item: Completion, tokens: list[int]) -> ExportedCompletion:
    final = row["attempt_id"] == row["attempt"]
    mask = [0] * len(tokens)
    for place in item.sampled_places() if item.untrainable is None else ():
        mask[item.prompt_length + place] = 1
    return ExportedCompletion(
        run=run.name,
        **{name: row[name] for name in COMMON},
        final=final,
        completion=item.id,
        ordinal=item.ordinal,
        follows=item.follows,
        message=item.reply,
        label=item.label,
        finish_reason=item.finish_reason,
        untrainable=None if item.untrainable is None else item.untrainable.reason,
        untrainable_detail=None if item.untrainable is None else item.untrainable.detail,
        misfit=item.misfit,
        tokens=tokens,
        prompt_length=item.prompt_length,
        mask=mask,
        given=[(item.prompt_length + start, item.prompt_length + end) for start, end in item.given],
        logprobs=item.logprobs.tolist(),
        versions=item.versions,
        reward=row["reward"] if final else None,
        reward_parts=row["reward_parts"] if final else None,
        failure=row["failure"] if final else None,
    )


def export(pool: Pool, run: Run, kind: str, file: Path) -> int:
    """Write a run's records to a file; return their number. An existing file is replaced only by a complete one."""
    count = 0
    try:
        with replacing(file) as partial, WRITERS[kind](partial) as write:
            batch: list[dict[str, Any]] = []
            for record in records(pool, run):
                batch.append(msgspec.to_builtins(record))
                count += 1
                if len(batch) == ROWS:
                    write(batch)
                    batch = []
            write(batch)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); name a file in a writable directory") from error
    return count


@contextmanager
def _jsonl(file: Path) -> Iterator[Write]:
    with file.open("wb") as output:
        yield lambda batch: output.writelines(msgspec.json.encode(record) + b"\n" for record in batch)


WRITERS = {"jsonl": _jsonl, "parquet": parquet_writer}
"""The formats."""
