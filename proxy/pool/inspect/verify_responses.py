"""Verification of an attempt's stored responses: each belongs to a completion, and its context can be put together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from proxy.pool.compressed_json import as_text
from proxy.pool.schema import responses

PACKED = ("items", "fields")


def read_responses(connection: Connection, attempt_id: int, dialect: str) -> Sequence[Row[Any]]:
    """The rows of an attempt; packed columns as text, so that broken ones are reported and do not raise."""
    names = ("id", "completion_id", "response_id", "prefix_of", "prefix_length", "fields_of")
    texts = [as_text(responses.c[name], dialect).label(name) for name in PACKED]
    query = select(*(responses.c[name] for name in names), *texts).where(responses.c.attempt_id == attempt_id)
    return connection.execute(query.order_by(responses.c.id)).all()


def response_problems(rows: Sequence[Row[Any]], replies: Mapping[int, dict[str, Any] | None]) -> Iterator[str]:
    """Yield what is wrong with an attempt's responses. `replies`: of its completions; None where one cannot be read."""
    lengths: dict[str, int | None] = {}  # items of the contexts so far; None where one cannot be read
    with_fields: set[str] = set()
    for row in rows:
        problems = list(_link_problems(row, lengths))
        items, fields = decoded(row.items, list[msgspec.Raw]), decoded(row.fields, dict[str, Any])
        if items is None:
            problems.append("its items are no list")
        if fields is not None:
            with_fields.add(row.response_id)
        elif row.fields_of is None:
            problems.append("its fields are no JSON object")
        elif row.fields_of not in with_fields:
            problems.append(f"its fields are those of response {row.fields_of!r}, which is no earlier one with fields")
        if row.completion_id not in replies:
            problems.append(f"its completion {row.completion_id} is none of its attempt")
        reply = replies.get(row.completion_id)
        lengths[row.response_id] = None
        if items is not None and reply is not None:
            lengths[row.response_id] = row.prefix_length + len(items) + _output_items(reply)
        yield from (f"response {row.id}: {problem}" for problem in problems)


def decoded(text: str | bytes, kind: Any) -> Any:
    """Return a JSON text as a value of this kind; None: it is not one."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _link_problems(row: Row[Any], lengths: Mapping[str, int | None]) -> Iterator[str]:
    if row.prefix_of is None:
        if row.prefix_length:
            yield f"it shares {row.prefix_length} items but names no response"
    elif row.prefix_of not in lengths:
        yield f"it begins with response {row.prefix_of!r}, which is no earlier one of its attempt"
    elif (length := lengths[row.prefix_of]) is None:
        yield f"it begins with response {row.prefix_of!r}, whose items cannot be read"
    elif not 0 <= row.prefix_length <= length:
        yield f"it shares {row.prefix_length} items with response {row.prefix_of!r}, which has {length}"


def _output_items(reply: Mapping[str, Any]) -> int:
    """How many items a reply has in the output: its reasoning, its text, and each call."""
    return sum(map(bool, (reply.get("reasoning_content"), reply.get("content")))) + len(reply.get("tool_calls") or ())
