"""A hostile program in a sandbox reaches the proxy's model routes with its own key, and nothing else.

tests/sandboxes/probe.py says what it tries. Beside it are a real proxy, whose pool has three attempts, a listener on
every address of this machine, an abstract socket, another sandbox with another attempt's key, and a verifier's files.
"""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from aiohttp import web

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine
from proxy.engine.tiny_model import make_tiny_model
from proxy.http import sandbox_listener as proxy_channel
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import Attempt, Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from sandboxes.base import Limits, Profile, Sandbox, Sandboxes, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import labels_of, this_process
from sandboxes.docker.network import Channel, Runtime, address_for
from sandboxes.local.bubblewrap import BubblewrapSandboxes, why_not
from sandboxes.network import forwarder
from tests.conftest import need
from tests.proxy.conftest import listening, served

PROBE = Path(__file__).parent / "probe.py"
VERIFIER = "verifier-5b3f0c9e2d"
PLACES = [
    "/run",
    "/tmp",
    "/var",
    "/home",
    "/root",
    "/work",
    "/sandbox",
    "/opt",
    "/srv",
    "/mnt",
    "/media",
    "/etc",
    "/dev",
    "/logs",
]
"""Where the probe looks at every file."""
ABSTRACT = f"blackforge-probe-{os.getpid()}"


@dataclass
class Scene:
    """What stands around the sandboxes."""

    directory: Path
    socket: Path
    address: str
    """Of the listener for relays, which is on every address of this machine."""
    pool: Pool
    ports: list[int]
    """Of the proxy's own listener on loopback, of any other on every address, and of the one for relays."""
    attempts: list[tuple[Attempt, str]]
    """The probe's own, another one's, and one that is closed."""

    def given(self, sandbox: "Sandbox | Direct", **more: Any) -> dict[str, Any]:
        """What the probe is told. Of others' secrets it gets digests only, to know them when it sees them."""
        host, port = sandbox.model_url.removeprefix("http://").split(":")
        return {
            "model_host": host,
            "model_port": int(port),
            "addresses": addresses(),
            "ports": self.ports,
            "others": [],
            "only": [""],
            "without": [],
            "places": PLACES,
            "skipped": [sys.base_prefix, "/usr", "/proc", "/sys"],  # thousands of files of nobody
            "abstract": ABSTRACT,
            "closed_key": self.attempts[2][1],
            "other_key": digest(self.attempts[1][1]),
            "hidden": [str(self.directory), str(self.socket), str(Path.home() / ".ssh"), str(Path.cwd())],
            "verifier_pattern": "verifier-[0-9a-f]{10}",
            "verifier_digest": digest(VERIFIER),
            "socket_directory": forwarder.DIRECTORY,
            "host_pid_namespace": os.readlink("/proc/self/ns/pid"),
        } | more


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def addresses() -> list[str]:
    """This machine's, with those of all its bridges."""
    shown = json.loads(subprocess.run(["ip", "-j", "address"], capture_output=True, check=True).stdout)
    addresses = [one["local"] for interface in shown for one in interface["addr_info"]]
    return [address for address in addresses if address not in ("127.0.0.1", "::1")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory, seed=0)
    return directory


@contextmanager
def listeners() -> Iterator[int]:
    """A TCP port on every address of this machine, and an abstract socket."""
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind("\0" + ABSTRACT)
        abstract.listen()
        yield tcp.getsockname()[1]


@pytest.fixture
async def scene(tmp_path: Path, model: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        short = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")), "door", "proxy.sock")
        engine = await listening(ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(model)).app(), stack)
        gateway = Gateway(ProxyConfig(engine=EngineConfig(model=str(model)), pool=str(tmp_path / "pool.db")), engine)
        url = await served(gateway, stack)
        runner = gateway.sandbox_runner(1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, proxy_channel.listen_unix(short)).start()
        relays = socket.create_server(("0.0.0.0", 0))
        await web.SockSite(runner, relays).start()
        pool = open_pool(str(tmp_path / "pool.db"))
        rollouts = open_group(pool, open_run(pool, "r", "train", {}).id, {"id": "t", "domain": "agent"}, 3)
        attempts = [open_attempt(pool, rollout.rollout_id, "command") for rollout in rollouts]
        close_attempt(pool, attempts[2][0].id, Ending())
        (tmp_path / "verifier.sh").write_text(f"echo {VERIFIER}")
        open_port = stack.enter_context(listeners())
        ports = [int(url.rpartition(":")[2]), open_port, relays.getsockname()[1]]
        yield Scene(tmp_path, short, f"http://0.0.0.0:{ports[2]}", pool, ports, attempts)


