"""Gemini generateContent and streamGenerateContent: reads the request, writes the answer, its events and its errors.

The path names model and method. Reasoning is sent as thought parts where the client asks for them, and always in the
thought signature of the next part, which clients send back.
Names of fields may be written in snake case, as Google reads them and its Python client sends some of them.
Refused with a sentence: images and files, hosted tools, cached content. Without effect, and named in the answer's
header: a thinking budget, and every field that is not read, such as safety settings, since nothing filters here.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, starmap
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from proxy.call import Call, CallError, Constraint, ContextOverflow, Reply, TokenLogprob
from proxy.dialects.base import (
    data_event,
    effort_options,
    is_sealed,
    options_of,
    refuse,
    refuse_any,
    sealed,
    tool_call,
    tool_definition,
    unsealed,
    without_nones,
)
from proxy.dialects.request_fields import RequestReader, camel_case
from proxy.dialects.structured_output import ANY_OBJECT, answer_constraint, call_constraint, combined
from proxy.dialects.token_logprobs import gemini_result, wanted
from proxy.parsing.turn_parser import Piece, Reasoning, Text

NAME, PROMPT, CHOICES = "gemini", "contents", "generationConfig.candidateCount"
ROLES = ("user", "model", "function", "tool")
"""Results come in any role but the model's: Google's pages and clients give them different ones."""
STREAMED = "streamGenerateContent"
JSON = "application/json"
LOGPROBS = ("generationConfig.responseLogprobs", "generationConfig.logprobs")
THINKING = "generationConfig.thinkingConfig"
SAMPLING_NAMES = {
    name: f"generationConfig.{camel_case(name)}"
    for name in ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
}
DATA, NAMED = ("default", "example", "examples", "enum", "const"), ("properties", "defs", "$defs")
"""Keywords of schemas that hold values, and those that hold schemas by names."""
STOPS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
KINDS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class _FunctionCall(msgspec.Struct):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class _FunctionResponse(msgspec.Struct):
    name: str | None = None
    response: dict[str, Any] | None = None
    id: str | None = None
    parts: list[Any] | None = None


class _Part(msgspec.Struct):
    text: str | None = None
    thought: bool | None = None
    thoughtSignature: str | None = None
    functionCall: _FunctionCall | None = None
    functionResponse: _FunctionResponse | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] = []
    role: str = "user"


class _Declaration(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parametersJsonSchema: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    functionDeclarations: list[_Declaration] | None = None


class _ThinkingConfig(msgspec.Struct):
    includeThoughts: bool | None = None
    thinkingBudget: int | None = None
    thinkingLevel: str | None = None


class _GenerationConfig(msgspec.Struct):
    maxOutputTokens: int | None = None
    stopSequences: list[str] | None = None
    temperature: float | None = None
    topP: float | None = None
    topK: float | None = None
    presencePenalty: float | None = None
    frequencyPenalty: float | None = None
    thinkingConfig: _ThinkingConfig | None = None
    candidateCount: int | None = None
    responseMimeType: str | None = None
    responseSchema: Any = None
    responseJsonSchema: Any = None
    responseModalities: list[str] | None = None
    responseLogprobs: bool | None = None
    logprobs: int | None = None
    speechConfig: Any = None
    imageConfig: Any = None


class _CallingConfig(msgspec.Struct):
    mode: str = "AUTO"
    allowedFunctionNames: list[str] | None = None


class _ToolConfig(msgspec.Struct):
    functionCallingConfig: _CallingConfig | None = None


class _Request(msgspec.Struct):
    contents: list[_Content] = []
    systemInstruction: _Content | str | None = None
    tools: list[_Tool] | None = None
    toolConfig: _ToolConfig | None = None
    generationConfig: _GenerationConfig | None = None
    cachedContent: str | None = None
    model: str | None = None
    generateContentRequest: "_Request | None" = None


_reader = RequestReader(_Request, "a generateContent request", snake_case=True)


# ---- reading


def read(body: bytes, path: str) -> Call:
    """Read the request as a call; CallError 400 names the field that is wrong or not supported."""
    request, unread = _reader.read(body)
    request = request.generateContentRequest or request  # countTokens may wrap it
    config = request.generationConfig or _GenerationConfig()
    _check(request, config)
    model, method = _model_and_method(path)
    thinking = config.thinkingConfig or _ThinkingConfig()
    budget = thinking.thinkingBudget
    tools = tuple(_tools(request))
    calling = (request.toolConfig and request.toolConfig.functionCallingConfig) or _CallingConfig()
    system: list[dict[str, Any]] = []
    if (instruction := request.systemInstruction) is not None:
        parts = [_Part(instruction)] if isinstance(instruction, str) else instruction.parts
        system.append({"role": "system", "content": _text(parts, "systemInstruction", "\n\n")})
    asked = options_of(
        (f"{THINKING}.thinkingLevel", effort_options((thinking.thinkingLevel or "").lower() or None)),
        (f"{THINKING}.thinkingBudget", {} if budget is None else {"enable_thinking": budget != 0}),
    )
    return Call(
        model=model,
        messages=(*system, *_messages(request.contents)),
        tools=tools,
        constraint=_constraint(request, config, tools),
        max_new_tokens=config.maxOutputTokens,
        stop=tuple(filter(None, config.stopSequences or ())),
        sampling=_sampling(config),
        no_calls=calling.mode == "NONE",
        choices=1 if config.candidateCount is None else config.candidateCount,
        logprobs=wanted(bool(config.responseLogprobs), config.logprobs, LOGPROBS),
        stream=method == STREAMED,
        options=asked["options"],
        fields=SAMPLING_NAMES | asked["fields"],
        echo={"thoughts": bool(thinking.includeThoughts)},
        ignored=(*_ignored(request, budget), *unread),
    )


def _model_and_method(path: str) -> tuple[str, str]:
    """The model and the method that the path names."""
    target, _, query = path.partition("?")
    model, _, method = unquote(target).rpartition("/models/")[2].rpartition(":")
    if method == STREAMED and parse_qs(query).get("alt") != ["sse"]:
        refuse("alt", "is not 'sse', and streams are server-sent events; send alt=sse")
    return model, method


def _check(request: _Request, config: _GenerationConfig) -> None:
    if not request.contents:
        refuse("contents", "is empty; send at least one content")
    for i, content in enumerate(request.contents):
        if content.role not in ROLES:
            refuse(f"contents[{i}].role", f"is {content.role!r}; use 'user' or 'model'")
    refuse_any({"cachedContent": request.cachedContent})
    if config.responseMimeType not in (None, "text/plain", JSON):
        refuse("generationConfig.responseMimeType", f"is {config.responseMimeType!r}; use 'text/plain' or {JSON!r}")
    if any(modality != "TEXT" for modality in config.responseModalities or ()):
        refuse("generationConfig.responseModalities", f"is {config.responseModalities}; send TEXT only")
    for name in ("speechConfig", "imageConfig"):
        refuse_any({f"generationConfig.{name}": msgspec.structs.asdict(config)[name]})
    if config.maxOutputTokens is not None and config.maxOutputTokens < 1:
        refuse("generationConfig.maxOutputTokens", f"is {config.maxOutputTokens}; ask for at least 1 token")
    calling = (request.toolConfig and request.toolConfig.functionCallingConfig) or _CallingConfig()
    if calling.mode not in ("AUTO", "NONE", "ANY", "VALIDATED", "MODE_UNSPECIFIED"):
        refuse("toolConfig.functionCallingConfig.mode", f"is {calling.mode!r}; use 'AUTO', 'ANY' or 'NONE'")


def _constraint(request: _Request, config: _GenerationConfig, tools: Sequence[dict[str, Any]]) -> Constraint | None:
    calling = (request.toolConfig and request.toolConfig.functionCallingConfig) or _CallingConfig()
    calls = None
    if calling.mode == "ANY":
        where = "toolConfig.functionCallingConfig"
        calls = replace(call_constraint(where, calling.allowedFunctionNames or [], tools), once=False)
    return combined(calls, _answer_constraint(config))


def _answer_constraint(config: _GenerationConfig) -> Constraint | None:
    schemas = {"responseJsonSchema": config.responseJsonSchema, "responseSchema": _json_schema(config.responseSchema)}
    field, schema = next(((name, value) for name, value in schemas.items() if value is not None), ("", None))
    if config.responseMimeType != JSON:
        if field:
            refuse(f"generationConfig.{field}", f"needs responseMimeType {JSON!r}; set it")
        return None
    return answer_constraint(
        f"generationConfig.{field or 'responseMimeType'}", ANY_OBJECT if schema is None else schema
    )


def _sampling(config: _GenerationConfig) -> dict[str, float]:
    return without_nones(
        {
            "temperature": config.temperature,
            "top_p": config.topP,
            "top_k": None if config.topK is None else int(config.topK),
            "presence_penalty": config.presencePenalty,
            "frequency_penalty": config.frequencyPenalty,
        }
    )


def _ignored(request: _Request, budget: int | None) -> Iterator[str]:
    """The fields that are read and have no effect: the number of a thinking budget, the wish that calls be validated,
    names of calls that are not forced, and reasoning that another service has sealed."""
    if (budget or 0) > 0:
        yield f"{THINKING}.thinkingBudget"
    calling = (request.toolConfig and request.toolConfig.functionCallingConfig) or _CallingConfig()
    if calling.mode == "VALIDATED":  # as AUTO: calls are parsed, no grammar holds them to their schema
        yield "toolConfig.functionCallingConfig.mode"
    if calling.allowedFunctionNames and calling.mode != "ANY":
        yield "toolConfig.functionCallingConfig.allowedFunctionNames"
    signatures = (part.thoughtSignature for content in request.contents for part in content.parts)
    if any(signature and not is_sealed(signature) for signature in signatures):
        yield "contents[].parts[].thoughtSignature"


def _tools(request: _Request) -> list[dict[str, Any]]:
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.functionDeclarations is None:
            refuse(f"tools[{i}]", "has no functionDeclarations, and hosted tools are not served; declare functions")
        for declared in tool.functionDeclarations:
            schema = declared.parametersJsonSchema or _json_schema(declared.parameters or {"type": "object"})
            tools.append(tool_definition(declared.name, declared.description, schema))
    return tools


def _json_schema(schema: Any, names: bool = False) -> Any:
    """Google's schema as JSON schema, with keywords in camel case and type names in lower case. `names`: the keys are
    names, of properties or definitions."""
    if isinstance(schema, list):
        return [_json_schema(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _json_schema(value) for name, value in schema.items()}
    return {camel_case(key): _of_keyword(key, value) for key, value in schema.items()}


def _of_keyword(key: str, value: Any) -> Any:
    if key in DATA:
        return value
    return value.lower() if key == "type" and isinstance(value, str) else _json_schema(value, key in NAMED)


def _messages(contents: list[_Content]) -> list[dict[str, Any]]:
    """Contents as messages. Each function response becomes a message. Contents of the model in a row become one turn,
    because Google's clients send each event of a streamed turn back as a content of its own."""
    messages: list[dict[str, Any]] = []
    for is_turn, placed in groupby(enumerate(contents), lambda item: item[1].role == "model"):
        if is_turn:
            messages.append(_assistant(list(placed)))
        else:
            messages += (message for i, content in placed for message in _said(content, f"contents[{i}]"))
    return messages


