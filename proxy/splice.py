"""Exact tokens: where a request continues a turn sampled in the same attempt, its recorded ids stand in for it.

A turn of equal meaning nominates a recorded completion; the rendered text decides. The request is rendered with the
recorded raw text of its turns; if that begins with exactly the text of the completion's path, the path's ids are taken
and only the rest, which starts at a special token, is tokenised. Otherwise (the agent changed something, the template
drops old reasoning, the turn ended by another token) the request is rendered and tokenised as it stands: a new branch.
Left out: re-inserting reasoning that the agent did not echo.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from proxy.call import Call, meaning
from proxy.formats import Format, Recorded
from proxy.pool.records import Completion, NewCompletion
from proxy.template import ChatTemplate, TemplateError
from proxy.toolcalls import ParsedCall, Reasoning, Text, TurnParser

SERVED = ("stop", "length", "tool_calls")
MAX_TRIES = 2
"""Renderings spent on finding recorded ids; a template that drops old reasoning makes all of them fail."""


@dataclass(frozen=True)
class Prompt:
    """A request as tokens, and where it hangs in the attempt's tree."""

    ids: "array[int]"
    text: str
    follows: int | None
    prefix_of: int | None
    prefix_length: int


@dataclass(frozen=True, eq=False)
class Node:
    """A recorded completion, as far as later requests need it."""

    id: int
    path: "array[int]"
    follows: int | None
    raw: str | None
    """The sampled text without the end of turn; None where the agent saw something else than what was sampled."""
    text_length: int
    text_digest: bytes
    """Of the text of the whole path."""
    call_ids: tuple[str, ...]
    seen_length: int
    """Of the text of the path without the end of turn, and its digest: what a client of text completions has seen."""
    seen_digest: bytes


