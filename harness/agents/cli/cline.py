"""cline from npm: streamed chat completions. A file of its own names the provider."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.agents import mcp_forms
from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer


class Cline(FromRegistry):
    """`cline` with every approval."""

    mcp = STDIO_AND_HTTP
    name = "cline"
    package = Package(name, "3.0.65", Path("node_modules/.bin/cline"), "itself")

    def install(self) -> None:
        npm_install(self.package, "cline")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary, model = shlex.join(self.package.command(bundle)), shlex.quote(endpoint.model)
        signed_in = f'{binary} auth -p openai -k "$OPENAI_API_KEY" -m {model} -b "$OPENAI_BASE_URL"'
        return Launch(
            files={
                "~/.cline/data/settings/cline_mcp_settings.json": json.dumps({"mcpServers": _servers(servers)}),
            },
            command=f'{signed_in} && exec {binary} -P openai -m {model} --auto-approve true --json -- "$INSTRUCTION"',
        )


def _servers(servers: Sequence[McpServer]) -> dict[str, Any]:
    usable = {"disabled": False, "timeout": mcp_forms.SECONDS}
    return mcp_forms.by_name(servers, usable, usable | {"type": "streamableHttp"}, "url")
