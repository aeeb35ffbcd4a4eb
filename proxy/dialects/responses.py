"""OpenAI Responses: reads the request, writes the answer, its events and its errors.

The model sees a namespaced tool as `namespace__name`, and a custom tool as a function with one string `input`, whose
grammar is part of the description. Reasoning is sent as reasoning text, and also in `encrypted_content` where the
client asks for that, since some clients send only this field back.
Answers are stored unless `store` is false, and later requests may name them (response_items.py beside this).
Refused with a sentence: conversations, hosted tools, images, files, filling a cache without an answer.
Without effect, and named in the answer's header: web_search, which codex always offers, and every field that is not
read.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from proxy.call import Call, CallError, Reply, StoredRequest, ToolCall
from proxy.dialects.base import (
    GRAMMAR,
    at_least_one,
    effort_options,
    is_sealed,
    named_event,
    openai_error,
    options_of,
    parsed_arguments,
    refuse,
    refuse_any,
    sealed,
    tool_definition,
    unread_of_form,
    without_nones,
)
from proxy.dialects.request_fields import RequestReader
from proxy.dialects.response_items import Item, StoredItems, completed, encoded, messages_of
from proxy.dialects.structured_output import openai_constraint
from proxy.dialects.token_logprobs import openai_entries, tokens_of, wanted
from proxy.parsing.turn_parser import Piece, Reasoning, Text

NAME, PROMPT, CHOICES = "responses", "input", ""
OWN = ("id", "created_at", "previous_response_id", "store")
"""Fields of a response object that are its own, unlike those that it repeats."""
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: "list[_Tool] | None" = None


class _ReasoningWishes(msgspec.Struct):
    effort: str | None = None


class _TextWishes(msgspec.Struct):
    format: dict[str, Any] | None = None


class _CacheWishes(msgspec.Struct):
    prewarm: bool | None = None


class _Request(msgspec.Struct):
    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: _ReasoningWishes | None = None
    text: _TextWishes | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    prompt_cache_options: _CacheWishes | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None


_reader = RequestReader(_Request, "a responses request")


# ---- reading


def read(body: bytes, path: str, stored: StoredItems | None = None) -> Call:
    """Read the request as a call; CallError names the field that is wrong or not supported.

    `stored`: what the request may name; None where nothing is stored.
    """
    request, unread = _reader.read(body)
    _check(request)
    own = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    items = completed(own, request.previous_response_id, stored)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    known, fields = dict(_tools(request.tools or (), "tools")), _echo(request, stored is not None)
    tools = tuple(tool for tool, _ in known.values())
    return Call(
        model=request.model,
        messages=(*system, *messages_of(items, len(own) - len(items))),
        tools=tools,
        constraint=openai_constraint(
            request.tool_choice, "text.format", request.text.format if request.text else None, tools
        ),
        max_new_tokens=request.max_output_tokens,
        single_call=request.parallel_tool_calls is False and bool(tools),
        no_calls=request.tool_choice == "none",
        sampling=without_nones({"temperature": request.temperature, "top_p": request.top_p}),
        logprobs=wanted(LOGPROBS in (request.include or ()), request.top_logprobs, ("include", "top_logprobs")),
        stream=bool(request.stream),
        **options_of(("reasoning.effort", effort_options(request.reasoning.effort if request.reasoning else None))),
        echo={**fields, "names": {name: origin for name, (_, origin) in known.items()}},
        ignored=(*_ignored(request), *unread),
        stored=None if request.store is False or stored is None else _stored(request, items, fields),
    )


def _stored(request: _Request, items: list[Item], fields: dict[str, Any]) -> StoredRequest:
    shared = {name: value for name, value in fields.items() if name not in OWN}
    return StoredRequest(
        response_id=fields["id"],
        created_at=fields["created_at"],
        previous=request.previous_response_id,
        items=tuple(map(encoded, items)),
        fields={"model": request.model, **shared},
    )


def _check(request: _Request) -> None:
    if not request.input:
        refuse("input", "is empty; send at least one item")
    refuse_any({"conversation": request.conversation}, "is not stored; use previous_response_id")
    refuse_any({"background": request.background, "prompt": request.prompt})
    refuse_any({"max_tool_calls": request.max_tool_calls})
    cache = request.prompt_cache_options
    refuse_any({"prompt_cache_options.prewarm": cache is not None and cache.prewarm})
    if request.truncation not in (None, "disabled"):
        refuse("truncation", f"is {request.truncation!r}; use 'disabled'")
    at_least_one({"max_output_tokens": request.max_output_tokens})
    if set(request.include or ()) - {ENCRYPTED, LOGPROBS}:
        refuse("include", f"is {request.include}; use {ENCRYPTED!r} and {LOGPROBS!r} only")


def _ignored(request: _Request) -> Iterator[str]:
    """The fields that are read and have no effect: the hosted tool that codex always offers, reasoning that another
    service has sealed, and a schema's name and `strict`."""
    if any(tool.type.startswith("web_search") for tool in request.tools or ()):
        yield "tools.web_search"
    items = request.input if isinstance(request.input, list) else []
    if any(item.encrypted_content and not is_sealed(item.encrypted_content) for item in items):
        yield "input[].encrypted_content"
    yield from unread_of_form("text.format", request.text.format if request.text else None)


