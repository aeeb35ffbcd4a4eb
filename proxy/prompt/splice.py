"""Exact tokens: where a request continues a turn sampled in the same attempt, its recorded ids stand in for it.

A turn of equal meaning after an equal history (`proxy/prompt/history.py`) nominates a recorded completion: the request
follows it. The rendered text decides on its tokens. The request is rendered with the recorded turns as placeholders
(`proxy/prompt/placeholders.py`). Where it reads, from its beginning on, as the completion's path does, and each turn's
slot shows what the turn says, the path's ids are taken and only what follows is tokenised. The first turn for which
that fails (the agent changed something before it, the template drops its reasoning) and all that follow are rendered as
the agent sent them: a new branch. Reasoning that the agent does not send back is put back where the template has a
place for it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import blake2b
from itertools import chain, islice
from threading import Lock
from typing import Any

from proxy.call import Call, meaning, words
from proxy.parsing.formats import Recorded
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion, History, NewCompletion, Shape
from proxy.pool.completions.routed_experts import known_after
from proxy.prompt.common_prefix import shared
from proxy.prompt.history import Histories, Turn
from proxy.prompt.json_ids import IdLists
from proxy.prompt.placeholders import MARK, Mask, find, mask, read
from proxy.prompt.template import ChatTemplate, TemplateError
from proxy.prompt.token_cache import Pieces

MAX_PLANS = 3
"""Paths that are tried for one request, each by rendering it."""

RESTORED = "reasoning_restored"
"""Counts calls whose prompt holds reasoning that the agent did not send back."""
ENDED = "ended_otherwise"
"""Counts calls that continue a turn whose last token, or stop string, is not the end that the template gives it."""
BRANCHED = "branched"
"""Counts calls that continue a recorded turn but not its path: agent or template changed what comes before its end."""


@dataclass(frozen=True)
class Prompt:
    """A request as tokens, and where it hangs in the attempt's tree."""

    ids: "array[int]"
    text: str
    """What was rendered behind the path of `base` (without its end of turn); all of it where there is no base."""
    follows: int | None
    prefix_of: int | None
    prefix_length: int
    base: "Node | None" = None
    """The completion whose recorded ids the prompt begins with."""
    counted: tuple[str, ...] = ()
    written: bytes = b""
    """The ids as a JSON list."""
    plain: bool = False
    """Whether it is a text completion's."""
    history: History | None = None
    """None without messages."""
    shape: Shape | None = None
    """What the completion's label is made from."""
    routed: int = 0
    """How many of its first tokens have recorded experts, which stand in the rows of `prefix_of`."""


@dataclass(eq=False)
class Node:
    """A recorded completion, as far as later requests need it."""

    id: int
    whole: "array[int]"
    """Begins with the path; where a later path goes on from this one, it is that one's."""
    size: int
    """Of the path."""
    length: int
    """Of the path without its end of turn."""
    follows: int | None
    base: "Node | None"
    """The nearest earlier turn of the conversation that stands in this one's prompt as it was sampled."""
    glue: str
    """The text of the prompt behind the path of `base` without its end of turn."""
    said: tuple[Any, ...]
    history: History | None
    """What its reply followed; None without messages, and for rows of before shapes."""
    call_ids: tuple[str, ...]
    spliceable: bool
    """Whether the agent saw all that was sampled."""
    opened: bool
    """Whether the prompt has opened the reasoning."""
    slot: str = field(default="", compare=False)
    """How the turn showed last in a prompt, in placeholders."""
    masked: tuple[dict[str, Any], Mask] | None = field(default=None, compare=False)
    """The message that it was last in a request, and that in placeholders."""

    parent: "Node | None" = None
    """Where the path begins as another one does, that one's."""
    routed: int = 0
    """How many tokens of the path, from its first one on, have recorded experts."""

    @property
    def path(self) -> "array[int]":
        return self.whole[: self.size]

    @property
    def thinks(self) -> bool:
        return bool(self.said[1]) or self.opened


@dataclass(frozen=True)
class _Step:
    """A message of the request that a recorded turn stands in for."""

    index: int
    node: Node


Plan = tuple[Node, list[_Step]]
"""A completion that the request may continue, and the turns up to it that stand in its path as they were sampled."""


