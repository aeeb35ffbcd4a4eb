"""Items of the Responses dialect: their messages for the template, and the stored ones that a request names.

A request may name what an earlier response of the same attempt had: its whole context (`previous_response_id`), or one
item of its output (`item_reference`). These are put in their places first; then the request reads as if they had been
sent. Left out: where they are stored (proxy/recording/stored_responses.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from proxy.call import CallError
from proxy.dialects.base import parsed_arguments, refuse, tool_call, unsealed

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE = "message"
TEXTS = ("input_text", "output_text", "text", "refusal")

NOT_FOUND = (
    "Item with id '{}' not found. Items are not persisted when `store` is set to false. Try again with `store` set to "
    "true, or remove this item from your input."
)
"""OpenAI's own sentence."""


class Part(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class Item(msgspec.Struct, omit_defaults=True):
    type: str = MESSAGE
    id: str | None = None
    role: str = ""
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    status: str | None = None

    @property
    def names_another(self) -> bool:
        """Whether it only names a stored item. OpenAI lets clients leave out the type."""
        return self.type == "item_reference" or (self.type == MESSAGE and not self.role and self.id is not None)


_decode = msgspec.json.Decoder(Item).decode


def encoded(item: Item) -> bytes:
    """Write an item as it is stored: only what messages are made of, the same bytes for the same meaning."""
    kind = MESSAGE if item.type == MESSAGE else item.type  # msgspec leaves out defaults that are the same object
    texts = {name: _plain(getattr(item, name)) for name in ("content", "summary", "output")}
    return msgspec.json.encode(msgspec.structs.replace(item, id=None, status=None, type=kind, **texts))


def _plain(content: str | list[Part] | None) -> str | list[Part] | None:
    return [Part(part.type, part.text, part.refusal) for part in content] if isinstance(content, list) else content


class StoredItems(Protocol):
    """What earlier responses of the attempt have, as `encoded` items."""

    most_bytes: int
    """The most bytes that a request may have once the items that it names are in their places."""

    def context(self, response_id: str) -> Sequence[bytes] | None:
        """The input and the output of a stored response; None where there is none of this id."""

    def items(self, ids: Sequence[str]) -> Mapping[str, bytes]:
        """The items of stored outputs with these ids, as many of them as there are."""


def completed(items: list[Item], previous: str | None, stored: StoredItems | None) -> list[Item]:
    """The whole input: first the context of `previous`, then `items` with the stored ones in the place of references.

    CallError as OpenAI's for what is not stored.
    """
    named = [item.id or "" for item in items if item.names_another]
    if not named and not previous:
        return items
    context = stored.context(previous) if stored and previous else ()
    if previous and (stored is None or context is None):
        message = f"Previous response with id '{previous}' not found."
        raise CallError(400, "previous_response_not_found", message, "previous_response_id")
    known = stored.items(named) if stored and named else {}
    for id in named:
        if id not in known:
            raise CallError(404, "not_found", NOT_FOUND.format(id), "input")
    added = [*(context or ()), *(known[id] for id in named)]
    if stored and sum(map(len, added)) > stored.most_bytes:
        rule = f"names more than {stored.most_bytes} bytes of stored items, and no more are served; send less"
        raise CallError(413, "request_too_large", f"input {rule}", "input")
    own = [_decode(known[item.id or ""]) if item.names_another else item for item in items]
    return [*map(_decode, context or ()), *own]


def messages_of(items: Sequence[Item], first: int) -> list[dict[str, Any]]:
    """Items as messages. Consecutive reasoning, text and calls are one turn; a second text begins another.

    `first`: the number of the first item, for error messages.
    """
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items, first):
        message = _message(item, f"input[{i}]")
        if message["role"] == "assistant" and messages and _same_turn(messages[-1], message):
            turn = messages[-1]
            turn["content"] += message["content"]
            for name, nothing in (("reasoning_content", ""), ("tool_calls", [])):
                if name in message:
                    turn[name] = turn.get(name, nothing) + message[name]
        else:
            messages.append(message)
    return messages


def _message(item: Item, where: str) -> dict[str, Any]:
    if item.type == MESSAGE:
        if item.role not in ROLES:
            refuse(f"{where}.role", f"is {item.role!r}; use one of {', '.join(ROLES)}")
        glue = "" if item.role == "assistant" else "\n\n"
        return {"role": ROLES[item.role], "content": _text(item.content, f"{where}.content", glue)}
    if item.type == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _reasoning(item)}
    if item.type in ("function_call", "custom_tool_call"):
        arguments = parsed_arguments(item.arguments) if item.type == "function_call" else {"input": item.input or ""}
        name = f"{item.namespace}__{item.name}" if item.namespace else item.name
        call = tool_call(item.call_id, name, arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return {
            "role": "tool",
            "tool_call_id": item.call_id or "",
            "content": _text(item.output, f"{where}.output", "\n"),
        }
    refuse(where, f"is of type {item.type!r}, which is not served; send messages, reasoning and tool calls in full")


def _same_turn(turn: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether the assistant's next item belongs to this turn. After text only calls do: a second text is another turn,
    as codex keeps the text of a reply that broke off."""
    has_text = turn["content"] and not turn.get("tool_calls")
    return turn["role"] == "assistant" and not (has_text and "tool_calls" not in more)


def _text(content: str | list[Part] | None, where: str, glue: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for j, other in ((j, part.type) for j, part in enumerate(content) if part.type not in TEXTS):
        refuse(f"{where}[{j}]", f"is of type {other!r}; send text only")
    return glue.join(part.text or part.refusal or "" for part in content)


def _reasoning(item: Item) -> str:
    """The reasoning text. Clients send back all of it, the encrypted content, or only a summary."""
    if item.content:
        return item.content if isinstance(item.content, str) else "".join(part.text or "" for part in item.content)
    return unsealed(item.encrypted_content) or "".join(part.text or "" for part in item.summary or ())