def _said(content: _Content, where: str) -> list[dict[str, Any]]:
    """What a content that is not the model's says: results and a user's text."""
    texts = [part for part in content.parts if part.functionResponse is None]
    results = [
        _result(part.functionResponse, f"{where}.parts[{j}]")
        for j, part in enumerate(content.parts)
        if part.functionResponse is not None
    ]
    return [*results, {"role": "user", "content": _text(texts, where, "\n\n")}] if texts or not results else results


def _result(result: _FunctionResponse, where: str) -> dict[str, Any]:
    refuse_any({f"{where}.functionResponse.parts": result.parts}, "are not served; send the result as text")
    response = result.response or {}
    output = response.get("output")
    alone = isinstance(output, str) and len(response) == 1
    content = output if alone else msgspec.json.encode(response).decode()
    return {"role": "tool", "tool_call_id": result.id or "", "name": result.name or "", "content": content}


def _assistant(contents: Sequence[tuple[int, _Content]]) -> dict[str, Any]:
    """One turn of contents, each with its place in the request."""
    parts = [part for _, content in contents for part in content.parts]
    thoughts = "".join(part.text or "" for part in parts if part.thought)
    signed = [unsealed(part.thoughtSignature) for part in parts if part.thoughtSignature]
    calls = [part.functionCall for part in parts if part.functionCall is not None]
    values: dict[str, Any] = {"role": "assistant", "content": "".join(starmap(_spoken, contents))}
    if thoughts or any(signed):
        values["reasoning_content"] = thoughts or "".join(dict.fromkeys(signed))  # litellm repeats a call's signature
    if calls:
        values["tool_calls"] = [tool_call(call.id, call.name, call.args or {}) for call in calls]
    return values


