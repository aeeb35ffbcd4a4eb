"""A small MCP server: two pages of tools, one that asks its client something first, one that fails, one that dies.

It also serves unmodified agents (tests/harness/test_agents.py), which ask for more than tools.
"""

import json
import os
import sys
from typing import Any


def say(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return {"name": name, "description": f"{name} a text", "inputSchema": schema}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "die":
        sys.exit(3)
    if name == "fail":
        return {"content": [{"type": "text", "text": "it does not work"}], "isError": True}
    if name == "tell":
        return {"content": [{"type": "text", "text": f"{arguments['text']} {os.environ['WORD']}"}]}
    say(id="s1", method="ping")
    pong = json.loads(sys.stdin.readline())
    say(id="s2", method="sampling/createMessage", params={})
    refused = json.loads(sys.stdin.readline())
    say(method="notifications/message", params={"level": "info", "data": "working"})
    words = f"{arguments['text']} {os.environ['WORD']} {pong['result']} {refused['error']['code']}"
    return {"content": [{"type": "text", "text": words}, {"type": "image", "data": ""}]}


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    if request["method"] == "initialize":
        name = request["params"]["clientInfo"]["name"]
        server = {"name": f"for {name}", "version": "1"}
        say(
            id=request["id"],
            result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server},
        )
    elif request["method"] == "tools/list":
        more = request.get("params", {}).get("cursor")
        rest = [tool("fail"), tool("die")]
        page = {"tools": rest} if more else {"tools": [tool("join"), tool("tell")], "nextCursor": "more"}
        say(id=request["id"], result=page)
    elif request["method"] == "ping":
        say(id=request["id"], result={})
    elif request["method"] != "tools/call":
        say(id=request["id"], error={"code": -32601, "message": "not served"})
    else:
        say(id=request["id"], result=call(request["params"]["name"], request["params"]["arguments"]))
