"""opencode from npm, streamed, in any of three dialects. Its configuration names the proxy as a provider.

It asks the same model for a session title in a second conversation without tools, which is recorded like every call.
What is said here of opencode's settings holds for version 1.18.33.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents import mcp_forms
from harness.agents.base import PATIENCE_MS, STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer

PROVIDER = "blackforge"
CLIENTS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
"""Dialect -> the client library for it, which opencode includes."""
TIMEOUTS = {"timeout": False, "headerTimeout": False, "chunkTimeout": PATIENCE_MS}
"""Limits of a whole call, of the wait for its first bytes and of the wait between two pieces. False: none. By default
opencode gives up after 300 s without a first byte or without a further piece."""
MAX_OUTPUT = 32_000
"""Tokens of an answer that opencode asks for at most, whatever the limit of the model."""


class Opencode(FromRegistry):
    """`opencode run` with every permission. Its name tells the dialect, except for chat completions."""

    mcp = STDIO_AND_HTTP
    package = Package("opencode", "1.18.33", Path("node_modules/.bin/opencode"), "itself")

    def __init__(self, dialect: str = "chat"):
        self.name = "opencode" if dialect == "chat" else f"opencode-{dialect}"
        self._dialect = dialect

    def install(self) -> None:
        # The directories left out are builds of the program, also this machine's: opencode-ai holds a copy of that one.
        npm_install(self.package, "opencode-ai", without="node_modules/opencode-*-*")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        return Launch(
            command=f'exec {shlex.join(self.package.command(bundle))} run -- "$INSTRUCTION"',
            env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            files={"~/.config/opencode/opencode.json": json.dumps(config(endpoint, self._dialect, servers))},
        )


def config(endpoint: Endpoint, dialect: str, servers: Sequence[McpServer]) -> dict[str, object]:
    """The content of opencode.json; kilo's file has the same form. `dialect`: a key of CLIENTS."""
    model = f"{PROVIDER}/{endpoint.model}"
    # opencode compacts its history when less than `output` is left of `context`
    limit = {"context": endpoint.context_length, "output": min(MAX_OUTPUT, endpoint.context_length // 4)}
    provider = {
        "npm": CLIENTS[dialect],
        # opencode itself replaces {env:...} by the variable
        "options": {"baseURL": endpoint.url, "apiKey": "{env:OPENAI_API_KEY}"} | TIMEOUTS,
        "models": {endpoint.model: {"name": endpoint.model, "tool_call": True, "limit": limit}},
    }
    return {
        "provider": {PROVIDER: provider},
        "model": model,
        "small_model": model,  # for session titles
        "permission": "allow",
        "mcp": {server.name: _server(server) for server in servers},
    }


def _server(server: McpServer) -> dict[str, object]:
    """A server's entry under the key `mcp`."""
    common: dict[str, object] = {"enabled": True, "timeout": 1000 * mcp_forms.SECONDS}  # in milliseconds
    if server.url:
        return {"type": "remote", "url": server.url} | common
    return {"type": "local", "command": server.command, "environment": server.env} | common
