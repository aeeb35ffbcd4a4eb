"""Cheating agents in a whole run: containers, a real proxy, a group of rollouts. Each is trained on, with reward 0."""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import func, select

from harness.agents.command import CommandAgent
from harness.async_pool import AsyncPool
from harness.monitor.engine_presence import EnginePresence
from harness.rollout.context import RunContext
from harness.rollout.run import run_rollout
from harness.setup.stack import RunningProxy
from proxy.pool.database import open_pool
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions, groups
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.network import Channel, Runtime
from sandboxes.network.forwarder import SOCKET, URL
from tests.harness.cheats import HELLO, WAYS

ASK = """python3 -c '
import json, os, urllib.request as u
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Write hello.txt"}]})
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
print(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), head)).read())
'
"""
TAKEN = ("reads the tests", "a test runner of its own", "rewards in every place", "a loop in the background")


@pytest.fixture
async def socket(proxy: RunningProxy) -> AsyncIterator[Path]:
    """A Unix socket that passes connections on to the proxy, alone in its directory."""
    port = int(proxy.url.rpartition(":")[2])

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inward, outward = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while chunk := await source.read(1 << 16):
                sink.write(chunk)
            sink.close()

        await asyncio.gather(pump(reader, outward), pump(inward, writer), return_exceptions=True)

    with tempfile.TemporaryDirectory(prefix="bf-") as directory:
        path = Path(directory) / SOCKET
        server = await asyncio.start_unix_server(pass_on, path)
        path.chmod(0o666)
        path.parent.chmod(0o755)
        yield path
        server.close()


@pytest.fixture
async def context(proxy: RunningProxy, docker_daemon: str, socket: Path, tmp_path: Path) -> AsyncIterator[RunContext]:
    async with AsyncExitStack() as stack:
        engine = await DockerDaemon.open(docker_daemon)
        stack.push_async_callback(engine.close)
        channel = Channel(daemon=engine, runtime=Runtime(python="python3", image="deb:py"), socket=socket)
        stack.push_async_callback(channel.close)
        options = Options(address=docker_daemon, image="deb:py", run="test", suppliers=[channel])
        sandboxes = await DockerSandboxes.open(options)
        stack.push_async_callback(sandboxes.close)
        yield RunContext(
            pool=AsyncPool(open_pool(proxy.pool)),
            sandboxes=sandboxes,
            url=f"{URL}/v1",
            model=proxy.model,
            context_length=proxy.context_length,
            logs=tmp_path,
            trouble=proxy.trouble,
            end_calls=proxy.end_calls,
            engine=EnginePresence(proxy.url, proxy.admin_key),
            pause_seconds=0.01,
        )


async def test_cheats_count_in_their_groups_statistics(context: RunContext) -> None:
    pool, cheats = context.pool.blocking, [WAYS[name].script for name in TAKEN]
    task = HELLO | {"network": "model", "timeout": 120}
    run_id = open_run(pool, str(context.logs), "train", {}).id
    opened = open_group(pool, run_id, task, len(cheats) + 1)
    agents = [CommandAgent(f"{ASK}\n{work}") for work in (*cheats, "echo hello > hello.txt")]
    work = (run_rollout(context, one, agent) for agent, one in zip(agents, opened, strict=True))
    outcomes = [outcome for outcome, _ in await asyncio.gather(*work)]
    assert [(came.reward, came.failure, came.detail) for came in outcomes[:-1]] == [(0.0, None, "")] * len(cheats)
    assert outcomes[-1].reward == 1.0
    with pool.read() as connection:
        assert connection.scalar(select(groups.c.state).where(groups.c.run_id == run_id)) == "DONE"
        trained = select(func.count()).where(
            completions.c.attempt_id.in_([came.attempt_id for came in outcomes]), completions.c.untrainable.is_(None)
        )
        assert connection.scalar(trained) == len(outcomes)
    steered = [path for path in context.logs.glob("*.steering.json") if "unittest.py" in path.read_text()]
    assert [path.name for path in steered] == [f"attempt-{outcomes[1].attempt_id}.steering.json"]
    assert len(list(context.logs.glob("*.manifest.json.gz"))) == len(outcomes)


LOOK = """
env | sort; id; hostname; pwd; ulimit -a; stat -c '%A %u:%g %n' / /* /work/* ~/* /tmp /tmp/* /dev/* /opt/* /run/*
sort /proc/mounts; find / -xdev | sort; tr '\\0' ' ' < /proc/1/cmdline
"""
IDS = re.compile(r"[0-9a-f]{64}|overlay2/l?/?[A-Z0-9]{26}|bf-\w+|\d\d:\d\d(:\d\d)?|OPENAI_API_KEY=\S+|lowerdir=\S+")


async def test_an_agent_cannot_see_where_it_will_be_judged(context: RunContext) -> None:
    pool = context.pool.blocking
    run_id = open_run(pool, str(context.logs), "train", {}).id
    seen = []
    for where in ("fresh", "shared"):
        task = HELLO | {"network": "model", "id": "same", "verifier": HELLO["verifier"] | {"where": where}}
        [opened] = open_group(pool, run_id, task, 1)
        outcome, _ = await run_rollout(context, opened, CommandAgent(f"{ASK}\n{LOOK}echo hello > hello.txt"))
        assert outcome.reward == 1.0
        log = (context.logs / f"attempt-{outcome.attempt_id}.log").read_text()
        seen.append(IDS.sub("ID", log.partition("}")[2].partition("\n")[2]).splitlines())
    assert seen[0] == seen[1] and len(seen[0]) > 100
