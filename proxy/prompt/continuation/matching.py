"""Which recorded turns a request repeats, and whether their recorded ids may stand in its prompt.

A turn of equal meaning after an equal history (history.py beside it) nominates a completion. The rendered text decides:
the request is rendered with the nominated turns as placeholders (placeholders.py), and a turn's ids may stand in where
the text reads as its path does and its slot shows all that the turn says.

Where an agent has changed a turn (its text dropped beside calls, two turns in one message, other words, the stop string
put back), no ids stand in for it. The turn still goes on from the completion that answered the same history and whose
call ids, or whose words, stand in it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any

from proxy.call import Call
from proxy.prompt.continuation.completion_tree import CompletionNode, CompletionTree
from proxy.prompt.continuation.history import RequestTurn
from proxy.prompt.continuation.meaning import DISTINCTIVE, as_javascript, distinctive_lines, without_reasoning
from proxy.prompt.continuation.placeholders import MARK, MaskedTurn, find_slot_end, mask
from proxy.prompt.template import ChatTemplate, TemplateError

MAX_PLANS = 3
"""Paths that are tried for one request; each costs a rendering."""
NEWEST = 32
"""Completions after one history that a changed turn is compared with, the newest: each costs a pass over the turn."""

Render = Callable[[Call, Sequence[dict[str, Any]]], str]


@dataclass(frozen=True)
class SpliceStep:
    """A message of the request, and the recorded turn that stands in for it."""

    index: int
    node: CompletionNode


@dataclass(frozen=True)
class SplicePlan:
    """A completion that the request may continue, and the turns up to it whose ids its path contains."""

    index: int
    """The message that repeats the completion."""
    follows: CompletionNode
    steps: list[SpliceStep]


@dataclass(frozen=True)
class SpliceMatch:
    """What of a request is recorded."""

    follows: CompletionNode | None = None
    """The completion that the request continues in conversation, whether its ids stand in or not."""
    steps: tuple[SpliceStep, ...] = ()
    """The turns whose recorded ids stand in, in order."""
    text: str | None = None
    """The rendered text behind the last of them; None without steps."""
    partly: bool = False
    """Whether the request repeats a part of `follows` only, so that nothing says that all of it arrived."""


class TurnMatcher:
    """Matches the requests of one attempt against its completions. Any thread may add and match."""

    def __init__(self, tree: CompletionTree, template: ChatTemplate, render: Render):
        self._tree = tree
        self._template = template
        self._render = render
        self._by_turn: dict[Any, list[CompletionNode]] = {}
        """Completions by their history (without tool results) and reply (without reasoning), as agents leave both out
        later. Lists only grow."""
        self._by_history: dict[int, list[CompletionNode]] = {}
        """Completions by their history (without tool results). Lists only grow."""

    def add(self, node: CompletionNode) -> None:
        """Add a served completion; those without messages are not matched here."""
        if node.history is not None:
            exact = without_reasoning(node.meaning)
            for key in {exact, as_javascript(exact)}:
                self._by_turn.setdefault((node.history.outline, *key), []).append(node)
            self._by_history.setdefault(node.history.outline, []).append(node)

    def knows(self, turn: RequestTurn) -> bool:
        return bool(self._candidates(turn))

    def match(self, call: Call, turns: list[RequestTurn], splice: bool) -> SpliceMatch:
        """Find the completion that the request continues and, if `splice`, the turns whose ids may stand in."""
        plans = self._plans(call, turns)
        first = next(plans, None)
        changed = [turn for turn in turns if first is None or turn.index > first.index]
        follows, partly = self._nominated(call, changed) or (None if first is None else first.follows, False)
        if first is None or not splice:
            return SpliceMatch(follows, partly=partly)
        steps, text = self._longest_that_fits(call, islice(chain([first], plans), MAX_PLANS))
        return SpliceMatch(follows, tuple(steps), text, partly)

    def call_ids(self, messages: Sequence[dict[str, Any]], turns: Sequence[RequestTurn]) -> dict[int, tuple[str, ...]]:
        """The place of each turn that is recorded -> the ids of its calls. Of turns that say the same after the same
        history, the one counts from which the request goes on."""
        ids, conversation = dict[int, tuple[str, ...]](), set[CompletionNode]()
        for turn in reversed(turns):
            nodes = self._by_preference(turn, messages[turn.index])
            node = next((node for node in nodes if node in conversation), nodes[0] if nodes else None)
            if node is not None:
                ids[turn.index] = node.call_ids
            while node is not None and node not in conversation:
                conversation.add(node)
                node = self._tree.get(node.follows)
        return ids

    # ---- which recorded turns the request repeats

    def _candidates(self, turn: RequestTurn) -> list[CompletionNode]:
        """Completions that say this after this. The agent may have left out their reasoning, but not changed it."""
        nodes = self._by_turn.get((turn.history.outline, *without_reasoning(turn.meaning)), ())
        return [node for node in nodes if turn.meaning[1] in ("", node.meaning[1])]

    def _plans(self, call: Call, turns: list[RequestTurn]) -> Iterator[SplicePlan]:
        """Completions that the request may continue, those of its last turn first."""
        earlier = list(turns)
        while earlier:
            turn = earlier.pop()
            for node in self._by_preference(turn, call.messages[turn.index]):
                steps = self._steps_before(earlier, node)
                if steps is not None:
                    own = [SpliceStep(turn.index, node)] if node.spliceable else []
                    yield SplicePlan(turn.index, node, steps + own)

    def _by_preference(self, turn: RequestTurn, message: dict[str, Any]) -> list[CompletionNode]:
        """The candidates: those after the same tool results first, then those with the same call ids, then those with
        the very same integers, then those with the same white space around their text, then the newest.

        Equal replies of siblings differ only in these.
        """
        ids, text = tuple(call.get("id") for call in message.get("tool_calls", ())), message.get("content") or ""
        newest_first = reversed(self._candidates(turn))
        exact = without_reasoning(turn.meaning)
        return sorted(
            newest_first,
            key=lambda node: (
                node.history != turn.history, node.call_ids != ids, without_reasoning(node.meaning) != exact,
                node.text != text,
            ),
        )  # fmt: skip

    def _steps_before(self, turns: list[RequestTurn], node: CompletionNode) -> list[SpliceStep] | None:
        """The turns whose recorded ids stand in the node's prompt; None when the request lacks one of them.

        Other ancestors may be missing: the agent has changed them in every request.
        """
        steps: list[SpliceStep] = []
        spliced, before = node.base, len(turns)
        ancestor = self._tree.get(node.follows)
        while ancestor is not None and spliced is not None:
            repeated = (place for place in reversed(range(before)) if ancestor in self._candidates(turns[place]))
            place = next(repeated, None)
            if place is None and ancestor is spliced:
                return None
            before = before if place is None else place
            if place is not None and ancestor is spliced:
                steps.append(SpliceStep(turns[place].index, ancestor))
                spliced = spliced.base
            ancestor = self._tree.get(ancestor.follows)
        return steps[::-1]

    # ---- which recorded turn a changed one was

    def _nominated(self, call: Call, turns: Sequence[RequestTurn]) -> tuple[CompletionNode, bool] | None:
        """The completion that the last of these turns was before the agent changed it, and whether the turn shows only
        a part of it; None where nothing tells."""
        for turn in reversed(turns):
            nodes, passage = self._by_history.get(turn.history.outline), _passage(call.messages, turn.index)
            if nodes and (node := _likeliest(nodes, passage)) is not None:
                last = self._last_of_merged(node, call.messages[turn.index])
                return last, not passage.shows_all_of(last)
        return None

    def _last_of_merged(self, node: CompletionNode, message: dict[str, Any]) -> CompletionNode:
        """The last of the turns that the agent has put into one message with this one."""
        ids = {call.get("id") for call in message.get("tool_calls", ())}
        merged = True
        while merged:
            following = [one for one in self._tree.following(node) if one.call_ids and ids.issuperset(one.call_ids)]
            merged = bool(following)
            node = following[-1] if merged else node
        return node

    # ---- whether their ids may stand in

    def _longest_that_fits(self, call: Call, plans: Iterable[SplicePlan]) -> tuple[list[SpliceStep], str | None]:
        """The steps of the plan that reaches furthest and the text behind them; ([], None) when no turn fits."""
        best: list[SpliceStep] = []
        failed: set[CompletionNode] = set()
        for plan in plans:
            if not plan.steps or any(step.node in failed for step in plan.steps):
                continue
            fitting, text = self._fit(call, plan.steps)
            if text is not None:
                return plan.steps, text
            failed.add(plan.steps[fitting].node)
            best = max(best, plan.steps[:fitting], key=len)
        while best:
            fitting, text = self._fit(call, best)
            if text is not None:
                return best, text
            best = best[:fitting]
        return [], None

    def _fit(self, call: Call, steps: list[SpliceStep]) -> tuple[int, str | None]:
        """Render with these turns masked: how many of them fit, and the text behind the last one if all do."""
        messages, masks = list(call.messages), []
        for step in steps:
            masks.append(self._mask(step.node, messages[step.index]))
            messages[step.index] = masks[-1].message
        try:
            text = self._render(call, messages)
        except TemplateError:
            return 0, None
        at = 0
        for number, step in enumerate(steps):
            end = self._slot_end(text, at, step.node, masks[number])
            if end is None:
                return number, None
            at = end
        return (len(steps), text[at:]) if MARK not in text[at:] else (len(steps) - 1, None)

    def _mask(self, node: CompletionNode, message: dict[str, Any]) -> MaskedTurn:
        cached = node.masked  # read once: another thread may replace it
        if cached is None or cached[0] is not message:
            cached = node.masked = message, mask(str(node.id), message, node.has_reasoning, self._template)
        return cached[1]

    def _slot_end(self, text: str, at: int, node: CompletionNode, masked: MaskedTurn) -> int | None:
        """Where the turn's slot ends; None unless the text at `at` is what the turn was sampled from, then the turn."""
        if not text.startswith(node.glue, at):
            return None
        start = at + len(node.glue)
        slot = node.slot  # read once: another thread may replace it
        end = start + len(slot)
        if slot and text.startswith(slot, start) and self._template.any_end.match(text, end):
            return end
        slot_end = find_slot_end(text, start, masked, node.opened, self._template)
        if slot_end is not None and node.unclosed and text.endswith(node.unclosed, start, slot_end):
            slot_end = start + len(text[start : slot_end - len(node.unclosed)].rstrip())  # the prompt closes it
        elif slot_end is not None:
            node.slot = text[start:slot_end]
        return slot_end


