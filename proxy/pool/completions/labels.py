"""What each call of an attempt was for: main, subagent, side or compaction.

Known from structure alone, and for good only when the attempt has ended: what comes after a call tells whether it
compacted the history. The work offers the tools of the earliest call that has any, or begins like the earliest call
where none has. Other conversations with tools are sub-agents'. A call without tools beside work that has them is a
compaction where the history goes on from its reply, and a side call otherwise (a title, a commit message, a
classification). Left out: every text, the agent's name, headers. Where structure does not decide, a call is work rather
than a side call.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.pool.completions.records import RequestShape

LABELS = ("main", "subagent", "side", "compaction")
ASIDE = "aside"
"""Not yet known: a call beside the work."""


class Labelled(Protocol):
    """What of a recorded completion its label needs."""

    @property
    def id(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def shape(self) -> RequestShape | None: ...


def labels(calls: Sequence[Labelled]) -> dict[int, str]:
    """Completion id -> label, for an attempt's completions in commit order; those without a shape have none."""
    shapes = {call.id: call.shape for call in calls if call.shape is not None}
    history = _Conversations(shapes, {call.id for call in calls if call.finish_reason == "tool_calls"})
    return {id: history.label(id) for id in shapes}


class _Conversations:
    """The conversations of an attempt. A call goes on where it repeats a reply and nothing before it was rewritten."""

    def __init__(self, shapes: Mapping[int, RequestShape], acting: set[int]):
        self._shapes = shapes
        self._acting = acting  # the calls that ended in tool calls
        self._before = {id: self._continued(shape) for id, shape in shapes.items()}
        self._after: dict[int, list[int]] = defaultdict(list)
        self._restarts: dict[int, list[int]] = defaultdict(list)
        """Call -> the later beginnings that hold its reply."""
        self._newest: dict[int, int] = {}
        """Tools offered -> the last call that begins with them."""
        self._openings: dict[int, list[int]] = defaultdict(list)
        self._conversation: dict[int, int] = {}
        self._last: dict[tuple[int, bool], int] = {}
        """Conversation and whether tools are offered -> its last call."""
        for id, before in self._before.items():
            self._place(id, before)
        self._roles: dict[int, str] = {}
        first = min(shapes, key=self._unlike_work, default=0)
        for id in shapes:
            self._roles[id] = self._role(id, shapes[first])

    def _continued(self, shape: RequestShape) -> int | None:
        before = self._shapes.get(shape.continues or 0)
        grown = before is not None and shape.turns > before.turns and shape.opening == before.opening
        return shape.continues if grown else None

    def _place(self, id: int, before: int | None) -> None:
        shape = self._shapes[id]
        if before is None:
            self._openings[shape.opening].append(id)
            self._newest[shape.tools] = id
            for source in {shape.quotes, shape.continues} - {None}:
                self._restarts[source or 0].append(id)
        else:
            self._after[before].append(id)
        self._conversation[id] = id if before is None else self._conversation[before]
        self._last[self._conversation[id], bool(shape.tools)] = id

    def _unlike_work(self, id: int) -> tuple[bool, bool]:
        return not self._shapes[id].tools, self._shapes[id].constrained

    def _role(self, id: int, first: RequestShape) -> str:
        """main, subagent or aside."""
        shape, before = self._shapes[id], self._before[id]
        if first.tools and not shape.tools:
            return ASIDE
        if before is not None and self._roles[before] != ASIDE:
            return "subagent" if self._forked(id, before) else self._roles[before]
        if not first.tools:
            return "main" if shape.system == first.system else ASIDE
        return "subagent" if shape.tools != first.tools or self._spawned(id) else "main"

    def _forked(self, id: int, before: int) -> bool:
        """Whether it took a copy of the history along, with other tools, while the conversation went on without it."""
        tools = self._shapes[before].tools
        return self._shapes[id].tools != tools and any(self._shapes[o].tools == tools for o in self._after[before])

    def _spawned(self, id: int) -> bool:
        """Whether it begins with the words of a tool call whose conversation goes on afterwards."""
        caller = self._shapes[id].quotes
        return caller in self._acting and self._goes_on(caller, id)

    def _goes_on(self, id: int, since: int) -> bool:
        """Whether the conversation of a call has a further one after `since`, with tools if that call had any."""
        return self._last[self._conversation[id], bool(self._shapes[id].tools)] > since

    def label(self, id: int) -> str:
        role = self._roles[id]
        if self._compacts(id):
            return "compaction"
        return self._aside(id) if role == ASIDE else role

    def _compacts(self, id: int) -> bool:
        """Whether a history began again after it: with its reply, or where it had repeated all turns until then."""
        shape, role = self._shapes[id], self._roles[id]
        repeated = shape.continues if role == ASIDE else self._before[id]
        read = repeated or (self._read(id) if role == ASIDE else None)
        if read is None or self._roles.get(read, ASIDE) == ASIDE or shape.constrained:
            return False
        begun = [o for o in self._restarts[id] if self._roles[o] != ASIDE]
        begun = [o for o in begun if self._shapes[o].tools == self._shapes[read].tools]
        if any(repeated is not None or self._shapes[o].opening != shape.opening for o in begun):
            return id not in self._acting and not any(self._roles[o] == role for o in self._after[id])
        again = self._newest.get(self._shapes[read].tools, 0) > id
        return role == ASIDE and repeated is not None and again and not self._goes_on(repeated, id)

    def _read(self, id: int) -> int | None:
        """A call of the work that an aside quotes or begins like."""
        shape = self._shapes[id]
        alike = (o for o in self._openings[shape.opening] if o < id and self._roles[o] != ASIDE)
        return next(alike, shape.quotes)

    def _aside(self, id: int) -> str:
        """The label of a call beside the work that is no compaction."""
        shape, before, after = self._shapes[id], self._before[id], self._after[id]
        work = [self._roles[o] for o in after if self._roles[o] != ASIDE]
        if work:  # a plan, say, that the work takes up as its own turn
            return work[0]
        if before is not None and self._roles[before] != ASIDE and not self._goes_on(before, id):
            return "side" if shape.constrained else self._roles[before]  # an answer at the end, when tools are over
        if after or before is not None and self._roles[before] == ASIDE:
            return "subagent"  # a conversation of its own
        passed_on = shape.quotes is not None and any(not self._shapes[o].tools for o in self._restarts[id])
        return "subagent" if passed_on else "side"  # or the middle of a chain of calls of which none offers tools
