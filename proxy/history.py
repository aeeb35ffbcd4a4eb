"""What stands before each turn of a request, as digests: a reply is continued only where its own history goes before.

Reasoning does not count, as agents drop that of older turns; neither do ids, as some give their own. Left out: texts of
system or user that an agent rewrites on its way; what follows those is a new conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import chain
from typing import Any

from proxy.call import meaning
from proxy.pool.records import History


@dataclass(frozen=True)
class Turn:
    """An assistant turn of a request: its place, what it says, and what stands before it."""

    index: int
    said: tuple[Any, ...]
    history: History


def turns(messages: Sequence[dict[str, Any]]) -> tuple[list[Turn], History]:
    """The assistant turns of a request, and the history of the turn that it asks for."""
    whole, outline = blake2b(digest_size=8), blake2b(digest_size=8)
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            said = meaning(message)
            found.append(Turn(i, said, _named(whole.digest(), outline.digest())))
            text = "".join(f"{len(part)}:{part}" for part in (said[0], *chain.from_iterable(said[2])))
        else:
            text = message.get("content") or ""
        sender = f"{message['role']} {message.get('name')} ".encode("utf-8", "surrogatepass")
        one = sender + sha256(text.encode("utf-8", "surrogatepass")).digest()  # processors have instructions for it
        whole.update(one)
        outline.update(sender if message["role"] == "tool" else one)
    return found, _named(whole.digest(), outline.digest())


def _named(*digests: bytes) -> History:
    return History(*(int.from_bytes(digest, "little") for digest in digests))
