"""An MCP server over HTTP, made with the SDK of MCP: its one tool tells a word. Prints its address."""

import os
import socket

import uvicorn
from mcp.server.fastmcp import FastMCP

server = FastMCP("words")


@server.tool()
def tell(text: str) -> str:
    """Tells the word."""
    return f"{text} {os.environ['WORD']}"


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listener])
