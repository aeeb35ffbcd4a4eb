"""One chat completion from any OpenAI-compatible endpoint, for the built-in one-call agent and for judges.

Left out: streams, tools and retries. The caller knows whether another try makes sense.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_ERROR = 300


@dataclass(frozen=True)
class ChatModel:
    """A model and its endpoint."""

    url: str
    """Base URL, ending in /v1."""
    name: str
    key: str = ""


class NoAnswer(Exception):
    """The endpoint gave no answer; the message says why in one sentence."""


async def complete(model: ChatModel, messages: Sequence[dict[str, str]], seconds: float | None, **options: Any) -> str:
    """Ask for one completion and return its text. NoAnswer when there is none, TimeoutError after `seconds`."""
    headers = {"Authorization": f"Bearer {model.key}"} if model.key else {}
    body = {"model": model.name, "messages": list(messages), **options}
    url = f"{model.url.rstrip('/')}/chat/completions"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as client,
            client.post(url, json=body, headers=headers) as reply,
        ):
            if reply.status != 200:
                raise NoAnswer(f"{model.url} answers {reply.status}: {(await reply.text())[:MAX_ERROR]}")
            content = (await reply.json())["choices"][0]["message"]["content"]
    except TimeoutError:
        raise
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"{model.url} gives no answer ({type(error).__name__}: {str(error)[:MAX_ERROR]})") from error
    return content if isinstance(content, str) else ""
