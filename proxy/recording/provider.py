"""Another provider's model in place of the engine, through litellm: for teachers, judges and baselines.

`engine.url = "litellm:PROVIDER/MODEL"`, in litellm's names; keys and addresses come from the environment, where litellm
looks for them. The provider gets the messages, and its answer is recorded as text: a row holds the prompt in the tokens
of the configured model directory, the reply, and no sampled tokens, as none came, so none of its rows is trained.
Left out: text completions; ids and logprobs, as no provider names the weights beside them (an SGLang elsewhere, which
does, is an engine: give its http URL); reasoning of earlier turns and whether to think, which providers take in
different ways or not at all; retries, which are the agent's.
"""

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from proxy.call import Call, Reply, ToolCall
from proxy.dialects.structured_output import openai_fields
from proxy.engine.client import EngineError, Sampling, SamplingRequest
from proxy.engine.replica import Origin, Replica
from proxy.http.redact import redacted
from proxy.parsing.turn_parser import Piece, Reasoning, Text
from proxy.pool.completions.records import Completion
from proxy.pool.errors import UserError
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.recording.turn import Turn

SCHEME = "litellm:"
KINDS = {408: "silent", 429: "busy", 503: "busy"}
"""HTTP status of a provider -> kind of EngineError; other 4xx are "refused", all else "failed"."""


@dataclass
class Said(Sampling):
    """What a provider has said so far; there are no ids."""

    call: Call | None = None
    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """By their place in the answer: id, name, arguments."""
    ended_by: str = ""
    """The provider's own finish reason."""
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> list[Piece]:
        """Take a message, or what a delta adds to it."""
        reasoning, text = part.get("reasoning_content") or "", part.get("content") or ""
        self.reasoning, self.text = self.reasoning + reasoning, self.text + text
        for place, call in enumerate(part.get("tool_calls") or ()):
            held = self.calls.setdefault(call.get("index", place), ["", "", ""])
            made = call.get("function") or {}
            for at, value in enumerate((call.get("id"), made.get("name"), made.get("arguments"))):
                held[at] += value or ""
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        return pieces + ([Text(text)] if text else [])


