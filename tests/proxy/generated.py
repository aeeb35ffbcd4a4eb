"""Generates unusual requests: edge values within a dialect's grammar, mutations of them, odd headers and bytes.

A body begins as one that the dialect could serve. Some of its values are then replaced, removed or doubled anywhere in
the tree; some bodies are cut or get other bytes; paths, methods, keys and encodings vary beside it.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import brotli
import zstandard
from hypothesis import strategies as st

EDGES = [0, -1, 0.5, -0.1, -0.0, 2**31, 2**53, 2**63, -(2**63) - 1, 10**40, 10**400, 1e308]
EDGES += [float("nan"), float("inf"), float("-inf")]
NUMBERS = st.sampled_from([1, 2, 7, *EDGES])
COUNTS = st.sampled_from([1, 5, 64, 500] * 10 + EDGES)
SHARES = st.sampled_from([0.1, 0.5, 0.9, 1.0] * 10 + EDGES)
ODD_TEXTS = [
    *(
        "",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\u202e",
        "\r\n\r\n",
        "e\u0301",
        "\U0001f980",
        "a" * 3000,
        "[" * 300,
        "../../etc",
    ),
    *("<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</think>", "{{ 1/0 }}", "{% raise %}", "data: [DONE]"),
    *('{"a": 1}', '{"a":', "[1, 2]", "1e999", "null", "'; drop table attempts; --", "bf-0123456789abcdef"),
]
TEXT = (
    st.sampled_from(["hi", "list the files", "ok", "thanks"])
    | st.sampled_from(["shell", "I look."])
    | st.sampled_from(ODD_TEXTS)
    | st.text(max_size=12)
)
NAME = st.sampled_from(["shell", "read_file"] * 6 + ["a.b", "", "f" * 200, "n\u00e4me", "\ud800", "\0"])
ID = st.sampled_from(["call_1", "call_2", "toolu_1", "", "x" * 1000, "\0", "1", "\ud800"])
LEAF = st.none() | st.booleans() | NUMBERS | TEXT
VALUE: st.SearchStrategy[Any] = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
OBJECT = st.dictionaries(st.sampled_from(["command", "path", "a", "", "type", "properties"]), VALUE, max_size=3)
SCHEMA = st.sampled_from(
    [
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        {"type": "OBJECT", "properties": {"type": {"type": "INTEGER"}}},
        {"$ref": "#/a", "anyOf": [{"type": ["string", "null"]}, True]},
        {},
    ]
)
SAMPLING = {
    "temperature": SHARES,
    "top_p": SHARES,
    "top_k": COUNTS,
    "frequency_penalty": SHARES,
    "repetition_penalty": SHARES,
}


def shape(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these members. A member that is not a strategy is a constant."""
    return st.fixed_dictionaries(_members(required), optional=_members(optional))


