"""A daemon that is no use is told in a sentence, when it is opened and when it goes away."""

import asyncio
import io
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from sandboxes.base import SandboxError
from sandboxes.docker import daemon as daemons
from sandboxes.docker.container import freezing
from sandboxes.docker.daemon import HOOK_FAILED, START_TRIES, DaemonError, DockerDaemon, start_container

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
INFO = {"OSType": "linux", "NCPU": 2, "SecurityOptions": [], "DockerRootDir": "/data/300000.300000"}


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts a daemon that knows nothing but its version, and says where."""
    runners: list[web.AppRunner] = []

    async def start(api: str = "1.41", info: dict[str, object] = INFO, rest: Handler | None = None) -> str:
        application = web.Application()
        application.router.add_get("/version", answer({"ApiVersion": api}))
        application.router.add_get("/v{version}/version", answer({"ApiVersion": api}))
        application.router.add_get("/v{version}/info", answer(info))
        if rest is not None:
            application.router.add_route("*", "/{path:.*}", rest)
        runners.append(web.AppRunner(application))
        await runners[-1].setup()
        path = tmp_path / f"{secrets.token_hex(4)}.sock"
        await web.UnixSite(runners[-1], str(path)).start()
        return f"unix://{path}"

    yield start
    for runner in runners:
        await runner.cleanup()


def answer(content: object, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(content, status=status)

    return handler


async def test_an_engine_that_is_too_old_or_of_another_system_is_refused(
    serve: Callable[..., Awaitable[str]],
) -> None:
    with pytest.raises(DaemonError, match=r"speaks API 1\.39, and 1\.41 is needed; update it"):
        await DockerDaemon.open(await serve(api="1.39"))
    with pytest.raises(DaemonError, match="runs windows; use one of Linux"):
        await DockerDaemon.open(await serve(info=INFO | {"OSType": "windows"}))


async def test_a_root_that_is_remapped_is_known(serve: Callable[..., Awaitable[str]]) -> None:
    for options, remapped in (([], False), (["name=seccomp,profile=default", "name=userns"], True)):
        daemon = await DockerDaemon.open(await serve(info=INFO | {"SecurityOptions": options}))
        assert (daemon.remapped, daemon.first_id) == (remapped, 300_000 if remapped else 0)
        await daemon.close()


async def test_a_root_that_is_remapped_to_nobody_knows_whom_is_refused(serve: Callable[..., Awaitable[str]]) -> None:
    info = INFO | {"SecurityOptions": ["name=userns"], "DockerRootDir": "/var/lib/docker"}
    with pytest.raises(
        DaemonError, match=r"does not say to which id \(its directory is /var/lib/docker, .*; use a daemon"
    ):
        await DockerDaemon.open(await serve(info=info))


async def test_a_socket_that_is_forwarded_from_another_machine_is_not_a_local_engine(
    serve: Callable[..., Awaitable[str]],
) -> None:
    for name, local in ((socket.gethostname(), True), ("another", False)):
        daemon = await DockerDaemon.open(await serve(info=INFO | {"Name": name}))
        assert daemon.local is local
        await daemon.close()


async def test_an_engine_out_of_disk_is_told_apart(serve: Callable[..., Awaitable[str]]) -> None:
    full = answer({"message": "mkdir /var/lib/docker/overlay2/x: no space left on device"}, 500)
    daemon = await DockerDaemon.open(await serve(rest=full))
    with pytest.raises(DaemonError, match="is out of disk .*; free some"), daemon.translating_errors("creating"):
        await daemon.docker.containers.create({"Image": "x"})
    await daemon.close()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("unix:///no/such/socket", "at unix:///no/such/socket does not answer"),
        ("tcp://127.0.0.1:1", "at tcp://127.0.0.1:1 does not answer"),
        ("ssh://host", "forwarding its socket: ssh -nNT -L"),
        ("https://127.0.0.1:1", "certificates for https://127.0.0.1:1 in .* cannot be used"),
    ],
)
async def test_an_address_that_leads_nowhere_is_told(address: str, sentence: str, tmp_path: Path) -> None:
    os.environ["DOCKER_CERT_PATH"] = str(tmp_path)
    try:
        with pytest.raises(DaemonError, match=sentence):
            await DockerDaemon.open(address)
    finally:
        del os.environ["DOCKER_CERT_PATH"]


async def test_an_engine_that_goes_away_is_told_and_nothing_waits_for_it(
    serve: Callable[..., Awaitable[str]],
) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(0)
        return web.Response()

    daemon = await DockerDaemon.open(await serve(rest=break_off))
    with pytest.raises(DaemonError, match="does not answer"), daemon.translating_errors("looking"):
        await daemon.container("x").show()
    await daemon.close()


@pytest.mark.parametrize(
    ("failures", "message", "tries"),
    [(2, HOOK_FAILED, 3), (START_TRIES, HOOK_FAILED, START_TRIES), (1, "no such program", 1)],
)
async def test_a_container_whose_network_hook_fails_is_started_again(
    serve: Callable[..., Awaitable[str]], failures: int, message: str, tries: int
) -> None:
    """Docker 20.10 on a busy machine: "error running hook #0: error running hook: exit status 1"."""
    starts: list[str] = []

    async def fail(request: web.Request) -> web.StreamResponse:
        starts.append(request.path)
        done = len(starts) > failures
        return web.Response(status=204) if done else web.json_response({"message": f"runc: {message} #0"}, status=500)

    daemon = await DockerDaemon.open(await serve(rest=fail))
    try:
        container = daemon.container("one")
        if failures < tries:
            await start_container(container)
        else:
            with pytest.raises(SandboxError, match=f"starting it: .*{message}"):
                with daemon.translating_errors("starting it"):
                    await start_container(container)
    finally:
        await daemon.close()
    assert len(starts) == tries and starts[0].endswith("/containers/one/start")


async def test_packing_may_take_longer_than_a_call(
    serve: Callable[..., Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"ab", b"cd"):
            await response.write(piece)
            await asyncio.sleep(2)
        return response

    monkeypatch.setattr(daemons, "CALL_SECONDS", 3.0)
    daemon = await DockerDaemon.open(await serve(rest=slowly))
    archive = io.BytesIO()
    try:
        assert await freezing.pack(daemon, "one", "/work", "/work", archive, 1 << 20)
        assert archive.getvalue() == b"abcd"
        monkeypatch.setattr(freezing, "PACK_SECONDS", 1.0)
        with pytest.raises(SandboxError, match="/work of one was not packed after 1 s"):
            await freezing.pack(daemon, "one", "/work", "/work", archive, 1 << 20)
    finally:
        await daemon.close()
