"""The interface of an agent's adapter, which says how the agent is started. The agent itself is never changed.

Every agent finds OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, INSTRUCTION and INSTRUCTION_FILE in its environment, and
MCP_FILE where the task has MCP servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.tasks.schema import McpServer
from proxy.pool.rollouts.prompt_variations import PromptKind

PATIENCE_MS = 1_200_000
"""How long an agent must wait for an answer at least, in milliseconds: calls wait during weight updates."""
NO_MCP: frozenset[str] = frozenset()
STDIO = frozenset({"stdio"})
STDIO_AND_HTTP = frozenset({"stdio", "http"})


@dataclass(frozen=True)
class Endpoint:
    """The model that an agent uses, and where it is."""

    url: str
    """Base URL, ending in /v1."""
    key: str
    model: str
    context_length: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How an agent's process is started in its sandbox."""

    command: str
    """Command line for /bin/sh."""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Configuration files: path in the sandbox -> text."""


@dataclass(frozen=True)
class Bundle:
    """Where an agent's files, Python and Node.js are, as the processes of its sandbox see them."""

    directory: str
    python: str
    """Path of a Python of the version that the agent's packages were installed for."""
    node: str


class Agent(Protocol):
    """An adapter for one agent."""

    @property
    def name(self) -> str:
        """The name on the command line and in the pool."""

    @property
    def bundle(self) -> str | None:
        """The name of the bundle with its files. None when it is in the sandbox anyway."""

    @property
    def mcp(self) -> frozenset[str]:
        """How it speaks with MCP servers, whose tools it then offers to the model."""

    @property
    def fixed(self) -> frozenset[PromptKind]:
        """Variations of what its model is shown that it does not work with (docs/augmentation.md)."""

    def check(self) -> None:
        """Check that the agent is installed. UserError with the command that installs it when it is not."""

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        """How to start it against this endpoint, with the tools of these MCP servers."""