def _echo(request: _Request, may_store: bool) -> dict[str, Any]:
    """The fields of the response object that are known from the request."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": int(time.time()),
        "previous_response_id": request.previous_response_id,
        "store": may_store and request.store is not False,
        "instructions": request.instructions,
        "tools": [tool for tool in request.tools or () if not tool.type.startswith("web_search")],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "include": request.include or (),
    }


def _tools(tools: Sequence[_Tool], where: str, space: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield for each tool the name that the model sees, the tool for the template, and how the client knows it."""
    for i, tool in enumerate(tools):
        if tool.type == "namespace" and tool.name and not space:
            yield from _tools(tool.tools or (), f"{where}[{i}].tools", tool.name)
            continue
        if tool.type.startswith("web_search"):
            continue
        if tool.type not in ("function", "custom") or not tool.name:
            refuse(f"{where}[{i}]", f"is of type {tool.type!r}; use function and custom tools with a name")
        name = f"{space}__{tool.name}" if space else tool.name
        origin = without_nones({"type": f"{tool.type}_call", "name": tool.name, "namespace": space or None})
        if tool.type == "function":
            parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
            yield name, (tool_definition(name, tool.description, parameters), origin)
        else:
            yield name, (_custom(name, tool), {**origin, "type": "custom_tool_call"})


def _custom(name: str, tool: _Tool) -> dict[str, Any]:
    grammar = (tool.format or {}).get("definition")
    texts = [tool.description, f"{GRAMMAR}\n{grammar}" if grammar else None]
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return tool_definition(name, "\n\n".join(filter(None, texts)), parameters)


# ---- answering


def reply(call: Call, answer: Reply, *_: Reply) -> bytes:
    """Write the answer of a call that is not streamed."""
    return msgspec.json.encode(response(call, answer))


def response(call: Call, answer: Reply) -> dict[str, Any]:
    """The response object of an answer."""
    stream = ResponsesEvents(call, answer.prompt_tokens)
    text = Text(answer.content, tokens=answer.logprobs)
    stream.deltas([piece for piece in (Reasoning(answer.reasoning), text) if piece.text])
    stream.closing(answer)
    return stream.response