class TextTurn(Turn):
    """A turn that comes as text."""

    sampling: Said

    def restart(self) -> None:
        self.sampling = Said(call=self.call)

    def __post_init__(self) -> None:
        self.restart()

    @property
    def begun(self) -> bool:
        return bool(self.sampling.text or self.sampling.reasoning or self.sampling.calls)

    @property
    def untrainable(self) -> Untrained:
        return Untrained(UntrainedReason.TEXT_ONLY, f"ended by {self.sampling.ended_by or 'nothing'}")

    def take(self, ids: list[Any]) -> list[Piece]:
        """Pieces, as the provider's route yields them."""
        return ids

    def close(self) -> list[Piece]:
        return []

    def reply(self) -> Reply:
        """The answer so far. The tokens are the provider's count; where it gives none, the local tokenizer's."""
        said = self.sampling
        calls = tuple(ToolCall(id, name, arguments or "{}") for id, name, arguments in said.calls.values())
        sampled = said.usage.get("completion_tokens")
        return Reply(
            content=said.text,
            reasoning=said.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else said.finish or "stop",
            prompt_tokens=said.usage.get("prompt_tokens") or len(self.prompt.ids),
            sampled_tokens=len(self.template.encode(said.text)) if sampled is None else sampled,
            cached_tokens=(said.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            stop_sequence=None,
        )

    def again(self, recorded: Completion) -> tuple[list[Piece], Reply]:
        pieces = self.sampling.add(recorded.reply)
        self.sampling.finish = "length" if recorded.finish_reason == "length" else "stop"
        return pieces, self.reply()


class Provider:
    """Stands where the fleet of engines stands. UserError when litellm is missing or does not know the name."""

    replicas: tuple[Replica, ...] = ()

    def __init__(self, url: str, max_new_tokens: int | None, silence_seconds: float):
        self.model = url.removeprefix(SCHEME)
        self.max_new_tokens = max_new_tokens
        self.silence_seconds = silence_seconds
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
        """Always: asking a provider costs money."""
        return True

    def route(self, _origin: Origin) -> "ProviderRoute":
        return ProviderRoute(self)


class ProviderRoute:
    """One call to the provider."""

    def __init__(self, provider: Provider):
        self._provider = provider

    def goes_on(self, _error: EngineError) -> bool:
        return False

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[Any], None]:
        """Yield the pieces as they come, while filling `into`."""
        assert isinstance(into, Said) and into.call is not None, "a provider is asked for text turns"
        wanted = _request(into.call) | {"model": self._provider.model, "timeout": self._provider.silence_seconds}
        limits = [limit for limit in (into.call.max_new_tokens, self._provider.max_new_tokens) if limit is not None]
        if limits:
            wanted["max_tokens"] = min(limits)
        litellm = self._provider.litellm
        try:
            answer = await litellm.acompletion(**wanted, num_retries=0, max_retries=0)
            if into.call.stream:
                try:
                    async for chunk in answer:
                        yield _take(chunk.model_dump(), "delta", into)
                finally:
                    await answer.aclose()
            else:
                yield _take(answer.model_dump(), "message", into)
        except self._provider.error as error:
            raise self._problem(error) from error
        _check(into)

    def _problem(self, error: Any) -> EngineError:
        """The base class of litellm's errors has no status; those of a provider all have one."""
        errors, told = self._provider.litellm.exceptions, redacted(str(error))  # some repeat the key they refuse
        if isinstance(error, errors.ContextWindowExceededError):
            return EngineError("refused", f"the prompt is longer than the model's context length: {told}")
        if isinstance(error, errors.APIConnectionError):
            return EngineError("unreachable", f"the provider of {self._provider.model} does not answer: {told}")
        status = int(vars(error).get("status_code", 500))
        kind = KINDS.get(status, "refused" if 400 <= status < 500 else "failed")
        return EngineError(kind, f"the provider of {self._provider.model} answered HTTP {status}: {told}")


def _libraries() -> tuple[Any, type[Exception]]:
    """litellm and the base of its errors: seconds of imports, for those who ask for a provider; nothing is fetched."""
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
    """A call in the form of litellm's completion; EngineError for what has no place in it."""
    if call.prompt is not None:
        raise EngineError("refused", "a provider serves conversations, not text completions; send messages")
    if other := sorted(set(call.options) - {"enable_thinking", "reasoning_effort"}):
        raise EngineError("refused", f"template arguments ({', '.join(other)}) are not for a provider; leave them out")
    body: dict[str, Any] = {"messages": [_message(message) for message in call.messages], **call.sampling}
    if "reasoning_effort" in call.options:
        body["reasoning_effort"] = call.options["reasoning_effort"]
    if call.tools:
        allowed = call.constraint.calls if call.constraint else None
        body["tools"] = [tool for tool in call.tools if allowed is None or tool["function"]["name"] in allowed]
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
    made = call["function"]
    arguments = made["arguments"] if isinstance(made["arguments"], str) else json.dumps(made["arguments"])
    return {"id": call["id"], "type": "function", "function": {"name": made["name"], "arguments": arguments}}


def _take(answer: dict[str, Any], part: str, into: Said) -> list[Piece]:
    """What an answer, or a chunk of one, adds."""
    into.usage = answer.get("usage") or into.usage
    pieces: list[Piece] = []
    for choice in answer.get("choices") or ():
        pieces += into.add(choice.get(part) or {})
        into.ended_by = choice.get("finish_reason") or into.ended_by
    return pieces


def _check(into: Said) -> None:
    """EngineError when the answer is not whole."""
    if not into.ended_by:
        raise EngineError("died", "the provider ended its stream without a finish reason")
    into.finish = "length" if into.ended_by == "length" else "stop"
    for _, name, arguments in into.calls.values():
        try:
            whole = isinstance(json.loads(arguments or "{}"), dict)
        except ValueError:
            whole = False
        if not whole:
            raise EngineError("failed", f"the provider called {name!r} with arguments that are no JSON object")
