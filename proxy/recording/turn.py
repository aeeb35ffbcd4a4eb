"""One turn while it is sampled: token ids become text, text becomes reasoning, text and tool calls.

The same pieces come out streamed or not. Left out of the visible text: the end-of-turn token, and a stop string with
what follows it.
"""

from dataclasses import dataclass, field, replace

from tokenizers.decoders import DecodeStream

from proxy.call import Call, Reply, ToolCall
from proxy.engine.client import Sampling
from proxy.parsing.formats import ToolSchemas
from proxy.parsing.turn_parser import ParsedCall, Piece, Reasoning, Text, TurnParser
from proxy.pool.completions.records import Completion
from proxy.pool.untrained import Untrained
from proxy.prompt.splice import Prompt
from proxy.prompt.template import ChatTemplate


class Plain:
    """The parser of a text that is continued as it stands."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass
class Turn:
    """Fills up by `take`, ends by `close`."""

    call: Call
    prompt: Prompt
    template: ChatTemplate
    sampling: Sampling = field(default_factory=Sampling)
    call_ids: tuple[str, ...] = ()
    """Of the tool calls, where the turn is a recorded one; new ones are made otherwise."""

    def __post_init__(self) -> None:
        form = self.template.form
        tools = ToolSchemas(self.call.tools) if self.call.tools else None
        reasoning = form.opens_reasoning(self.prompt.text) and self.call.constraint is None
        plain = self.call.prompt is not None
        self._parser = Plain() if plain else TurnParser(form, tools=tools, reasoning=reasoning)
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._decoded = ""
        self._incomplete = False  # the last ids have not become text yet
        self._parsed = 0  # how much of the decoded text the parser has
        self._pieces: list[Piece] = []

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return bool(self.sampling.ids)

    @property
    def untrainable(self) -> Untrained | None:
        """Why no such turn can be trained on, whatever it says."""
        return None

    def restart(self) -> None:
        """Begin again, as nothing of what came has been used."""
        self.sampling = Sampling()
        self.__post_init__()

    def take(self, ids: list[int]) -> list[Piece]:
        """The pieces that have become certain with these ids."""
        visible = [token for token in ids if token not in self.template.ends]
        if visible:
            text = self._decoder.step(self.template.tokenizer, visible)
            self._decoded, self._incomplete = self._decoded + (text or ""), text is None
        held = max(map(len, self.call.stop), default=0)  # a stop string may have begun in the last characters
        return self._parse(max(self._parsed, len(self._decoded) - held))

    def _parse(self, end: int) -> list[Piece]:
        cuts = [at for at in (self._decoded.find(stop, 0) for stop in self.call.stop) if at >= 0]
        end = min([end, *cuts])
        pieces = self._parser.feed(self._decoded[self._parsed : end])
        self._parsed = max(self._parsed, end)
        self._pieces += pieces
        return pieces

    def _stop(self) -> str | None:
        """The stop string that comes first in the text."""
        found = {self._decoded.find(stop): stop for stop in self.call.stop if stop in self._decoded}
        return found[min(found)] if found else None

    def close(self) -> list[Piece]:
        """What was held back until the end of the turn."""
        if self._incomplete:  # bytes of a character that never became whole
            whole = self.template.decode([token for token in self.sampling.ids if token not in self.template.ends])
            self._decoded = whole if whole.startswith(self._decoded) else self._decoded
        first = self._parse(len(self._decoded))
        last = self._parser.finish()
        self._pieces += last
        return first + last

    def reply(self) -> Reply:
        """The answer, from all pieces so far."""
        calls = [piece for piece in self._pieces if isinstance(piece, ParsedCall)]
        ids = self.call_ids or self.template.form.ids(calls, self._taken_ids())
        finish = "length" if self.sampling.finish == "length" else "tool_calls" if calls else "stop"
        return Reply(
            content="".join(piece.text for piece in self._pieces if isinstance(piece, Text)),
            reasoning="".join(piece.text for piece in self._pieces if isinstance(piece, Reasoning)),
            tool_calls=tuple(ToolCall(id, call.name, call.arguments) for id, call in zip(ids, calls, strict=True)),
            finish_reason=finish,
            prompt_tokens=len(self.prompt.ids),
            sampled_tokens=len(self.sampling.ids),
            cached_tokens=self.sampling.cached_tokens,
            stop_sequence=self._stop(),
        )

    def again(self, recorded: Completion) -> tuple[list[Piece], Reply]:
        """The answer that was recorded for this request: its pieces, and the whole with its own call ids."""
        self.sampling.ids = recorded.sampled
        self.sampling.finish = recorded.finish_reason
        pieces = self.take(recorded.sampled.tolist()) + self.close()
        functions = [(call["id"], call["function"]) for call in recorded.reply.get("tool_calls", ())]
        calls = tuple(ToolCall(id, made["name"], made["arguments"]) for id, made in functions)
        return pieces, replace(self.reply(), tool_calls=calls)

    def _taken_ids(self) -> set[str]:
        """The ids of the calls in the conversation so far."""
        return {call.get("id", "") for message in self.call.messages for call in message.get("tool_calls") or ()}
