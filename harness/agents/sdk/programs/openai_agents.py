"""An agent of the OpenAI Agents SDK with a shell: the Responses API, with the whole conversation in each request."""

import asyncio
from contextlib import AsyncExitStack

from .common import CALL_SECONDS, SERVER_SECONDS, SYSTEM, TURNS, Work, shell


def main() -> None:
    asyncio.run(_work(Work.from_command_line()))


async def _work(work: Work) -> None:
    from agents import Agent, RunConfig, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from agents.mcp import MCPServerStdio, MCPServerStreamableHttp
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(timeout=CALL_SECONDS), use_for_tracing=False)
    async with AsyncExitStack() as stack:
        servers = []
        for name, server in work.servers.items():
            kind = MCPServerStdio if "command" in server else MCPServerStreamableHttp
            params = {key: value for key, value in server.items() if key != "type"}
            servers.append(
                kind(params, name=name, cache_tools_list=True, client_session_timeout_seconds=SERVER_SECONDS)
            )
            await stack.enter_async_context(servers[-1])
        agent = Agent(
            name="agent",
            instructions=SYSTEM,
            model=work.model,
            tools=[function_tool(shell)],
            mcp_servers=servers,
        )
        config = RunConfig(tool_not_found_behavior="return_error_to_model")  # else the first unknown name ends the run
        await Runner.run(agent, work.instruction, max_turns=TURNS, run_config=config)
