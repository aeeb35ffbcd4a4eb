"""What the model is shown of an attempt's requests, and what the agent is told of its answers.

All of it follows from the attempt's seed and the request, so a repeated request, another proxy, and the next request
with the same history come to the same prompt. The pool records what the model saw and said.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import msgspec

from proxy.augment import texts
from proxy.augment.names import Pairs
from proxy.call import Call, Reply, ToolCall
from proxy.dialects.base import parsed_arguments
from proxy.pool.rollouts.prompt_variations import PromptVariation


@dataclass
class PromptView:
    """The view of one attempt. Any thread may use it."""

    variation: PromptVariation | None
    _tools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tools that requests have offered so far -> their arguments, in the agent's words. Replaced as a whole."""
    _learning: Lock = field(default_factory=Lock)
    """Two requests at once would each add to what was known before both, and the names of one would be lost."""

    def shown(self, call: Call) -> Call:
        """The request as the model is shown it."""
        if self.variation is None or not call.messages:
            return call
        self._learn(call.tools)
        names = self._names()
        constraint = call.constraint
        if constraint is not None and constraint.calls is not None:
            constraint = replace(constraint, calls=tuple(names[name] for name in constraint.calls))
        return replace(
            call,
            messages=tuple(self._message(message, names) for message in call.messages),
            tools=tuple(self._tool(tool, names) for tool in call.tools),
            constraint=constraint,
        )

    def told(self, reply: Reply) -> Reply:
        """The answer as the agent gets it."""
        if self.variation is None or not reply.tool_calls:
            return reply
        names = self._names()
        return replace(reply, tool_calls=tuple(self._told(call, names) for call in reply.tool_calls))

    def _learn(self, tools: Sequence[dict[str, Any]]) -> None:
        with self._learning:
            known = dict(self._tools)
            for tool in tools:
                name = _name(tool)
                known[name] = tuple(dict.fromkeys((*known.get(name, ()), *_arguments(tool))))
            self._tools = known

    def _has(self, kind: str) -> bool:
        return self.variation is not None and kind in self.variation.kinds

    @property
    def _seed(self) -> int:
        return self.variation.seed if self.variation else 0

    def _names(self) -> Pairs:
        return Pairs(self._tools if self._has("tool_names") else (), self._seed, "tool")

    def _keys(self, tool: str) -> Pairs:
        """The pairs of a tool's arguments. `tool`: its name in the agent's words."""
        known = self._tools.get(tool, ()) if self._has("argument_names") else ()
        return Pairs(known, self._seed, f"argument of {tool}")

    def _tool(self, tool: dict[str, Any], names: Pairs) -> dict[str, Any]:
        function = dict(tool["function"])
        own = function["name"]
        function["name"] = names[own]
        if self._has("descriptions") and function.get("description"):
            function["description"] = texts.shorter(function["description"])
        if isinstance(parameters := function.get("parameters"), dict):
            function["parameters"] = self._parameters(parameters, own)
        return tool | {"function": function}

    def _parameters(self, parameters: dict[str, Any], tool: str) -> dict[str, Any]:
        properties = parameters.get("properties")
        if not isinstance(properties, dict):
            return parameters
        keys, order = self._keys(tool), list(properties)
        if self._has("argument_order"):
            random.Random(f"{self._seed}/order of {tool}").shuffle(order)
        shown = parameters | {"properties": {keys[key]: properties[key] for key in order}}
        if isinstance(required := parameters.get("required"), list):
            shown["required"] = [keys[key] if isinstance(key, str) else key for key in required]
        return shown

    def _message(self, message: dict[str, Any], names: Pairs) -> dict[str, Any]:
        content = message.get("content")
        if message["role"] in ("system", "developer") and self._has("system_prompt") and isinstance(content, str):
            return message | {"content": texts.paraphrase(content, self._seed)}
        if message["role"] == "tool":
            return message | self._result(message, names)
        if calls := message.get("tool_calls"):
            return message | {"tool_calls": [self._history_call(call, names) for call in calls]}
        return message

    def _result(self, message: dict[str, Any], names: Pairs) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if isinstance(name := message.get("name"), str):
            changed["name"] = names[name]
        if isinstance(content := message.get("content"), str):
            content = texts.cut(content, self._seed) if self._has("truncation") else content
            content = texts.observation(content, self._seed) if self._has("observations") else content
            changed["content"] = content
        return changed

    def _history_call(self, call: dict[str, Any], names: Pairs) -> dict[str, Any]:
        function = call["function"]
        own, arguments = function["name"], function["arguments"]
        if isinstance(arguments, dict):
            arguments = _renamed(arguments, self._keys(self._own(own, names)))
        return call | {"function": function | {"name": names[own], "arguments": arguments}}

    def _told(self, call: ToolCall, names: Pairs) -> ToolCall:
        own = names[call.name]
        arguments = parsed_arguments(call.arguments)
        keys = self._keys(self._own(own, names))
        if isinstance(arguments, dict) and (told := _renamed(arguments, keys)).keys() != arguments.keys():
            return ToolCall(call.id, own, msgspec.json.encode(told).decode())
        return ToolCall(call.id, own, call.arguments)

    def _own(self, name: str, names: Pairs) -> str:
        """The tool that a name stands for, in whichever words."""
        return name if name in self._tools else names[name]


def _name(tool: dict[str, Any]) -> str:
    return tool["function"]["name"]


def _arguments(tool: dict[str, Any]) -> tuple[str, ...]:
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return tuple(properties) if isinstance(properties, dict) else ()


def _renamed(arguments: dict[str, Any], keys: Pairs) -> dict[str, Any]:
    """The arguments under their other names, in their order."""
    renamed = {keys[key]: value for key, value in arguments.items()}
    return renamed if len(renamed) == len(arguments) else arguments