@dataclass(frozen=True)
class _Passage:
    """A changed turn of a request with what answers it."""

    ids: frozenset[str]
    """The call ids that its messages carry."""
    turn: str
    text: str
    """The text of the turn and of all messages up to the next one."""

    def has_calls_of(self, node: CompletionNode) -> bool:
        """Whether the ids of all its calls stand here. False without calls."""
        return bool(node.call_ids) and all(id in self.ids or id in self.text for id in node.call_ids)

    def shows_all_of(self, node: CompletionNode) -> bool:
        """Whether a client that sends this has got the whole answer, as its end stands here."""
        return self.has_calls_of(node) or (not node.call_ids and self.turn.startswith(node.text.strip()))


def _passage(messages: Sequence[dict[str, Any]], index: int) -> _Passage:
    answers = takewhile(lambda message: message["role"] != "assistant", messages[index + 1 :])
    passage = [messages[index], *answers]
    ids = {call.get("id", "") for call in passage[0].get("tool_calls", ())}
    ids |= {message.get("tool_call_id", "") for message in passage[1:]}
    texts = [message.get("content") or "" for message in passage]
    return _Passage(frozenset(ids), texts[0].strip(), "\n".join(texts))


def _likeliest(nodes: Sequence[CompletionNode], passage: _Passage) -> CompletionNode | None:
    """The newest completion whose call ids stand in the passage; else the longest whose words stand in its turn."""
    newest = nodes[-NEWEST:]
    called = [node for node in newest if passage.has_calls_of(node)]
    if called:
        return called[-1]
    quoted = [node for node in newest if _quotes(passage.turn, node.text.strip())]
    return max(quoted, key=lambda node: (len(node.text), node.id), default=None)


def _quotes(turn: str, text: str) -> bool:
    """Whether a turn is a recorded text with a little behind it, cuts it short, or holds a distinctive line of it."""
    longer = bool(text) and turn.startswith(text) and len(turn) - len(text) < DISTINCTIVE
    shorter = len(turn) >= DISTINCTIVE and text.startswith(turn)
    return longer or shorter or any(line in turn for line in distinctive_lines(text))
