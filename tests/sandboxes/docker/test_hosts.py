"""Several daemons as one: the shared one, and one of the test's own that can be killed or filled up."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.process import free_port
from sandboxes.base import Image, Limits, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DaemonError
from sandboxes.docker.labels import labels_of, this_process
from sandboxes.docker.leftovers import DockerResource
from sandboxes.fleet import HostedSandbox, HostOptions, Hosts, parse_host
from sandboxes.gc import SearchScope, remove_leftovers
from sandboxes.network import relay
from tests.daemons import OwnDaemon, own_daemon

BUSYBOX = Spec(image=Image(name="bb:1"), network="none", profile="harbor")


async def on(address: str) -> DockerSandboxes:
    return await DockerSandboxes.open(Options(address=address))


@asynccontextmanager
async def hosts(*wanted: str, out_seconds: float = 600) -> AsyncIterator[Hosts]:
    fleet = Hosts([parse_host(one) for one in wanted], on, out_seconds=out_seconds)
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture(scope="module")
def second(docker_daemon: str) -> Iterator[OwnDaemon]:
    with own_daemon() as daemon:
        yield daemon


async def started(fleet: Hosts, number: int) -> list[HostedSandbox]:
    return list(await asyncio.gather(*(fleet.start(BUSYBOX) for _ in range(number))))


@pytest.mark.parametrize(
    "text, host",
    [
        ("tcp://a:2375", HostOptions(address="tcp://a:2375")),
        ("tcp://a:2375=2", HostOptions(address="tcp://a:2375", weight=2)),
        ("unix:///run/docker.sock=0.5/64", HostOptions(address="unix:///run/docker.sock", weight=0.5, limit=64)),
    ],
)
def test_a_host_is_an_address_a_weight_and_a_limit(text: str, host: HostOptions) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "=2", "tcp://a=x", "tcp://a=0", "tcp://a=-1", "tcp://a=1/0", "tcp://a=nan"])
def test_a_host_that_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=f"with both above 0, not: {text}$"):
        parse_host(text)


async def test_sandboxes_are_shared_out_by_weight_and_metrics_tell_them_apart(
    docker_daemon: str, second: OwnDaemon
) -> None:
    async with hosts(f"{docker_daemon}=2", f"{second.address}=1") as both:
        placed = await started(both, 6)
        assert Counter(one.host for one in placed) == {docker_daemon: 4, second.address: 2}
        result = await placed[-1].run("echo here", Limits(), {})
        assert result.output == "here\n"
        text = both.metrics.text()
        assert f'blackforge_sandboxes_live{{host="{docker_daemon}",image="bb:1"}} 4.0\n' in text
        assert f'blackforge_sandbox_start_seconds_count{{host="{second.address}",image="bb:1"}} 2.0\n' in text
        await placed[0].stop()
        assert (await both.start(BUSYBOX)).host == docker_daemon
        await asyncio.gather(*(one.stop() for one in placed))
        assert f'blackforge_sandboxes_live{{host="{docker_daemon}",image="bb:1"}} 1.0\n' in both.metrics.text()
    assert second.say("ps", "--all", "--quiet") == ""


@asynccontextmanager
async def over_tcp(daemon: OwnDaemon) -> AsyncIterator[str]:
    """The daemon's address on a port of the loopback."""
    port = free_port()
    ready = asyncio.Event()
    passing = asyncio.create_task(
        relay.serve(f"tcp:127.0.0.1:{port}", daemon.address.replace("unix://", "unix:"), ready.set)
    )
    try:
        await asyncio.wait_for(ready.wait(), 60)
        yield f"tcp://127.0.0.1:{port}"
    finally:
        passing.cancel()
        await asyncio.wait([passing])


