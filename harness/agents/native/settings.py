"""What can be set of the agent, in one JSON file. Every key may be left out."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

SYSTEM = "You work on the user's task with your tools. When it is done, answer without calling a tool."


class SettingsError(Exception):
    """A setting makes no sense; the message is one sentence that says which and what to write."""


@dataclass(frozen=True, kw_only=True)
class ConnectedServer:
    """An MCP server: a program that offers tools over its standard input and output, or an address."""

    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """The program's, beside ours."""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Every key of the file."""

    policy: str = "free"
    """Who manages the context, unless the command line says it."""
    system: str = SYSTEM
    """The system prompt."""
    tools: tuple[str, ...] = ()
    """Names of the tools that are offered. Empty: all of them."""
    threshold: tuple[float, float] = (0.5, 0.8)
    """The share of the context at which `threshold` and `hybrid` compact is drawn from this range, once per task."""
    keep_last: int = 5
    """Turns whose tool results `hybrid` keeps."""
    drafts: int = 1
    """Answers to the first turn, which one more turn merges. 1: no merge."""
    command_seconds: float = 120
    """Seconds that a shell command may take."""
    mcp: dict[str, ConnectedServer] = field(default_factory=dict)
    """Name -> MCP server."""


def read_settings(file: Path, *, must_exist: bool) -> AgentSettings:
    """Read the file; without it, the defaults. SettingsError names the key that is wrong."""
    try:
        table = json.loads(file.read_text())
    except FileNotFoundError:
        if must_exist:
            raise SettingsError(f"the settings file {file} does not exist; create it or leave it out") from None
        return AgentSettings()
    except (OSError, ValueError) as error:
        raise SettingsError(f"the settings file {file} cannot be read as JSON ({error}); correct it") from None
    known = {key.name for key in fields(AgentSettings)}
    if not isinstance(table, dict) or (unknown := sorted(set(table) - known)):
        what = f"an unknown key, {unknown[0]!r}" if isinstance(table, dict) else "no object"
        raise SettingsError(f"the settings file {file} holds {what}; its keys are: {', '.join(sorted(known))}")
    return AgentSettings(**{key: _READERS[key](key, value) for key, value in table.items()})


def read_servers(file: Path) -> dict[str, ConnectedServer]:
    """Read the servers of a file in the common form. SettingsError when it cannot be read."""
    try:
        table = json.loads(file.read_text())["mcpServers"]
        return {name: _common_server(server) for name, server in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"the file of MCP servers {file} cannot be read ({error}); correct it") from None


def _common_server(server: dict[str, Any]) -> ConnectedServer:
    if "url" in server:
        return ConnectedServer(url=str(server["url"]))
    return ConnectedServer(command=(server["command"], *server.get("args", ())), env=server.get("env", {}))


def _text(key: str, value: Any) -> str:
    return value if isinstance(value, str) and value else _wrong(key, value, "a text")


def _texts(key: str, value: Any) -> tuple[str, ...]:
    whole = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return tuple(value) if whole else _wrong(key, value, "a list of texts")


def _count(key: str, value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return int(value) if whole else _wrong(key, value, "a number of at least 1")


def _seconds(key: str, value: Any) -> float:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if whole else _wrong(key, value, "a number above 0")


def _shares(key: str, value: Any) -> tuple[float, float]:
    numbers = isinstance(value, list) and len(value) == 2 and all(isinstance(item, int | float) for item in value)
    if not numbers or not 0 < value[0] <= value[1] < 1:
        _wrong(key, value, "[lowest, highest] of a range between 0 and 1")
    return float(value[0]), float(value[1])


_LIKE = 'like {"command": ["program", "argument"], "env": {"NAME": "value"}} or {"url": "http://..."}'


def _servers(key: str, value: Any) -> dict[str, ConnectedServer]:
    if not isinstance(value, dict):
        _wrong(key, value, 'like {"name": {"command": ["program", "argument"], "env": {"NAME": "value"}}}')
    servers = {}
    for name, server in value.items():
        if isinstance(server, dict) and set(server) == {"url"}:
            servers[name] = ConnectedServer(url=_text(f"{key}.{name}.url", server["url"]))
            continue
        if not isinstance(server, dict) or not server.get("command") or set(server) - {"command", "env"}:
            _wrong(f"{key}.{name}", server, _LIKE)
        env = server.get("env", {})
        if not isinstance(env, dict) or not all(isinstance(text, str) for text in env.values()):
            _wrong(f"{key}.{name}.env", env, 'like {"NAME": "value"}')
        servers[name] = ConnectedServer(command=_texts(f"{key}.{name}.command", server["command"]), env=env)
    return servers


def _wrong(key: str, value: Any, wanted: str) -> Any:
    raise SettingsError(f"the setting {key} is {json.dumps(value)}; it must be {wanted}")


_READERS: dict[str, Any] = {
    "policy": _text,
    "system": _text,
    "tools": _texts,
    "threshold": _shares,
    "keep_last": _count,
    "drafts": _count,
    "command_seconds": _seconds,
    "mcp": _servers,
}
