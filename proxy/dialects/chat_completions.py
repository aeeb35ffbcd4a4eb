"""OpenAI chat completions: reads the request, writes the answer, its events and its errors.

Refused with a sentence: images and audio, logit_bias, the old `functions`. Whether and how hard to think is asked in
several ways, and becomes arguments of the chat template. What is not read is named in the answer's header.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.call import Call, CallError, Reply, TokenLogprob
from proxy.dialects.base import (
    COMMENT,
    DONE,
    SAMPLING_FIELDS,
    at_least_one,
    data_event,
    effort_options,
    openai_error,
    options_of,
    parsed_arguments,
    refuse,
    refuse_any,
    tool_call,
    unread_of_form,
    usage,
    without_nones,
)
from proxy.dialects.request_fields import RequestReader
from proxy.dialects.structured_output import openai_constraint
from proxy.dialects.token_logprobs import openai_entries, tokens_of, wanted
from proxy.parsing.turn_parser import Piece, Reasoning, Text

NAME, PROMPT, CHOICES = "chat_completions", "messages", "n"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NAMES: dict[type, str] = {Text: "content", Reasoning: "reasoning_content"}
OWN_VARIABLES = {"messages", "tools", "documents", "self"}
"""Template variables that the proxy sets itself, so that no client may."""


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None
    type: str | None = None
    index: int | None = None
    """Place of a streamed call; clients that send it back send the calls in this order."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None
    audio: Any = None


class _Thinking(msgspec.Struct):
    type: str


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    enabled: bool | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: _Reasoning | None = None
    thinking: _Thinking | bool | None = None
    enable_thinking: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: list[Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None


_reader = RequestReader(_Request, "a chat completion request")


# ---- reading


def read(body: bytes, path: str) -> Call:
    """Read the request as a call; CallError 400 names the field that is wrong or not supported."""
    request, unread = _reader.read(body)
    _check(request)
    limits = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None]
    fields = msgspec.structs.asdict(request)
    asked = {name: fields[name] for name in SAMPLING_FIELDS}
    tools = tuple(request.tools or ())
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return Call(
        model=request.model,
        messages=tuple(_message(message, i) for i, message in enumerate(request.messages)),
        tools=tools,
        constraint=openai_constraint(request.tool_choice, "response_format", request.response_format, tools),
        max_new_tokens=min(limits) if limits else None,
        stop=tuple(filter(None, stop)),
        sampling={name: value for name, value in asked.items() if value is not None},
        single_call=request.parallel_tool_calls is False and bool(tools),
        no_calls=request.tool_choice == "none",
        choices=1 if request.n is None else request.n,
        logprobs=wanted(bool(request.logprobs), request.top_logprobs, ("logprobs", "top_logprobs")),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        **options_of(*_options(request)),
        ignored=(*unread_of_form("response_format", request.response_format), *unread),
    )


def _options(request: _Request) -> list[tuple[str, dict[str, Any]]]:
    """What asks for arguments of the chat template: the request's field and the arguments."""
    reasoning, thinking = request.reasoning or _Reasoning(), request.thinking
    if isinstance(thinking, _Thinking):
        thinking = thinking.type != "disabled"
    return [
        ("reasoning_effort", effort_options(request.reasoning_effort)),
        ("reasoning.effort", effort_options(reasoning.effort)),
        ("reasoning.enabled", without_nones({"enable_thinking": reasoning.enabled})),
        ("thinking", without_nones({"enable_thinking": thinking})),
        ("enable_thinking", without_nones({"enable_thinking": request.enable_thinking})),
        *(
            (f"chat_template_kwargs.{name}", {name: value})
            for name, value in (request.chat_template_kwargs or {}).items()
        ),
    ]


def _check(request: _Request) -> None:
    if not request.messages:
        refuse("messages", "is empty; send at least one message")
    refuse_any({"logit_bias": request.logit_bias, "functions": request.functions, "audio": request.audio})
    if any(modality != "text" for modality in request.modalities or ()):
        refuse("modalities", f"is {request.modalities}; send text only")
    at_least_one({"max_tokens": request.max_tokens, "max_completion_tokens": request.max_completion_tokens})
    for name in OWN_VARIABLES & (request.chat_template_kwargs or {}).keys():
        refuse("chat_template_kwargs", f"sets {name!r}, which the request sets in another field; leave it out")
    for i, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            refuse(f"tools[{i}]", "is not a function with a name; send {'type': 'function', 'function': {'name': ...}}")
        for key in ("name", "description"):
            if not isinstance(function.get(key), str | None):
                refuse(f"tools[{i}].function.{key}", "is no text; send one")


