"""Tool calls written in every format, as the chat templates of its models write them."""

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

PARAMETERS: dict[str, Any] = {
    "command": {"type": "string"},
    "text": {"type": "string", "description": "any text"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "force": {"type": "boolean"},
    "options": {"type": "object"},
    "paths": {"type": "array", "items": {"type": "string"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PARAMETERS}}}
    for name in ("shell", "edit_file")
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _qwen(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: Calls, line: str = "\n") -> str:
    return "\n".join(
        f"<tool_call>{name}{line}"
        + "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{bare(v)}</arg_value>{line}" for k, v in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def _minimax(calls: Calls) -> str:
    invokes = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def _deepseek_v3(calls: Calls) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    written = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def _deepseek_v32(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        string = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{string}">{bare(value)}</｜DSML｜parameter>\n'

    invokes = (
        f'<｜DSML｜invoke name="{n}">\n' + "".join(parameter(*item) for item in a.items()) + "</｜DSML｜invoke>\n"
        for n, a in calls
    )
    return "<｜DSML｜function_calls>\n" + "".join(invokes) + "</｜DSML｜function_calls>"


def _kimi(calls: Calls) -> str:
    written = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def _llama(calls: Calls) -> str:
    return "<|python_tag|>" + ";".join(dumps({"name": n, "parameters": a}) for n, a in calls)


def _llama_bare(calls: Calls) -> str:
    return _llama(calls).removeprefix("<|python_tag|>")


def _mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": n, "arguments": a} for n, a in calls])


def _mistral_compact(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "qwen": ("qwen", _qwen),
    "hermes": ("hermes", _qwen),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "glm45": ("glm45", _glm),
    "glm47": ("glm47", lambda calls: _glm(calls, line="")),
    "minimax-m2": ("minimax-m2", _minimax),
    "deepseekv3": ("deepseekv3", _deepseek_v3),
    "deepseekv31": ("deepseekv31", _deepseek_v31),
    "deepseekv32": ("deepseekv32", _deepseek_v32),
    "kimi_k2": ("kimi_k2", _kimi),
    "llama3": ("llama3", _llama),
    "llama3, no tag": ("llama3", _llama_bare),
    "mistral": ("mistral", _mistral),
    "mistral, compact": ("mistral", _mistral_compact),
}
"""What a test calls it -> the format's name and how calls are written in it."""

ONE: Calls = [("shell", {"command": "ls -la"})]
SAMPLES: dict[str, Calls] = {
    "one": ONE,
    "no arguments": [("shell", {})],
    "two": [("shell", {"command": "ls"}), ("edit_file", {"text": "a", "count": 3})],
    "every type": [
        ("edit_file", {"text": "x", "count": -7, "ratio": 0.5, "force": True, "options": {"a": [1, None]}, "paths": []})
    ],
    "unicode": [("shell", {"command": "écho 你好 👍🏽 \u200b"})],
    "strings that look typed": [
        ("shell", {"command": "null", "text": "true"}),
        ("shell", {"text": "5", "command": '{"a":  1}'}),
    ],
    "edges": [("shell", {"command": "  two\n\nlines\n", "text": '"quoted"'})],
    "closing tags": [
        ("shell", {"command": "a </parameter> b </function> c </tool_call> d </invoke> e </arg_value> f [/x] ``` g"})
    ],
    "nested": [("edit_file", {"options": {"a": {"b": [{"c": '"}]'}, [[]], {}]}, "d": "\\"}, "paths": ["x", "ü y"]})],
    "code": [("edit_file", {"text": "if (a < b && c > d) {\n    print(\"}{][\")\n}\n\n# `x` 'y' \\n"})],
}