class Tree:
    """The completions of one attempt. Adding and preparing may happen in any threads."""

    def __init__(self, template: ChatTemplate, clock: float | None = None):
        """`clock`: unix time of the attempt's beginning, at which the template's date stamps stand still."""
        self._template = template
        self._pieces = Pieces(template)
        self._lists = IdLists()
        self._histories = Histories()
        self._clock = None if clock is None else datetime.fromtimestamp(clock)
        self.read_to = 0
        """The last of the ids up to which the pool has nothing that is missing here."""
        self.held = 0
        """Token ids in memory."""
        self._adding, self._reading = Lock(), Lock()
        self._nodes: dict[int, Node] = {}
        self._by_turn: dict[Any, list[Node]] = {}
        """By what they follow and what they say, both without what agents leave out later."""
        self._by_text: dict[bytes, tuple[Node, int]] = {}  # texts as clients of text completions have seen them
        self._unread: deque[Node] = deque()  # whose text nobody has asked for yet

    def known_after(self, id: int) -> list[int]:
        return [known for known in list(self._nodes) if known > id]

    def path(self, id: int) -> "array[int]":
        return self._nodes[id].path

    def add(self, id: int, item: NewCompletion | Completion, path: "array[int]", prompt: Prompt | None = None) -> None:
        """Take in a committed completion. Without its prompt, as after a restart, the text is decoded."""
        ids = path[: item.prompt_length]
        base = self._base(item.follows, ids) if prompt is None else prompt.base
        glue = prompt.text if prompt is not None else self._template.decode(ids[base.length if base else 0 :])
        form, said = self._template.form, meaning(item.reply)
        calls, opened = item.reply.get("tool_calls"), form.opens_reasoning(glue)
        sampled = self._without_end(item.sampled)
        raw = self._template.decode(sampled)
        spliceable = read(form, raw, Recorded(calls) if calls else None, opened) == said
        call_ids = tuple(call["id"] for call in calls or ())
        length = len(ids) + len(sampled)
        history = item.shape.history if item.shape else None
        node = Node(id, path, len(path), length, item.follows, base, glue, said, history, call_ids, spliceable, opened)
        with self._adding:
            if id in self._nodes:  # read from the pool before its own handler came to it
                return
            self._nodes[id] = node
            self._share(node, item)
            node.routed = known_after(item.experts, self._routed(item.prefix_of, item.prefix_length))
        if item.finish_reason not in SERVED_FINISH_REASONS:
            return
        if prompt is not None:
            self._lists.add(id, path, prompt.written, len(prompt.ids))
        if history is not None:
            self._by_turn.setdefault((history.outline, *words(said)), []).append(node)
        if prompt is not None and prompt.plain:
            self._by_text[_digest(glue + raw)] = node, len(glue) + len(raw)
        else:
            self._unread.append(node)

    def _share(self, node: Node, item: NewCompletion | Completion) -> None:
        """Let the paths with which this one begins be parts of it: a conversation is held once, not once per turn."""
        self.held += node.size
        before = node.parent = self._nodes.get(item.prefix_of or -1)
        if before is None or item.prefix_length < before.size or before.size < len(before.whole):
            return
        old = before.whole
        self.held -= len(old)
        while before is not None and before.whole is old:
            before.whole, before = node.whole, before.parent

    def _base(self, follows: int | None, ids: "array[int]") -> Node | None:
        """The nearest of the turns before whose path, but for its end, these ids begin with."""
        node = self._nodes.get(follows or -1)
        while node is not None:
            if node.spliceable and node.whole[: node.length] == ids[: node.length]:
                return node
            node = self._nodes.get(node.follows or -1)
        return None

    def prepare(self, call: Call, splice: bool, newer: Callable[[], None] = lambda: None) -> Prompt:
        """Render and tokenise a request, with recorded ids where they stand for the same text.

        `newer` adds what other gateways have recorded; it is called where the request holds a turn unknown here.
        """
        if call.prompt is not None:
            return self._continued(call.prompt, splice)
        asked = self._histories.read(call.messages)
        call = replace(call, messages=asked.messages)
        if any(not self._candidates(turn) for turn in asked.turns):
            newer()
        plans = self._plans(call, asked.turns)
        first = next(plans, None)
        follows = None if first is None else first[0]
        steps, text = self._best(call, islice(chain([first], plans), MAX_PLANS)) if first and splice else ([], None)
        if text is None:
            text = self._render(call, call.messages)
        base = steps[-1].node if steps else None
        ids, counted = self._tokens(base, text)
        if any(step.node.said[1] and not call.messages[step.index].get("reasoning_content") for step in steps):
            counted.append(RESTORED)
        if splice and follows is not None and base is not follows:
            counted.append(BRANCHED if follows.spliceable else ENDED)
        prefix_of, length = self._longest_prefix(ids, base)
        written = self._lists.write(ids, prefix_of, length)
        prompt = Prompt(ids, text, follows.id if follows else None, prefix_of, length, base, tuple(counted), written)
        return replace(prompt, history=asked.history, routed=self._routed(prefix_of, length))

    def _render(self, call: Call, messages: Sequence[dict[str, Any]]) -> str:
        fixed = {} if self._clock is None else {"strftime_now": self._clock.strftime}
        return self._template.render(messages, call.tools, **(call.options | fixed))

    def _tokens(self, base: Node | None, text: str) -> tuple["array[int]", list[str]]:
        """The path of `base`, then the text behind it. An end of turn that the text repeats is not repeated."""
        if base is None:
            return self._pieces.encode(text), []
        if base.length == base.size:
            return base.path + self._pieces.encode(text), []
        end = self._template.decode(base.path[-1:])
        if text.startswith(end):
            return base.path + self._pieces.encode(text[len(end) :], after=base.path[-1]), []
        return base.whole[: base.length] + self._pieces.encode(text), [ENDED]

    # ---- which recorded turns a request holds

    def _candidates(self, turn: Turn) -> list[Node]:
        """Recorded turns that say this after this. The reasoning of one that is sent without may be missing only."""
        found = self._by_turn.get((turn.history.outline, *words(turn.said)), ())
        return [node for node in found if turn.said[1] in ("", node.said[1])]

    def _plans(self, call: Call, said: list[Turn]) -> Iterator[Plan]:
        """Completions that the request continues, the last turn first, with the turns that stand in their paths."""
        said = list(said)
        while said:
            turn = said.pop()
            for node in self._preferred(turn, call.messages[turn.index]):
                before = self._before(said, node)
                if before is not None:
                    yield node, before + ([_Step(turn.index, node)] if node.spliceable else [])

    def _preferred(self, turn: Turn, message: dict[str, Any]) -> list[Node]:
        """The candidates: those after the same tool results first, then with the same ids, then the newest."""
        ids = tuple(call.get("id") for call in message.get("tool_calls", ()))
        found = reversed(self._candidates(turn))
        return sorted(found, key=lambda node: (node.history != turn.history, node.call_ids != ids))

    def _before(self, said: list[Turn], node: Node) -> list[_Step] | None:
        """The turns that stand in the node's prompt as sampled; None when the request does not hold one of them."""
        found: list[_Step] = []
        standing, at = node.base, len(said)
        before = self._nodes.get(node.follows or -1)
        while before is not None and standing is not None:
            while at > 0 and before not in self._candidates(said[at - 1]):
                at -= 1
            if at == 0:
                return None
            at -= 1
            if before is standing:
                found.append(_Step(said[at].index, before))
                standing = standing.base
            before = self._nodes.get(before.follows or -1)
        return found[::-1]

    # ---- whether their ids may stand in for them

    def _best(self, call: Call, plans: Iterable[Plan]) -> tuple[list[_Step], str | None]:
        """The steps of the plan that reaches furthest, and the text behind them; no text when there are none."""
        best: list[_Step] = []
        failed: set[Node] = set()
        for _, plan in plans:
            if not plan or any(step.node in failed for step in plan):
                continue
            reached, text = self._joined(call, plan)
            if text is not None:
                return plan, text
            failed.add(plan[reached].node)
            best = max(best, plan[:reached], key=len)
        while best:
            reached, text = self._joined(call, best)
            if text is not None:
                return best, text
            best = best[:reached]
        return [], None

    def _joined(self, call: Call, plan: list[_Step]) -> tuple[int, str | None]:
        """How many of the steps hold, and the text behind the last one if all do."""
        messages, masks = list(call.messages), []
        for step in plan:
            masks.append(self._mask(step.node, messages[step.index]))
            messages[step.index] = masks[-1].message
        try:
            text = self._render(call, messages)
        except TemplateError:
            return 0, None
        at = 0
        for number, step in enumerate(plan):
            end = self._slot_end(text, at, step.node, masks[number])
            if end is None:
                return number, None
            at = end
        return (len(plan), text[at:]) if MARK not in text[at:] else (len(plan) - 1, None)

    def _mask(self, node: Node, message: dict[str, Any]) -> Mask:
        known = node.masked  # another thread may make another one meanwhile
        if known is None or known[0] is not message:
            known = node.masked = message, mask(str(node.id), message, node.thinks, self._template)
        return known[1]

    def _slot_end(self, text: str, at: int, node: Node, masked: Mask) -> int | None:
        """Where the turn's slot ends, if the text from `at` on is what the turn was sampled from, then the turn."""
        if not text.startswith(node.glue, at):
            return None
        start = at + len(node.glue)
        slot = node.slot  # another thread may find another one meanwhile
        end = start + len(slot)
        if slot and text.startswith(slot, start) and self._template.any_end.match(text, end):
            return end
        found = find(text, start, masked, node.opened, self._template)
        if found is not None:
            node.slot = text[start:found]
        return found

    # ---- text completions

    def _continued(self, prompt: str | tuple[int, ...], splice: bool) -> Prompt:
        """A prompt without a template: recorded ids where it begins with a recorded prompt and its completion."""
        if isinstance(prompt, str):
            node, start = self._seen_in(prompt) if splice else (None, 0)
            ids = array("i", self._template.encode(prompt[start:]))
            tokens, text = ids if node is None else node.whole[: node.length] + ids, prompt
        else:
            size = self._template.tokenizer.get_vocab_size()
            if not all(0 <= id < size for id in prompt):
                raise TemplateError(f"prompt holds ids outside of 0 to {size - 1}; send this model's tokens")
            tokens, text = array("i", prompt), self._template.decode(prompt)
        prefix_of, length = self._longest_prefix(tokens)
        follows = prefix_of if prefix_of is not None and length >= self._nodes[prefix_of].length else None
        written, routed = self._lists.write(tokens, prefix_of, length), self._routed(prefix_of, length)
        return Prompt(tokens, text, follows, prefix_of, length, written=written, plain=True, routed=routed)

    def _seen_in(self, text: str) -> tuple[Node | None, int]:
        """The completion with the longest text that this text begins with, and that text's length."""
        with self._reading:
            while self._unread:
                node = self._unread.popleft()
                seen = self._template.decode(node.whole[: node.length])
                self._by_text[_digest(seen)] = node, len(seen)
        lengths = sorted({length for _, length in list(self._by_text.values()) if length <= len(text)})
        digest, at, found = blake2b(digest_size=16), 0, None
        for length in lengths:
            digest.update(text[at:length].encode("utf-8", "surrogatepass"))
            at, found = length, self._by_text.get(digest.digest(), found)
        return found or (None, 0)

    def _without_end(self, sampled: "array[int]") -> "array[int]":
        return sampled[:-1] if sampled and sampled[-1] in self._template.ends else sampled

    def _routed(self, prefix_of: int | None, length: int) -> int:
        """How many of the first `length` tokens of this completion have recorded experts."""
        return min(length, self._nodes[prefix_of].routed) if prefix_of in self._nodes else 0

    def _longest_prefix(self, tokens: "array[int]", base: Node | None = None) -> tuple[int | None, int]:
        """The completion that shares the most leading tokens with these, and how many.

        `base`: one with whose path, but for its end of turn, they are known to begin.
        """
        best, length = (None, 0) if base is None else (base.id, base.length)
        for node in reversed(list(self._nodes.values())):  # a copy: others may be added meanwhile
            if length < min(node.size, len(tokens)) and node.whole[length] == tokens[length]:
                common = shared(node.whole, tokens, node.size, length if node is base else 0)
                if common > length:
                    best, length = node.id, common
        return best, length


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
