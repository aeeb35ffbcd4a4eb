"""Anthropic Messages: reads the request, writes the answer, its events and its errors.

Refused with a sentence: images and documents, hosted tools, threads, compactions and other edits of the context,
prefilled answers. Without effect: cache_control (the engine caches every prefix), and what is not read, such as a
thinking budget, which the answer's header names.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from proxy.call import Call, CallError, Constraint, ContextOverflow, Reply
from proxy.dialects.base import (
    at_least_one,
    named_event,
    options_of,
    refuse,
    refuse_any,
    tool_call,
    tool_definition,
    without_nones,
)
from proxy.dialects.request_fields import RequestReader
from proxy.dialects.structured_output import answer_constraint, call_constraint, combined
from proxy.parsing.turn_parser import Piece, Reasoning, Text

NAME, PROMPT, CHOICES = "messages", "messages", ""
SIGNATURE = "blackforge"
"""The signature of thinking blocks. Thinking is sent in the clear, but clients require a signature."""
COUNTING = "/count_tokens"
"""Ends the path of a request that asks for a prompt's length."""
ROLES = ("user", "assistant", "system")
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNTHREADED = "thread_unsupported_request"
"""The code on which Anthropic's clients send the whole conversation again, without `thread`."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[_Block] | None" = None
    is_error: bool | None = None
    signature: str | None = None
    cache_control: Any = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = None


class _Choice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    cache_control: Any = None
    compaction: Any = None
    thread: Any = None


_reader = RequestReader(_Request, "a messages request")


# ---- reading


def read(body: bytes, path: str) -> Call:
    """Read the request as a call; CallError 400 names the field that is wrong or not supported."""
    request, unread = _reader.read(body)
    _check(request)
    if not path.partition("?")[0].endswith(COUNTING):  # a count is that of the messages, and asks for no answer
        refuse_any({"compaction": request.compaction})
        _check_end(request.messages)
    system = [{"role": "system", "content": _joined(request.system, "system", "\n\n")}] if request.system else []
    tools = tuple(_tool(tool, i) for i, tool in enumerate(request.tools or ()))
    effort = request.output_config.effort if request.output_config else None
    return Call(
        model=request.model,
        messages=(*system, *_messages(request.messages)),
        tools=tools,
        constraint=_constraint(request, tools),
        max_new_tokens=request.max_tokens,
        single_call=bool(request.tool_choice and request.tool_choice.disable_parallel_tool_use and tools),
        no_calls=request.tool_choice is not None and request.tool_choice.type == "none",
        stop=tuple(filter(None, request.stop_sequences or ())),
        sampling=without_nones({"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}),
        stream=bool(request.stream),
        **options_of(
            ("output_config.effort", without_nones({"reasoning_effort": effort})),
            ("thinking", {} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"}),
        ),
        ignored=unread,
    )


def _check(request: _Request) -> None:
    if request.thread is not None:
        rule = "is not served, because no conversation is kept between requests; send the whole conversation without it"
        raise CallError(400, UNTHREADED, f"thread {rule}", "thread")
    if not request.messages:
        refuse("messages", "is empty; send at least one message")
    at_least_one({"max_tokens": request.max_tokens})
    choice = request.tool_choice
    if choice is not None and choice.type not in ("auto", "none", "any", "tool"):
        refuse("tool_choice", f"is {choice.type!r}; use 'auto', 'none', 'any' or 'tool'")
    if request.thinking is not None and request.thinking.type not in ("enabled", "adaptive", "disabled"):
        refuse("thinking.type", f"is {request.thinking.type!r}; use 'enabled', 'adaptive' or 'disabled'")
    refuse_any({"mcp_servers": request.mcp_servers, "container": request.container})
    edits = (request.context_management or {}).get("edits") or []
    if not isinstance(edits, list):
        refuse("context_management.edits", "is no list; send a list of edits, or leave it out")
    for i, edit in enumerate(edits):
        if not isinstance(edit, dict) or edit.get("keep") not in ("all", {"type": "all"}):
            refuse(
                f"context_management.edits[{i}]",
                "would change the history in the proxy, which is not served; send the history as it should be",
            )


def _check_end(messages: Sequence[_Message]) -> None:
    if messages[-1].role == "assistant":
        refuse(
            f"messages[{len(messages) - 1}].role",
            "is 'assistant', and prefilled answers are not served; end with a user message",
        )


def _constraint(request: _Request, tools: Sequence[dict[str, Any]]) -> Constraint | None:
    choice, calls = request.tool_choice, None
    if choice is not None and choice.type in ("any", "tool"):
        calls = call_constraint("tool_choice", [choice.name] if choice.type == "tool" else [], tools)
    form = (request.output_config and request.output_config.format) or request.output_format
    if form and form.get("type") != "json_schema":
        refuse("output_config.format", f"is of type {form.get('type')!r}; use 'json_schema'")
    return combined(calls, answer_constraint("output_config.format.schema", form.get("schema")) if form else None)


def _tool(tool: _Tool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        refuse(
            f"tools[{index}]",
            f"is of type {tool.type!r}, and hosted tools are not served; send tools with an input_schema",
        )
    if not tool.name or tool.input_schema is None:
        refuse(f"tools[{index}]", "lacks a name or an input_schema; send both")
    return tool_definition(tool.name, tool.description, tool.input_schema)


def _messages(messages: Sequence[_Message]) -> Iterator[dict[str, Any]]:
    """Messages for the template. Assistant messages in a row become one turn, as in Anthropic's service."""
    for is_turn, placed in groupby(enumerate(messages), lambda item: item[1].role == "assistant"):
        if is_turn:
            yield _assistant(placed)
        else:
            for i, message in placed:
                yield from _said(message, f"messages[{i}]")