def _spoken(place: int, content: _Content) -> str:
    """The text of a content of the model."""
    texts = [part for part in content.parts if not part.thought and part.functionCall is None]
    return _text(texts, f"contents[{place}]", "")


def _text(parts: list[_Part], where: str, glue: str) -> str:
    for j, part in enumerate(parts):
        if part.text is None and part.thoughtSignature is None:
            refuse(f"{where}.parts[{j}]", "has no text, function call or function response; send one of these")
    return glue.join(part.text for part in parts if part.text)


# ---- answering


def reply(call: Call, answer: Reply, *others: Reply) -> bytes:
    """Write all answers of a call that is not streamed."""
    answers, parts = [answer, *others], []
    for each in answers:
        thoughts = [{"text": each.reasoning, "thought": True}] if each.reasoning and call.echo["thoughts"] else []
        text = [{"text": each.content}] if each.content else []
        parts.append([*thoughts, *_signed_parts(each, text)])
    chunk = _final_chunk(call, answers, _id(), parts)
    chunk["candidates"] = [
        candidate | _logprobs(call, each.logprobs) for candidate, each in zip(chunk["candidates"], answers, strict=True)
    ]
    return msgspec.json.encode(chunk)


class GeminiEvents:
    """Writes the events of one streamed answer."""

    breaks_off = True

    def __init__(self, call: Call, prompt_tokens: int):
        self._call = call
        self._id = _id()

    def opening(self) -> bytes:
        return b""

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        texts = [piece for piece in pieces if isinstance(piece, Text)]
        parts: list[dict[str, Any]] = [{"text": piece.text} for piece in texts]
        if self._call.echo["thoughts"]:
            parts = [
                {"text": piece.text, **({"thought": True} if isinstance(piece, Reasoning) else {})}
                for piece in pieces
                if isinstance(piece, Text | Reasoning)
            ]
        logprobs = _logprobs(self._call, [token for piece in texts for token in piece.tokens])
        return data_event(_chunk(self._call, self._id, [_candidate(choice, parts) | logprobs])) if parts else b""

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        answers = [answer, *others]
        return data_event(_final_chunk(self._call, answers, self._id, [_signed_parts(each, []) for each in answers]))

    def failure(self, problem: CallError) -> bytes:
        return data_event(error(problem))

    def keepalive(self) -> bytes:
        """Nothing: comments break Google's clients, and once they have the headers they wait."""
        return b""


