"""The agents that the harness can start, one module each: how to install and to launch them. No rollouts."""

from harness.agents.base import Agent
from harness.agents.bundles.install import FromRegistry
from harness.agents.cli.aider import Aider
from harness.agents.cli.claude_code import ClaudeCode
from harness.agents.cli.cline import Cline
from harness.agents.cli.codex import Codex
from harness.agents.cli.gemini_cli import GeminiCli
from harness.agents.cli.kilo import Kilo
from harness.agents.cli.mini_swe_agent import MiniSweAgent
from harness.agents.cli.opencode import CLIENTS, Opencode
from harness.agents.cli.pi import Pi
from harness.agents.cli.qwen_code import QwenCode
from harness.agents.command import CommandAgent
from harness.agents.native_agent import CONTEXT_POLICIES, Native
from harness.agents.sdk.adapter import SDK_AGENTS
from proxy.pool.errors import UserError

_ADAPTERS: tuple[FromRegistry, ...] = (
    MiniSweAgent(),
    *(Opencode(dialect) for dialect in CLIENTS),
    Codex(),
    ClaudeCode(),
    QwenCode(),
    GeminiCli(),
    Aider(),
    Cline(),
    Kilo(),
    Pi(),
    *SDK_AGENTS,
    *(Native(policy) for policy in CONTEXT_POLICIES),
)
INSTALLED = {adapter.name: adapter for adapter in _ADAPTERS}
"""Name -> agent that `harness agents install` can install."""


def agent_named(name: str, command: str | None) -> Agent:
    """The adapter of this name, ready to start. UserError when it is unknown or not installed."""
    if name == CommandAgent.name:
        if not command:
            raise UserError("the agent 'command' needs a command line; give --command 'CMD'")
        return CommandAgent(command)
    agent = INSTALLED.get(name)
    if agent is None:
        raise UserError(f"the agent {name!r} is unknown; choose one of: {', '.join((CommandAgent.name, *INSTALLED))}")
    if command:
        raise UserError(f"--command goes with the agent 'command' only, not with {name!r}; leave one of them out")
    agent.check()
    return agent
