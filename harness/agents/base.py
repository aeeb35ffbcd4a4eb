"""What an adapter says about an agent: how it is started. The agent itself is never changed.

Every agent finds OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, INSTRUCTION and INSTRUCTION_FILE in its environment.
"""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Endpoint:
    """Where an agent finds its model."""

    url: str
    """Base URL, ending in /v1."""
    key: str
    model: str
    context_length: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one agent process is started in its sandbox."""

    command: str
    """For /bin/sh."""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Configuration files: path in the sandbox -> text."""


@dataclass(frozen=True)
class Bundle:
    """An agent's own files and what it runs on, as the processes of its sandbox see them."""

    directory: str
    python: str
    """An interpreter of the version that its packages were installed for."""
    node: str


class Agent(Protocol):
    """An adapter."""

    @property
    def name(self) -> str:
        """The name on the command line and in the pool."""

    @property
    def bundle(self) -> str | None:
        """The name of the bundle that it comes in, None when it is in the sandbox anyway."""

    def check(self) -> None:
        """UserError with the way to install it when the agent is not there."""

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        """How to start it against this endpoint."""