async def probed(scene: Scene, sandboxes: Sandboxes, spec: Spec, **more: Any) -> dict[str, dict[str, Any]]:
    """What the probe says of each try, with another rollout's sandbox beside it."""
    (own, key), (other, another) = scene.attempts[:2]
    beside, sandbox = await sandboxes.start(spec), await sandboxes.start(spec)
    try:
        await beside.write("~/.key", another)
        neighbour = beside.run("sleep 600", Limits(), {"OPENAI_API_KEY": another})
        waiting = asyncio.create_task(neighbour)
        await sandbox.write("probe.py", PROBE.read_text())
        given = scene.given(sandbox, **more)
        await sandbox.write("probe.json", json.dumps(given))
        environment = {"OPENAI_API_KEY": key}
        # Docker 28.2.2 can lose the end of a command's output on a busy machine; a file is whole.
        probing = "python3 -I -S probe.py probe.json > tries.jsonl"
        result = await sandbox.run(probing, Limits(seconds=500), environment)
        written = await sandbox.read("tries.jsonl")
        waiting.cancel()
        await asyncio.wait({waiting})
    finally:
        await sandbox.stop()
        await beside.stop()
    assert (result.ended, result.exit_code) == ("exit", 0), result.output[-2000:]
    assert of_attempt(scene.pool, own.id) and not of_attempt(scene.pool, other.id)
    assert written is not None
    tries = {one["try"]: one for one in map(json.loads, written.splitlines())}
    assert {f"tcp {address}:{port}" for address in given["addresses"] for port in given["ports"]} <= tries.keys()
    return tries


def check(tries: dict[str, dict[str, Any]]) -> None:
    """Nothing was reached but the model; and the probe has tried what it is there for."""
    assert tries.pop("a model call")["reached"]
    assert len(tries) > 60 and "another rollout's key" in tries
    assert [one for one in tries.values() if one["reached"]] == []


async def test_the_probe_has_good_eyes(scene: Scene) -> None:
    """On this machine itself it finds what is there to be found. What would do harm here is left out."""
    (scene.directory / "key").write_text(scene.attempts[1][1])
    only = [
        f"tcp 127.0.0.1:{scene.ports[1]} ",
        "an abstract",
        "another rollout",
        "the host's",
        "a file with",
        "another so",
    ]
    given = scene.given(Direct(f"http://127.0.0.1:{scene.ports[0]}"), only=only, places=[str(scene.directory)])
    (scene.directory / "probe.json").write_text(json.dumps(given | {"socket_directory": str(scene.directory)}))
    with socket.socket(socket.AF_UNIX) as beside:
        beside.bind(str(scene.socket.parent / "s"))
        beside.close()
        (scene.directory / "sub").mkdir()
        (scene.socket.parent / "s").rename(scene.directory / "sub" / "s")
    environment = {"OPENAI_API_KEY": scene.attempts[0][1]}
    probe = [sys.executable, "-I", "-S", str(PROBE), str(scene.directory / "probe.json")]
    started = await asyncio.create_subprocess_exec(*probe, env=environment, cwd=scene.directory, stdout=-1)
    tries = [json.loads(line) for line in (await started.communicate())[0].splitlines()]
    reached = {one["try"].split(" of the host")[0] for one in tries if one["reached"]}
    assert reached >= {
        f"tcp 127.0.0.1:{scene.ports[1]}",
        "an abstract socket",
        "another rollout's key",
        "another socket",
    }
    assert reached >= {f"the host's {scene.directory}", "a file with the verifier's content", "a model call"}


@dataclass
class Direct:
    """The proxy's own address in place of a sandbox's."""

    model_url: str


@asynccontextmanager
async def listening_container(daemon: DockerDaemon) -> AsyncIterator[tuple[str, int]]:
    """A container on the daemon's bridge whose port 8000 is open to whoever can reach it."""
    labels = labels_of("test", this_process())
    command = ["python3", "-m", "http.server", "8000"]
    container = await daemon.docker.containers.run({"Image": "deb:py", "Cmd": command, "Labels": labels})
    try:
        address = (await container.show())["NetworkSettings"]["IPAddress"]
        while True:
            with suppress(OSError), socket.create_connection((address, 8000), 5):
                break
            await asyncio.sleep(0.05)
        yield address, 8000
    finally:
        await container.delete(force=True)


@pytest.mark.parametrize(
    ("profile", "way"),
    [
        ("strict", "socket"),
        ("harbor", "relay"),
        pytest.param("strict", "relay", marks=pytest.mark.long),
        pytest.param("harbor", "socket", marks=pytest.mark.long),
    ],
)
async def test_docker(scene: Scene, docker_daemon: str, profile: Profile, way: str) -> None:
    async with AsyncExitStack() as stack:
        daemon = await DockerDaemon.open(docker_daemon)
        stack.push_async_callback(daemon.close)
        address = address_for(daemon, scene.address) if way == "relay" else ""
        runtime = Runtime(python="python3", image="deb:py")
        reach = Channel(daemon=daemon, runtime=runtime, socket=scene.socket, address=address)
        stack.push_async_callback(reach.close)
        options = Options(address=docker_daemon, image="deb:py", suppliers=[reach])
        sandboxes = await DockerSandboxes.open(options)
        stack.push_async_callback(sandboxes.close)
        others = [await stack.enter_async_context(listening_container(daemon))]
        spec = Spec(profile=profile, memory_mb=512, disk_mb=64)
        suicide = ["the first process"] if profile == "harbor" else []  # root inside may end its own sandbox
        check(await probed(scene, sandboxes, spec, others=others, without=suicide))


async def test_bubblewrap(scene: Scene, tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    sandboxes = BubblewrapSandboxes(tmp_path / "sandboxes", model_socket=scene.socket)
    check(await probed(scene, sandboxes, Spec()))