class Tree:
    """The completions of one attempt. Adding is for the event loop; a prompt may be prepared in any thread."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._nodes: dict[int, Node] = {}
        self._by_meaning: dict[Any, list[Node]] = {}
        self._by_text: dict[bytes, Node] = {}

    def add(self, id: int, item: NewCompletion | Completion, path: "array[int]", prompt: str | None = None) -> None:
        """Take in a committed completion. Without its prompt's text, as after a restart, that is decoded."""
        prompt = self._template.decode(path[: item.prompt_length]) if prompt is None else prompt
        text = prompt + self._template.decode(item.sampled)
        visible = item.sampled[:-1] if item.sampled and item.sampled[-1] in self._template.ends else item.sampled
        raw = self._template.decode(visible)
        seen = prompt + raw
        form = self._template.form
        shown = _shown(form, raw, item.reply, form.opens_reasoning(prompt))
        spliceable = item.finish_reason in SERVED and shown == meaning(item.reply)
        call_ids = tuple(call["id"] for call in item.reply.get("tool_calls", ()))
        raw_text = raw if spliceable else None
        digest, seen_digest = _digests(text, seen)
        node = Node(id, path, item.follows, raw_text, len(text), digest, call_ids, len(seen), seen_digest)
        self._nodes[id] = node
        if item.finish_reason in SERVED:
            self._by_text[node.seen_digest] = node
        if item.finish_reason in SERVED:
            self._by_meaning.setdefault(meaning(item.reply), []).append(node)

    def prepare(self, call: Call, splice: bool) -> Prompt:
        """Render and tokenise a request, with recorded ids where they stand for the same text."""
        if call.prompt is not None:
            return self._continued(call.prompt, splice)
        lines = list(islice(self._lines(call.messages), MAX_TRIES))
        node, ids, text = lines[0][0] if lines else None, None, ""
        for candidate, turns in lines if splice else ():
            ids, text = self._joined(call, candidate, turns)
            if ids is not None:
                node = candidate
                break
        if ids is None:
            text = self._template.render(call.messages, call.tools, **call.options)
        tokens = array("i", self._template.encode(text)) if ids is None else ids
        prefix_of, length = self._longest_prefix(tokens)
        follows = None if node is None else node.id
        return Prompt(tokens, text, follows, prefix_of, length)

    def _continued(self, prompt: str | tuple[int, ...], splice: bool) -> Prompt:
        """A prompt without a template: recorded ids where it begins with a recorded prompt and its completion."""
        if isinstance(prompt, str):
            node = self._seen_in(prompt) if splice else None
            start = 0 if node is None else node.seen_length
            ids = array("i", self._template.encode(prompt[start:]))
            tokens, text = ids if node is None else self._without_end(node.path) + ids, prompt
        else:
            size = self._template.tokenizer.get_vocab_size()
            if not all(0 <= id < size for id in prompt):
                raise TemplateError(f"prompt holds ids outside of 0 to {size - 1}; send this model's tokens")
            tokens, text = array("i", prompt), self._template.decode(prompt)
        prefix_of, length = self._longest_prefix(tokens)
        whole = prefix_of is not None and length >= len(self._without_end(self._nodes[prefix_of].path))
        return Prompt(tokens, text, prefix_of if whole else None, prefix_of, length)

    def _seen_in(self, text: str) -> Node | None:
        """The completion with the longest text that this text begins with."""
        lengths = sorted({node.seen_length for node in self._by_text.values() if node.seen_length <= len(text)})
        digest, at, found = blake2b(digest_size=16), 0, None
        for length in lengths:
            digest.update(text[at:length].encode("utf-8", "surrogatepass"))
            at, found = length, self._by_text.get(digest.digest(), found)
        return found

    def _without_end(self, path: "array[int]") -> "array[int]":
        return path[:-1] if path[-1] in self._template.ends else path

    def _lines(self, messages: Sequence[dict[str, Any]]) -> Iterator[tuple[Node, dict[int, str]]]:
        """Completions that the request may continue, the last turn first, with their raw texts by message index."""
        turns = [(i, meaning(messages[i])) for i in range(len(messages)) if messages[i]["role"] == "assistant"]
        while turns:
            index, said = turns.pop()
            for node in _preferred(self._by_meaning.get(said, []), messages[index]):
                line = self._line(turns, node)
                if line is not None:
                    yield node, {index: node.raw, **line} if node.raw is not None else line

    def _line(self, turns: list[tuple[int, Any]], node: Node) -> dict[int, str] | None:
        """Raw texts of what the node follows, by message index; None when one of them is not among the turns."""
        found, turns = {}, list(turns)
        before = self._nodes.get(node.follows or -1)
        while before is not None:
            index = next((i for i, said in reversed(turns) if before in self._by_meaning.get(said, ())), None)
            if index is None:
                return None
            if before.raw is not None:
                found[index] = before.raw
            turns = [turn for turn in turns if turn[0] < index]
            before = self._nodes.get(before.follows or -1)
        return found

    def _joined(self, call: Call, node: Node, turns: dict[int, str]) -> tuple["array[int] | None", str]:
        """The node's path with the tokens of what follows it; None when the texts do not agree."""
        if node.raw is None:
            return None, ""
        messages = [
            {"role": "assistant", "content": turns[i]} if i in turns else message
            for i, message in enumerate(call.messages)
        ]
        text = self._template.render(messages, call.tools, **call.options)
        rest = text[node.text_length :]
        at_boundary = node.path[-1] in self._template.ends or rest.startswith(self._template.special)
        if not at_boundary or _digest(text[: node.text_length]) != node.text_digest:
            return None, ""
        return node.path + array("i", self._template.encode(rest)), text

    def _longest_prefix(self, tokens: "array[int]") -> tuple[int | None, int]:
        """The completion that shares the most leading tokens with these, and how many."""
        best, length = None, 0
        wanted = tokens.tobytes()
        for node in reversed(self._nodes.values()):
            path = node.path
            if length < min(len(path), len(tokens)) and path[length] == tokens[length]:
                common = _common(path.tobytes(), wanted)
                if common > length:
                    best, length = node.id, common
        return best, length


def _preferred(candidates: list[Node], message: dict[str, Any]) -> list[Node]:
    """Turns that say the same: those with the message's tool-call ids first, then the newest."""
    ids = tuple(call.get("id") for call in message.get("tool_calls", ()))
    return sorted(reversed(candidates), key=lambda node: node.call_ids != ids)


def _common(a: bytes, b: bytes) -> int:
    """How many leading int32 of two byte strings are equal; bytes, because only they are compared by memcmp."""
    low, high = 0, min(len(a), len(b)) // 4
    if a[: high * 4] == b[: high * 4]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * 4 : middle * 4] == b[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low


def _shown(form: Format, raw: str, reply: dict[str, Any], reasoning: bool) -> tuple[Any, ...]:
    """What the raw text says; where the tools' schemas decide on types, as the reply took it."""
    recorded = reply.get("tool_calls")
    parser = TurnParser(form, tools=Recorded(recorded) if recorded else None, reasoning=reasoning)
    pieces = [*parser.feed(raw), *parser.finish()]
    calls = [{"name": p.name, "arguments": p.arguments} for p in pieces if isinstance(p, ParsedCall)]
    content = "".join(p.text for p in pieces if isinstance(p, Text))
    thoughts = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    return meaning({"content": content, "reasoning_content": thoughts, "tool_calls": calls})


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digests(text: str, start: str) -> tuple[bytes, bytes]:
    """Of a text and of its start, in one pass where it is its start."""
    if not text.startswith(start):
        return _digest(text), _digest(start)
    state = blake2b(start.encode("utf-8", "surrogatepass"), digest_size=16)
    of_start = state.digest()
    state.update(text[len(start) :].encode("utf-8", "surrogatepass"))
    return state.digest(), of_start
