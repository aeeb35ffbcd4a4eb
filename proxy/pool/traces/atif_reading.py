"""Reads ATIF documents: the messages of each, and which of them are demonstrations. Embedded sub-agents come along.

A demonstration is an agent's step that no other document has (`is_copied_context`) and that a model wrote
(`llm_call_count`). Refused: content that is no text, and results that are in another document only.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.pool.completions.labels import LABELS
from proxy.pool.errors import UserError
from proxy.pool.traces.atif_format import (
    OURS,
    AtifCall,
    AtifDocument,
    AtifMetrics,
    AtifResult,
    AtifStep,
    Content,
    OurCall,
    OurDocument,
    OurMetrics,
    OurResult,
    OurStep,
)
from proxy.pool.traces.times import unix_time

DOCUMENT_BYTES = 512 << 20
"""One document. Our own have the whole prompt at every step, so long ones are large."""
DEPTH = 64
"""Levels of sub-agents in one document."""
VERSIONS = re.compile(r"ATIF-v1\.\d+")
Extra = TypeVar("Extra")
ROLES = {"system": "system", "user": "user", "agent": "assistant"}


@dataclass(frozen=True, kw_only=True)
class AtifTurn:
    """A message of a document, in the form of chat completions."""

    message: dict[str, Any]
    place: str
    """The document and the step, for messages."""
    demonstration: bool = False
    metrics: AtifMetrics | None = None
    """Metrics of the call that wrote the step."""
    own: OurMetrics = OurMetrics()
    started_at: float | None = None
    """When the call began, unix time; None: the document does not say it."""


@dataclass(frozen=True, kw_only=True)
class ReadTrajectory:
    """One document."""

    place: str
    offset: int
    """The byte of its file at which it begins, or the document in which it is."""
    session: str
    """Documents of one session are of one rollout."""
    task: str
    agent: str
    tools: list[dict[str, Any]]
    turns: list[AtifTurn]
    reward: float | None
    label: str | None
    """main | subagent | side | compaction, in our own documents; None: it does not say."""
    tokenizer: str | None
    """The fingerprint of the tokenizer of its token ids; None: it does not say."""


def documents(file: Path, offset: int | None = None) -> Iterator[ReadTrajectory]:
    """Yield the documents of a .json file, or of the lines of a .jsonl file: of all, or of the one at this byte.

    UserError where one is no ATIF or holds what no chat template can show.
    """
    try:
        with file.open("rb") as data:
            if file.suffix != ".jsonl":
                yield from _read(data.read(DOCUMENT_BYTES + 1), str(file), 0, str(file))
                return
            at, number = data.seek(offset or 0), 0
            while line := data.readline(DOCUMENT_BYTES + 1):
                number += 1
                place = f"{file}:{number}" if offset is None else f"{file}, byte {offset}"
                if line.strip():
                    yield from _read(line, place, at, f"{file}, byte {at}")
                if offset is not None:
                    return
                at += len(line)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); name a readable file") from error


def count_documents(file: Path) -> int:
    """Count the documents of a file, without those of sub-agents in them. A file that cannot be read counts as one."""
    if file.suffix != ".jsonl":
        return 1
    try:
        with file.open("rb") as data:
            return sum(bool(line.strip()) for line in iter(lambda: data.readline(DOCUMENT_BYTES + 1), b""))
    except OSError:  # `documents` says it
        return 1


def _read(data: bytes, place: str, offset: int, unnamed: str) -> Iterator[ReadTrajectory]:
    """Yield a document, then the sub-agents in it, each before its own. They are of the session and task of it.

    `unnamed`: the session of a document that names none.
    """
    if len(data) > DOCUMENT_BYTES:
        raise UserError(f"{place} has more than {DOCUMENT_BYTES} bytes, which is the limit; leave the document out")
    whole: ReadTrajectory | None = None
    left: list[tuple[bytes | msgspec.Raw, str, int]] = [(data, place, 0)]
    while left:
        text, where, depth = left.pop()
        if depth > DEPTH:
            raise UserError(f"{place} has sub-agents more than {DEPTH} levels deep; leave the document out")
        read, inner = _trajectory(text, where, offset, unnamed)
        whole = read if whole is None else whole
        yield replace(read, session=whole.session, task=whole.task)
        left += [(each, f"{where}, a sub-agent of it", depth + 1) for each in reversed(inner)]


def _trajectory(
    data: bytes | msgspec.Raw, place: str, offset: int, unnamed: str
) -> tuple[ReadTrajectory, list[msgspec.Raw]]:
    """Return one document, and the documents of its sub-agents."""
    try:
        document = msgspec.json.decode(data, type=AtifDocument)
        steps = [msgspec.json.decode(step, type=AtifStep) for step in document.steps]
        ours = _ours(document.extra, OurDocument)
        session = document.session_id or document.trajectory_id or unnamed
        task = ours.task or session
        if "\0" in task + document.agent.name:
            raise UserError(f"{place} has a zero character in its task, session or agent; take it out")
        turns = [turn for step in steps for turn in _turns(step, f"{place}, step {step.step_id}")]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{place} is no ATIF document ({error}); validate it with its writer's own tools") from error
    if not VERSIONS.fullmatch(document.schema_version):
        raise UserError(f"{place} is {document.schema_version!r}, and documents of ATIF-v1 are read; convert it first")
    if [step.step_id for step in steps] != list(range(1, len(steps) + 1)):
        raise UserError(f"the step_ids of {place} are not 1, 2, 3 ...; ATIF demands that, so steps may be missing")
    read = ReadTrajectory(
        place=place,
        offset=offset,
        session=session,
        task=task,
        agent=document.agent.name,
        tools=document.agent.tool_definitions or [],
        turns=turns,
        reward=ours.reward,
        label=ours.label if ours.label in LABELS else None,
        tokenizer=ours.tokenizer,
    )
    return read, document.subagent_trajectories or []


def _turns(step: AtifStep, place: str) -> Iterator[AtifTurn]:
    results = step.observation.results if step.observation else []
    if _ours(step.extra, OurStep).role != "tool":
        message: dict[str, Any] = {"role": ROLES[step.source], "content": _text(step.message, place)}
        if step.reasoning_content:
            message["reasoning_content"] = step.reasoning_content
        if step.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call) for call in step.tool_calls]
        written = step.source == "agent" and not step.is_copied_context and step.llm_call_count != 0
        if written:
            own, started = _answer_extra(step.metrics, place), unix_time(step.timestamp)
            yield AtifTurn(
                message=message, place=place, demonstration=True, metrics=step.metrics, own=own, started_at=started
            )
        else:
            yield AtifTurn(message=message, place=place)
    for result in results:
        yield AtifTurn(message=_result(result, place), place=place)


def _answer_extra(metrics: AtifMetrics | None, place: str) -> OurMetrics:
    """Return what our own export says about a call. UserError for spans that its answer does not have."""
    own = _ours(metrics.extra if metrics else None, OurMetrics)
    length = len(metrics.completion_token_ids or ()) if metrics else 0
    ends = [0, *(place for span in own.given for place in span)]
    ordered = all(a <= b for a, b in pairwise(ends)) and all(start < end for start, end in own.given)
    if own.given and not (ordered and ends[-1] <= length):
        raise UserError(f"{place} has given = {own.given}, no spans of its {length} tokens; leave the document out")
    return own


def _call(call: AtifCall) -> dict[str, Any]:
    written = _ours(call.extra, OurCall).arguments
    text = written if written is not None else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.tool_call_id, "type": "function", "function": {"name": call.function_name, "arguments": text}}


def _result(result: AtifResult, place: str) -> dict[str, Any]:
    if result.content is None:
        raise UserError(f"{place} has a result without content; write what the sub-agent returned as its content")
    id = result.source_call_id or _ours(result.extra, OurResult).call
    return {"role": "tool", "content": _text(result.content, place)} | ({"tool_call_id": id} if id else {})


def _text(content: Content, place: str) -> str:
    if isinstance(content, str):
        return content
    other = next((part.type for part in content if part.type != "text" or part.text is None), None)
    if other is not None:
        raise UserError(f"{place} holds {other}, and only text can be imitated; leave the document out")
    return "".join(part.text or "" for part in content)


def _ours(extra: dict[str, Any] | None, form: type[Extra]) -> Extra:
    """Return our own fields of an `extra`. msgspec.ValidationError where they have another form."""
    return msgspec.convert((extra or {}).get(OURS, {}), form)
