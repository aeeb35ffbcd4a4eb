"""Answers of a prescribed form (JSON of a schema, or calls of functions): reads the request's wish, makes the grammar.

Where the engine enforces it (proxy.prescribed = "grammar"), the grammar holds from the first sampled token, so a
prescribed answer has no reasoning. Such turns are not trained: a grammar changes the distribution that they are sampled
from. Left out: free text around the prescribed form, a schema for the answer beside tools that may be called instead,
grammars of calls in formats whose arguments are not JSON; proxy/prompt/prefill.py begins calls without a grammar.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.call import ANY_OBJECT, Call, Constraint, Grammar, Reply, ToolCallGrammar
from proxy.dialects.base import refuse
from proxy.parsing.formats import Format
from proxy.parsing.schema_check import misfit as schema_misfit

Tools = Sequence[dict[str, Any]]


def openai_constraint(choice: Any, field: str, form: dict[str, Any] | None, tools: Tools) -> Constraint | None:
    """Read `tool_choice` and the form in `field` of chat completions and Responses, which nest them differently.

    None where the answer is free; CallError 400 names a field whose value is not served.
    """
    return combined(_openai_calls(choice, tools), _openai_answer(field, form or {}))


def _openai_calls(choice: Any, tools: Tools) -> Constraint | None:
    if choice == "required":
        return call_constraint("tool_choice", [], tools)
    if isinstance(choice, dict) and isinstance(name := _inner(choice, "function").get("name"), str):
        return call_constraint("tool_choice", [name], tools)
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", f"is {choice!r}; use 'auto', 'none', 'required' or one named function")
    return None


def _openai_answer(field: str, form: dict[str, Any]) -> Constraint | None:
    kind = form.get("type", "text")
    if kind == "json_object":
        return answer_constraint(field, ANY_OBJECT)
    if kind == "json_schema":
        return answer_constraint(field, _inner(form, "json_schema").get("schema"))
    if kind != "text":
        refuse(field, f"is of type {kind!r}; use 'text', 'json_object' or 'json_schema'")
    return None


def combined(calls: Constraint | None, answer: Constraint | None) -> Constraint | None:
    """The constraint of a request that prescribes calls, or the form of the answer, or both."""
    return answer if calls is None else calls if answer is None else replace(calls, schema=answer.schema)


def _inner(value: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of this name inside a value, or the value itself where it has none."""
    inner = value.get(name)
    return inner if isinstance(inner, dict) else value


def answer_constraint(field: str, schema: Any) -> Constraint:
    """The constraint to JSON of a schema. `field` is the request's, for error messages."""
    if not isinstance(schema, dict | bool):
        refuse(field, "has no JSON schema; send an object")
    return Constraint(field, schema)


def call_constraint(field: str, names: Sequence[str], tools: Tools) -> Constraint:
    """The constraint to calls of these functions: of all where none is named, and to one call where one is."""
    offered = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in offered:
            refuse(field, f"names {name!r}, which is not one of the request's tools; add it to them")
    if not offered:
        refuse(field, "asks for a call, and the request has no tools; send some")
    return Constraint(field, calls=tuple(names or offered), once=len(names) == 1)


def enforceable(call: Call) -> bool:
    """Whether a grammar can enforce the call's constraint: not a schema beside tools that may be called instead."""
    constraint = call.constraint
    return constraint is not None and (constraint.calls is not None or not call.tools or call.no_calls)


def misfit(call: Call, answer: Reply) -> str | None:
    """Say how a whole answer misses the form that the call prescribes; empty where it does not.

    None where the form is free or enforced. A call of a tool is no answer yet, so no schema is asked of it.
    """
    constraint = call.constraint
    if constraint is None or constraint.enforced:
        return None
    if constraint.calls is not None:
        called = any(item.name in constraint.calls for item in answer.tool_calls)
        return "" if called else "the answer calls none of the tools that it should"
    return "" if answer.tool_calls else schema_misfit(answer.content, constraint.schema)


def grammar(call: Call, form: Format) -> Grammar | None:
    """The grammar of the call's constraint; CallError 400 where the model's tool-call format has no way to write it."""
    constraint = call.constraint
    if constraint is None:
        return None
    if constraint.calls is None:
        return Grammar(constraint.schema)
    if form.written is None:
        refuse(constraint.field, "asks for a call, which cannot be forced in this model's tool-call format; use 'auto'")
    before, between, after = form.written
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in call.tools}
    calls = [
        ToolCallGrammar(f"{before}{msgspec.json.encode(name).decode()}{between}", schemas[name] or ANY_OBJECT, after)
        for name in constraint.calls
    ]
    return Grammar(calls=tuple(calls), once=constraint.once)


def openai_fields(constraint: Constraint) -> dict[str, Any]:
    """The constraint as fields of a chat completion, for providers."""
    fields: dict[str, Any] = {}
    if constraint.schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": constraint.schema}}
        fields["response_format"] = form
    if constraint.calls is not None:
        named = {"type": "function", "function": {"name": constraint.calls[0]}}
        fields["tool_choice"] = named if constraint.once else "required"
    return fields
