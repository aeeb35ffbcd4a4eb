"""An attempt's completions as events: the one function that readers of behaviour call."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from proxy.pool.behaviour.actions import Action, Readable, actions, turn_before, work_of
from proxy.pool.behaviour.conduct import conduct_events
from proxy.pool.behaviour.event import Event, Kind, quoted
from proxy.pool.behaviour.loops import Conversation
from proxy.pool.behaviour.results import failures
from proxy.pool.behaviour.words import speech_events
from proxy.pool.completions.labels import COMPACTION
from proxy.pool.completions.observed import UNKNOWN_TOOL


def events(chain: Sequence[Readable]) -> list[Event]:
    """Return the events of an attempt's completions, which are in the order of their commits.

    Side calls and answers that no agent acted on have none. What a row does not hold (written before anything was
    kept) gives no event.
    """
    work = work_of(chain)
    done = actions(work)
    conversation_of: dict[int, Conversation] = {}
    continuations = Counter(turn_before(item) for item in work if item.label != COMPACTION)
    last = max((item.id for item in work if item.label in ("main", None)), default=0)
    seen: set[str] = set()
    found: list[Event] = []
    for item in work:
        seen.update(item.observed.scripts if item.observed else ())
        before = turn_before(item)
        conversation = conversation_of.get(before or 0) or Conversation()
        if item.label != COMPACTION:
            continuations[before] -= 1
            if continuations[before]:  # others branch off here, too: what this one does is not their history
                conversation = conversation.copy()
            else:
                conversation_of.pop(before or 0, None)
        conversation_of[item.id] = conversation
        found += speech_events(item, seen, item.id == last)
        found += _calls(item, done[item.id])
        for action in done[item.id]:
            found += _of_action(action)
            found += conversation.events(action)
    return found


def _calls(item: Readable, done: Sequence[Action]) -> Iterator[Event]:
    """The events of a reply's calls together."""
    if len(done) > 1:
        names = ", ".join(action.name for action in done)
        yield Event(Kind.PARALLEL_CALLS, item.id, name=str(len(done)), quote=quoted(names))
    if item.observed is not None and item.observed.broken:
        yield Event(Kind.MALFORMED_CALL, item.id, name="unparsed", quote=quoted(item.observed.broken))


def _of_action(action: Action) -> Iterator[Event]:
    at = (action.completion, action.call, action.name)
    yield Event(Kind.TOOL_CALLED, *at, quoted(action.written))
    if action.fault == UNKNOWN_TOOL:
        yield Event(Kind.UNKNOWN_TOOL, *at, quoted(action.written))
    elif action.fault or action.arguments is None:
        yield Event(Kind.MALFORMED_CALL, *at, quoted(f"{action.fault or 'no JSON object'}: {action.written}"))
    for why, result in islice(failures(action), 1):
        shown = result.head.strip() or result.tail
        yield Event(Kind.TOOL_FAILED, *at, quoted(f"{why}: {shown}"))
    yield from conduct_events(action)
