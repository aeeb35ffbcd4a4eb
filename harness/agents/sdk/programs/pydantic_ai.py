"""An agent of Pydantic AI with a shell: chat completions."""

import asyncio
import os

from .common import CALL_SECONDS, SYSTEM, TURNS, Work, shell


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.mcp import load_mcp_toolsets
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    model = OpenAIChatModel(work.model, provider=OpenAIProvider(openai_client=AsyncOpenAI(timeout=CALL_SECONDS)))
    toolsets = load_mcp_toolsets(os.environ["MCP_FILE"]) if work.servers else []
    # by default the second faulty call in a row ends the run
    agent = Agent(model, instructions=SYSTEM, tools=[shell], toolsets=toolsets, retries=TURNS)
    async with agent:
        await agent.run(work.instruction, usage_limits=UsageLimits(request_limit=None))
