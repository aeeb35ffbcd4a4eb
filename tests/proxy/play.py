"""Plays rollouts against the tree of an attempt, as the handler does, and writes models' turns in unusual tokens.

The turns are made of pieces that a real engine sampled at temperature 1. Such turns hardly ever hold a well-formed call
or a whole reasoning section, so two kinds are played: `as_sampled` is an engine's answer as it stands; in `framed`
turns the markers, names and brackets are written here, cut into tokens that the tokenizer would not choose, and only
what stands between them was sampled (less what the frame cannot hold: ends of turn, markers, quotes in JSON).
"""

import json
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from zlib import crc32

import aiohttp

from proxy.call import Call
from proxy.dialects import chat_completions
from proxy.pool.completions.records import NewCompletion, RequestShape, int_bytes
from proxy.prompt.splice import Prompt, PromptBuilder
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn
from tests.proxy.written import TOOLS, WRITERS, Calls
from tests.proxy.zoo import SPECIAL, Family

CLOCK = 1_700_000_000.0
HOLE = "HOLE"
UNFRIENDLY = 0.2
"""The share of turns that must tokenise differently from how they were sampled, or the tests prove nothing."""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", *SPECIAL)


@dataclass
class Speaker:
    """Makes turns of a family. `sampled`: what the engine answered, as token ids."""

    family: Family
    template: ChatTemplate
    sampled: Sequence[Sequence[int]]
    rng: random.Random
    _added: dict[str, list[int]] = field(default_factory=dict)

    def as_sampled(self) -> list[int]:
        return list(self.rng.choice(self.sampled))

    def framed(self) -> list[int]:
        """A turn with reasoning, text or calls, ended in one of the ways in which turns end."""
        rng, ids = self.rng, self._reasoning()
        calls = self.family.calls and rng.random() < 0.6
        if not calls or (not self.family.one_of and rng.random() < 0.4):
            ids += self._free(rng.randint(6, 16), self._plain)
        if calls:
            ids += self._spell(rng.choice(["", "\n"])) + self._calls()
        if ids and rng.random() < 0.15:
            return ids[: rng.randint(1, len(ids))]
        usual = self.family.call_end if calls and self.family.call_end else self.family.ends[0]
        end = rng.choice(self.family.ends) if rng.random() < 0.15 else usual
        return [*ids, self.template.encode(end)[0]]

    def spoken(self, text: str) -> list[int]:
        """This text in tokens of this model's own choice, with something sampled before its calls, or at its end.

        Equal texts get the same words, in other tokens.
        """
        thoughts, mark, rest = text.rpartition("</think>")
        content, call, calls = rest.partition("<tool_call>")
        something = self._added.setdefault(text, self._free(self.rng.randint(1, 8), self._plain))
        return self._spell(thoughts + mark + content) + something + self._spell(call + calls)

    def _reasoning(self) -> list[int]:
        if self.family.thinks == "no" or (self.family.thinks and self.rng.random() < 0.3):
            return []
        before, behind = (self.rng.choice(["", "\n", "\n\n"]) for _ in range(2))
        begin = self._spell(self.family.thinks + before)
        return begin + self._free(self.rng.randint(0, 12), self._plain) + self._spell(behind + "</think>" + before)

    def _calls(self) -> list[int]:
        """One or two calls whose string argument was sampled."""
        many = 1 if self.family.one_of else self.rng.randint(1, 2)
        calls: Calls = [
            ("shell", {"command": HOLE, "count": self.rng.randint(0, 9), "options": {"b": [1.0, None], "a": "<&>"}})
        ] * many
        first, *rest = WRITERS[self.family.way][1](calls).split(HOLE)
        ids = self._spell(first)
        for text in rest:
            ids += self._free(self.rng.randint(1, 12), self._quotable) + self._spell(text)
        return ids

    def _free(self, count: int, fits: Callable[[str], bool]) -> list[int]:
        """Take tokens of answers that fit: as many as asked for, or fewer where such tokens are rare."""
        answers = [token for _ in range(4) for token in self.as_sampled()]
        return [token for token in answers if fits(self.template.decode([token]))][:count]

    def _plain(self, text: str) -> bool:
        return text not in self.family.ends and text not in MARKERS and "{" not in text

    def _quotable(self, text: str) -> bool:
        return text not in MARKERS and text.isprintable() and not set(text) & set('"\\<�')

    def _spell(self, text: str) -> list[int]:
        """Tokens of a text, cut at random places; markers stay the tokens that they are."""
        ids: list[int] = []
        for piece in _markers(text, self.template.special):
            cut = self.rng.randint(0, len(piece)) if piece not in self.template.special else 0
            ids += self.template.encode(piece[:cut]) + self.template.encode(piece[cut:])
        return ids


async def sample(url: str, prompt: Sequence[int], ends: Sequence[int], length: int) -> list[int]:
    """An answer of the engine at temperature 1, as token ids."""
    params = {"temperature": 1.0, "max_new_tokens": length, "skip_special_tokens": False, "stop_token_ids": list(ends)}
    async with aiohttp.request(
        "POST", f"{url}/generate", json={"input_ids": list(prompt), "sampling_params": params}
    ) as answer:
        return list((await answer.json())["output_ids"])


