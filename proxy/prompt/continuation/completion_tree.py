"""The completions of one attempt as a tree of token paths: a conversation is held once, not once per turn.

A path is a completion's prompt and its sampled tokens. Left out: which requests continue a completion
(matching.py beside it).
"""

from array import array
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from proxy.pool.completions.common_prefix import common_length
from proxy.pool.completions.records import Completion, HistoryDigest, NewCompletion
from proxy.pool.completions.routed_experts import known_after
from proxy.prompt.continuation.placeholders import MaskedTurn


@dataclass(eq=False)
class CompletionNode:
    """A recorded completion, as far as later requests need it."""

    id: int
    buffer: "array[int]"
    """Token ids; the first `size` are this path. Shared with the path that extends it."""
    size: int
    """Length of the path in tokens."""
    length: int
    """Length of the path without its end-of-turn token."""
    follows: int | None
    """The completion whose reply its request continued."""
    base: "CompletionNode | None"
    """The nearest earlier turn of the conversation whose recorded ids stand in this one's prompt."""
    glue: str
    """The text of the prompt behind the path of `base` (without its end of turn)."""
    meaning: tuple[Any, ...]
    """What the reply says (meaning.py beside it)."""
    text: str
    """The reply's text with the white space around it."""
    history: HistoryDigest | None
    """What the reply answered; None for text completions and for rows written before histories were stored."""
    call_ids: tuple[str, ...]
    spliceable: bool
    """Whether the agent saw everything that was sampled, so that the ids may stand for the reply."""
    opened: bool
    """Whether the prompt ends inside reasoning that the template has opened."""
    unclosed: str = ""
    """The marker that would close the section of calls in which the turn was ended."""
    slot: str = field(default="", compare=False)
    """The turn as the template last rendered it, in placeholders. A cache shared by threads: any value is valid."""
    masked: tuple[dict[str, Any], MaskedTurn] | None = field(default=None, compare=False)
    """The message that last repeated the turn, and its placeholders. A cache shared by threads: read it once."""

    parent: "CompletionNode | None" = None
    """The completion whose path this path begins with, if there is one."""
    experts_end: int = 0
    """How many tokens from the start of the path have recorded experts."""

    @property
    def path(self) -> "array[int]":
        return self.buffer[: self.size]

    @property
    def has_reasoning(self) -> bool:
        return bool(self.meaning[1]) or self.opened


class CompletionTree:
    """The completions of one attempt. Any thread may add and read."""

    def __init__(self) -> None:
        self.read_to = 0
        """The pool has no completion up to this id that is missing here."""
        self.token_count = 0
        """Token ids in memory."""
        self._nodes: dict[int, CompletionNode] = {}
        self._following: dict[int, list[CompletionNode]] = {}
        # Two proxies' rows and this proxy's own may arrive at once, and sharing a buffer changes several nodes.
        # Readers take no lock: a node's buffer is only replaced by one that begins with the same tokens.
        self._adding = Lock()

    def add(self, node: CompletionNode, item: NewCompletion | Completion) -> bool:
        """Add a committed completion. False when it is known: the pool's row may be read before the handler adds it."""
        with self._adding:
            if node.id in self._nodes:
                return False
            self._nodes[node.id] = node
            self._following.setdefault(node.follows or -1, []).append(node)
            self._share_buffer(node, item)
            node.experts_end = known_after(item.experts, self.experts_end(item.prefix_of, item.prefix_length))
        return True

    def _share_buffer(self, node: CompletionNode, item: NewCompletion | Completion) -> None:
        """Let paths that this one extends use its buffer instead of their own."""
        self.token_count += node.size
        ancestor = node.parent = self._nodes.get(item.prefix_of or -1)
        if ancestor is None or item.prefix_length < ancestor.size or ancestor.size < len(ancestor.buffer):
            return
        old = ancestor.buffer
        self.token_count -= len(old)
        while ancestor is not None and ancestor.buffer is old:
            ancestor.buffer = node.buffer
            ancestor = ancestor.parent

    def get(self, id: int | None) -> CompletionNode | None:
        return self._nodes.get(id or -1)

    def following(self, node: CompletionNode) -> tuple[CompletionNode, ...]:
        """The completions that continue this one in conversation."""
        return tuple(self._following.get(node.id, ()))

    def path(self, id: int) -> "array[int]":
        """The token path of a completion; KeyError when it is unknown."""
        return self._nodes[id].path

    def known_after(self, id: int) -> list[int]:
        """The known completions with higher ids."""
        return [known for known in list(self._nodes) if known > id]  # a copy: others may be added meanwhile

    def base_of(self, follows: int | None, ids: "array[int]") -> CompletionNode | None:
        """The nearest earlier turn of the conversation whose path, without its end of turn, begins these ids."""
        node = self.get(follows)
        while node is not None:
            if node.spliceable and node.buffer[: node.length] == ids[: node.length]:
                return node
            node = self.get(node.follows)
        return None

    def experts_end(self, prefix_of: int | None, length: int) -> int:
        """How many of the first `length` tokens of the path of `prefix_of` have recorded experts."""
        node = self.get(prefix_of)
        return 0 if node is None else min(length, node.experts_end)

    def longest_prefix(self, tokens: "array[int]", base: CompletionNode | None = None) -> tuple[int | None, int]:
        """The completion that shares the most leading tokens with these, and how many; (None, 0) when none does.

        `base`: a completion with whose path, without its end of turn, the tokens are known to begin.
        """
        best, length = (None, 0) if base is None else (base.id, base.length)
        for node in reversed(list(self._nodes.values())):  # a copy: others may be added meanwhile
            if length < min(node.size, len(tokens)) and node.buffer[length] == tokens[length]:
                common = common_length(node.buffer, tokens, node.size, length if node is base else 0)
                if common > length:
                    best, length = node.id, common
        return best, length