def _message(message: _Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.audio:
        refuse(f"{where}.audio", "is not served; send text only")
    if message.function_call:
        refuse(f"{where}.function_call", "is the old form; send tool_calls")
    role = ROLES.get(message.role)
    if role is None:
        refuse(f"{where}.role", f"is {message.role!r}; use one of {', '.join(ROLES)}")
    values: dict[str, Any] = {"role": role, "content": _text(message, index)}
    reasoning = message.reasoning_content or message.reasoning
    if role == "assistant" and reasoning:
        values["reasoning_content"] = reasoning
    if role == "assistant" and message.tool_calls:
        values["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value:
            values[name] = value
    return values


def _text(message: _Message, index: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = [part.refusal if part.type == "refusal" else part.text for part in message.content]
    for j, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text", "refusal") or texts[j] is None:
            refuse(f"messages[{index}].content[{j}]", f"is of type {part.type!r}; send text only")
    return "".join(filter(None, texts))


def _tool_call(call: _ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    parsed = arguments if isinstance(arguments, dict) else parsed_arguments(arguments)
    return tool_call(call.id, call.function.name, parsed)


# ---- answering


def reply(call: Call, answer: Reply, *others: Reply) -> bytes:
    """Write all answers of a call that is not streamed."""
    choices = [
        {
            "index": i,
            "message": each.message(),
            "logprobs": _logprobs(call, each.logprobs),
            "finish_reason": each.finish_reason,
        }
        for i, each in enumerate((answer, *others))
    ]
    envelope = {"id": _id(), "object": "chat.completion", "created": int(time.time()), "model": call.model}
    return msgspec.json.encode({**envelope, "choices": choices, "usage": usage(answer, *others)})


class ChatEvents:
    """Writes the events of one streamed answer."""

    breaks_off = False

    def __init__(self, call: Call, prompt_tokens: int):
        self._call = call
        created = int(time.time())
        self._envelope = {"id": _id(), "object": "chat.completion.chunk", "created": created, "model": call.model}
        # There is one event per token, and events differ in their delta only, so the rest is encoded once.
        self._before = b"data: " + msgspec.json.encode(self._envelope)[:-1] + b',"choices":[{"index":'

    def opening(self) -> bytes:
        return b"".join(self._event(i, {"role": "assistant", "content": ""}) for i in range(self._call.choices))

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        return b"".join(
            self._event(choice, {NAMES[type(piece)]: piece.text}, tokens=tokens_of(piece))
            for piece in pieces
            if isinstance(piece, Text | Reasoning)
        )

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        events = []
        for choice, each in enumerate((answer, *others)):
            for i, call in enumerate(each.message().get("tool_calls", [])):
                events.append(self._event(choice, {"tool_calls": [{"index": i, **call}]}))
            events.append(self._event(choice, {}, each.finish_reason))
        if self._call.include_usage:
            events.append(data_event({**self._envelope, "choices": [], "usage": usage(answer, *others)}))
        return b"".join([*events, DONE])

    def failure(self, problem: CallError) -> bytes:
        return data_event(error(problem)) + DONE

    def keepalive(self) -> bytes:
        return COMMENT

    def _event(
        self, index: int, delta: dict[str, Any], finish: str | None = None, tokens: Sequence[TokenLogprob] = ()
    ) -> bytes:
        logprobs = msgspec.json.encode(_logprobs(self._call, tokens)) if tokens else b"null"
        after = b',"logprobs":%b,"finish_reason":%b}]}\n\n' % (logprobs, msgspec.json.encode(finish))
        return b"%b%d%b%b%b" % (self._before, index, b',"delta":', msgspec.json.encode(delta), after)


events = ChatEvents
error = openai_error


def _logprobs(call: Call, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return None if call.logprobs is None else {"content": openai_entries(tokens), "refusal": None}


def models(name: str) -> dict[str, Any]:
    """The answer of GET /v1/models."""
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    """The answer of GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "blackforge"}


def _id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
