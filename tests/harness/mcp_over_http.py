"""An MCP server over HTTP on Python's standard library alone, for a service of a task: its one tool tells a word.

usage: WORD=quince python3 mcp_over_http.py PORT
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
RESULTS: dict[str, Any] = {
    "initialize": {
        "protocolVersion": "2025-03-26", "capabilities": {"tools": {}}, "serverInfo": {"name": "words", "version": "1"},
    },
    "ping": {},
    "tools/list": {"tools": [{"name": "tell", "description": "Tells the word.", "inputSchema": SCHEMA}]},
}  # fmt: skip


class Words(BaseHTTPRequestHandler):
    """Answers each request with one JSON object, and keeps no session."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in message:  # a notification
            return self._send(202)
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "tools/call":
            words = f"{message['params']['arguments']['text']} {os.environ['WORD']}"
            answer["result"] = {"content": [{"type": "text", "text": words}]}
        elif message["method"] in RESULTS:
            answer["result"] = RESULTS[message["method"]]
        else:
            answer["error"] = {"code": -32601, "message": "not served"}
        self._send(200, json.dumps(answer).encode())

    def do_GET(self) -> None:
        self._send(405)

    def _send(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Words).serve_forever()