def _said(message: _Message, where: str) -> list[dict[str, Any]]:
    """A message that is not the assistant's, for the template. Each tool result becomes a message."""
    if message.role not in ROLES:
        refuse(f"{where}.role", f"is {message.role!r}; use one of {', '.join(ROLES)}")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[_Block] = []
    for j, block in enumerate(message.content):
        if block.type == "tool_result":
            content = _joined(block.content or "", f"{where}.content[{j}].content", "\n")
            result = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}
            results.append({**result, "is_error": True} if block.is_error else result)  # for templates that show it
        else:
            texts.append(_text_only(block, f"{where}.content[{j}]"))
    text = "\n\n".join(block.text or "" for block in texts)
    return [*results, {"role": message.role, "content": text}] if texts or not results else results


def _assistant(messages: Iterable[tuple[int, _Message]]) -> dict[str, Any]:
    """One turn of assistant messages, each with its place in the request."""
    values: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning, calls = "", []
    for where, block in _placed_blocks(messages):
        if block.type == "thinking":
            reasoning += block.thinking or ""
        elif block.type == "tool_use":
            calls.append(tool_call(block.id, block.name or "", block.input or {}))
        else:
            values["content"] += _text_only(block, where).text or ""
    return values | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _placed_blocks(messages: Iterable[tuple[int, _Message]]) -> Iterator[tuple[str, _Block]]:
    """The blocks of messages, each with its place in the request."""
    for i, message in messages:
        blocks = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
        yield from ((f"messages[{i}].content[{j}]", block) for j, block in enumerate(blocks))


def _joined(content: str | list[_Block], where: str, glue: str) -> str:
    if isinstance(content, str):
        return content
    return glue.join(_text_only(block, f"{where}[{i}]").text or "" for i, block in enumerate(content))


def _text_only(block: _Block, where: str) -> _Block:
    if block.type != "text":
        refuse(where, f"is of type {block.type!r}; use text, thinking, tool_use or tool_result")
    return block


# ---- answering


def reply(call: Call, answer: Reply, *_: Reply) -> bytes:
    """Write the answer of a call that is not streamed."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    for item in answer.tool_calls:
        arguments = msgspec.Raw(item.arguments.encode())
        content.append({"type": "tool_use", "id": item.id, "name": item.name, "input": arguments})
    return msgspec.json.encode({**_envelope(call), "content": content, **_stop(answer), "usage": _usage(answer)})


class AnthropicEvents:
    """Writes the events of one streamed answer."""

    breaks_off = False

    def __init__(self, call: Call, prompt_tokens: int):
        self._call = call
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open_kind: type | None = None  # the kind of the block that is open

    def opening(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**_envelope(self._call), "content": [], **stop, "usage": usage}
        return named_event({"type": "message_start", "message": message}) + named_event({"type": "ping"})

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        return b"".join(
            self._open_block(type(piece)) + self._delta(piece.text)
            for piece in pieces
            if isinstance(piece, Text | Reasoning)
        )

    def closing(self, answer: Reply, *_: Reply) -> bytes:
        events = [self._close_block()]
        for call in answer.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            events += [self._start_block(block), self._event("delta", delta=delta), self._event("stop")]
        events.append(named_event({"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)}))
        return b"".join([*events, named_event({"type": "message_stop"})])

    def failure(self, problem: CallError) -> bytes:
        return named_event(error(problem))

    def keepalive(self) -> bytes:
        """Inside a block, an empty delta, since some clients wait for content and do not count pings."""
        return named_event({"type": "ping"}) if self._open_kind is None else self._delta("")

    def _open_block(self, kind: type) -> bytes:
        if self._open_kind is kind:
            return b""
        ended, self._open_kind = self._close_block(), kind
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        return ended + self._start_block({"type": "text", "text": ""} if kind is Text else thinking)

    def _close_block(self) -> bytes:
        if self._open_kind is None:
            return b""
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        last = self._event("delta", delta=signed) if self._open_kind is Reasoning else b""
        self._open_kind = None
        return last + self._event("stop")

    def _delta(self, text: str) -> bytes:
        kind, name = ("thinking_delta", "thinking") if self._open_kind is Reasoning else ("text_delta", "text")
        return self._event("delta", delta={"type": kind, name: text})

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return self._event("start", content_block=block)

    def _event(self, what: str, **values: Any) -> bytes:
        return named_event({"type": f"content_block_{what}", "index": self._index, **values})


events = AnthropicEvents


def error(problem: CallError) -> dict[str, Any]:
    """The error in Anthropic's format. An overflow has the words on which its clients compact their history."""
    message = str(problem)
    if isinstance(problem, ContextOverflow):
        message = f"prompt is too long: {problem.length} tokens > {problem.limit} maximum"
    elif problem.code == "context_length_exceeded":
        message = f"prompt is too long: {problem}"
    kind = KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    details = {"details": {"error_code": UNTHREADED}} if problem.code == UNTHREADED else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def count(tokens: int) -> bytes:
    """Write the answer of count_tokens."""
    return msgspec.json.encode({"input_tokens": tokens})


def _envelope(call: Call) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": call.model}


def _stop(answer: Reply) -> dict[str, Any]:
    cut = answer.stop_sequence is not None and not answer.tool_calls
    return {
        "stop_reason": "stop_sequence" if cut else STOPS[answer.finish_reason],
        "stop_sequence": answer.stop_sequence if cut else None,
    }


def _usage(answer: Reply) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.sampled_tokens,
    }
