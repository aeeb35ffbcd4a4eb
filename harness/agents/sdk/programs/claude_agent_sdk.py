"""An agent of the Claude Agent SDK, with the tools of Claude Code: streamed Anthropic messages.

The SDK brings Claude Code's program and drives it over its standard input and output.
"""

import asyncio
import os

from .common import Work


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from claude_agent_sdk import ClaudeAgentOptions, query

    options = ClaudeAgentOptions(
        model=work.model,
        permission_mode="bypassPermissions",
        system_prompt={"type": "preset", "preset": "claude_code"},
        mcp_servers=os.environ["MCP_FILE"] if work.servers else {},  # a dict would stand on a command line
        strict_mcp_config=True,
    )
    async for message in query(prompt=work.instruction, options=options):
        print(message, flush=True)
