"""claude-code from npm: streamed Anthropic Messages, by environment variables alone.

Non-essential traffic is off: it asks for no session titles and connects to no host but the proxy.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents import mcp_forms
from harness.agents.base import PATIENCE_MS, STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.tasks.schema import McpServer


class ClaudeCode(FromRegistry):
    """`claude -p` with every permission."""

    mcp = STDIO_AND_HTTP
    name = "claude-code"
    # later versions need Node.js 22 or newer
    package = Package(name, "2.1.197", Path("node_modules/.bin/claude"), "itself")

    def install(self) -> None:
        npm_install(self.package, "@anthropic-ai/claude-code", without="node_modules/@anthropic-ai/claude-code-*")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary, model = shlex.join(self.package.command(bundle)), shlex.quote(endpoint.model)
        options = f"--model {model} --dangerously-skip-permissions --output-format stream-json --verbose"
        options += ' --strict-mcp-config --mcp-config "$MCP_FILE"' if servers else ""
        return Launch(
            command=f'export ANTHROPIC_API_KEY="$OPENAI_API_KEY"; exec {binary} -p {options} -- "$INSTRUCTION"',
            env=environment(endpoint),
        )


def environment(endpoint: Endpoint) -> dict[str, str]:
    """The environment that claude-code needs, the key left out."""
    return {
        "ANTHROPIC_BASE_URL": endpoint.url.removesuffix("/v1"),
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": endpoint.model,
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context_length),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
        "ENABLE_TOOL_SEARCH": "false",  # otherwise it hides the tools of MCP servers behind a search
        "MCP_CONNECTION_NONBLOCKING": "0",  # otherwise its first call does not wait for the servers
        "MCP_CONNECT_TIMEOUT_MS": str(1000 * mcp_forms.SECONDS),
        "MCP_TIMEOUT": str(1000 * mcp_forms.SECONDS),
        "MCP_TOOL_TIMEOUT": str(1000 * mcp_forms.SECONDS),
        "IS_SANDBOX": "1",  # otherwise it refuses to run as root
    }
