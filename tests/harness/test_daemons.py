"""Daemons of several agents: tmux, and one like it that listens on every kind of socket with a well-known name."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task
from harness.verdict.isolation import verifier_sandbox
from sandboxes.base import Limits
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox
from tests.harness.cheats import HELLO

SERVER = """
import os, socket, sys, threading
name = sys.argv[1]
def serve(family, address):
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen()
    def answer():
        while True:
            connection, _ = listening.accept()
            connection.sendall(name.encode())
            connection.close()
    return answer
os.makedirs("/tmp/tmux-0", exist_ok=True)
answers = [serve(socket.AF_UNIX, "/tmp/tmux-0/default"), serve(socket.AF_UNIX, "\\0tmux"),
           serve(socket.AF_INET, ("127.0.0.1", 7777))]
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for stream in (0, 1, 2): os.dup2(os.open(os.devnull, os.O_RDWR), stream)
threads = [threading.Thread(target=answer) for answer in answers]
[thread.start() for thread in threads]
"""
CLIENT = """
import socket
for family, address in ((socket.AF_UNIX, "/tmp/tmux-0/default"), (socket.AF_UNIX, "\\0tmux"),
                        (socket.AF_INET, ("127.0.0.1", 7777))):
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        print(connection.recv(100).decode())
    except OSError as error:
        print(type(error).__name__)
"""
TASK = HELLO | {"files": {"server.py": SERVER, "client.py": CLIENT}}
GONE = ["FileNotFoundError", "ConnectionRefusedError"]


@pytest.fixture
async def sandboxes(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


async def says(sandbox: DockerSandbox, command: str) -> list[str]:
    return (await sandbox.run(command, Limits(seconds=60), {})).output.split()


def on_this_machine(name: str) -> list[str]:
    """Processes that name it, as the engine's host sees them."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            pids += [file.parent.name] if name.encode() in file.read_bytes() else []
        except OSError:  # it has ended meanwhile
            continue
    return pids


async def gone(name: str) -> bool:
    """Once no process of this machine names it: the kernel takes its time with what was killed."""
    async with asyncio.timeout(120):
        while on_this_machine(name):
            await asyncio.sleep(0.05)
    return True


async def test_two_agents_with_servers_of_the_same_names_cannot_touch_each_other(sandboxes: DockerSandboxes) -> None:
    task = msgspec.convert(TASK, Task)
    one, other = await asyncio.gather(sandboxes.start(spec_of(task)), sandboxes.start(spec_of(task)))
    names = [secrets.token_hex(8), secrets.token_hex(8)]
    try:
        for sandbox, name in zip((one, other), names, strict=True):
            await set_up(sandbox, task)
            await says(sandbox, f"python3 server.py {name}")
            assert await says(sandbox, "python3 client.py") == [name] * 3
        await says(one, "rm -rf /tmp/tmux-0; kill -9 -1")
        assert await says(other, "python3 client.py") == [names[1]] * 3
        assert set(await says(one, "python3 client.py")) == set(GONE)
        assert await gone(names[0]) and on_this_machine(names[1])
    finally:
        await asyncio.gather(one.stop(), other.stop())
    assert not on_this_machine(names[1])


async def typed(sandbox: DockerSandbox) -> list[str]:
    """What the shell in the sandbox's tmux session has in its environment, found out by typing into that session."""
    await says(sandbox, "rm -f who; tmux send-keys -t shared 'echo $WHO >who.new; mv who.new who' Enter")
    async with asyncio.timeout(120):
        while (output := await sandbox.read("who")) is None:
            await asyncio.sleep(0.1)
    return output.decode().split()


async def test_two_agents_with_tmux_cannot_touch_each_other(sandboxes: DockerSandboxes) -> None:
    task = msgspec.convert(HELLO, Task)
    both = await asyncio.gather(sandboxes.start(spec_of(task)), sandboxes.start(spec_of(task)))
    one, other = both
    names = [secrets.token_hex(8), secrets.token_hex(8)]
    listed = "tmux list-sessions -F '#S'"
    try:
        for sandbox, name in zip(both, names, strict=True):
            assert await says(sandbox, f'WHO={name} tmux new-session -d -s shared "WHO={name} exec sh"') == []
        assert [await typed(sandbox) for sandbox in both] == [[name] for name in names]
        await says(one, "tmux kill-server; rm -rf /tmp/tmux-*; kill -9 -1")
        assert (await says(one, f"{listed} 2>&1 || echo none"))[-1] == "none"
        assert await says(other, listed) == ["shared"] and await typed(other) == [names[1]]
        assert await gone(names[0]) and on_this_machine(names[1])
        assert await other.end_processes() >= 2  # the server and the shell
        assert not on_this_machine(names[1])
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in both))


@pytest.mark.parametrize("daemons", [True, False])
async def test_the_tasks_daemons_outlive_the_agent_and_the_agents_do_not(
    sandboxes: DockerSandboxes, daemons: bool
) -> None:
    setup = f"{HELLO['setup']}; python3 server.py task"
    task = msgspec.convert(TASK | {"setup": setup, "daemons": daemons}, Task)
    sandbox = await sandboxes.start(spec_of(task))
    try:
        await set_up(sandbox, task)
        snapshot = await take_snapshot(sandbox, task, sandboxes)
        agent = f"agent-{secrets.token_hex(8)}"
        await says(sandbox, f"sed 's/tmux/mine/g; s/7777/7778/' server.py > mine.py; python3 mine.py {agent}")
        assert on_this_machine(agent)
        async with verifier_sandbox(sandboxes, sandbox, task, snapshot) as (room, _):
            answers = (await room.run("python3 client.py", Limits(seconds=60), {})).output.split()
            assert answers[1:] == (["task", "task"] if daemons else GONE[1:] * 2)  # the socket file is the agent user's
            assert not on_this_machine(agent)
    finally:
        await sandbox.stop()
