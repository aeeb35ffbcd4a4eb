"""What a request showed of its agent's surroundings, bounded: requests themselves are not kept.

A tool's result is in the request after its call, and whether a call fits its tool is known from the request before it.
Both are kept here, for whoever reads behaviour from the pool (proxy/pool/behaviour). Where the model was shown other
words than the agent's, the agent's are kept. Left out: whole texts.
"""

from typing import Any

import msgspec

from proxy.pool.schema import storable

HEAD, TAIL = 300, 200
"""Characters of a result that are kept: the first, and of a longer one also the last."""
MOST_TEXT = 8192
"""Characters of all results of one request that are kept. The results behind these keep their sizes and flags."""
MOST_RESULTS = 64
"""Results of one request that are kept at all."""
FOREIGN = 40
"""Characters of a reply's foreign words of one script that are kept."""
UNKNOWN_TOOL = "unknown tool"
"""The fault of a call of a tool that the request did not offer."""


class ToolResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one tool call, cut."""

    call: str
    """The id of its call in the request; empty where the agent names none."""
    name: str
    """The tool, where the request names it."""
    head: str
    tail: str = ""
    """The last characters of a text that is longer than the head."""
    size: int = 0
    """Characters of the whole text."""
    error: bool = False
    """The dialect's flag."""
    spoken: bool = False
    """A user's message: so agents answer that write their calls as text."""


class ToldCall(msgspec.Struct, frozen=True, array_like=True):
    """The words in which the agent got a call, where its model was shown others (proxy/augment)."""

    name: str
    keys: dict[str, str] = {}
    """The model's names of arguments that differ -> the agent's."""

    def arguments(self, written: str) -> str:
        """The arguments that the model wrote, as the agent got them."""
        try:
            value = msgspec.json.decode(written) if self.keys else None
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return written
        return msgspec.json.encode(self.renamed(value)).decode() if isinstance(value, dict) else written

    def renamed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {self.keys.get(key, key): value for key, value in arguments.items()}


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """What a completion's request showed, and what it offered the completion's reply."""

    results: tuple[ToolResult, ...] = ()
    """The results behind the last assistant turn of the request, in order."""
    faults: tuple[str, ...] = ()
    """How each call of the reply misses its tool's schema, `UNKNOWN_TOOL`, or an empty text. Empty: all fit."""
    broken: str = ""
    """The beginning of a call in the reply that could not be parsed and stayed text."""
    scripts: tuple[str, ...] = ()
    """The scripts other than Latin in the messages of system and user behind the last assistant turn."""
    foreign: tuple[tuple[str, str], ...] = ()
    """Scripts that nobody who asked has written, each with the first words of the reply in it that stand in no result.
    Empty also in rows written before these were kept."""
    told: tuple[ToldCall, ...] = ()
    """For each call of the reply the agent's words for it. Empty: they are the model's, as in all rows without."""


_decode = msgspec.json.Decoder(Observed).decode
_TEXTS = ("call", "name", "head", "tail")
"""The fields of a ToolResult that are texts."""


def pack(observed: Observed) -> bytes:
    """Encode for the pool. What UTF-8 cannot store (lone surrogates) is replaced."""
    try:
        return msgspec.json.encode(observed)
    except UnicodeEncodeError:
        results = [
            msgspec.structs.replace(each, **{name: storable(getattr(each, name)) for name in _TEXTS})
            for each in observed.results
        ]
        faults = tuple(map(storable, observed.faults))
        told = tuple(
            ToldCall(storable(each.name), {storable(key): storable(own) for key, own in each.keys.items()})
            for each in observed.told
        )
        whole = msgspec.structs.replace(
            observed, results=tuple(results), faults=faults, broken=storable(observed.broken), told=told
        )
        return msgspec.json.encode(whole)


def unpack(stored: bytes) -> Observed:
    """Decode what `pack` wrote."""
    return _decode(stored)


def cut(text: str, room: int) -> tuple[str, str]:
    """Return the first and last characters of a text that are kept, at most `room` of them."""
    if len(text) <= min(room, HEAD + TAIL):
        return text[:HEAD], text[HEAD:]
    return text[: min(room, HEAD)], text[-TAIL:] if room >= HEAD + TAIL else ""