def unfriendly(template: ChatTemplate, turns: Sequence[Sequence[int]]) -> float:
    """The share of turns whose text a tokenizer would write in other tokens."""
    return sum(template.encode(template.decode(turn)) != list(turn) for turn in turns) / len(turns)


def _markers(text: str, special: Sequence[str]) -> list[str]:
    pieces = [text]
    for mark in sorted(special, key=len, reverse=True):
        pieces = [part for piece in pieces for part in ([piece] if piece in special else _around(piece, mark))]
    return [piece for piece in pieces if piece]


def _around(text: str, mark: str) -> list[str]:
    first, *rest = text.split(mark)
    return [first, *(part for after in rest for part in (mark, after))]


# ---- how agents send back what they got


def verbatim(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "provider_specific_fields": {}}


def reserialised(message: dict[str, Any]) -> dict[str, Any]:
    """Write the message as JavaScript does: compact, nothing escaped, 1 for 1.0; an empty string for no content."""
    return _rewritten(message, lambda value: json.dumps(_whole(value), separators=(",", ":"), ensure_ascii=False))


def as_python(message: dict[str, Any]) -> dict[str, Any]:
    """Write the message as json.dumps does, with the keys in another order and the content in parts."""
    parts = [{"type": "text", "text": message["content"] or ""}]
    return {**_rewritten(message, lambda value: json.dumps(dict(reversed(value.items())))), "content": parts}


def trimmed(message: dict[str, Any]) -> dict[str, Any]:
    """Text and reasoning without the white space around them."""
    kept = {name: (message.get(name) or "").strip() for name in ("content", "reasoning_content")}
    return {**message, **{name: text for name, text in kept.items() if text or name == "content"}}


def thoughtless(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


ECHOES = (verbatim, reserialised, as_python, trimmed, thoughtless)


def _rewritten(message: dict[str, Any], write: Callable[[Any], str]) -> dict[str, Any]:
    echo = {**message, "content": message["content"] or ""}
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [write(json.loads(function["arguments"])) for function in functions]
        echo["tool_calls"] = [
            {**call, "function": {**function, "arguments": text}}
            for call, function, text in zip(message["tool_calls"], functions, texts, strict=True)
        ]
    return echo


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---- a rollout


@dataclass
class Rollout:
    """One attempt: its tree, what was recorded, and the conversation as the agent sends it."""

    family: Family
    template: ChatTemplate
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[NewCompletion] = field(default_factory=list)
    paths: list["array[int]"] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = PromptBuilder(self.template, CLOCK)
        self.tools = TOOLS if self.family.calls else []

    def call(self, messages: list[dict[str, Any]]) -> Call:
        body = {"model": "m", "messages": messages, "tools": self.tools, "chat_template_kwargs": self.family.options}
        return chat_completions.read(json.dumps(body).encode(), "/v1/chat/completions")

    def rendered(self, messages: list[dict[str, Any]]) -> str:
        """Render these messages with the template, as they were sent."""
        call = self.call(messages)
        clock = datetime.fromtimestamp(CLOCK).strftime
        return self.template.render(call.messages, call.tools, **call.options, strftime_now=clock)

    def ask(self, ids: list[int]) -> dict[str, Any]:
        """Send the conversation so far, let these ids be the answer, and return the message that the agent gets."""
        call = self.call(self.messages)
        prompt = self.builder.build(call, True)
        turn = Turn(call, prompt, self.template)
        turn.sampling.ids, turn.sampling.finish = array("i", ids), "stop" if ids[-1] in self.template.ends else "length"
        turn.take(ids)
        turn.close()
        item = self._row(prompt, turn)
        path = prompt.ids + turn.sampling.ids
        self.rows.append(item)
        self.paths.append(path)
        self.prompts.append(prompt)
        self.builder.add(len(self.rows), item, path, prompt)
        return item.reply

    def _row(self, prompt: Prompt, turn: Turn) -> NewCompletion:
        reply = turn.reply()
        return NewCompletion(
            attempt_id=1,
            prefix_of=prompt.prefix_of,
            prefix_length=prompt.prefix_length,
            follows=prompt.follows,
            prompt_tail=prompt.ids[prompt.prefix_length :],
            sampled=turn.sampling.ids,
            logprobs=array("f", [0.0] * len(turn.sampling.ids)),
            versions=(),
            finish_reason=reply.finish_reason,
            reply=reply.message(),
            shape=RequestShape(history=prompt.history),
            path_crc=crc32(int_bytes(prompt.ids + turn.sampling.ids)),
            started_at=0.0,
            finished_at=0.0,
        )

    def restarted(self) -> PromptBuilder:
        """The tree as another proxy builds it from what was recorded."""
        builder = PromptBuilder(self.template, CLOCK)
        for id, (item, path) in enumerate(zip(self.rows, self.paths, strict=True), 1):
            builder.add(id, item, path)
        return builder

    def standing(self, index: int = -1) -> "array[int]":
        """A path without the token that ended its turn."""
        path = self.paths[index]
        return path[:-1] if path[-1] in self.template.ends else path

    def opened(self, index: int = -1) -> str:
        """The reasoning marker at the end of a completion's prompt, if there is one."""
        text = self.template.decode(self.prompts[index].ids[-8:]).rstrip()
        return next((mark for mark in ("<think>", "</think>") if text.endswith(mark)), "")
