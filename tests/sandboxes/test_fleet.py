"""Several hosts as one, without a daemon: the hosts are directories of processes."""

import asyncio
from pathlib import Path

from sandboxes.docker.daemon import DaemonError
from sandboxes.fleet import HostOptions, Hosts
from sandboxes.local.process import ALONE, ProcessSandboxes


async def test_a_start_that_waits_takes_a_host_that_is_due_again(tmp_path: Path) -> None:
    tries: list[str] = []

    async def opening(address: str) -> ProcessSandboxes:
        tries.append(address)
        if tries.count("b") == 1 and address == "b":
            raise DaemonError("b does not answer")
        return ProcessSandboxes(tmp_path / address)

    hosts = Hosts([HostOptions(address=one, limit=1) for one in "ab"], opening, kind="process", out_seconds=0.5)
    first = await hosts.start(ALONE)
    failing = asyncio.create_task(hosts.start(ALONE))  # at b, and then waits for a
    while tries != ["a", "b"]:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        second = await hosts.start(ALONE)
    assert (first.host, second.host, failing.done()) == ("a", "b", False)
    await first.stop()
    await (await failing).stop()
    await second.stop()
    await hosts.close()
