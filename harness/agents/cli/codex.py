"""codex from npm: streamed Responses. Its configuration names the proxy as a provider.

It compacts its history when `model_auto_compact_token_limit` is reached; the limit leaves room for the reply.
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


class Codex(FromRegistry):
    """`codex exec` without approvals and without its own sandbox."""

    mcp = STDIO_AND_HTTP
    name = "codex"
    package = Package(name, "0.169.0", Path("codex"), "itself")

    def install(self) -> None:
        npm_install(self.package, "@openai/codex", native="node_modules/@openai/codex-*/vendor/*/bin/codex")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        options = "--dangerously-bypass-approvals-and-sandbox --skip-git-repo-check"
        return Launch(
            command=f'exec {shlex.join(self.package.command(bundle))} exec {options} -- "$INSTRUCTION"',
            files={"~/.codex/config.toml": _config(endpoint, servers)},
        )


def _config(endpoint: Endpoint, servers: Sequence[McpServer]) -> str:
    """The configuration as TOML."""
    settings = {
        "model": endpoint.model,
        "model_provider": PROVIDER,
        "model_context_window": endpoint.context_length,
        "model_auto_compact_token_limit": endpoint.context_length * 3 // 4,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "features.plugins": False,
        f"model_providers.{PROVIDER}.name": PROVIDER,
        f"model_providers.{PROVIDER}.base_url": endpoint.url,
        f"model_providers.{PROVIDER}.env_key": "OPENAI_API_KEY",
        f"model_providers.{PROVIDER}.wire_api": "responses",
        f"model_providers.{PROVIDER}.stream_idle_timeout_ms": PATIENCE_MS,
    }
    for name, server in mcp_forms.by_name(servers, {}, {}, "url").items():
        limits = {"startup_timeout_sec": mcp_forms.SECONDS, "tool_timeout_sec": mcp_forms.SECONDS}
        limits["required"] = True  # otherwise its first call does not wait for the server
        variables = {f"env.{key}": value for key, value in server.pop("env", {}).items()}
        settings |= {f"mcp_servers.{name}.{key}": value for key, value in (server | variables | limits).items()}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items())


def _toml(value: object) -> str:
    """A value as TOML: as JSON, without its surrogate pairs, and with the one control character that JSON leaves."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
