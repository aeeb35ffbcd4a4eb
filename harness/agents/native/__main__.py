"""Starts the agent at one task: reads its options and the environment, and closes what it opened.

usage: python -m native --context TOKENS [--policy NAME] [--settings FILE] [--mcp FILE] -- INSTRUCTION
"""

import argparse
import os
import sys
from pathlib import Path

from .context import Results
from .loop import Worker
from .mcp import Servers
from .model import Model, NoCompletion
from .policy import POLICIES, ContextPolicy
from .settings import SettingsError, read_servers, read_settings
from .shell import Shell

USUAL_FILE = "~/.native.json"
"""Settings of the agent, where the task or its image brings any."""


def main() -> int:
    """Work on the instruction. 0 when the model has ended the work, or has no room or calls left.

    1 when the model does not answer, 2 for settings that make no sense.
    """
    try:
        _work(_arguments())
    except (NoCompletion, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def _work(arguments: argparse.Namespace) -> None:
    file = arguments.settings or os.environ.get("NATIVE_SETTINGS") or USUAL_FILE
    settings = read_settings(Path(file).expanduser(), must_exist=file != USUAL_FILE)
    policy = ContextPolicy(arguments.policy or settings.policy, settings, arguments.instruction, arguments.context)
    model = Model(*map(_variable, ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL")))
    with Shell(settings.command_seconds) as shell, Servers() as servers:
        servers.start(settings.mcp | (read_servers(Path(arguments.mcp)) if arguments.mcp else {}))
        worker = Worker(model, settings, policy, shell, servers.tools(), Results())
        print(worker.work_on_task(arguments.instruction))


def _variable(name: str) -> str:
    if name not in os.environ:
        raise SettingsError(f"the environment has no {name}; set it")
    return os.environ[name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="native", description=__doc__.split("\n")[0])
    parser.add_argument("instruction", help="the task")
    parser.add_argument("--context", type=int, required=True, metavar="TOKENS", help="the model's context length")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="who manages the context (default: free)")
    parser.add_argument("--mcp", metavar="FILE", help="JSON file of more MCP servers, under the key mcpServers")
    parser.add_argument("--settings", metavar="FILE", help=f"JSON file (default: {USUAL_FILE}, where there is one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
