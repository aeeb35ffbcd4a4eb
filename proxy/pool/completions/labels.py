"""Labels: what each call of an attempt was for (main, subagent, side or compaction).

Labels follow from structure alone, and are final only when the attempt has ended, because the later calls show whether
a call compacted the history. The main work offers the tools of the earliest call that has any; if none has, it begins
like the earliest call. Other conversations with tools belong to sub-agents. A call without tools next to work with
tools is a compaction if the history continues from its reply; otherwise it is a side call (a title, a commit message, a
classification). Not used: texts, the agent's name, headers. If the structure does not decide, a call counts as work.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.pool.completions.records import RequestShape

SIDE = "side"
"""The label of calls that are no part of the task; `batch.labels` leaves it out by default."""
COMPACTION = "compaction"
"""The label of calls that sum up the history, which goes on from their replies."""
SUBAGENT = "subagent"
LABELS = ("main", SUBAGENT, SIDE, COMPACTION)
ASIDE = "aside"
"""A preliminary role: a call beside the work, not yet labelled."""


class Labelled(Protocol):
    """The fields of a recorded completion that its label depends on."""

    @property
    def id(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def shape(self) -> RequestShape | None: ...


def labels(calls: Sequence[Labelled]) -> dict[int, str]:
    """Return the labels of an attempt's completions (in commit order) by id; a completion without a shape has none."""
    shapes = {call.id: call.shape for call in calls if call.shape is not None}
    history = _Conversations(shapes, {call.id for call in calls if call.finish_reason == "tool_calls"})
    return {id: history.label(id) for id in shapes}


class _Conversations:
    """The conversations of an attempt.

    A call continues an earlier one if it repeats its reply and nothing before that reply was rewritten.
    """

    def __init__(self, shapes: Mapping[int, RequestShape], acting: set[int]):
        self._shapes = shapes
        self._acting = acting  # the calls that ended in tool calls
        self._before = {id: self._continued(shape) for id, shape in shapes.items()}
        self._after: dict[int, list[int]] = defaultdict(list)
        self._restarts: dict[int, list[int]] = defaultdict(list)
        """Call -> later first calls of conversations that contain its reply."""
        self._newest: dict[int, int] = {}
        """Digest of tools -> the last first call of a conversation that offers them."""
        self._kept: set[int] = set()
        """The calls that a later one continues with the same tools."""
        self._works: dict[int, int] = {}
        """Digest of an opening -> the first call of the work that begins a conversation with it."""
        self._conversation: dict[int, int] = {}
        self._last: dict[tuple[int, bool], int] = {}
        """(conversation, whether tools are offered) -> its last such call."""
        for id, before in self._before.items():
            self._place(id, before)
        self._roles: dict[int, str] = {}
        first = min(shapes, key=lambda id: (not shapes[id].tools, shapes[id].constrained), default=0)
        for id, shape in shapes.items():
            self._roles[id] = self._role(id, shapes[first])
            if self._before[id] is None and self._roles[id] != ASIDE:
                self._works.setdefault(shape.opening, id)

    def _continued(self, shape: RequestShape) -> int | None:
        before = self._shapes.get(shape.continues or 0)
        grown = before is not None and shape.turns > before.turns and shape.opening == before.opening
        return shape.continues if grown else None

    def _place(self, id: int, before: int | None) -> None:
        shape = self._shapes[id]
        if before is None:
            self._newest[shape.tools] = id
            for source in {shape.quotes, shape.continues} - {None}:
                self._restarts[source or 0].append(id)
        else:
            self._after[before].append(id)
            if shape.tools == self._shapes[before].tools:
                self._kept.add(before)
        self._conversation[id] = id if before is None else self._conversation[before]
        self._last[self._conversation[id], bool(shape.tools)] = id

    def _role(self, id: int, first: RequestShape) -> str:
        """Return main, subagent or aside."""
        shape, before = self._shapes[id], self._before[id]
        if first.tools and not shape.tools:
            return ASIDE
        if before is not None and self._roles[before] != ASIDE:
            return "subagent" if self._forked(id, before) else self._roles[before]
        if not first.tools:
            return "main" if shape.system == first.system else ASIDE
        return "subagent" if shape.tools != first.tools or self._spawned(id) else "main"

    def _forked(self, id: int, before: int) -> bool:
        """Whether the call copied the history, with other tools, while the conversation continued without it."""
        return before in self._kept and self._shapes[id].tools != self._shapes[before].tools

    def _spawned(self, id: int) -> bool:
        """Whether the call begins with the words of a tool call whose conversation continues afterwards."""
        caller = self._shapes[id].quotes
        return caller in self._acting and self._goes_on(caller, id)

    def _goes_on(self, id: int, since: int) -> bool:
        """Whether the conversation of a call has a later call than `since`, with tools if this call had any."""
        return self._last[self._conversation[id], bool(self._shapes[id].tools)] > since

    def label(self, id: int) -> str:
        role = self._roles[id]
        if self._compacts(id):
            return COMPACTION
        return self._aside(id) if role == ASIDE else role

    def _compacts(self, id: int) -> bool:
        """Whether a history restarted after the call: with its reply, or after it had repeated all turns so far."""
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
        """Return the call of the work that an aside quotes, or begins like; None: there is none."""
        shape = self._shapes[id]
        alike = self._works.get(shape.opening)
        return alike if alike is not None and alike < id else shape.quotes

    def _aside(self, id: int) -> str:
        """Return the label of an aside that is not a compaction."""
        shape, before, after = self._shapes[id], self._before[id], self._after[id]
        work = [self._roles[o] for o in after if self._roles[o] != ASIDE]
        if work:  # for example a plan that the work continues as its own turn
            return work[0]
        if before is not None and self._roles[before] != ASIDE and not self._goes_on(before, id):
            return SIDE if shape.constrained else self._roles[before]  # a last answer, after the tools
        if after or before is not None and self._roles[before] == ASIDE:
            return "subagent"  # a conversation of its own
        passed_on = shape.quotes is not None and any(not self._shapes[o].tools for o in self._restarts[id])
        return "subagent" if passed_on else SIDE  # passed on: the middle of a chain of calls without tools
