"""Logprobs of an answer's tokens in the forms of the dialects that have them, and the requests' wish for them.

No form has a place for a token without a logprob, so such a token is left out; nor is there an alternative where the
engine named none: the official types allow fewer than were asked for.
"""

from collections.abc import Sequence
from typing import Any

from proxy.call import TokenLogprob
from proxy.dialects.base import refuse
from proxy.parsing.turn_parser import Piece, Text

MOST = 20
"""The most alternatives that the services name for each token; text completions name 5."""


def wanted(asked: bool, top: int | None, fields: tuple[str, str], most: int = MOST) -> int | None:
    """How many alternatives a request wants for each token; None where it wants no logprobs.

    `fields`: the names of the field that asks for logprobs and of the one that counts alternatives, for messages.
    """
    if top is not None and not 0 <= top <= most:
        refuse(fields[1], f"is {top}; ask for 0 to {most} alternatives")
    if top and not asked:
        refuse(fields[1], f"needs {fields[0]}; set it as well")
    return (top or 0) if asked else None


def tokens_of(piece: Piece) -> tuple[TokenLogprob, ...]:
    """The tokens of a text; none of anything else."""
    return piece.tokens if isinstance(piece, Text) else ()


def openai_entries(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The tokens as chat completions and Responses write them."""
    return [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.data), "logprob": token.logprob}


def text_entries(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The tokens as text completions write them: offsets count from the beginning of the answer's text."""
    tops = [{_key(other): other.logprob for other in (*token.top, token)} for token in tokens]
    return {
        "tokens": [_key(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if top else None,
        "text_offset": [token.start for token in tokens],
    }


def _key(token: TokenLogprob) -> str:
    """The token's text; for a part of a character its bytes, as OpenAI writes them, since alternatives are keys."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def gemini_result(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The tokens as Gemini's `logprobsResult`."""
    tops = [{"candidates": [_candidate(other) for other in token.top]} for token in tokens]
    return {"chosenCandidates": [_candidate(token) for token in tokens]} | ({"topCandidates": tops} if top else {})


def _candidate(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "tokenId": token.id, "logProbability": token.logprob}
