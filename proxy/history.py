"""What stands before each turn of a request, as digests: a reply is continued only where its own history goes before.

Reasoning does not count, as agents drop that of older turns; neither do ids, as some give their own. Left out: texts of
system or user that an agent rewrites on its way; what follows those is a new conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from proxy.call import meaning


@dataclass(frozen=True)
class History:
    """Digests of messages: of all, and of the same without tool results, which agents shorten later on."""

    whole: bytes
    outline: bytes


@dataclass(frozen=True)
class Turn:
    """An assistant turn of a request: its place, what it says, and what stands before it."""

    index: int
    said: tuple[Any, ...]
    history: History


def turns(messages: Sequence[dict[str, Any]]) -> tuple[list[Turn], History]:
    """The assistant turns of a request, and the history of the turn that it asks for."""
    whole, outline = blake2b(digest_size=16), blake2b(digest_size=16)
    found = []
    for i, message in enumerate(messages):
        key: tuple[Any, ...] = message["role"], message.get("name"), message.get("content")
        if message["role"] == "assistant":
            said = meaning(message)
            found.append(Turn(i, said, History(whole.digest(), outline.digest())))
            key = "assistant", said[0], said[2]
        text = repr(key).encode("utf-8", "surrogatepass")
        whole.update(text)
        outline.update(b"result" if message["role"] == "tool" else text)
    return found, History(whole.digest(), outline.digest())
