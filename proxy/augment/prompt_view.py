"""What the model is shown of an attempt's requests, and what the agent is told of its answers.

All of it follows from the attempt's seed and the request, so a repeated request, another proxy, and the next request
with the same history come to the same prompt. The pool records what the model saw and said.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.augment import wordings
from proxy.augment.names import MOST, Pairs
from proxy.call import Call, Reply, ToolCall
from proxy.dialects.base import parsed_arguments
from proxy.pool.completions.observed import ToldCall
from proxy.pool.rollouts.prompt_variations import NAMES, TOOLS_IN_USER, PromptVariation

WHOLE = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "strict"}
)
"""Keys of a schema that name no argument beside `properties` and `required`. A schema with others keeps its names."""


class PromptView:
    """The view of one attempt. Any thread may use it."""

    def __init__(self, variation: PromptVariation | None):
        self.variation = variation
        self._kinds = frozenset(variation.kinds) if variation else frozenset()
        self._seed = variation.seed if variation else 0
        self._names = Pairs((), self._seed, "tool")
        """Names of the tools that requests have offered so far."""
        self._keys: dict[str, Pairs] = {}
        """Tool, in the agent's words -> its arguments."""

    def shown(self, call: Call) -> Call:
        """The request as the model is shown it."""
        if not self._kinds or not call.messages:
            return call
        self.learn(call.tools)
        constraint = call.constraint
        if constraint is not None and constraint.calls is not None:
            constraint = replace(constraint, calls=tuple(self._names[name] for name in constraint.calls))
        return replace(
            call,
            messages=tuple(map(self._message, call.messages)),
            tools=tuple(map(self._tool, call.tools)),
            constraint=constraint,
            options=self._options(call) if "tool_format" in self._kinds else call.options,
        )

    def told(self, reply: Reply) -> Reply:
        """The answer as the agent gets it."""
        if not self._kinds or not reply.tool_calls:
            return reply
        return replace(reply, tool_calls=tuple(map(self._told, reply.tool_calls)))

    def words(self, reply: Reply) -> tuple[ToldCall, ...]:
        """For each call of the answer, the words in which the agent gets it; empty where they are all the model's."""
        told = tuple(map(self._words, reply.tool_calls)) if self._kinds & NAMES else ()
        return told if told != tuple(ToldCall(call.name) for call in reply.tool_calls) else ()

    def result(self, message: dict[str, Any]) -> tuple[str, str]:
        """The name and the text of a tool's result that the model is shown, as the agent wrote them.

        What truncation has left out stays out.
        """
        name, text = message.get("name") or "", message.get("content") or ""
        framed = "observations" in self._kinds and message["role"] == "tool"
        return self._names[name], wordings.without_frame(text, self._seed) if framed else text

    def learn(self, tools: Sequence[dict[str, Any]]) -> None:
        """Give the names of tools that are offered their pairs."""
        functions = [tool["function"] for tool in tools]
        if "tool_names" in self._kinds:
            self._names.learn(function["name"] for function in functions)
        if "argument_names" in self._kinds:
            for function in functions:
                tool = function["name"]
                if len(self._keys) >= MOST:
                    break
                new = Pairs((), self._seed, f"argument of {tool}")
                self._keys.setdefault(tool, new).learn(_arguments(function))  # as one step, whatever thread comes next

    def _options(self, call: Call) -> dict[str, Any]:
        """The arguments for the chat template, with the place of the tools where the messages have both places."""
        system, first = (*call.messages, {}, {})[:2]
        both = system["role"] == "system" and first.get("role") == "user" and isinstance(first["content"], str)
        if not both:  # the template would refuse the request, or leave the tools out
            return call.options
        in_user = random.Random(f"{self._seed}/tool format").choice((True, False))
        return {TOOLS_IN_USER: in_user} | call.options

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = dict(tool["function"])
        own = function["name"]
        function["name"] = self._names[own]
        if "descriptions" in self._kinds and function.get("description"):
            function["description"] = wordings.shorter(function["description"])
        if isinstance(parameters := function.get("parameters"), dict):
            function["parameters"] = self._parameters(parameters, own)
        return tool | {"function": function}

    def _parameters(self, parameters: dict[str, Any], tool: str) -> dict[str, Any]:
        properties = parameters.get("properties")
        if not isinstance(properties, dict):
            return parameters
        order = list(properties)
        if "argument_order" in self._kinds:
            random.Random(f"{self._seed}/order of {tool}").shuffle(order)
        shown = parameters | {"properties": {self._key(tool, key): properties[key] for key in order}}
        if isinstance(required := parameters.get("required"), list):
            shown["required"] = [self._key(tool, key) if isinstance(key, str) else key for key in required]
        return shown

    def _key(self, tool: str, argument: str) -> str:
        """The other name of an argument. `tool`: its name in the agent's words."""
        keys = self._keys.get(tool)
        return argument if keys is None else keys[argument]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if message["role"] == "system" and "system_prompt" in self._kinds and isinstance(content, str):
            return message | {"content": wordings.paraphrase(content, self._seed)}
        if message["role"] == "tool":
            return message | self._result(message)
        if calls := message.get("tool_calls"):
            return message | {"tool_calls": [self._history_call(call) for call in calls]}
        return message

    def _result(self, message: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        if isinstance(name := message.get("name"), str):
            changed["name"] = self._names[name]
        if isinstance(content := message.get("content"), str):
            content = wordings.cut(content, self._seed) if "truncation" in self._kinds else content
            content = wordings.observation(content, self._seed) if "observations" in self._kinds else content
            changed["content"] = content
        return changed

    def _history_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        own, arguments = function["name"], function["arguments"]
        if isinstance(arguments, dict):
            arguments = self._renamed(arguments, own)
        return call | {"function": function | {"name": self._names[own], "arguments": arguments}}

    def _told(self, call: ToolCall) -> ToolCall:
        words = self._words(call)
        if not words.keys:
            return ToolCall(call.id, words.name, call.arguments)
        told = words.renamed(parsed_arguments(call.arguments))
        return ToolCall(call.id, words.name, msgspec.json.encode(told).decode())

    def _words(self, call: ToolCall) -> ToldCall:
        own = self._names[call.name]
        arguments = parsed_arguments(call.arguments)
        if not isinstance(arguments, dict) or self._renamed(arguments, own).keys() == arguments.keys():
            return ToldCall(own)
        keys = {key: self._key(self._known(own), key) for key in arguments}
        return ToldCall(own, {key: other for key, other in keys.items() if other != key})

    def _renamed(self, arguments: dict[str, Any], tool: str) -> dict[str, Any]:
        """The arguments under their other names, in their order. `tool`: the agent's name of it."""
        known = self._known(tool)
        return {self._key(known, key): value for key, value in arguments.items()}

    def _known(self, tool: str) -> str:
        """The name under which the arguments of a tool are known."""
        return tool if tool in self._keys else self._names[tool]


def _arguments(function: dict[str, Any]) -> Iterable[str]:
    """The arguments whose names may be changed: all, or none where the schema speaks of them elsewhere, too."""
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or not isinstance(properties := parameters.get("properties"), dict):
        return ()
    return properties if parameters.keys() <= WHOLE else ()
