"""An attempt as a readable tree: which completion follows which, how much is new, how it ended, what was dropped.

Below each reply stands what the tools answered, as far as it is recorded: the ends of long results.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select

from proxy.pool.behaviour.actions import results_behind, results_of_calls, turn_before
from proxy.pool.completions.labels import SIDE
from proxy.pool.completions.observed import HEAD, TAIL, ToolResult
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import labelled, of_attempts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect import segments
from proxy.pool.inspect.account import place_of
from proxy.pool.schema import archives, attempts, completions, fates, groups, policy_versions, rollouts, runs, tasks
from proxy.pool.training.places import CONSUMED

REPLY_CHARACTERS = 60
"""Maximum characters of a reply that are shown."""


@dataclass(frozen=True)
class Branch:
    """A completion and the number of forks above it."""

    depth: int
    completion: Completion


def tree(chain: list[Completion]) -> Iterator[Branch]:
    """Yield the completions, each after the one it follows. Only a fork increases the depth."""
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
    """Return the lines that show an attempt; UserError when there is none with this id."""
    query = (
        select(attempts, runs.c.name.label("run"), tasks.c.name.label("task"), groups.c.queue_index)
        .add_columns(rollouts.c.member, rollouts.c.reward, rollouts.c.attempt_id.label("final"), groups.c.dropped_at)
        .add_columns(rollouts.c.hacked, rollouts.c.integrity, groups.c.start_attempt_id, groups.c.start_turns)
        .add_columns(archives.c.file)
        .outerjoin(runs, runs.c.id == attempts.c.run_id)
        .outerjoin(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .outerjoin(groups, groups.c.id == rollouts.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(archives, archives.c.id == groups.c.archive_id)
    )
    with pool.read() as connection:
        row = connection.execute(query.where(attempts.c.id == attempt_id)).one_or_none()
        known = connection.scalars(select(attempts.c.id).order_by(attempts.c.id.desc()).limit(5)).all()
        chain = of_attempts(connection, [attempt_id])[attempt_id]
        where = place_of(connection, attempt_id)
        trained = {fate.completion_id: _fate(fate) for fate in connection.execute(_fates(attempt_id))}
    if row is None:
        newest = ", ".join(map(str, known))
        raise UserError(f"attempt {attempt_id} is not in the pool {pool.name}; its newest are: {newest or 'none'}")
    chain = labelled(chain)
    behind = results_behind(sorted(chain, key=lambda item: item.label == SIDE))  # requests of the work first
    results = {id: requests[0] for id, requests in behind.items()}
    lines = (line for branch in tree(chain) for line in _turn(branch, trained.get(branch.completion.id), results))
    return [*_heading(row._mapping, where), *lines, *segments.lines(chain)]


def _fates(attempt_id: int) -> Select[Any]:
    return (
        select(fates, policy_versions.c.step, policy_versions.c.retired_at)
        .join_from(fates, completions)
        .join(policy_versions, policy_versions.c.id == fates.c.version_id)
        .where(completions.c.attempt_id == attempt_id)
    )


def _fate(row: Row[Any]) -> str:
    """Say what the last step that took a completion did with its tokens."""
    left_out = "".join(f", {tokens} left out ({plain(why)})" for why, tokens in row.left_out.items())
    back = "" if row.retired_at is None else ", which was rolled back"
    return f"{row.trained} trained{left_out} in step {row.step}{back}"


def _heading(row: Any, where: str | None) -> Iterator[str]:
    yield f"attempt {row['id']}: {plain(row['agent'])}, {_state(row)}"
    if row["rollout_id"] is not None:
        place = f"task {plain(row['task'])}, group {row['queue_index']}, member {row['member']}"
        yield f"run {plain(row['run'])}, {place}, try {row['number']}"
    if row["final"] == row["id"]:
        yield f"reward {'missing' if row['reward'] is None else row['reward']}"
        yield from _integrity(row["hacked"], row["integrity"] or {})
    if row["start_attempt_id"] is not None:
        yield f"it begins with {row['start_turns']} turns of attempt {row['start_attempt_id']}"
    if row["differed"] is not None:
        yield f"it left the recorded attempt: {plain(row['differed'])}"
    if where not in (None, CONSUMED):
        yield f"its tokens: {where}"
    if row["dropped_at"] is not None:
        yield f"its calls have left the pool for {row['file']}; read them with proxy.pool.read"


def _integrity(hacked: str | None, found: dict[str, Any]) -> Iterator[str]:
    """Yield what detectors of reward hacking and a judge found, with the evidence."""
    if hacked is not None:
        yield f"hacked ({hacked}), by {', '.join(found['by'])}; its reward was {found['reward']}"
    for finding in found.get("findings", ()):
        at = "" if finding.get("completion") is None else f" at #{finding['completion']}"
        yield f"{finding['severity']} {finding['detector']}{at}: {plain(finding['quote'])}"
    if judge := found.get("judge"):
        words = {True: "hacked", False: "not hacked", None: "no opinion"}[judge["hacked"]]
        yield f"the judge: {words}: {plain(judge['reason'])}"


def _state(row: Any) -> str:
    if row["closed_at"] is None:
        return "open"
    seconds = f"ended after {row['closed_at'] - row['opened_at']:.1f} s"
    return seconds if row["failure"] is None else f"{seconds} with {row['failure']}: {plain(row['detail'] or '')}"


def _turn(branch: Branch, fate: str | None, results: dict[int, tuple[ToolResult, ...]]) -> Iterator[str]:
    """Yield the line of a completion, and below it those of results."""
    item = branch.completion
    yield _line(branch, fate)
    indented = f"{'    ' * branch.depth}  "
    if item.observed is not None and turn_before(item) is None:
        for result in item.observed.results:
            yield f"{indented}before it, {_stray(result)}"
    for line in _answers(item, results.get(item.id, ())):
        yield indented + line


def _answers(item: Completion, results: Sequence[ToolResult]) -> Iterator[str]:
    """Yield what is known of the result of each call of a reply, then what else the agent sent behind the reply."""
    calls = item.reply.get("tool_calls") or []
    answers = results_of_calls([call.get("id", "") for call in calls], [each for each in results if not each.spoken])
    for call, result in zip(calls, answers, strict=True):
        name = plain(str(call["function"]["name"]))
        yield f"result of {name} is not known" if result is None else f"result of {name}, {_kept(result)}"
    yield from (_stray(each) for each in results if not any(each is answer for answer in answers))


def _stray(result: ToolResult) -> str:
    """Describe a result that cannot be said to answer a certain call."""
    tool = f"result of {plain(result.name) or 'a tool'}, whose call is not known"
    return f"{'message of the user' if result.spoken else tool}, {_kept(result)}"


def _kept(result: ToolResult) -> str:
    """Return the size of a result and what is kept of it, with a mark where characters are missing."""
    head, tail = result.head[:HEAD], result.tail[-TAIL:]
    missing = result.size - len(head) - len(tail)
    words = [plain(head), f"[{missing} characters not kept]", plain(tail)] if missing > 0 else [plain(head + tail)]
    size = f"{result.size} character{'s' * (result.size != 1)}{', flagged as an error' * result.error}"
    return ": ".join(filter(None, [size, " ".join(filter(None, words))]))


def _line(branch: Branch, fate: str | None) -> str:
    item = branch.completion
    shared = f"{item.prefix_length} of #{item.prefix_of}" if item.prefix_of is not None else "0"
    parts = [
        f"#{item.id}" if item.follows is None else f"#{item.id} follows #{item.follows}",
        f"shared {shared}",
        f"new {len(item.prompt_tail)}",
        f"sampled {item.sampled_count}",
        *([f"given {item.given_count}"] if item.given else []),
        *([] if item.label is None else [item.label]),
        item.finish_reason,
        *[span.version for span in item.versions],
    ]
    if item.untrainable is not None:
        parts.append(f"untrainable ({plain(str(item.untrainable))})")
    if fate is not None:
        parts.append(fate)
    if item.misfit:
        parts.append(f"misses its form ({plain(item.misfit)})")
    return f"{'    ' * branch.depth}{', '.join(parts)}: {_words(item.reply)}"


def _words(reply: dict[str, Any]) -> str:
    """Return the first words of a reply: its text and tool calls, else its reasoning."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in reply.get("tool_calls") or []]
    text = " ".join([str(reply.get("content") or ""), *calls]).strip() or str(reply.get("reasoning_content") or "")
    words = plain(text)
    return words if len(words) <= REPLY_CHARACTERS else f"{words[:REPLY_CHARACTERS]}..."


def plain(text: str) -> str:
    """Return the text as one line without control characters, which could control the terminal."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