events = GeminiEvents


def error(problem: CallError) -> dict[str, Any]:
    """The error in Google's format."""
    message = str(problem)
    if isinstance(problem, ContextOverflow):
        message = (
            f"The input token count ({problem.length}) exceeds the maximum number of tokens allowed ({problem.limit})."
        )
    return {"error": {"code": problem.status, "message": message, "status": KINDS.get(problem.status, "INTERNAL")}}


def count(tokens: int) -> bytes:
    """Write the answer of countTokens."""
    return msgspec.json.encode({"totalTokens": tokens})


def model(name: str, context_length: int, most_sampled: int | None) -> dict[str, Any]:
    """The answer of GET /v1beta/models/NAME. `most_sampled`: the most tokens of an answer, if that is configured."""
    return {
        "name": f"models/{name}",
        "inputTokenLimit": context_length,
        "outputTokenLimit": min(context_length, most_sampled or context_length),
        "supportedGenerationMethods": ["generateContent", STREAMED, "countTokens"],
    }


def _final_chunk(call: Call, answers: list[Reply], id: str, parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    ends = [{"finishReason": STOPS[answer.finish_reason]} | _average(answer.logprobs) for answer in answers]
    chunk = _chunk(call, id, [_candidate(i, parts[i]) | end for i, end in enumerate(ends)])
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
    cached = {"cachedContentTokenCount": answers[0].cached_tokens} if answers[0].cached_tokens else {}
    return {**chunk, "usageMetadata": {**usage, **cached}}


def _logprobs(call: Call, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {} if call.logprobs is None else {"logprobsResult": gemini_result(tokens, call.logprobs)}


def _average(tokens: Sequence[TokenLogprob]) -> dict[str, float]:
    return {"avgLogprobs": sum(token.logprob for token in tokens) / len(tokens)} if tokens else {}


def _signed_parts(answer: Reply, text: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text and function calls, with the reasoning in the signature of the first call, or else of the last text."""
    calls: list[dict[str, Any]] = [
        {"functionCall": {"id": call.id, "name": call.name, "args": msgspec.Raw(call.arguments.encode())}}
        for call in answer.tool_calls
    ]
    parts = [*text, *calls] or [{"text": ""}]
    if answer.reasoning:
        parts[-len(calls) or -1]["thoughtSignature"] = sealed(answer.reasoning)
    return parts


def _candidate(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": index}


def _chunk(call: Call, id: str, candidates: list[dict[str, Any]]) -> dict[str, Any]:
    return {"candidates": candidates, "modelVersion": call.model, "responseId": id}


def _id() -> str:
    return uuid.uuid4().hex
