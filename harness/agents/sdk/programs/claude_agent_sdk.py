"""An agent of the Claude Agent SDK, with the tools of Claude Code: streamed Anthropic messages.

The SDK brings Claude Code's program and drives it over its standard input and output.
"""

import asyncio

from .common import Work


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from claude_agent_sdk import ClaudeAgentOptions, query

    options = ClaudeAgentOptions(
        model=work.model,
        permission_mode="bypassPermissions",
        system_prompt={"type": "preset", "preset": "claude_code"},
        mcp_servers=work.servers,
        strict_mcp_config=True,
    )
    async for message in query(prompt=work.instruction, options=options):
        print(message, flush=True)
