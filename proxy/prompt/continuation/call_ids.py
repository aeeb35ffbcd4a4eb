"""Ids for the calls and results of a history that came without: recorded ones, or else ones made up.

Some templates write ids into the prompt, or refuse a call that has none. Google's Python client sends results without
ids, and litellm sends Gemini calls without them, too. A result without an id belongs to the next call of its function
in the turn before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.parsing.formats import Format

Message = dict[str, Any]


def lacks_ids(messages: Sequence[Message]) -> bool:
    """Whether a call or a result has no id."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    results = (message for message in messages if message["role"] == "tool")
    return not all(call["id"] for call in calls) or not all(result.get("tool_call_id") for result in results)


def with_ids(messages: Sequence[Message], recorded: Mapping[int, Sequence[str]], form: Format) -> tuple[Message, ...]:
    """The messages with ids. `recorded`: the place of a turn -> the ids that its calls had."""
    complete, open_calls = list[Message](), list[tuple[str, str]]()
    taken = set[str]()
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            message = _turn(message, recorded.get(place), form, taken)
            open_calls = [(call["function"]["name"], call["id"]) for call in message.get("tool_calls") or ()]
            taken.update(id for _, id in open_calls)
        elif message["role"] == "tool":
            message = _result(message, open_calls)
            open_calls = [call for call in open_calls if call[1] != message.get("tool_call_id")]
        complete.append(message)
    return tuple(complete)


def _turn(message: Message, recorded: Sequence[str] | None, form: Format, taken: set[str]) -> Message:
    calls = message.get("tool_calls") or ()
    if all(call["id"] for call in calls):
        return message
    names = [call["function"]["name"] for call in calls]
    ids = recorded or form.lasting_ids(names, taken | {call["id"] for call in calls})
    return {**message, "tool_calls": [{**call, "id": call["id"] or id} for call, id in zip(calls, ids, strict=True)]}


def _result(message: Message, open_calls: Sequence[tuple[str, str]]) -> Message:
    name = message.get("name")
    id = next((id for called, id in open_calls if name in (None, "", called)), None)
    return message if message.get("tool_call_id") or id is None else {**message, "tool_call_id": id}
