"""A deep agent (LangGraph) with its own tools: files, a shell, sub-agents, a list of things to do. Chat completions."""

import asyncio
import os
from contextlib import AsyncExitStack

from .common import CALL_SECONDS, MINUTES, TURNS, Work


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from deepagents import create_deep_agent
    from deepagents.backends import LocalShellBackend
    from langchain_mcp_adapters.client import MultiServerMCPClient
    from langchain_mcp_adapters.tools import load_mcp_tools
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=work.model,
        timeout=CALL_SECONDS,
        use_responses_api=False,
        profile={"max_input_tokens": work.context_length, "tool_calling": True},  # it summarises its history by this
    )
    servers = {
        name: server | {"transport": "stdio" if "command" in server else "streamable_http"}
        for name, server in work.servers.items()
    }
    for server in servers.values():
        server.pop("type")
    client, tools = MultiServerMCPClient(servers), []
    async with AsyncExitStack() as stack:  # one session for all calls of a server, which may keep a state
        for name in servers:
            tools += await load_mcp_tools(await stack.enter_async_context(client.session(name)))
        agent = create_deep_agent(
            model,
            tools=tools,
            backend=LocalShellBackend(os.getcwd(), virtual_mode=False, inherit_env=True, timeout=60 * MINUTES),
        )
        messages = [{"role": "user", "content": work.instruction}]
        await agent.ainvoke({"messages": messages}, {"recursion_limit": TURNS})
