"""pi from npm: streamed chat completions. Its files name the proxy as a provider.

It compacts its history when a request did not fit and, by a call that nothing follows, when its work is done. It has no
MCP.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents.base import NO_MCP, PATIENCE_MS, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer

PROVIDER = "blackforge"


class Pi(FromRegistry):
    """`pi` without questions. It reads the instruction from standard input, as an argument could be an option."""

    mcp = NO_MCP
    name = "pi"
    # the same project under its next name needs Node.js 22
    package = Package(name, "0.73.1", Path("node_modules/.bin/pi"), "node")

    def install(self) -> None:
        npm_install(self.package, "@mariozechner/pi-coding-agent")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        return Launch(
            command=f'exec {shlex.join(self.package.command(bundle))} --print --no-session < "$INSTRUCTION_FILE"',
            env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            files={
                "~/.pi/agent/models.json": json.dumps(_models(endpoint)),
                "~/.pi/agent/settings.json": json.dumps(_settings(endpoint)),
            },
        )


def _models(endpoint: Endpoint) -> dict[str, object]:
    limits = {"contextWindow": endpoint.context_length, "maxTokens": _quarter(endpoint, 32_000)}
    provider = {
        "baseUrl": endpoint.url,
        "api": "openai-completions",
        "apiKey": "OPENAI_API_KEY",  # the variable that holds it
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
        "models": [{"id": endpoint.model} | limits],
    }
    return {"providers": {PROVIDER: provider}}


def _settings(endpoint: Endpoint) -> dict[str, object]:
    return {
        "defaultProvider": PROVIDER,
        "defaultModel": endpoint.model,
        "retry": {"provider": {"timeoutMs": PATIENCE_MS}},
        # it compacts when less than `reserveTokens` is left
        "compaction": {"reserveTokens": _quarter(endpoint, 16_384), "keepRecentTokens": _quarter(endpoint, 20_000)},
    }


def _quarter(endpoint: Endpoint, most: int) -> int:
    """A quarter of the context length in tokens, `most` at most."""
    return min(most, endpoint.context_length // 4)
