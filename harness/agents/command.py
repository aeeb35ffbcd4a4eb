"""Runs any command line as an agent.

The command reads $INSTRUCTION and calls the model at $OPENAI_BASE_URL with $OPENAI_API_KEY.
"""

from dataclasses import dataclass

from harness.agents.base import Bundle, Endpoint, Launch


@dataclass(frozen=True)
class CommandAgent:
    """The adapter for a shell command."""

    command: str
    name = "command"
    bundle = None

    def check(self) -> None:
        """Nothing to check here: if the shell does not find the command (exit code 127), the run ends."""

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        return Launch(command=self.command)
