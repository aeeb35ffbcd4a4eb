"""What all programs share: the command line, the shell tool, and the task's MCP servers. Standard library only."""

import argparse
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MINUTES = 10
"""Limit of a command."""
CALL_SECONDS = 1200
"""Limit of a model call, which waits while weights are updated."""
SERVER_SECONDS = 600
"""Limit of an MCP server's start, and of a call of its tools."""
SHOWN = 8_000
"""Bytes of the beginning and of the end of a command's output that the model sees."""
TURNS = 10_000
"""More than any task allows; the harness and the task have the limits that count."""
SYSTEM = "You work on a task on a Linux machine, in the current directory. Use your tools, and end when it is done."


@dataclass(frozen=True)
class Work:
    """What a program is started with."""

    instruction: str
    model: str
    context_length: int
    servers: dict[str, dict[str, Any]]
    """Name -> MCP server, as MCP_FILE has it."""

    @classmethod
    def from_command_line(cls) -> "Work":
        parser = argparse.ArgumentParser(description="Works on one task with an SDK's agent and a shell.")
        parser.add_argument("--context", type=int, required=True, help="tokens of the model's context")
        parser.add_argument("--mcp", type=Path, help="file with MCP servers")
        parser.add_argument("instruction")
        given = parser.parse_args()
        servers = json.loads(given.mcp.read_text())["mcpServers"] if given.mcp else {}
        return cls(given.instruction, os.environ["MODEL"], given.context, servers)


def shell(command: str) -> str:
    """Run a command line in the working directory and return what it prints and its exit code.

    Args:
        command: The command line, for sh. It ends after ten minutes.
    """
    # a file, not a pipe: a server that the command leaves in the background would keep a pipe open
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # too long, or with a character that no command may have
            return f"[the command cannot be run: {error}]"
        try:
            end = f"exit code: {process.wait(60 * MINUTES)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = f"the command timed out after {MINUTES} minutes"
        return f"{_shown(output)}\n[{end}]"


def _shown(output: IO[bytes]) -> str:
    """The beginning and the end of an output, of which there may be gigabytes."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= 2 * SHOWN:
        return output.read().decode(errors="replace")
    begin = output.read(SHOWN).decode(errors="replace")
    output.seek(-SHOWN, os.SEEK_END)
    return f"{begin}\n[{size - 2 * SHOWN} bytes are left out]\n{output.read().decode(errors='replace')}"