def offered(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a stored request, in the chat template's form."""
    return tuple(tool for _, (tool, _) in _tools(msgspec.convert(fields["tools"], list[_Tool]), "tools"))


def stored_response(own: dict[str, Any], fields: dict[str, Any], answer: Reply) -> dict[str, Any]:
    """The response object of a stored answer, with the same ids for its items as when it was sent.

    `own`: its values of the names in OWN; `fields`: what was stored of the request.
    """
    tools = msgspec.convert(fields["tools"], list[_Tool])
    names = {name: origin for name, (_, origin) in _tools(tools, "tools")}
    return response(Call(model=fields["model"], echo={**fields, **own, "names": names}), answer)


class ResponsesEvents:
    """Writes the events of one streamed answer, and the response object that they add up to."""

    breaks_off = False

    def __init__(self, call: Call, prompt_tokens: int):
        self._call = call
        self._numbers = count()
        self._output: list[dict[str, Any]] = []
        self._open_kind: type | None = None  # the kind of the item that is open, the last of the output
        self._texts: list[str] = []  # of that item
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self.response = _begun_response(call, self._output)

    def opening(self) -> bytes:
        return self._event("created", response=self.response) + self._event("in_progress", response=self.response)

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        events = []
        for piece in pieces:
            if isinstance(piece, Text | Reasoning):
                events.append(self._open_item(type(piece)))
                self._texts.append(piece.text)
                logprobs = openai_entries(tokens_of(piece))
                self._logprobs += logprobs
                events.append(self._text_event("delta", logprobs, delta=piece.text))
        return b"".join(events)

    def closing(self, answer: Reply, *_: Reply) -> bytes:
        events = [self._close_item(), *(self._tool_call(call) for call in answer.tool_calls)]
        cut = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        status = "incomplete" if cut else "completed"
        self.response |= {"status": status, "incomplete_details": cut, "usage": usage(answer)}
        return b"".join([*events, self._event(status, response=self.response)])

    def failure(self, problem: CallError) -> bytes:
        self.response |= {"status": "failed", "error": {"code": problem.code, "message": str(problem)}}
        return self._event("failed", response=self.response)

    def keepalive(self) -> bytes:
        """An event, since codex does not count comments as a sign of life."""
        return self._event("in_progress", response=self.response)

    def _open_item(self, kind: type) -> bytes:
        if self._open_kind is kind:
            return b""
        ended, self._open_kind, self._texts, self._logprobs = self._close_item(), kind, [], []
        if kind is Text:
            item = {
                "type": "message",
                "id": self._id("msg"),
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"type": "reasoning", "id": self._id("rs"), "summary": [], "content": []}
        return ended + self._item_added(item) + self._part_event("content_part.added", part=self._part())

    def _close_item(self) -> bytes:
        if self._open_kind is None:
            return b""
        item, part = self._output[-1], self._part()
        item["content"] = [part]
        if self._open_kind is Text:
            item["status"] = "completed"
        elif ENCRYPTED in self._call.echo["include"]:
            item["encrypted_content"] = sealed(part["text"])
        done = self._text_event("done", self._logprobs, text=part["text"])
        self._open_kind = None
        return done + self._part_event("content_part.done", part=part) + self._item_done()

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self._open_kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _text_event(self, what: str, logprobs: list[dict[str, Any]], **values: Any) -> bytes:
        if self._open_kind is Reasoning:
            return self._part_event(f"reasoning_text.{what}", **values)
        return self._part_event(f"output_text.{what}", logprobs=logprobs, **values)

    def _tool_call(self, call: ToolCall) -> bytes:
        origin = self._call.echo["names"].get(call.name, {"type": "function_call", "name": call.name})
        arguments = parsed_arguments(call.arguments)
        fits = list(arguments) == ["input"] and isinstance(arguments["input"], str)
        if origin["type"] == "custom_tool_call" and fits:
            field, text, kind = "input", arguments["input"], "custom_tool_call_input"
        else:  # also a call of a custom tool with other arguments: the agent must see what was sampled
            field, text, kind = "arguments", call.arguments, "function_call_arguments"
            origin = {**origin, "type": "function_call"}
        item = {**origin, "id": self._id("fc"), "call_id": call.id, field: "", "status": "in_progress"}
        added = self._item_added(item)
        item |= {field: text, "status": "completed"}
        deltas = self._item_event(f"{kind}.delta", delta=text) + self._item_event(f"{kind}.done", **{field: text})
        return added + deltas + self._item_done()

    def _id(self, kind: str) -> str:
        """The next item's id. It names the response and the place in its output, so that it can be found again."""
        return f"{kind}_{self.response['id'].removeprefix('resp_')}{len(self._output):04x}"

    def _item_added(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("output_item.added", output_index=len(self._output) - 1, item=item)

    def _item_done(self) -> bytes:
        return self._event("output_item.done", output_index=len(self._output) - 1, item=self._output[-1])

    def _part_event(self, name: str, **values: Any) -> bytes:
        return self._item_event(name, content_index=0, **values)

    def _item_event(self, name: str, **values: Any) -> bytes:
        return self._event(name, output_index=len(self._output) - 1, item_id=self._output[-1]["id"], **values)

    def _event(self, name: str, **values: Any) -> bytes:
        return named_event({"type": f"response.{name}", "sequence_number": next(self._numbers), **values})


events = ResponsesEvents
error = openai_error


def _begun_response(call: Call, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object before anything is sampled. `output` is filled later."""
    echo = {name: value for name, value in call.echo.items() if name not in ("names", "include")}
    return {
        "object": "response",
        "status": "in_progress",
        "model": call.model,
        "output": output,
        **dict.fromkeys(("error", "incomplete_details", "usage")),
        **echo,
    }


def usage(answer: Reply) -> dict[str, Any]:
    """The answer's token counts."""
    known = answer.reasoning_tokens if answer.reasoning else 0  # None, sent as null, where nothing tells the number
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},  # none are charged
        "output_tokens": answer.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": known},
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }
