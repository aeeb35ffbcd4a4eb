"""One model call between the dialects and the engine: the request, the answer and the errors.

A dialect reads its request into a `Call` and writes its answer from a `Reply`. Nothing else passes between a dialect
and the rest of the proxy.
"""

from dataclasses import dataclass, field
from typing import Any

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Constraint:
    """The prescribed form of an answer: JSON of a schema, or calls (proxy/dialects/structured_output.py).

    With both, the answer is calls; the schema is that of a later answer, when no call is required any more.
    """

    field: str
    """The request's field that prescribes it, for error messages."""
    schema: Any = None
    """None where none is asked for."""
    calls: tuple[str, ...] | None = None
    """The functions that may be called."""
    once: bool = False
    """The answer is exactly one call."""
    enforced: bool = False
    """Whether the engine's grammar enforces it (proxy.prescribed = "grammar"); such an answer is not trained."""


@dataclass(frozen=True)
class ToolCallGrammar:
    """A tool call as the engine must write it: JSON of a schema between two fixed texts."""

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True)
class Grammar:
    """The form that the engine enforces on an answer: JSON of one schema, or, where `calls` has any, tool calls."""

    schema: Any = None
    calls: tuple[ToolCallGrammar, ...] = ()
    once: bool = False
    """The answer is exactly one call."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer's text, or one that might have stood in its place, with its recorded logprob."""

    id: int
    data: bytes
    """Its text in UTF-8; a token may be a part of a character."""
    logprob: float
    start: int = 0
    """Where it begins in the text of the turn."""
    top: "tuple[TokenLogprob, ...]" = ()
    """The likeliest tokens of its place, as many as the client asked for and the engine named."""

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class StoredRequest:
    """What is stored of a request beside its answer, so that later requests can name them."""

    response_id: str
    created_at: int
    previous: str | None
    """The response that the request continues by its id."""
    items: tuple[bytes, ...]
    """The whole input, each item as JSON."""
    fields: dict[str, Any]
    """What the response repeats of the request."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The agent's request, the same for every dialect."""

    model: str
    messages: tuple[dict[str, Any], ...] = ()
    """Form of the chat template: content is text, tool-call arguments are parsed where they are JSON objects."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue unchanged, without a chat template and without parsing reasoning."""
    tools: tuple[dict[str, Any], ...] = ()
    max_new_tokens: int | None = None
    """The most tokens of each answer; None: as many as the configuration and the context allow."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    sampling: dict[str, float] = field(default_factory=dict)
    """The sampling parameters that the agent named (temperature, top_p, ...)."""
    constraint: Constraint | None = None
    """The prescribed form of the answer; None where it is free."""
    single_call: bool = False
    """Whether an answer ends with its first tool call."""
    no_calls: bool = False
    """The tools stay in the prompt, which so goes on from the conversation, but what looks like a call is text."""
    choices: int = 1
    """The number of answers to the one prompt."""
    logprobs: int | None = None
    """How many of the likeliest tokens are wanted beside each token's logprob; None: no logprobs are wanted."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the token counts."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template."""
    fields: dict[str, str] = field(default_factory=dict)
    """The request's names of sampling parameters and of arguments for the chat template, where it has other names."""
    echo: dict[str, Any] = field(default_factory=dict)
    """Values of the request that the dialect needs again for the answer."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect here; a header of the answer names them."""
    stored: StoredRequest | None = None
    """Set where later requests may name the answer, in the Responses dialect."""


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer, parsed."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop | length | tool_calls, as the client sees it: no dialect has a word for an answer that repeats itself."""
    stop_sequence: str | None
    """The stop string that ended the text."""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the engine did not compute again."""
    reasoning_tokens: int | None = None
    """Those of the sampled tokens that are reasoning, its marks among them; None where that is not known."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The tokens of the content, where the call asks for them. A token without a recorded logprob is left out."""

    def message(self) -> dict[str, Any]:
        """The assistant message as the pool stores it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class CallError(Exception):
    """An error that the client gets: an HTTP status, a code that clients know, and one sentence.

    The sentence says what happened, why, and what to do. `param` is the request's field at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ContextOverflow(CallError):
    """The prompt does not fit into the context. The words are OpenAI's, on which agents shorten their history."""

    def __init__(self, length: int, limit: int, param: str):
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {length} "
            "tokens. Please reduce the length of the messages.",
            param,
        )
        self.length = length
        self.limit = limit


def internal_error(status: int = 500) -> CallError:
    """The error for a bug of the proxy, whose details only the log gets."""
    return CallError(
        status, "internal_error", "the proxy failed because of a bug; repeat the call, and see the proxy's log"
    )
