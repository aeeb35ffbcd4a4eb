"""Which tool results an agent dropped when it rewrote its context: those whose tokens the next context does not have.

Requests are not in the pool, but their tokens are. A result stands between the turn that asked for it and the end of
the first prompt that shows it. Where the next segment's first prompt does not have these tokens, the result was dropped
or rewritten, for example to a mark. Where that prompt has no turns at all, it has no results. Left out: dropped turns
of the model, results that no prompt showed, and those behind turns that the agent did not repeat word for word.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.pool.completions.labels import COMPACTION
from proxy.pool.completions.records import Completion

CLOSING = 64
"""Tokens at the end of every prompt, at most, that belong to no result: with them a template opens the answer."""
SHOWN = 3
"""Turns whose dropped results are quoted."""
WORDS = 40
"""Characters of a quotation."""


@dataclass(frozen=True)
class TurnResults:
    """The results of one turn's calls as a prompt showed them."""

    tokens: "array[int] | None"
    """None: only a request for a summary showed them, so where they end is not known."""
    head: str


def dropped(segments: Sequence[Sequence[Completion]], whole: Mapping[int, "array[int]"]) -> list[list[TurnResults]]:
    """Return for each segment of a conversation the results of earlier segments that its first prompt does not have.

    `whole`: the token path of each completion.
    """
    prompts = {item.id: whole[item.id][: item.prompt_length] for calls in segments for item in calls}
    turns = {item.id: item for calls in segments for item in calls}
    closing = _closing(list(prompts.values()))
    standing: dict[int, TurnResults] = {}
    """By the turn whose calls they answer."""
    found = []
    for calls in segments:
        kept = _kept(standing, calls[0], prompts[calls[0].id])
        found.append([results for turn, results in standing.items() if turn not in kept])
        standing = {turn: results for turn, results in kept.items() if results.tokens is not None}
        for item in calls:
            if item.follows in turns and (results := _new(turns[item.follows], item, prompts[item.id], closing)):
                standing.setdefault(item.follows, results)
    return found


def described(gone: Sequence[TurnResults]) -> str:
    """Say how many turns lost their results, and how the first of these began. Empty: none did."""
    if not gone:
        return ""
    heads = [" ".join(each.head.split()) for each in gone[:SHOWN]]
    quoted = ", ".join(repr(head if len(head) <= WORDS else f"{head[:WORDS]}...") for head in heads)
    more = f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
    return f"without the results of {len(gone)} turn{'s' * (len(gone) > 1)}: {quoted}{more}"


def _closing(prompts: Sequence["array[int]"]) -> int:
    """The number of tokens with which all of these prompts end, at most CLOSING."""
    ends = [prompt[-CLOSING:].tolist()[::-1] for prompt in prompts]
    return next((n for n, each in enumerate(zip(*ends, strict=False)) if len(set(each)) > 1), min(map(len, ends)))


def _new(turn: Completion, item: Completion, prompt: "array[int]", closing: int) -> TurnResults | None:
    """The results of a turn in the prompt that continues it. None: it shows none, or they cannot be told apart."""
    if item.observed is None or not item.observed.results:
        return None
    head = item.observed.results[0].head
    if item.label == COMPACTION:  # its prompt asks for the summary behind them
        return TurnResults(None, head)
    places = list(_places(turn.sampled, prompt)) if turn.sampled else []
    tokens = prompt[places[-1] + len(turn.sampled) : len(prompt) - closing] if places else None
    return TurnResults(tokens, head) if tokens else None


def _kept(standing: Mapping[int, TurnResults], first: Completion, prompt: "array[int]") -> dict[int, TurnResults]:
    """The results that are not known to be missing in the first prompt of a segment."""
    if first.shape is not None and first.shape.turns == 0:
        return {}
    kept, begin = {}, 0
    for turn, results in standing.items():
        place = begin if results.tokens is None else next(_places(results.tokens, prompt, begin), None)
        if place is not None:
            kept[turn] = results
            begin = place + len(results.tokens or ())
    return kept


def _places(some: "array[int]", among: "array[int]", begin: int = 0) -> Iterator[int]:
    """Yield the places at or behind `begin` where these tokens stand among others."""
    size, needle, haystack = among.itemsize, some.tobytes(), among.tobytes()
    at = haystack.find(needle, begin * size)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = haystack.find(needle, at + 1)
