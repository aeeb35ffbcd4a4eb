"""What a recorded answer said, whatever its wire format: text, reasoning, tool calls.

Reads whole bodies and raw server-sent events of chat completions, Responses and Messages, also streams that were cut.
Left out: Gemini, as no recording speaks it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]


def reply_of(api: str, answer: Mapping[str, Any]) -> Json | None:
    """`content`, `reasoning`, `calls` (id, name, namespace, arguments) and `finish`; None if the answer is empty.

    Arguments are the text as sent, which may be no JSON. `finish` is None for a stream that was cut.
    """
    if answer.get("status") != 200 or not ("events" in answer or "body" in answer):
        return None
    reply: Json = {"content": "", "reasoning": "", "calls": [], "finish": None}
    if "events" not in answer:
        (_chat_body if api == "chat" else _responses_body)(reply, answer["body"])
        return reply
    take = {"chat": _chat_event, "responses": _responses_event, "anthropic": _messages_event}[api]
    for event in _events(answer["events"]):
        take(reply, event)
    return reply


def _events(raw: list[str]) -> Iterator[Json]:
    for text in raw:
        for line in text.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def _chat_body(reply: Json, body: Json) -> None:
    choice = body["choices"][0]
    message = choice["message"]
    reply["content"] = message.get("content") or ""
    reply["reasoning"] = message.get("reasoning_content") or ""
    reply["calls"] = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    reply["finish"] = choice["finish_reason"]


def _chat_event(reply: Json, event: Json) -> None:
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        reply["content"] += delta.get("content") or ""
        reply["reasoning"] += delta.get("reasoning_content") or ""
        reply["finish"] = choice["finish_reason"] or reply["finish"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                reply["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            reply["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""


def _responses_body(reply: Json, body: Json) -> None:
    for item in body["output"]:
        if item["type"] == "message":
            reply["content"] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            reply["calls"].append(_named(item) | {"arguments": item["arguments"]})
    reply["finish"] = body["status"]


def _responses_event(reply: Json, event: Json) -> None:
    kind = event["type"]
    if kind == "response.output_text.delta":
        reply["content"] += event["delta"]
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        reply["calls"].append(_named(event["item"]))
    elif kind == "response.function_call_arguments.delta":
        reply["calls"][-1]["arguments"] += event["delta"]
    elif kind == "response.completed":
        reply["finish"] = "completed"


def _named(item: Json) -> Json:
    space = {"namespace": item["namespace"]} if item.get("namespace") else {}
    return {"id": item["call_id"], "name": item["name"], **space, "arguments": ""}


def _messages_event(reply: Json, event: Json) -> None:
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        block = event["content_block"]
        reply["calls"].append({"id": block["id"], "name": block["name"], "arguments": ""})
    elif event["type"] == "content_block_delta":
        delta = event["delta"]
        reply["content"] += delta.get("text", "")
        reply["reasoning"] += delta.get("thinking", "")
        if "partial_json" in delta:
            reply["calls"][-1]["arguments"] += delta["partial_json"]
    elif event["type"] == "message_delta":
        reply["finish"] = event["delta"]["stop_reason"]
