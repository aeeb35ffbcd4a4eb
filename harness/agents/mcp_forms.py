"""A task's MCP servers in the forms that agents' configurations have for them.

The common form is an object under the key `mcpServers`. It also lies in the file that MCP_FILE names.
"""

import json
from collections.abc import Sequence
from typing import Any

from harness.tasks.schema import McpServer

FILE = "mcp.json"
"""Its name in the agent's home."""
SECONDS = 600
"""How long a server's start and a call of a tool may take, where an agent has limits of its own."""


def by_name(servers: Sequence[McpServer], program: dict[str, Any], address: dict[str, Any], url: str) -> dict[str, Any]:
    """Name -> command, args and env with `program` added, or the server's URL under the key `url` with `address`."""
    return {
        server.name: _program(server) | program if server.command else {url: server.url} | address for server in servers
    }


def _program(server: McpServer) -> dict[str, Any]:
    return {"command": server.command[0], "args": list(server.command[1:]), "env": server.env}


def file_text(servers: Sequence[McpServer]) -> str:
    """The content of MCP_FILE."""
    return json.dumps({"mcpServers": by_name(servers, {"type": "stdio"}, {"type": "http"}, "url")})
