"""The five dialects from a client's side: the request with one user message, and the place of the answer's text."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec


@dataclass(frozen=True)
class DialectClient:
    """One dialect: its paths, its request, and how to read the text of an answer, an event and an error."""

    name: str
    path: str
    streamed: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    delta: Callable[[dict[str, Any]], str]
    error: Callable[[dict[str, Any]], tuple[Any, str]]
    """Kind and message of an error: in a whole answer, or in the event that ends a stream."""

    def request(self, text: str, stream: bool, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Path and body of a request with this text."""
        marked = {"stream": True} if stream and self.name != "gemini" else {}
        return self.streamed if stream else self.path, {**self.body(text), **marked, **fields}

    def text_of(self, data: bytes, stream: bool) -> str:
        """The text of a whole answer, or of all events of one."""
        if not stream:
            return self.text(msgspec.json.decode(data))
        return "".join(map(self.delta, events(data)))


def events(data: bytes) -> Sequence[dict[str, Any]]:
    """The events of a stream, without comments and `[DONE]`."""
    return [msgspec.json.decode(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]


async def body_of(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer, or what came of it before it broke off, as Gemini's streams do behind an error."""
    data = bytearray()
    with suppress(aiohttp.ClientPayloadError):
        async for chunk in answer.content.iter_any():
            data += chunk
    return bytes(data)


def _user(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


def _parts(answer: dict[str, Any]) -> str:
    candidates = answer.get("candidates") or [{"content": {"parts": []}}]
    return "".join(part.get("text", "") for part in candidates[0]["content"]["parts"])


def _chat_delta(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _messages_delta(event: dict[str, Any]) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def _responses_delta(event: dict[str, Any]) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _output(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


def _openai_error(answer: dict[str, Any]) -> tuple[Any, str]:
    error = answer["error"]
    return error["code"], error["message"]


def _responses_error(answer: dict[str, Any]) -> tuple[Any, str]:
    assert answer.get("type") in (None, "response.failed")
    return _openai_error(answer.get("response", answer))


def _typed_error(answer: dict[str, Any]) -> tuple[Any, str]:
    assert answer["type"] == "error"
    return answer["error"]["type"], answer["error"]["message"]


GEMINI = "/v1beta/models/tiny:"
DIALECT_CLIENTS = (
    DialectClient(
        "chat", "/v1/chat/completions", "/v1/chat/completions", _user,
        lambda answer: str(answer["choices"][0]["message"]["content"]), _chat_delta, _openai_error,
    ),
    DialectClient(
        "responses", "/v1/responses", "/v1/responses", lambda text: {"model": "tiny", "input": text},
        _output, _responses_delta, _responses_error,
    ),
    DialectClient(
        "messages", "/v1/messages", "/v1/messages", lambda text: {**_user(text), "max_tokens": 4000},
        lambda answer: "".join(block["text"] for block in answer["content"]), _messages_delta, _typed_error,
    ),
    DialectClient(
        "gemini", GEMINI + "generateContent", GEMINI + "streamGenerateContent?alt=sse",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]}, _parts, _parts, _openai_error,
    ),
    DialectClient(
        "completions", "/v1/completions", "/v1/completions",
        lambda text: {"model": "tiny", "prompt": text, "max_tokens": 4000},
        lambda answer: str(answer["choices"][0]["text"]),
        lambda event: "".join(choice["text"] for choice in event.get("choices", ())), _openai_error,
    ),
)  # fmt: skip
