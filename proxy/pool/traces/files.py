"""Writes the branches of many rollouts to files, one attempt in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import replacing, write_whole
from proxy.pool.read.pages import RolloutFilter
from proxy.pool.read.shown import shown
from proxy.pool.traces.atif_writing import atif_document
from proxy.pool.traces.branches import PromptBranch, PromptReader, branches
from proxy.pool.traces.messages import chat_line, session_trace
from proxy.pool.training.finished_rollouts import tokenizers

DIRECTORIES = {"atif": ".json", "hf-traces": ".jsonl"}
"""The formats that are a directory with a file for each branch, and how the files' names end."""
TRACE_FILES = ("atif", "chat", "hf-traces")


@dataclass
class TraceCounts:
    """What was read of rollouts."""

    rollouts: int = 0
    without_calls: int = 0
    branches: int = 0
    raw: int = 0
    """Branches with text that could not be read as messages."""
    unknown_tools: int = 0


def recorded_branches(
    pool: Pool, which: RolloutFilter, reader: PromptReader, tokenizer: str | None, counts: TraceCounts
) -> Iterator[list[PromptBranch]]:
    """Yield the branches of each rollout that passes. UserError where another tokenizer made its tokens."""
    with shown(pool, which, f"exporting rollouts of {pool.name}") as all_found:
        for rollout in all_found:
            counts.rollouts += 1
            counts.without_calls += not rollout.completions
            if not rollout.completions:
                continue
            foreign = tokenizers(pool, [rollout.attempt or 0]) - {tokenizer}
            if tokenizer is not None and foreign:
                raise UserError(
                    f"attempt {rollout.attempt} was recorded with the tokenizer {min(foreign)}, and the model has "
                    f"{tokenizer}; name the directory of the proxy's engine.model with --model"
                )
            found = branches(rollout, reader)
            counts.branches += len(found)
            counts.raw += sum(any(turn.raw for turn in branch.turns) for branch in found)
            counts.unknown_tools += sum(branch.tools is None for branch in found)
            yield found


def write_traces(
    pool: Pool, which: RolloutFilter, kind: str, target: Path, reader: PromptReader, tokenizer: str | None
) -> TraceCounts:
    """Write the branches of the rollouts that pass, to a new directory or (chat) a file."""
    counts = TraceCounts()
    found = recorded_branches(pool, which, reader, tokenizer, counts)
    encode: Callable[[PromptBranch], bytes] = {
        "atif": lambda branch: atif_document(branch, tokenizer),
        "chat": chat_line,
        "hf-traces": session_trace,
    }[kind]
    try:
        if kind in DIRECTORIES:
            _demand_empty(target)
            for of_rollout in found:
                for branch in of_rollout:
                    write_whole(target / f"{branch.name}{DIRECTORIES[kind]}", encode(branch))
        else:
            with replacing(target) as partial, partial.open("wb") as output:
                output.writelines(encode(branch) for of_rollout in found for branch in of_rollout)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); name a writable place") from error
    return counts


def _demand_empty(directory: Path) -> None:
    """Make the directory. UserError when it has files, which would be taken for branches of this export."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UserError(f"the directory {directory} is not empty; name a new one for --output")
