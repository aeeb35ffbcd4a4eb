"""qwen-code from npm: streamed chat completions, by environment variables and a settings file.

It compacts its history when that fills most of the context length.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents import mcp_forms
from harness.agents.base import PATIENCE_MS, STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer


class QwenCode(FromRegistry):
    """`qwen` with every permission."""

    mcp = STDIO_AND_HTTP
    name = "qwen-code"
    # later versions need Node.js 22 or newer
    package = Package(name, "0.15.10", Path("node_modules/.bin/qwen"), "node")

    def install(self) -> None:
        npm_install(self.package, "@qwen-code/qwen-code")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary = shlex.join(self.package.command(bundle))
        return Launch(
            command=f'exec {binary} --yolo --prompt="$INSTRUCTION"',
            env={"OPENAI_MODEL": endpoint.model},
            files={"~/.qwen/settings.json": json.dumps(_settings(endpoint, servers))},
        )


def _settings(endpoint: Endpoint, servers: Sequence[McpServer]) -> dict[str, object]:
    generation = {"contextWindowSize": endpoint.context_length, "timeout": PATIENCE_MS}
    trusted = {"trust": True, "timeout": 1000 * mcp_forms.SECONDS}
    return {
        # it would hide the tools of MCP servers behind a search; without that tool it shows them at once
        "permissions": {"deny": ["tool_search"] if servers else []},
        "mcpServers": mcp_forms.by_name(servers, trusted, trusted, "httpUrl"),
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {"name": endpoint.model, "generationConfig": generation},
    }
