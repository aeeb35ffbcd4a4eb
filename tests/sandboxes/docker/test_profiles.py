"""What each profile permits, tried from the inside."""

import subprocess
from dataclasses import replace

import msgspec
import pytest

from sandboxes.base import Image, SandboxError, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox
from tests.sandboxes.calls import CALLS, call_answers
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says

CAPABILITIES = "grep -E '^Cap(Prm|Eff|Inh|Amb)' /proc/self/status | cut -f2 | sort -u"


async def test_the_agent_of_a_strict_sandbox_is_nobody_in_particular(strict: DockerSandbox) -> None:
    assert await says(strict, "id -u; whoami; pwd; echo $HOME") == "10000\nagent\n/work\n/home/agent"
    assert await says(strict, CAPABILITIES) == "0000000000000000"
    assert await says(strict, "grep NoNewPrivs /proc/self/status | cut -f2") == "1"


async def test_the_agent_writes_to_its_own_places_and_to_no_other(strict: DockerSandbox) -> None:
    await says(strict, "touch /work/a ~/a /tmp/a && cp /bin/true /tmp && /tmp/true")
    for place in ("/etc/passwd", "/bin/x", "/root/x", "/home/verifier/x", "/x", "/var/lib/x", "/sys/x", "/proc/sys/x"):
        refused = await says(strict, f"(echo >{place}) 2>&1 && echo written || true")
        assert "written" not in refused and refused


async def test_not_even_root_writes_to_a_strict_root_file_system(strict: DockerSandbox) -> None:
    for place in ("/etc/passwd", "/x", "/usr/bin/sh"):
        assert "Read-only" in await says(strict, f"(echo >{place}) 2>&1 || true", user="root")


async def test_no_way_of_raising_rights_is_open(strict: DockerSandbox) -> None:
    attempts = (
        "mount -t tmpfs x /mnt",
        "chroot / true",
        "unshare -U true",
        "unshare -m true",
        "su -c true",
        "mknod /tmp/disk b 8 0",
        "python3 -c 'import os; os.setuid(0)'",
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        "kill -9 1 2>&1 && ! kill -0 1",
        "cat /proc/1/environ",
        "ls /home/verifier",
    )
    for attempt in attempts:
        assert await says(strict, f"({attempt}) >/dev/null 2>&1 && echo works || echo fails") == "fails", attempt
    effective = "grep CapEff /proc/self/status | cut -f2"
    assert await says(strict, effective, user="root") == "000000000000002b"


async def test_calls_that_attack_kernels_and_other_processes_are_refused(strict: DockerSandbox) -> None:
    refused = {name: "EPERM" for name in CALLS} | {"clone3": "ENOSYS"}
    assert await call_answers(strict, "python3") == refused


async def test_harbor_traces_processes_and_a_spec_may_allow_a_call_by_its_name(sandboxes: DockerSandboxes) -> None:
    sandbox = await sandboxes.start(replace(HARBOR, system_calls=("request_key",)))
    answers = await call_answers(sandbox, "python3")
    assert (answers["ptrace"], answers["keyctl"], answers["unshare"]) == ("worked", "EPERM", "EPERM")
    assert answers["request_key"] == "EFAULT"  # the kernel's own answer
    await sandbox.stop()


async def test_a_profile_may_have_a_runtime_of_its_own(docker_daemon: str) -> None:
    other = "io.containerd.runc.v2"
    options = Options(address=docker_daemon, image="deb:py", run="test", runtimes={"strict": other})
    sandboxes = await DockerSandboxes.open(options)
    for spec, runtime in ((SMALL, other), (HARBOR, "runc")):
        sandbox = await sandboxes.start(spec)
        details = await sandboxes.daemon.container(sandbox.container).show()
        assert details["HostConfig"]["Runtime"] == runtime and await says(sandbox, "echo works") == "works"
    await sandboxes.close()


async def test_agent_and_verifier_do_not_reach_each_other(strict: DockerSandbox) -> None:
    await strict.write("~/secret", "hidden", user="verifier")
    await says(strict, "sleep 300 >/dev/null 2>&1 & echo $! >/tmp/pid", user="verifier")
    assert await says(strict, "cat /home/verifier/secret 2>&1 || kill $(cat /tmp/pid) 2>&1 || true") != "hidden"
    assert await says(strict, "kill -0 $(cat /tmp/pid)", user="verifier") == ""
    assert await strict.read("/home/verifier/secret") is None
    assert await strict.read("~/secret", user="verifier") == b"hidden"


async def test_the_writable_places_are_sized(strict: DockerSandbox) -> None:
    for place in ("/work", "/home/agent", "/tmp"):
        output = await says(
            strict, f"head -c 100000000 /dev/zero 2>&1 >{place}/big; wc -c <{place}/big; rm {place}/big"
        )
        assert "No space left" in output and int(output.split()[-1]) <= 64 << 20


async def test_a_harbor_sandbox_is_root_with_a_root_file_system_to_write_to(harbor: DockerSandbox) -> None:
    assert await says(harbor, "id -u; echo $HOME") == "0\n/root"
    await says(
        harbor, "useradd -m someone && su someone -c 'touch ~/x' && chown someone /etc/hosts && touch /usr/bin/x"
    )
    for attempt in ("mount -t tmpfs x /mnt", "mknod /tmp/disk b 8 0", "unshare -m true", "date -s 2020-01-01"):
        assert await says(harbor, f"({attempt}) >/dev/null 2>&1 && echo works || echo fails") == "fails", attempt


async def test_a_container_says_whose_it_is_and_what_was_relaxed(sandboxes: DockerSandboxes) -> None:
    sandbox = await sandboxes.start(Spec(profile="harbor", memory_mb=None, pids=2000, network="none"))
    shown = subprocess.run(["docker", "inspect", sandbox.container], capture_output=True, check=True).stdout
    labels = msgspec.json.decode(shown)[0]["Config"]["Labels"]
    await sandbox.stop()
    assert labels["blackforge.relaxed"] == "profile=harbor memory_mb=unlimited pids=2000"
    assert (labels["blackforge.sandbox"], labels["blackforge.run"]) == (sandbox.id, "test")
    assert labels["blackforge.image"] == "deb:py"


async def test_without_a_network_there_is_loopback_alone_until_it_is_switched_on(strict: DockerSandbox) -> None:
    assert await says(strict, "ls /sys/class/net") == "lo"
    resolve = "import socket; socket.getaddrinfo('example.org', 80)"
    assert "gaierror" in await says(strict, f'python3 -c "{resolve}" 2>&1 || true')
    await strict.allow_network()
    assert await says(strict, "ls /sys/class/net") == "eth0\nlo"


async def test_a_working_directory_that_the_image_has_not_is_made(sandboxes: DockerSandboxes) -> None:
    for spec, owner in ((SMALL, "10000"), (HARBOR, "0")):
        sandbox = await sandboxes.start(replace(spec, image=Image(name="bb:1"), work="/made/here"))
        assert await says(sandbox, "pwd; touch x; stat -c %u .") == f"/made/here\n{owner}"
        await sandbox.stop()


async def test_a_place_that_would_hide_the_system_is_refused(sandboxes: DockerSandboxes) -> None:
    with pytest.raises(SandboxError, match="working directory '/usr' cannot be made writable"):
        await sandboxes.start(Spec(work="/usr"))
