"""Serves another provider's model in place of the engine, through litellm: for teachers, judges and baselines.

Set `engine.url = "litellm:PROVIDER/MODEL"`, in litellm's names; litellm takes keys and addresses from the environment.
The provider gets the messages, and its answer is recorded as text: a row holds the prompt in the tokens of the
configured model directory, the reply, and no sampled tokens, so it is never trained. Left out: text completions; token
ids and logprobs, because no provider names the weights that sampled them (an SGLang elsewhere does: give its http URL
as an engine); reasoning of earlier turns and whether to think, which providers take in different ways or not at all;
retries, which are the agent's.
"""

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from proxy.call import Call, Reply, ToolCall
from proxy.dialects.structured_output import openai_fields
from proxy.engine.client import RESERVED_TOKENS
from proxy.engine.engine_call import EngineError, Sampling, SamplingRequest
from proxy.engine.replicas.outage import Outage
from proxy.engine.replicas.replica import Replica
from proxy.http.admission import FairThreads
from proxy.http.redact import redacted
from proxy.parsing.turn_parser import Piece, Reasoning, Text
from proxy.pool.completions.records import CUT_FINISH_REASONS, Completion
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Attempt
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.recording.turn import Turn

SCHEME = "litellm:"
CUT = "length"
"""How a provider, and the client's answer, name an end by the limit of tokens."""
KINDS = {408: "silent", 429: "busy", 503: "busy"}
"""HTTP status of a provider -> kind of EngineError; other 4xx are "refused", all others "failed"."""


@dataclass
class ProviderAnswer:
    """What a provider has answered so far: text and calls, no token ids."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Place in the answer -> id, name and arguments of a tool call."""
    ended_by: str = ""
    """The provider's own finish reason."""
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> list[Piece]:
        """Add a message, or what a delta adds to it, and return the new pieces."""
        reasoning, text = part.get("reasoning_content") or "", part.get("content") or ""
        self.reasoning, self.text = self.reasoning + reasoning, self.text + text
        for place, call in enumerate(part.get("tool_calls") or ()):
            fields = self.calls.setdefault(call.get("index", place), ["", "", ""])
            function = call.get("function") or {}
            for at, value in enumerate((call.get("id"), function.get("name"), function.get("arguments"))):
                fields[at] += value or ""
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        return pieces + ([Text(text)] if text else [])

    def take(self, answer: dict[str, Any], part: str) -> list[Piece]:
        """Add an answer (`part` "message"), or a chunk of one ("delta"), and return the new pieces."""
        self.usage = answer.get("usage") or self.usage
        pieces: list[Piece] = []
        for choice in answer.get("choices") or ():
            pieces += self.add(choice.get(part) or {})
            self.ended_by = choice.get("finish_reason") or self.ended_by
        return pieces

    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far. In a whole answer, a call without arguments has an empty object."""
        nothing = "" if self.ended_by in ("", CUT) else "{}"
        return tuple(ToolCall(id, name, arguments or nothing) for id, name, arguments in self.calls.values())

    def check(self) -> None:
        """Raise EngineError unless the provider ended the answer and every call's arguments are a JSON object, but for
        those that the answer's length has cut."""
        if not self.ended_by:
            raise EngineError("died", "the provider ended its stream without a finish reason")
        broken = next((call.name for call in self.tool_calls() if not _is_object(call.arguments)), None)
        if broken is not None and self.ended_by != CUT:
            raise EngineError("failed", f"the provider called {broken!r} with arguments that are no JSON object")


@dataclass
class ProviderTurn(Turn):
    """A turn that comes as text. Its `sampling` has no ids; only the finish reason is set."""

    provider: "Provider | None" = None

    def restart(self) -> None:
        self.sampling, self.answer = Sampling(), ProviderAnswer()

    @property
    def begun(self) -> bool:
        return bool(self.answer.text or self.answer.reasoning or self.answer.calls)

    @property
    def untrainable(self) -> Untrained:
        return Untrained(UntrainedReason.TEXT_ONLY, f"ended by {self.answer.ended_by or 'nothing'}")

    async def stream(
        self, _request: SamplingRequest, _work: FairThreads, _attempt: Attempt
    ) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces as the provider sends them. The engine's parameters do not apply to it."""
        assert self.provider is not None, "a provider's turn is sampled by a provider"
        async with aclosing(self.provider.sample(self.call, self.answer)) as parts:
            async for pieces in parts:
                yield pieces
        self.answer.check()
        self.sampling.finish = CUT if self.answer.ended_by == CUT else "stop"

    def reply(self) -> Reply:
        """The answer so far, without cut calls. Token counts are the provider's; where it gives none, the local
        tokenizer's."""
        answer, usage = self.answer, self.answer.usage
        calls = tuple(call for call in answer.tool_calls() if _is_object(call.arguments))
        sampled = usage.get("completion_tokens")
        return Reply(
            content=answer.text,
            reasoning=answer.reasoning,
            tool_calls=calls,
            finish_reason=CUT if self.sampling.finish == CUT else "tool_calls" if calls else "stop",
            prompt_tokens=usage.get("prompt_tokens") or len(self.prompt.ids),
            reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
            sampled_tokens=len(self.template.encode(answer.text)) if sampled is None else sampled,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            stop_sequence=None,
        )

    def from_record(self, recorded: Completion) -> tuple[list[Piece], Reply]:
        pieces = self.answer.add(recorded.reply)
        self.sampling.finish = CUT if recorded.finish_reason in CUT_FINISH_REASONS else "stop"
        return pieces, self.reply()