def _members(given: dict[str, Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in given.items()}


def some(*of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(*of), min_size=least, max_size=4)


PARTS = some(shape({"type": st.sampled_from(["text"] * 9 + ["image_url"]), "text": TEXT}))
CONTENT = TEXT | PARTS
FUNCTION = shape({"name": NAME, "arguments": st.builds(json.dumps, OBJECT) | TEXT})
CHAT = shape(
    {
        "messages": some(
            shape({"role": st.sampled_from(["user", "system", "developer"]), "content": CONTENT}),
            shape(
                {"role": "assistant", "content": CONTENT | st.none()},
                reasoning_content=TEXT,
                tool_calls=some(shape({"id": ID, "type": "function", "function": FUNCTION})),
            ),
            shape({"role": "tool", "tool_call_id": ID, "content": CONTENT}),
            least=1,
        ),
    },
    model=NAME,
    tools=some(shape({"type": "function", "function": shape({"name": NAME, "parameters": SCHEMA}, description=TEXT)})),
    tool_choice=st.sampled_from(["auto", "none", "auto", "required"]),
    max_tokens=COUNTS,
    stop=TEXT | some(TEXT),
    stream=st.booleans(),
    stream_options={"include_usage": True},
    chat_template_kwargs=OBJECT,
    reasoning_effort=TEXT,
    n=st.sampled_from([1, None, 1, 2, 10**4]),
    **SAMPLING,
)
ITEMS = some(
    shape({"role": st.sampled_from(["user", "developer", "assistant"]), "content": TEXT}),
    shape({"type": "message", "role": "user", "content": some(shape({"type": "input_text", "text": TEXT}))}),
    shape({"type": "function_call", "call_id": ID, "name": NAME, "arguments": TEXT}, namespace=NAME),
    shape({"type": "custom_tool_call", "call_id": ID, "name": NAME, "input": TEXT}),
    shape({"type": "function_call_output", "call_id": ID, "output": CONTENT}),
    shape(
        {"type": "reasoning", "summary": some(shape({"type": "summary_text", "text": TEXT}))}, encrypted_content=TEXT
    ),
    least=1,
)
FUNCTION_TOOL = shape({"type": "function", "name": NAME, "parameters": SCHEMA}, description=TEXT)
RESPONSES = shape(
    {"input": TEXT | ITEMS},
    model=NAME,
    instructions=TEXT,
    tools=some(
        FUNCTION_TOOL,
        shape({"type": "custom", "name": NAME}, format=shape({"type": "grammar", "definition": TEXT})),
        shape({"type": "namespace", "name": NAME, "tools": some(FUNCTION_TOOL)}),
        shape({"type": "web_search"}),
    ),
    tool_choice=st.sampled_from(["auto", "none"]),
    include=st.sampled_from([[], ["reasoning.encrypted_content"]]),
    metadata=OBJECT,
    max_output_tokens=COUNTS,
    reasoning=shape({}, effort=TEXT, summary="auto"),
    stream=st.booleans(),
    store=False,
    temperature=SHARES,
)
BLOCKS = some(
    shape({"type": "text", "text": TEXT}),
    shape({"type": "tool_result", "tool_use_id": ID, "content": TEXT | some(shape({"type": "text", "text": TEXT}))}),
)
MESSAGES = shape(
    {
        "messages": st.tuples(
            some(
                shape({"role": "user", "content": TEXT | BLOCKS}),
                shape(
                    {
                        "role": "assistant",
                        "content": some(
                            shape({"type": "thinking", "thinking": TEXT, "signature": TEXT}),
                            shape({"type": "tool_use", "id": ID, "name": NAME, "input": OBJECT}),
                            shape({"type": "text", "text": TEXT}),
                        ),
                    }
                ),
            ),
            shape({"role": "user", "content": TEXT | BLOCKS}),
        ).map(lambda turns: [*turns[0], turns[1]]),
    },
    model=NAME,
    max_tokens=COUNTS,
    system=TEXT | some(shape({"type": "text", "text": TEXT}, cache_control={"type": "ephemeral"})),
    tools=some(shape({"name": NAME, "input_schema": SCHEMA}, description=TEXT)),
    tool_choice=shape({"type": st.sampled_from(["auto", "none", "any"])}),
    thinking=shape({"type": st.sampled_from(["enabled", "disabled"])}, budget_tokens=COUNTS),
    stop_sequences=some(TEXT),
    stream=st.booleans(),
    temperature=SHARES,
    top_k=COUNTS,
)
GEMINI = shape(
    {
        "contents": some(
            shape({"role": "user", "parts": some(shape({"text": TEXT}), least=1)}),
            shape(
                {
                    "role": "model",
                    "parts": some(
                        shape({"text": TEXT}, thought=st.booleans(), thoughtSignature=TEXT),
                        shape({"functionCall": shape({"name": NAME, "args": OBJECT}, id=ID)}),
                    ),
                }
            ),
            shape(
                {
                    "role": "user",
                    "parts": some(shape({"functionResponse": shape({"name": NAME, "response": OBJECT}, id=ID)})),
                }
            ),
            least=1,
        ),
    },
    systemInstruction=shape({"parts": some(shape({"text": TEXT}))}),
    tools=some(shape({"functionDeclarations": some(shape({"name": NAME}, parameters=SCHEMA, description=TEXT))})),
    generationConfig=shape(
        {},
        temperature=SHARES,
        topK=COUNTS,
        maxOutputTokens=COUNTS,
        stopSequences=some(TEXT),
        seed=COUNTS,
        candidateCount=st.sampled_from([1, 1, 2, 3]),
        thinkingConfig=shape({}, includeThoughts=st.booleans(), thinkingBudget=COUNTS),
    ),
)
COMPLETIONS = shape(
    {"prompt": TEXT | some(TEXT) | st.lists(st.integers(-2, 3000), max_size=6)},
    model=NAME,
    max_tokens=COUNTS,
    stop=TEXT | some(TEXT),
    stream=st.booleans(),
    echo=st.sampled_from([False, None, False, True]),
    **SAMPLING,
)


@dataclass(frozen=True)
class Request:
    """One request. `dialect` is the format of its errors; empty where the path belongs to none."""

    dialect: str
    path: str
    body: bytes
    method: str = "POST"
    headers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """Whether a 200 must have recorded rows."""
        return "count" not in self.path and "/models" != self.path[-7:]


GRAMMARS: dict[str, tuple[st.SearchStrategy[dict[str, Any]], list[str]]] = {
    "chat": (CHAT, ["/v1/chat/completions", "/a/b/v1/chat/completions"]),
    "responses": (RESPONSES, ["/v1/responses", "/r/k\u00e4y/v1/responses"]),
    "messages": (MESSAGES, ["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"]),
    "gemini": (
        GEMINI,
        [
            "/v1beta/models/m:generateContent",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            "/v1beta/models/m:countTokens",
            "/v1beta/models/m:streamGenerateContent?alt=json",
            "/v1beta/models/a%00:b/c:generateContent?key=\ud7ff",
        ],
    ),
    "completions": (COMPLETIONS, ["/v1/completions", "//v1/completions"]),
}
"""Dialect -> the strategy of its bodies, and its paths, the usual one first."""


def requests(dialect: str) -> st.SearchStrategy[Request]:
    """Requests to one dialect: half of them follow its grammar, the others are mutated."""
    grammar, paths = GRAMMARS[dialect]
    where = st.sampled_from([paths[0]] * 3 + paths)
    whole = st.builds(lambda path, body: Request(dialect, path, written(body)), where, grammar)
    mutated = st.builds(
        lambda path, body, changes: Request(dialect, path, written(_changed(body, changes))),
        where,
        grammar,
        st.lists(
            st.tuples(st.integers(0, 2**16), st.sampled_from(["put", "drop", "double", "wrap"]), VALUE), max_size=3
        ),
    )
    return st.one_of(
        whole,
        mutated,
        st.builds(_with_bytes, mutated, st.integers(0, 2**16), st.binary(max_size=6)),
        st.builds(_with_headers, whole, st.integers(0, len(HEADERS) - 1)),
        st.builds(
            lambda request, method: replace(request, method=method),
            whole,
            st.sampled_from(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "PROPFIND"]),
        ),
        st.builds(lambda path, body: Request(dialect, path, written(body)), where, VALUE),
    )


