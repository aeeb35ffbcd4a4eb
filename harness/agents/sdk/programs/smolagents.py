"""smolagents' ToolCallingAgent with a shell: chat completions that require a tool call in each turn."""

import os
from contextlib import nullcontext

from .common import CALL_SECONDS, TURNS, Work, shell

START_SECONDS = 120
"""Limit of an MCP server's start. It is waited out when a server ends at once, as the library does not notice that."""


def main() -> None:
    from mcp import StdioServerParameters
    from smolagents import MCPClient, OpenAIServerModel, ToolCallingAgent, tool

    work = Work.from_command_line()
    model = OpenAIServerModel(
        work.model,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        client_kwargs={"timeout": CALL_SECONDS},
    )
    servers = [
        StdioServerParameters(command=server["command"], args=server["args"], env=server["env"])
        if "command" in server
        else {"url": server["url"], "transport": "streamable-http"}
        for server in work.servers.values()
    ]
    limits = {"connect_timeout": START_SECONDS}
    with MCPClient(servers, limits, structured_output=False) if servers else nullcontext([]) as tools:
        ToolCallingAgent(tools=[tool(shell), *tools], model=model, max_steps=TURNS).run(work.instruction)
