"""A small real agent: one `shell` tool, chat completions, standard library only. It starts in some 25 ms.

It reads $INSTRUCTION, calls the model at $OPENAI_BASE_URL with $OPENAI_API_KEY and $MODEL, runs every command that the
model asks for in its working directory, hands back what the command printed, and ends when the model replies without a
tool call or after $MAX_TURNS model calls. Left out: streaming, retries, https, any help for the model.

usage: python -I -S shell_agent.py
"""

import json
import os
import socket
import subprocess
import sys
from typing import Any

SYSTEM = "Use the shell."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}}
MAX_OUTPUT = 4000


def main() -> int:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": os.environ["INSTRUCTION"]},
    ]
    seconds = float(os.environ.get("COMMAND_SECONDS", "10"))
    model = Model(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["MODEL"])
    for _ in range(int(os.environ.get("MAX_TURNS", "10"))):
        reply = model.complete(messages)
        messages.append(reply)
        print(json.dumps(reply), flush=True)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            answer = run(call["function"], seconds)
            print(answer, flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
    return 0


class Model:
    """Chat completions over one kept-alive connection. http.client would double the time to start."""

    def __init__(self, base_url: str, key: str, name: str):
        host, _, self._path = base_url.removeprefix("http://").partition("/")
        address, _, port = host.partition(":")
        self._name = name
        self._head = f"Host: {host}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        self._wire = socket.create_connection((address, int(port or 80)))
        self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._wire.makefile("rb")

    def complete(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message. SystemExit with the answer's text when the call failed."""
        body = json.dumps({"model": self._name, "messages": messages, "tools": [TOOL]}).encode()
        head = f"POST /{self._path}/chat/completions HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._wire.sendall(head.encode() + body)
        status = self._reader.readline().split(b" ", 2)
        length, chunked = 0, False
        while (line := self._reader.readline().strip().lower()) not in (b"", b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
            chunked = chunked or line == b"transfer-encoding: chunked"  # as answers are that take long
        answer = self._chunks() if chunked else self._reader.read(length)
        if len(status) < 2 or status[1] != b"200":
            raise SystemExit(f"the model call failed: {b' '.join(status).decode()}{answer.decode()}")
        message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
        return message

    def _chunks(self) -> bytes:
        chunks = []
        while size := int(self._reader.readline() or b"0", 16):
            chunks.append(self._reader.read(size))
            self._reader.readline()
        self._reader.readline()
        return b"".join(chunks)


def run(function: dict[str, Any], seconds: float) -> str:
    """What a command printed, or why it was not run."""
    try:
        command = json.loads(function["arguments"])["command"]
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"
    if function["name"] != "shell" or not isinstance(command, str) or "\0" in command:
        return "error: call shell with a command"
    shell = ["/bin/sh", "-c", command]
    try:
        done = subprocess.run(
            shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "error: timeout"
    return done.stdout[:MAX_OUTPUT].decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
