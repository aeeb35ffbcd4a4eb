"""The model behind chat completions. Left out: streams, since nobody watches, and sampling parameters."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, Any]
SECONDS = 3600
"""Calls wait during weight updates, and while no engine is up."""
PAUSES = (0.5, 1, 2, 4, 8, 16, 32, 32)
"""Seconds before each further try of a call that failed without a fault of ours."""


class NoCompletion(Exception):
    """The model does not answer; the message is one sentence."""


class ContextFull(NoCompletion):
    """The request does not fit into the model's context."""


class RefusedCall(NoCompletion):
    """The call was refused, for example because the attempt has used up its turns."""


@dataclass(frozen=True)
class Answer:
    """One answer of the model."""

    message: Message
    """The assistant's message, as later requests repeat it."""
    cut: bool
    """Whether it ended at a token limit."""
    prompt_tokens: int

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


class Model:
    """One model at one address, which ends in /v1. The connection is kept."""

    def __init__(self, url: str, key: str, name: str):
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=SECONDS)
        self._path = f"{parts.path.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._name = name

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **fields: Any) -> list[Answer]:
        """The answers to a request, as many as `n` of `fields` says. ContextFull when it does not fit; NoCompletion."""
        body: dict[str, Any] = {"model": self._name, "messages": list(messages), **fields}
        if tools:
            body["tools"] = list(tools)
        value = self._post(json.dumps(body).encode())
        tokens = value["usage"]["prompt_tokens"]
        return [Answer(_sent(item["message"]), item["finish_reason"] == "length", tokens) for item in value["choices"]]

    def _post(self, body: bytes) -> Any:
        for pause in (*PAUSES, None):
            try:
                status, text = self._once(body)
            except (HTTPException, OSError) as error:
                status, text = 0, f"{type(error).__name__}: {error}"
            if status == 200:
                return json.loads(text)
            if 400 <= status < 500 and status not in (408, 429):
                raise _refusal(status, text)
            if pause is not None:
                time.sleep(pause)
        raise NoCompletion(
            f"the model does not answer after {len(PAUSES) + 1} tries (the last one: {status} {text[:300]})"
        )

    def _once(self, body: bytes) -> tuple[int, str]:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read().decode()
        except (HTTPException, OSError):
            self._connection.close()  # the next request opens another one
            raise


def _refusal(status: int, text: str) -> NoCompletion:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": text[:300]}
    kind = ContextFull if error.get("code") == "context_length_exceeded" else RefusedCall
    return kind(f"the model call was refused with {status}: {error.get('message')}")


def _sent(message: Message) -> Message:
    """The parts of an assistant's message that are sent back."""
    kept = ("role", "content", "reasoning_content", "tool_calls")
    return {name: message[name] for name in kept if message.get(name) is not None}
