"""Answers of a prescribed form: JSON of a schema, or calls of functions. It reads what is asked and makes the grammar.

The engine's grammar holds from the first sampled token, so a prescribed answer has no reasoning. Such turns are not
trained: a grammar changes the distribution that they are sampled from. Left out: free text around the prescribed form,
a schema for the answer beside tools that may be called instead, and calls in formats whose arguments are not JSON.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.call import Call, Constraint, Grammar, ToolCallGrammar
from proxy.dialects.base import refuse
from proxy.parsing.formats import Format

ANY_OBJECT: dict[str, Any] = {"type": "object"}

Tools = Sequence[dict[str, Any]]


def openai_constraint(choice: Any, field: str, form: dict[str, Any] | None, tools: Tools) -> Constraint | None:
    """What `tool_choice` and the form in `field` prescribe in chat completions and Responses, which nest differently.

    None where the answer is free; CallError 400 names the field that asks for what is not served.
    """
    kind = (form or {}).get("type", "text")
    if choice == "required":
        return call_constraint("tool_choice", [], tools)
    if isinstance(choice, dict) and isinstance(name := _inner(choice, "function").get("name"), str):
        return call_constraint("tool_choice", [name], tools)
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", f"is {choice!r}; 'auto', 'none', 'required' and one named function are served")
    if kind == "json_object":
        return answer_constraint(field, ANY_OBJECT, tools)
    if kind == "json_schema":
        return answer_constraint(field, _inner(form or {}, "json_schema").get("schema"), tools)
    if kind != "text":
        refuse(field, f"is of type {kind!r}; 'text', 'json_object' and 'json_schema' are served")
    return None


def _inner(value: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of this name in a value, or the value where there is none."""
    inner = value.get(name)
    return inner if isinstance(inner, dict) else value


def answer_constraint(field: str, schema: Any, tools: Tools) -> Constraint:
    """The answer is JSON of this schema. `field` is the request's, for refusals."""
    if not isinstance(schema, dict | bool):
        refuse(field, "holds no JSON schema; send an object")
    if tools:
        refuse(field, "stands beside tools, which could then not be called; leave one of the two out")
    return Constraint(field, schema)


def call_constraint(field: str, names: Sequence[str], tools: Tools) -> Constraint:
    """The answer is calls of these functions, of any where none is named: one call where one is."""
    offered = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in offered:
            refuse(field, f"names {name!r}, which is none of the request's tools; offer it")
    if not offered:
        refuse(field, "asks for a call, and the request offers no tools; offer some")
    return Constraint(field, calls=tuple(names or offered), once=len(names) == 1)


def grammar(call: Call, form: Format) -> Grammar | None:
    """The grammar of the call's constraint; CallError 400 where the model's tool-call format has no way to write it."""
    constraint = call.constraint
    if constraint is None:
        return None
    if constraint.calls is None:
        return Grammar(constraint.schema)
    if form.written is None:
        refuse(constraint.field, "asks for a call, which is not served for models that write calls as this one does")
    before, between, after = form.written
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in call.tools}
    calls = [
        ToolCallGrammar(f"{before}{msgspec.json.encode(name).decode()}{between}", schemas[name] or ANY_OBJECT, after)
        for name in constraint.calls
    ]
    return Grammar(calls=tuple(calls), once=constraint.once)


def openai_fields(constraint: Constraint) -> dict[str, Any]:
    """The constraint as a chat completion says it, for other providers."""
    if constraint.calls is None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": constraint.schema}}
        return {"response_format": form}
    named = {"type": "function", "function": {"name": constraint.calls[0]}}
    return {"tool_choice": named if constraint.once else "required"}
