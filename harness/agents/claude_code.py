"""claude-code from npm: streamed Anthropic Messages, by environment variables alone.

Non-essential traffic is off: it asks for no session titles and connects to no host but the proxy.
"""

import shlex
from pathlib import Path

from harness.agents.base import Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install

PATIENCE_MS = 1_200_000  # calls wait during weight updates


class ClaudeCode(FromRegistry):
    """`claude -p` with every permission."""

    name = "claude-code"
    # later versions need Node.js 22 or newer
    package = Package(name, "2.1.197", Path("node_modules/.bin/claude"), "itself")

    def install(self) -> None:
        npm_install(self.package, "@anthropic-ai/claude-code", without="node_modules/@anthropic-ai/claude-code-*")

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        binary, model = shlex.join(self.package.command(bundle)), shlex.quote(endpoint.model)
        options = f"--model {model} --dangerously-skip-permissions --output-format stream-json --verbose"
        return Launch(
            command=f'export ANTHROPIC_API_KEY="$OPENAI_API_KEY"; exec {binary} -p {options} -- "$INSTRUCTION"',
            env={
                "ANTHROPIC_BASE_URL": endpoint.url.removesuffix("/v1"),
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": endpoint.model,
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context_length),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
                "IS_SANDBOX": "1",  # otherwise it refuses to run as root
            },
        )