def written(body: Any) -> bytes:
    """JSON in which surrogates are escaped, and NaN and Infinity are written as Python does."""
    return json.dumps(body).encode()


def _changed(body: Any, changes: list[tuple[int, str, Any]]) -> Any:
    for where, how, value in changes:
        body = _change(body, where, how, value)
    return body


def _change(value: Any, where: int, how: str, new: Any) -> Any:
    """The tree with one change at the place to which `where` leads, digit by digit."""
    if isinstance(value, dict | list) and value and where % 5:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[where % len(keys)]
        inner = value[key]
        copy = value.copy()
        if how == "drop" and where % 3 == 0:
            del copy[key]
        else:
            copy[key] = _change(inner, where // 7, how, new)
        return copy
    return {"put": new, "drop": None, "wrap": [value], "double": [value, value] if isinstance(value, dict) else new}[
        how
    ]


def _with_bytes(request: Request, at: int, raw: bytes) -> Request:
    cut = at % (len(request.body) + 1)
    return replace(request, body=request.body[:cut] + raw + (request.body[cut:] if at % 2 else b""))


def _with_headers(request: Request, change: int) -> Request:
    headers, pack = HEADERS[change]
    return replace(request, headers=headers, body=pack(request.body))


Change = tuple[list[tuple[str, str]], Callable[[bytes], bytes]]


def _same(body: bytes) -> bytes:
    return body


HEADERS: list[Change] = [
    ([("Content-Encoding", "gzip")], gzip.compress),
    ([("Content-Encoding", "deflate")], zlib.compress),
    ([("Content-Encoding", "deflate")], _same),
    ([("Content-Encoding", "br")], _same),
    ([("Content-Encoding", "br")], brotli.compress),
    ([("Content-Encoding", "zstd")], _same),
    ([("Content-Encoding", "zstd")], zstandard.compress),
    ([("Content-Type", "multipart/form-data; boundary=")], _same),
    ([("Content-Type", "text/plain; charset=utf-16")], _same),
    ([("Authorization", "Bearer")], _same),
    ([("Authorization", "Bearer bf-not-issued")], _same),
    ([("Authorization", "Basic \u00ff\u00fe")], _same),
    ([("x-api-key", "k" * 600)], _same),
    ([("x-api-key", "\u00e4\u0080")], _same),
    ([("x-goog-api-key", "a"), ("x-api-key", "b"), ("Authorization", "Bearer c")], _same),
    ([("Accept", "text/html"), ("Accept-Encoding", "gzip")], _same),
    ([("Range", "bytes=0-1"), ("If-None-Match", "*")], _same),
    ([("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13")], _same),
    ([("X-Long", "x" * 60_000)], _same),
    ([("X-Long", "x" * 70_000)], _same),
    ([(f"X-{number}", "y") for number in range(90)], _same),
    ([("Expect", "200-maybe")], _same),
    ([("Expect", "100-continue")], _same),
]
