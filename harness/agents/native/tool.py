"""What a tool is, and how the model's calls of tools are checked, run and cut to length."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 16_000
"""The longest result that is shown, whatever the context."""
TYPES: dict[str, type] = {"string": str, "integer": int}


class ToolFailed(Exception):
    """A tool cannot do what it was asked; the model reads the message."""


@dataclass(frozen=True)
class Tool:
    """One tool. `run` takes the arguments by name and returns what the model reads; ToolFailed says why it cannot."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments: an object."""
    run: Callable[..., str]
    checked: bool = True
    """Whether names and types of arguments are checked here. MCP servers check their own."""

    def definition(self) -> dict[str, Any]:
        """The tool as a request offers it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def parameters(optional: tuple[str, ...] = (), **types: str) -> dict[str, Any]:
    """The schema of arguments of these types, string or integer."""
    required = [name for name in types if name not in optional]
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in types.items()},
        "required": required,
    }


class Toolbox:
    """The tools of one conversation."""

    def __init__(self, tools: Iterable[Tool], most_characters: int):
        self._tools = {tool.name: tool for tool in tools}
        self._most = min(MOST_CHARACTERS, most_characters)
        self.definitions = [tool.definition() for tool in self._tools.values()]

    def run(self, call: dict[str, Any]) -> str:
        """The result of one of the model's calls, or why there is none; never longer than is shown."""
        try:
            name = call["function"]["name"]
            tool = self._tools.get(name)
            if tool is None:
                raise ToolFailed(f"there is no tool {name}; the tools are: {', '.join(self._tools)}")
            result = tool.run(**_arguments(tool, call["function"]["arguments"]))
        except ToolFailed as failed:
            result = f"Error: {failed}"
        return shortened(result, self._most)


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise ToolFailed(f"the arguments are not JSON ({error})") from None
    known = tool.parameters.get("properties", {})
    if not isinstance(given, dict) or (tool.checked and set(given) - set(known)):
        raise ToolFailed(f"the arguments must be an object with: {', '.join(known)}")
    if not tool.checked:
        return given
    if missing := [name for name in tool.parameters["required"] if name not in given]:
        raise ToolFailed(f"the argument {missing[0]} is missing")
    for name, value in given.items():
        kind = known[name]["type"]
        if not isinstance(value, TYPES[kind]) or isinstance(value, bool):
            raise ToolFailed(f"the argument {name} must be of type {kind}")
    return given


def shortened(text: str, most: int) -> str:
    """The text, with its middle left out where it is longer than that."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[... {len(text) - most} characters left out ...]\n{text[-(most - most // 2) :]}"