async def test_an_engine_on_tcp_is_a_host_like_another_and_an_earlier_boot_is_not_judged_there(
    docker_daemon: str, second: OwnDaemon, tmp_path: Path
) -> None:
    gone = replace(this_process(), boot="an-earlier-one pid:[1]")
    labels = [f"--label={label}={value}" for label, value in labels_of("sandbox", gone).items()]
    second.say("volume", "create", "--name", "unjudged", *labels)
    async with over_tcp(second) as address, hosts(f"{docker_daemon}=1", f"{address}=3") as both:
        placed = await started(both, 4)
        assert Counter(one.host for one in placed) == {docker_daemon: 1, address: 3}
        [far, *_] = [one for one in placed if one.host == address]
        await far.write("note", "from afar")
        assert (await far.run("cat note", Limits(), {})).output == "from afar" and await far.read(
            "note"
        ) == b"from afar"
        seen = await asyncio.to_thread(remove_leftovers, SearchScope(daemons=[address], root=tmp_path))
        assert seen.resources == [] and seen.troubles == []
    assert [thing.name for thing in await asyncio.to_thread(reaped_here, second, tmp_path)] == ["unjudged"]


def reaped_here(daemon: OwnDaemon, root: Path) -> list[DockerResource]:
    return remove_leftovers(SearchScope(daemons=[daemon.address], root=root)).resources


async def test_a_full_host_is_waited_for(second: OwnDaemon) -> None:
    async with hosts(f"{second.address}=1/1") as one:
        first = await one.start(BUSYBOX)
        waiting = asyncio.create_task(one.start(BUSYBOX))
        await asyncio.sleep(0)
        where = {"host": second.address, "image": "bb:1"}
        assert not waiting.done()
        async with asyncio.timeout(300):  # a verifier's sandbox, for which the first waits
            await (await one.start(replace(BUSYBOX, beside=True))).stop()
        assert not waiting.done()
        assert one.metrics.registry.get_sample_value("blackforge_sandboxes_starting", where) == 0
        await first.stop()
        assert (await waiting).id != first.id


@pytest.mark.timeout(600)
async def test_a_host_that_fails_is_left_out_and_comes_back(docker_daemon: str) -> None:
    with own_daemon() as dying:
        async with hosts(f"{docker_daemon}=1", f"{dying.address}=1000", out_seconds=600) as both:
            lost = await both.start(BUSYBOX)
            assert lost.host == dying.address
            dying.kill()
            with pytest.raises(DaemonError, match="does not answer"):
                await lost.run("true", Limits(), {})
            placed = await started(both, 3)
            assert {one.host for one in placed} == {docker_daemon}
            text = both.metrics.text()
            assert f'blackforge_sandbox_hosts_left_out_total{{host="{dying.address}"}} 1.0\n' in text
            assert f'blackforge_sandbox_failures_total{{host="{dying.address}",image="bb:1",kind="daemon"}}' in text
        async with hosts(f"{docker_daemon}=1", f"{dying.address}=1000", out_seconds=0.01) as both:
            assert (await both.start(BUSYBOX)).host == docker_daemon  # it was tried, and nobody heard of it
            dying.start()
            assert (await both.start(BUSYBOX)).host == dying.address


async def test_with_no_host_left_the_engines_sentence_is_told(second: OwnDaemon) -> None:
    async with hosts("unix:///nowhere/a.sock", "unix:///nowhere/b.sock") as neither:
        with pytest.raises(DaemonError, match="the Docker daemon at unix:///nowhere/[ab].sock does not answer"):
            await neither.check()
        with pytest.raises(DaemonError, match="nowhere"):
            await neither.start(BUSYBOX)
    async with hosts("unix:///nowhere/a.sock", second.address) as one:
        assert ["nowhere/a.sock does not answer" in sentence for sentence in await one.check()] == [True]
        assert (await one.start(BUSYBOX)).host == second.address


@pytest.mark.timeout(600)
async def test_a_host_out_of_disk_is_left_out_and_nothing_is_lost(docker_daemon: str) -> None:
    with own_daemon(disk_mb=24) as small:
        async with hosts(f"{docker_daemon}=1", f"{small.address}=1000") as both:
            filling = await both.start(BUSYBOX)
            assert filling.host == small.address
            full = await filling.run("dd if=/dev/zero of=/full bs=64k", Limits(), {})
            assert "No space left" in full.output
            assert (await both.start(BUSYBOX)).host == docker_daemon
            assert 'kind="disk"} 1.0\n' in both.metrics.text()
            async with hosts(small.address) as alone:
                with pytest.raises(
                    DaemonError, match=f"the Docker daemon at {small.address} is out of disk .*free some"
                ):
                    await alone.start(BUSYBOX)
