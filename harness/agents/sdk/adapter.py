"""The adapter of all SDKs: it installs the SDK with the programs beside it, and starts that SDK's program."""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import PACKAGES, FromRegistry, Package, pip_install
from harness.agents.cli import claude_code
from harness.tasks.schema import McpServer
from proxy.pool.rollouts.prompt_variations import NAMES, PromptKind

PROGRAMS = Path(__file__).with_name("programs")
MAIN = "import {package}\n\nfrom programs.{module} import main\n\nmain()\n"
"""Imports the SDK first, so that the check of an installation, `--help`, finds one that does not load."""
PACKAGES_OF = {"openai_agents": "agents"}
"""Module of a program -> what its SDK is imported as, where that is another name."""
QUIET = {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1", "PYDANTIC_DISABLE_PLUGINS": "true"}
"""No SDK asks a service of its own."""


class SdkAgent(FromRegistry):
    """One SDK's agent."""

    mcp = STDIO_AND_HTTP

    def __init__(self, name: str, version: str, *requirements: str, fixed: frozenset[PromptKind] = NAMES):
        """`requirements`: the SDK at this version first, then what it needs beside."""
        self.fixed = fixed
        self.name, self._requirements = name, requirements
        self._module = name.replace("-", "_")
        self._main = MAIN.format(package=PACKAGES_OF.get(self._module, self._module), module=self._module)
        digest = hashlib.sha256(repr((self._main, requirements)).encode())
        for file in ("common", self._module):
            digest.update((PROGRAMS / f"{file}.py").read_bytes())
        # a bundle with another program or other packages is not taken for this one
        self.package = Package(name, f"{version}+{digest.hexdigest()[:8]}", PACKAGES, "python")

    def install(self) -> None:
        pip_install(self.package, self._requirements, self._main, beside=PROGRAMS)

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary = shlex.join(self.package.command(bundle))
        options = f"--context {endpoint.context_length}" + (' --mcp "$MCP_FILE"' if servers else "")
        return Launch(command=f'exec {binary} {options} -- "$INSTRUCTION"', env=QUIET)


class ClaudeAgentSdk(SdkAgent):
    """Starts claude-agent-sdk with Anthropic's variables instead of OpenAI's."""

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        launch = super().launch(endpoint, bundle, servers)
        command = f'export ANTHROPIC_API_KEY="$OPENAI_API_KEY"; {launch.command}'
        return Launch(command=command, env=launch.env | claude_code.environment(endpoint))


SDK_AGENTS = (
    ClaudeAgentSdk("claude-agent-sdk", "0.2.189", "claude-agent-sdk==0.2.189"),
    SdkAgent("deepagents", "0.7.32", "deepagents==0.7.32", "langchain-openai==1.7.4", "langchain-mcp-adapters==0.3.2"),
    SdkAgent("openai-agents", "0.24.0", "openai-agents==0.24.0", fixed=frozenset()),
    SdkAgent("pydantic-ai", "2.68.0", "pydantic-ai-slim[openai,mcp]==2.68.0", fixed=frozenset()),
    SdkAgent("smolagents", "1.26.0", "smolagents[openai,mcp]==1.26.0", "mcp==1.30.0"),
)
