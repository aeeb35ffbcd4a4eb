"""What one attempt has stored of its Responses calls: finds the items that a request names, and what is new in it.

Everything is read from the pool, so any proxy can serve what another one has stored. In memory are only the digests of
the last few contexts, by which a request's new items are found. Left out: the SQL
(proxy.pool.completions.responses.py), and how items read (proxy/dialects/response_items.py).
"""

import logging
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from proxy.augment.prompt_view import PromptView
from proxy.call import CallError, Reply, StoredRequest, ToolCall
from proxy.dialects.response_items import Item, encoded
from proxy.dialects.responses import offered, stored_response, usage
from proxy.http.limits import LIMITS, RequestLimits
from proxy.pool.completions.common_prefix import common_length
from proxy.pool.completions.records import CUT_FINISH_REASONS, NewResponse
from proxy.pool.completions.responses import (
    StoredResponse,
    ancestry,
    delete_response,
    newest,
    responses_of,
    store_again,
    stored_bytes,
)
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError

log = logging.getLogger(__name__)
KEPT = 4
"""Contexts whose digests are kept, as a conversation may have parallel branches."""
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
"""A response. Clients may name any text, also one that PostgreSQL does not take (NUL); others are not looked up."""
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{4,})")
"""An item of an output: its response and its place."""


@dataclass(frozen=True)
class _Context:
    """A response's input and output as digests."""

    response_id: str
    digests: "array[int]"
    fields: bytes
    """Digest of the request's fields."""
    fields_of: str
    """The response whose row holds them."""


