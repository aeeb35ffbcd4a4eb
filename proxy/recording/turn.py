"""One turn while it is sampled: token ids become text, text becomes reasoning, text and tool calls.

The same pieces come out streamed or not. Left out of the visible text: the end-of-turn token, and a stop string with
what follows it. Where only one call is wanted, the turn ends with the token that completes it, in every format; in
training, a turn that does nothing but repeat itself is ended too. The engine is stopped there, and what it has sampled
beyond is no part of the turn.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from proxy.call import Call, Reply, ToolCall
from proxy.engine.engine_call import CallExperts, EngineError, Sampling, SamplingRequest
from proxy.engine.moe_config import Mixture
from proxy.engine.repetition import RepetitionWatch
from proxy.engine.replicas.fleet import Route
from proxy.http.admission import FairThreads
from proxy.parsing.formats import ToolSchemas
from proxy.parsing.turn_parser import ParsedCall, Piece, Reasoning, Text, TurnParser
from proxy.pool.completions.records import CUT_FINISH_REASONS, REPETITION, Completion
from proxy.pool.completions.text_stream import TextStream
from proxy.pool.rollouts.attempts import Attempt
from proxy.pool.rollouts.starts import as_replayed
from proxy.pool.untrained import Untrained
from proxy.prompt.prefill import Stage, stages
from proxy.prompt.splice import Prompt
from proxy.prompt.template import ChatTemplate
from proxy.recording.text_tokens import TextTokens


class PlainParser:
    """The parser of a text completion: everything is text."""

    def __init__(self) -> None:
        self._fed = 0

    def feed(self, text: str) -> list[Piece]:
        self._fed += len(text)
        return [Text(text, self._fed - len(text))] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass
class Turn:
    """Fills up by `stream`, or by `take` and at the end `close`."""

    call: Call
    prompt: Prompt
    template: ChatTemplate
    route: Route | None = None
    """The way to the engine's replicas; None where nothing is sampled, as in a replay."""
    mixture: Mixture | None = None
    """Set: the engine must name the experts that it chose, else the call fails."""
    sampling: Sampling = field(init=False, default_factory=Sampling)
    call_ids: tuple[str, ...] = ()
    """Ids of the tool calls where the turn is a recorded one; new ones are made otherwise."""
    replayed: int | None = None
    """The recorded completion whose answer this is, and with which its attempt begins; None: it is sampled."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again with nothing sampled. Only allowed while the client has got nothing of the turn."""
        experts = None if self.mixture is None else CallExperts(self.mixture, self.prompt.experts_end)
        self.sampling = Sampling(experts=experts, queued_seconds=self.sampling.queued_seconds)
        form = self.template.form
        tools = ToolSchemas(self.call.tools) if self.call.tools and not self.call.no_calls else None
        enforced = self.call.constraint is not None and self.call.constraint.enforced
        reasoning = form.opens_reasoning(self.prompt.text) and not enforced
        plain = self.call.prompt is not None
        self._parser = PlainParser() if plain else TurnParser(form, tools=tools, reasoning=reasoning)
        self._decoder = TextStream(self.template.tokenizer)
        self._decoded = ""
        self._incomplete = False  # the last ids have not become text yet
        self._parsed = 0  # how much of the decoded text the parser has
        self._tokens = None if self.call.logprobs is None else TextTokens(self.template.tokenizer, self.sampling)
        self._decoded_ids = 0  # how many ids have been taken
        self._stops_from = 0  # where the text begins in which stop strings count: behind given tokens
        self._stops_found: dict[str, int] = {}  # stop string -> its first place there
        self._stops_searched = 0  # how much of the decoded text was searched for them
        self._cached_tokens: int | None = None
        self._pieces: list[Piece] = []
        self._repetition: RepetitionWatch | None = None

    @property
    def single_call(self) -> bool:
        """Whether the turn ends with its first call. Where the engine enforces a call, its grammar sees to that."""
        constraint = self.call.constraint
        return self.call.single_call or constraint is not None and constraint.once and not constraint.enforced

    @property
    def begun(self) -> bool:
        """Whether anything has been sampled."""
        return self.sampling.sampled > 0

    @property
    def untrainable(self) -> Untrained | None:
        """Why no turn of this kind can be trained on, whatever it says; None where it can."""
        return None if self.replayed is None else as_replayed(self.replayed)

    def may_move(self, error: EngineError) -> bool:
        """Whether another replica may sample the turn after this error."""
        return self.route is not None and self.route.goes_on(error)

    async def stream(
        self, request: SamplingRequest, work: FairThreads, attempt: Attempt
    ) -> AsyncGenerator[list[Piece], None]:
        """Sample the whole turn on one replica and yield its pieces as they become certain; EngineError on failure.

        Work that grows with the number of tokens runs in `work`'s threads where there are many.
        """
        self._repetition = RepetitionWatch() if request.stop_repetition else None
        for stage in stages(self.call, self.prompt, self.template):
            if self.begun and not self._goes_on():
                break
            rest = request.max_new_tokens - len(self.sampling.ids)
            if rest <= 0:
                self.sampling.finish = "length"
                break
            given = list(stage.given[: rest - 1])  # the model samples one token at least
            self.sampling.go_on(given)
            if given:
                yield self.take(given)
            assert self.route is not None, "a turn is sampled through a route"
            async with aclosing(self.route.sample(self._behind(request, stage), self.sampling)) as events:
                async for ids in events:
                    yield await work.sized(len(ids), attempt, self.take, ids)
            await self._end_call(work, attempt)
        yield await work.sized(len(self.sampling.ids), attempt, self.close)

    def _behind(self, request: SamplingRequest, stage: Stage) -> SamplingRequest:
        """The engine call of a stage, behind what the turn has so far."""
        tokens = [text for text in stage.ends if text in self.template.special]  # never part of a longer token
        texts = [text for text in stage.ends if text not in tokens]
        end_ids = [id for text in tokens for id in self.template.encode(text)]
        return request.behind(self.sampling.ids, end_ids, texts)

    async def _end_call(self, work: FairThreads, attempt: Attempt) -> None:
        """Check what an engine call brought; EngineError where something is missing."""
        self.sampling.check()
        if self._cached_tokens is None:
            self._cached_tokens = self.sampling.cached_tokens
        if (experts := self.sampling.experts) is not None:
            length = len(self.prompt.ids) + len(self.sampling.ids)
            await work.sized(length - experts.start, attempt, experts.read, length)
        self.sampling.cut(len(self.prompt.ids))

    def _goes_on(self) -> bool:
        """Whether the last engine call ended where its stage ends, and not where the turn does."""
        ids, sampling = self.sampling.ids, self.sampling
        ended = sampling.finish != "stop" or sampling.enough is not None or ids[-1] in self.template.ends
        return not ended and not self._stops()

    def take(self, ids: list[int]) -> list[Piece]:
        """The pieces that have become certain with these ids, which the turn may end in the middle of."""
        end = self._repetition_end(len(ids))
        if end is not None:
            ids = ids[: end - self._decoded_ids]
        pieces = self._take_until_call(ids) if self.single_call else self._take(ids)
        if end is not None and self.sampling.enough is None:
            self.sampling.enough, self.sampling.enough_finish = end, REPETITION
        return pieces

    def _repetition_end(self, new: int) -> int | None:
        """Where the turn has repeated itself for too long, with `new` further ids; None: nowhere."""
        if self._repetition is None:
            return None
        end = self._repetition.end(self.sampling.ids, self._decoded_ids + new)
        return end if end is not None and end > self.sampling.start else None  # never among given ids

    def _take_until_call(self, ids: list[int]) -> list[Piece]:
        pieces: list[Piece] = []
        for id in ids:
            if self.sampling.enough is not None:
                break
            new = self._take([id])
            for number, piece in enumerate(new, 1):
                if isinstance(piece, ParsedCall):
                    self.sampling.enough = self._decoded_ids
                    del self._pieces[len(self._pieces) - len(new) + number :], new[number:]
                    break
            pieces += new
        return pieces

    def _take(self, ids: list[int]) -> list[Piece]:
        if self._tokens is None:
            self._decode(ids)
        else:  # each token for itself, to know its place in the text
            for token in ids:
                start = len(self._decoded)
                self._decode([token])
                self._tokens.add(start, len(self._decoded), token not in self.template.ends)
        withheld = max(map(len, self.call.stop), default=0)  # a stop string may have begun in the last characters
        return self._parse(max(self._parsed, len(self._decoded) - withheld))

    def _decode(self, ids: list[int]) -> None:
        visible = [token for token in ids if token not in self.template.ends]
        if visible:
            text = self._decoder.step(visible)
            self._decoded, self._incomplete = self._decoded + (text or ""), text is None
        self._decoded_ids += len(ids)
        if self.sampling.given and self._decoded_ids <= self.sampling.given[-1][1]:
            self._stops_from = len(self._decoded)
            self._stops_found.clear()

    def _parse(self, end: int) -> list[Piece]:
        end = min([end, *self._stops()])
        pieces = self._with_tokens(self._parser.feed(self._decoded[self._parsed : end]))
        self._parsed = max(self._parsed, end)
        self._pieces += pieces
        return pieces

    def _stops(self) -> dict[int, str]:
        """Where stop strings stand in the text that the model sampled behind all given tokens."""
        for stop in self.call.stop:
            if stop not in self._stops_found:
                # Nothing is searched twice, but for the end of what was: the string may have begun there.
                begin = max(self._stops_from, self._stops_searched - len(stop) + 1)
                if (at := self._decoded.find(stop, begin)) >= 0:
                    self._stops_found[stop] = at
        self._stops_searched = len(self._decoded)
        return {self._stops_found[stop]: stop for stop in self.call.stop if stop in self._stops_found}

    def close(self) -> list[Piece]:
        """What was held back until the end of the turn. Nothing that stands behind the only call."""
        if self.sampling.enough is not None and self.sampling.enough_finish != REPETITION:
            return []
        if self._incomplete:  # bytes of a character that never became whole
            whole = self.template.decode([token for token in self.sampling.ids if token not in self.template.ends])
            self._decoded = whole if whole.startswith(self._decoded) else self._decoded
        first = self._parse(len(self._decoded))
        last = self._with_tokens(self._parser.finish())
        self._pieces += last
        return first + last

    def _with_tokens(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, texts with their tokens where the client asks for logprobs."""
        if (tokens := self._tokens) is None:
            return pieces
        return [replace(piece, tokens=tokens.take(piece)) if isinstance(piece, Text) else piece for piece in pieces]

    def reply(self) -> Reply:
        """The answer, from all pieces so far."""
        calls = [piece for piece in self._pieces if isinstance(piece, ParsedCall)]
        earlier = {call.get("id", "") for message in self.call.messages for call in message.get("tool_calls") or ()}
        ids = self.call_ids or self.template.form.ids(calls, earlier)
        stops = self._stops()
        return Reply(
            content="".join(piece.text for piece in self._pieces if isinstance(piece, Text)),
            reasoning="".join(piece.text for piece in self._pieces if isinstance(piece, Reasoning)),
            tool_calls=tuple(ToolCall(id, call.name, call.arguments) for id, call in zip(ids, calls, strict=True)),
            finish_reason="length" if self.sampling.finish in CUT_FINISH_REASONS else "tool_calls" if calls else "stop",
            prompt_tokens=len(self.prompt.ids),
            sampled_tokens=len(self.sampling.ids),
            reasoning_tokens=self._reasoning_tokens(),
            cached_tokens=self.sampling.cached_tokens if self._cached_tokens is None else self._cached_tokens,
            stop_sequence=stops[min(stops)] if stops else None,
            logprobs=tuple(token for piece in self._pieces if isinstance(piece, Text) for token in piece.tokens),
        )

    def _reasoning_tokens(self) -> int | None:
        """The sampled tokens up to the one that ends the reasoning; None where that mark was spelled in several."""
        if not any(isinstance(piece, Reasoning) for piece in self._pieces):
            return 0
        mark, ids = self.template.form.think[1], self.sampling.ids
        if mark not in self._decoded[: self._parsed]:
            return sum(id not in self.template.ends for id in ids)
        end = self.template.tokenizer.token_to_id(mark)
        if end is None or ids.count(end) != self._decoded.count(mark):
            return None
        return ids.index(end) + 1

    def from_record(self, recorded: Completion) -> tuple[list[Piece], Reply]:
        """The answer that was recorded for this request: its pieces, and the whole with its own call ids."""
        self.sampling.ids, self.sampling.logprobs = recorded.sampled, recorded.logprobs
        self.sampling.given = given = recorded.prescribed
        self.sampling.finish = recorded.finish_reason
        ids, free = recorded.sampled.tolist(), given[-1][1] if given else 0
        pieces = self.take(ids[:free]) + self.take(ids[free:]) + self.close()
        functions = [(call["id"], call["function"]) for call in recorded.reply.get("tool_calls", ())]
        calls = tuple(ToolCall(id, function["name"], function["arguments"]) for id, function in functions)
        return pieces, replace(self.reply(), tool_calls=calls)
