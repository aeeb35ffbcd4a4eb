"""Runs any command line as an agent.

The command reads $INSTRUCTION and calls the model at $OPENAI_BASE_URL with $OPENAI_API_KEY.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.tasks.schema import McpServer
from proxy.pool.rollouts.prompt_variations import PromptKind


@dataclass(frozen=True)
class CommandAgent:
    """The adapter for a shell command."""

    command: str
    mcp = STDIO_AND_HTTP
    name = "command"
    bundle = None
    fixed: frozenset[PromptKind] = frozenset()

    def check(self) -> None:
        """Nothing to check here: if the shell does not find the command (exit code 127), the run ends."""

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        return Launch(command=self.command)
