"""An agent of Pydantic AI with a shell: chat completions."""

import asyncio

from .common import CALL_SECONDS, SERVER_SECONDS, SYSTEM, TURNS, Work, shell


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset, StdioTransport
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    model = OpenAIChatModel(work.model, provider=OpenAIProvider(openai_client=AsyncOpenAI(timeout=CALL_SECONDS)))
    toolsets = []
    for name, server in work.servers.items():
        stdio = "command" in server
        where = StdioTransport(server["command"], server["args"], env=server["env"]) if stdio else server["url"]
        # its own limit of a start is 5 s, and load_mcp_toolsets takes no other
        toolset = MCPToolset(where, id=name, init_timeout=SERVER_SECONDS, read_timeout=SERVER_SECONDS)
        toolsets.append(toolset.prefixed(name))
    # by default the second faulty call in a row ends the run
    agent = Agent(model, instructions=SYSTEM, tools=[shell], toolsets=toolsets, retries=TURNS)
    async with agent:
        await agent.run(work.instruction, usage_limits=UsageLimits(request_limit=None))
