"""gemini-cli from npm: streamed Gemini, by environment variables and a settings file that names the kind of key."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.agents import mcp_forms
from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer

SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True},
}


class GeminiCli(FromRegistry):
    """`gemini` with every permission."""

    mcp = STDIO_AND_HTTP
    name = "gemini-cli"
    package = Package(name, "0.61.0", Path("node_modules/.bin/gemini"), "node")

    def install(self) -> None:
        npm_install(self.package, "@google/gemini-cli")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary, model = shlex.join(self.package.command(bundle)), shlex.quote(endpoint.model)
        return Launch(
            command=f'export GEMINI_API_KEY="$OPENAI_API_KEY"; exec {binary} --yolo -m {model} --prompt="$INSTRUCTION"',
            env={
                "GOOGLE_GEMINI_BASE_URL": endpoint.url.removesuffix("/v1"),
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
            },
            files={"~/.gemini/settings.json": json.dumps(SETTINGS | {"mcpServers": _servers(servers)})},
        )


def _servers(servers: Sequence[McpServer]) -> dict[str, Any]:
    trusted = {"trust": True, "timeout": 1000 * mcp_forms.SECONDS}
    return mcp_forms.by_name(servers, trusted, trusted, "httpUrl")
