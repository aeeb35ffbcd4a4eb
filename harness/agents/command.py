"""Any command line as an agent: it reads $INSTRUCTION and calls the model at $OPENAI_BASE_URL with $OPENAI_API_KEY."""

from dataclasses import dataclass

from harness.agents.base import Bundle, Endpoint, Launch


@dataclass(frozen=True)
class CommandAgent:
    """A shell command."""

    command: str
    name = "command"
    bundle = None

    def check(self) -> None:
        """Only the shell can tell what the command means; its exit 127 without a model call ends the run."""

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        return Launch(command=self.command)