class StoredResponses:
    """The stored responses of an attempt. Any thread may use it: the kept contexts are replaced as a whole."""

    def __init__(self, pool: Pool, attempt_id: int, limits: RequestLimits = LIMITS, view: PromptView | None = None):
        self._pool = pool
        self._attempt_id = attempt_id
        self._limits = limits
        self._view = view or PromptView(None)
        self._bytes = 0
        """What the attempt has stored, as far as this proxy knows."""
        self.most_bytes = limits.body_bytes
        self._kept: tuple[_Context, ...] = ()
        self._ready = False

    # ---- what a request names

    def context(self, response_id: str) -> list[bytes] | None:
        """The input and the output of a response; None where there is none of this id."""
        return self._context(response_id)

    def items(self, ids: Sequence[str]) -> dict[str, bytes]:
        """The items of outputs with these ids, as many of them as there are."""
        named = {match[1] for id in ids if (match := ITEM_ID.fullmatch(id))}
        items = (item for each in self._responses([f"resp_{hex}" for hex in named]) for item in each["output"])
        wanted = set(ids)
        return {item["id"]: _encoded(item) for item in items if item["id"] in wanted}

    # ---- what clients retrieve

    def response(self, response_id: str) -> dict[str, Any] | None:
        """The response object; None where there is none of this id."""
        ours = RESPONSE_ID.fullmatch(response_id) is not None
        return next(iter(self._responses([response_id])), None) if ours else None

    def input_items(self, response_id: str) -> list[dict[str, Any]] | None:
        """The items of a response's input, with ids; None where there is none of this id."""
        context = self._context(response_id, with_output=False)
        if context is None:
            return None
        items = [msgspec.json.decode(item) for item in context]
        name = response_id.removeprefix("resp_")
        return [{"type": "message", **item, "id": f"in_{name}{place:04x}"} for place, item in enumerate(items)]

    def delete(self, response_id: str, at: float) -> bool:
        """Hide a response; False where there is none of this id."""
        ours = RESPONSE_ID.fullmatch(response_id) is not None
        return ours and delete_response(self._pool, self._attempt_id, response_id, at)

    # ---- what is stored of a call

    def ready(self) -> None:
        """Prepare for a response that is to be stored; CallError when the attempt has stored as much as it may.

        The first call reads the context of the attempt's last response, which another proxy may have stored. Calls in
        flight at the same time may exceed the limit by what they store.
        """
        if not self._ready:
            self._ready = True
            self._bytes += stored_bytes(self._pool, self._attempt_id)
            if (last := newest(self._pool, self._attempt_id)) is not None:
                self._context(last)
        if self._bytes >= self._limits.stored_bytes:
            message = (
                f"this attempt's stored responses have reached their limit of {self._limits.stored_bytes} bytes; send "
                "the whole input with store: false"
            )
            raise CallError(400, "too_many_stored_bytes", message, "store")

    def new(self, request: StoredRequest, reply: Reply) -> NewResponse:
        """The row of an answered request: the items and fields that no kept context has."""
        digests, fields = _digests(request.items), _digest(msgspec.json.encode(request.fields))
        lengths = [(common_length(each.digests, digests, len(digests)), each) for each in self._kept]
        length, base = max(lengths, key=lambda pair: pair[0], default=(0, None))
        same = next((each.fields_of for each in self._kept if each.fields == fields), None)
        return NewResponse(
            id=request.response_id,
            previous=request.previous,
            prefix_of=base.response_id if base and length else None,
            prefix_length=length,
            items=request.items[length:],
            fields=None if same else request.fields,
            fields_of=same,
            usage=usage(reply),
            created_at=request.created_at,
        )

    def add(self, request: StoredRequest, reply: Reply, new: NewResponse) -> None:
        """Count a response that is committed, and keep its context."""
        self._bytes += sum(map(len, new.items)) + len(msgspec.json.encode(new.fields))
        output = _object(new, request.fields, self._view.told(reply))["output"]
        context = [*request.items, *map(_encoded, output)]
        fields = _digest(msgspec.json.encode(request.fields))
        self._keep(_Context(new.id, _digests(context), fields, new.fields_of or new.id))

    def answer_again(self, completion_id: int, request: StoredRequest, reply: Reply) -> None:
        """Store a response for a retry, which gets a recorded answer under an id of its own."""
        new = self.new(request, reply)
        try:
            store_again(self._pool, self._attempt_id, completion_id, new)
        except PoolError as error:  # the client has its answer; what names it later is refused
            log.warning("response %s is not stored: %s", new.id, error)
            return
        self.add(request, reply, new)

    # ----

    def _keep(self, context: _Context) -> None:
        others = [each for each in self._kept if each.response_id != context.response_id]
        self._kept = (context, *others[: KEPT - 1])

    def _context(self, response_id: str, with_output: bool = True) -> list[bytes] | None:
        ours = RESPONSE_ID.fullmatch(response_id) is not None
        chain = ancestry(self._pool, self._attempt_id, response_id) if ours else []
        if not chain:
            return None
        fields = self._fields(chain)
        items: list[bytes] = []
        for each in chain:
            items = items[: each.row.prefix_length] + list(each.row.items)
            if with_output or each is not chain[-1]:
                items += map(_encoded, self._object(each, fields)["output"])
        if with_output:
            last = chain[-1].row
            source = last.fields_of or last.id
            digest = _digest(msgspec.json.encode(fields[source]))
            self._keep(_Context(last.id, _digests(items), digest, source))
        return items

    def _responses(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        stored = responses_of(self._pool, self._attempt_id, ids)
        fields = self._fields(list(stored.values()))
        return [self._object(each, fields) for each in stored.values()]

    def _object(self, stored: StoredResponse, fields: dict[str, Any]) -> dict[str, Any]:
        """The response object of a stored response, as it was sent."""
        message, row = stored.reply, stored.row
        self._view.learn(offered(fields[row.fields_of or row.id]))
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        reply = Reply(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(ToolCall(id, function["name"], function["arguments"]) for id, function in calls),
            finish_reason="length" if stored.finish_reason in CUT_FINISH_REASONS else stored.finish_reason,
            stop_sequence=None,
            prompt_tokens=0,
            sampled_tokens=0,
            cached_tokens=0,
        )
        return _object(row, fields[row.fields_of or row.id], self._view.told(reply)) | {"usage": row.usage}

    def _fields(self, stored: Sequence[StoredResponse]) -> dict[str, Any]:
        """The fields of these responses, by the response whose row holds them."""
        known = {each.row.id: each.row.fields for each in stored if each.row.fields is not None}
        missing = {each.row.fields_of for each in stored} - {None, *known}
        others = responses_of(self._pool, self._attempt_id, [id for id in missing if id], deleted=True)
        return known | {id: each.row.fields for id, each in others.items()}


def _object(row: NewResponse, fields: dict[str, Any], reply: Reply) -> dict[str, Any]:
    own = {"id": row.id, "created_at": row.created_at, "previous_response_id": row.previous, "store": True}
    return stored_response(own, fields, reply)


def _encoded(item: dict[str, Any]) -> bytes:
    return encoded(msgspec.convert(item, Item))


def _digests(items: Sequence[bytes]) -> "array[int]":
    return array("q", [int.from_bytes(_digest(item), "little", signed=True) for item in items])


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