class Provider:
    """Takes the place of the fleet of engines. UserError when litellm is missing or does not know the provider."""

    replicas: tuple[Replica, ...] = ()
    reserved_tokens = RESERVED_TOKENS
    """Providers do not name theirs."""

    def __init__(self, url: str, max_new_tokens: int | None, silence_seconds: float):
        self.model = url.removeprefix(SCHEME)
        self.max_new_tokens = max_new_tokens
        self.silence_seconds = silence_seconds
        self._outage = Outage()
        self.litellm, self.error = _libraries()
        try:
            self.litellm.get_llm_provider(self.model)
        except self.litellm.exceptions.BadRequestError as error:
            raise UserError(
                f"litellm knows no provider for {self.model!r}; write litellm:PROVIDER/MODEL, say litellm:openai/gpt-4o"
            ) from error

    async def close(self) -> None:
        await self.litellm.close_litellm_async_clients()

    async def healthy(self) -> bool:
        """Always true: asking a provider costs money."""
        return True

    def outage_of(self, run_id: int | None) -> Outage:
        """No outage: nobody knows whether a provider is up before it is asked."""
        return self._outage

    def waited(self, attempt_id: int, within: float) -> float:
        return 0.0

    def away(self, run_id: int | None = None) -> str:
        return ""

    def without_effect(self, call: Call) -> tuple[str, ...]:
        """The fields of the request that change nothing: those that the dialect does not read, and whether to think."""
        return (*call.ignored, *(call.fields.get(name, name) for name in call.options if name != "reasoning_effort"))

    async def sample(self, call: Call, into: ProviderAnswer) -> AsyncGenerator[list[Piece], None]:
        """Ask for one answer and yield its pieces as they come while filling `into`; EngineError on failure."""
        body = _request(call) | {"model": self.model, "timeout": self.silence_seconds}
        limits = [limit for limit in (call.max_new_tokens, self.max_new_tokens) if limit is not None]
        if limits:
            body["max_tokens"] = min(limits)
        try:
            answer = await self.litellm.acompletion(**body, num_retries=0, max_retries=0)
            if call.stream:
                try:
                    async for chunk in answer:
                        yield into.take(chunk.model_dump(), "delta")
                finally:
                    await answer.aclose()
            else:
                yield into.take(answer.model_dump(), "message")
        except self.error as error:
            raise self._problem(error) from error

    def _problem(self, error: Any) -> EngineError:
        """The EngineError for an error of litellm, of which those that a provider answers have an HTTP status."""
        errors, message = self.litellm.exceptions, redacted(str(error))  # some repeat the key they refuse
        if isinstance(error, errors.ContextWindowExceededError):
            return EngineError("refused", f"the prompt is longer than the model's context length: {message}")
        if isinstance(error, errors.APIConnectionError):
            return EngineError("unreachable", f"the provider of {self.model} does not answer: {message}")
        status = int(vars(error).get("status_code", 500))
        kind = KINDS.get(status, "refused" if 400 <= status < 500 else "failed")
        return EngineError(kind, f"the provider of {self.model} answered HTTP {status}: {message}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):  # a model may repeat a bracket until its length cuts it
        return False


def _libraries() -> tuple[Any, type[Exception]]:
    """Import litellm and the base class of its errors; it takes seconds, so only when needed. Nothing is fetched."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        litellm: Any = import_module("litellm")
        openai: Any = import_module("openai")
    except ImportError as error:
        raise UserError(
            "engine.url names a litellm: provider, and litellm is not installed; pip install 'blackforge[providers]'"
        ) from error
    litellm.suppress_debug_info = True
    return litellm, openai.OpenAIError


def _request(call: Call) -> dict[str, Any]:
    """The arguments of litellm's completion for a call; EngineError for what they cannot express."""
    if call.prompt is not None:
        raise EngineError("refused", "a provider serves conversations, not text completions; send messages")
    if call.logprobs is not None:
        raise EngineError("refused", "a provider's logprobs are not passed on; leave them out")
    if other := sorted(set(call.options) - {"enable_thinking", "reasoning_effort"}):
        raise EngineError("refused", f"template arguments ({', '.join(other)}) are not for a provider; leave them out")
    body: dict[str, Any] = {"messages": [_message(message) for message in call.messages], **call.sampling}
    if "reasoning_effort" in call.options:
        body["reasoning_effort"] = call.options["reasoning_effort"]
    if call.tools:
        allowed = call.constraint.calls if call.constraint else None
        body["tools"] = [tool for tool in call.tools if allowed is None or tool["function"]["name"] in allowed]
        if call.no_calls:
            body["tool_choice"] = "none"
    if call.single_call:
        body["parallel_tool_calls"] = False
    if call.constraint:
        body |= openai_fields(call.constraint)
    if call.stop:
        body["stop"] = list(call.stop)
    if call.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _message(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_called(call) for call in calls]
    return kept


def _called(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}
