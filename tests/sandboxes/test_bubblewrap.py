"""Bubblewrap sandboxes: what they hide, whom they are, and that they end with whoever started them.

Not covered: machines where an ordinary user may make no namespaces, other than that it is said.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sandboxes.base import Image, Limits, SandboxError, Spec
from sandboxes.local.bubblewrap import BubblewrapSandbox, BubblewrapSandboxes, _bound, why_not
from sandboxes.local.processes import processes_of, table
from tests.conftest import need
from tests.sandboxes.calls import CALLS, call_answers

ALONE = Spec(network="none")
PYTHON = f"{os.path.realpath(sys.executable)} -I -S"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[BubblewrapSandbox]:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "file").write_text("shown")
    (tmp_path / "secret").write_text("secret")
    started = await BubblewrapSandboxes(tmp_path / "root", shown=[tmp_path / "shown"]).start(ALONE)
    yield started
    await started.stop()


async def said(sandbox: BubblewrapSandbox, command: str) -> str:
    return (await sandbox.run(command, Limits(), {})).output.strip()


async def test_only_what_was_shown_is_there(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    assert await said(sandbox, f"cat {tmp_path}/shown/file") == "shown"
    assert await said(sandbox, f"ls {tmp_path}") == "shown"
    for hidden in (f"{tmp_path}/secret", str(ROOT), str(Path.home() / ".cache"), "/var/run/docker.sock", "/etc/shadow"):
        result = await sandbox.run(f"cat {hidden} || ls {hidden}/.", Limits(), {})
        assert result.exit_code != 0, hidden
    assert await said(sandbox, "ls -A /root/.ssh /etc/ssh /etc/ssl/private 2>/dev/null | grep -v :") == ""
    writable = "for d in / /usr /etc /run /var /dev /home /opt; do touch $d/x 2>/dev/null && echo $d; done"
    assert await said(sandbox, writable) == ""


async def test_nobody_inside_is_root_or_can_touch_the_first_process(sandbox: BubblewrapSandbox) -> None:
    assert await said(sandbox, "id -un; id -u | grep -c '^0$'; grep CapEff /proc/self/status") == (
        "agent\n0\nCapEff:\t0000000000000000"
    )
    assert await said(sandbox, "kill -9 1; kill -STOP 1; ls /proc/1/fd 2>/dev/null; echo alive") == "alive"
    assert int(await said(sandbox, "ps -e -o pid= | wc -l")) < 6


async def test_the_network_can_be_switched_on(sandbox: BubblewrapSandbox) -> None:
    assert await said(sandbox, "grep -c : /proc/net/dev") == "1"
    await sandbox.allow_network()
    network = os.readlink("/proc/self/ns/net")  # its interfaces come and go, as others start containers
    look = "readlink /proc/self/ns/net; test -r /etc/resolv.conf && echo and names"
    assert await said(sandbox, look) == f"{network}\nand names"


async def test_processes_are_bounded(tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    sandbox = await BubblewrapSandboxes(tmp_path).start(Spec(network="none", pids=20))
    try:
        fork = "for i in $(seq 40); do sleep 600 & done; wait"
        result = await sandbox.run(fork, Limits(seconds=300), {})
        assert result.ended == "exit" and "ork" in result.output
        assert 10 < await sandbox.end_processes() <= 20
    finally:
        await sandbox.stop()


async def test_the_verifier_has_a_home_that_the_agent_never_sees(sandbox: BubblewrapSandbox) -> None:
    await sandbox.run("sleep 600 >/dev/null & echo from the agent > left", Limits(), {})
    await sandbox.write("~/check.sh", "cat left; ps -e -o args= | grep -c 'sleep 6[0]0'", user="verifier")
    assert await said(sandbox, "ls ~ /home; ls /home/verifier 2>/dev/null") == "/home:\nagent\n\n/home/agent:"
    verdict = await sandbox.run("sh ~/check.sh", Limits(), {}, user="verifier")
    assert verdict.output == "from the agent\n0\n"  # and nothing of the agent runs any more


async def test_absolute_paths_are_the_sandboxs_own(sandbox: BubblewrapSandbox) -> None:
    for path in ("/sandbox/a/b", "/home/agent/c", "/tmp/d"):
        await sandbox.write(path, path)
        assert await said(sandbox, f"cat {path}") == path == (await sandbox.read(path) or b"").decode()


async def test_calls_that_attack_kernels_and_other_processes_are_refused(sandbox: BubblewrapSandbox) -> None:
    refused = {name: "EPERM" for name in CALLS} | {"clone3": "ENOSYS", "socket": "EAFNOSUPPORT"}
    assert await call_answers(sandbox, PYTHON) == refused


async def test_a_spec_may_allow_a_call_by_its_name(tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    sandbox = await BubblewrapSandboxes(tmp_path).start(Spec(network="none", system_calls=("ptrace",)))
    try:
        answers = await call_answers(sandbox, PYTHON)
        assert (answers["ptrace"], answers["process_vm_readv"]) == ("worked", "EPERM")
        assert await said(sandbox, "echo $ASAN_OPTIONS") == ""
    finally:
        await sandbox.stop()


async def test_a_sound_program_passes_although_its_leaks_cannot_be_looked_for(sandbox: BubblewrapSandbox) -> None:
    need("gcc with its sanitizers (apt-get install gcc)", shutil.which("gcc") is not None)
    await sandbox.write("sound.c", "int main(void) { return 0; }")
    assert await said(sandbox, "gcc -fsanitize=address sound.c && ./a.out && echo sound") == "sound"


async def test_links_of_a_copied_directory_belong_to_the_user_inside(
    sandbox: BubblewrapSandbox, tmp_path: Path
) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "link").symlink_to("nowhere")
    await sandbox.put(tmp_path / "task", "task")
    assert await said(sandbox, "chown -hR $(id -u):$(id -g) . && echo given") == "given"


async def test_another_namespace_follows_one_that_was_ended(sandbox: BubblewrapSandbox) -> None:
    await sandbox.run("echo kept > ~/file; sleep 600 >/dev/null &", Limits(), {})
    assert await sandbox.end_processes() == 1 and await sandbox.end_processes() == 0
    assert await said(sandbox, "cat ~/file") == "kept"


async def test_commands_may_be_long_and_run_side_by_side(sandbox: BubblewrapSandbox) -> None:
    text = "ü\n" * 40_000
    result = await sandbox.run('printf %s "$TEXT" | wc -c', Limits(), {"TEXT": text, "MORE": text[:40_000]})
    assert result.output.strip() == "120000"
    with pytest.raises(SandboxError, match="cannot be started .*Argument list too long"):
        await sandbox.run("true", Limits(), {"TEXT": text * 9})
    assert await said(sandbox, "echo still there") == "still there"


async def test_a_command_that_cannot_be_started_leaves_no_file_open(sandbox: BubblewrapSandbox) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SandboxError, match="Argument list too long"):
            await sandbox.run("true", Limits(), {"TEXT": "x" * 200_000})
    assert len(os.listdir("/proc/self/fd")) == opened


async def test_all_ends_and_begins_again_where_bwrap_was_killed(sandbox: BubblewrapSandbox) -> None:
    await sandbox.run("sleep 600 >/dev/null &", Limits(), {})
    bwrap = next(iter(sandbox.sessions))
    os.kill(bwrap, signal.SIGKILL)
    async with asyncio.timeout(60):
        await sandbox.end_processes()
        while processes_of(table(), sandbox.id):  # the kernel ends the others right after process 1
            await asyncio.sleep(0.01)
        assert await said(sandbox, "echo again") == "again"


async def test_a_command_just_after_the_end_of_process_1_is_refused(sandbox: BubblewrapSandbox) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    bwrap = next(iter(sandbox.sessions))
    (first,) = (process.pid for process in processes_of(table(), sandbox.id) if process.parent == bwrap)
    os.kill(first, signal.SIGKILL)
    while processes_of(table(), sandbox.id):  # without the event loop, which would hear of it
        time.sleep(0.01)
    with pytest.raises(SandboxError, match=f"cannot be started in sandbox {sandbox.id} .*Broken pipe"):
        await sandbox.run("true", Limits(), {})
    assert len(os.listdir("/proc/self/fd")) <= opened
    assert await said(sandbox, "echo again") == "again"


async def test_bwrap_is_taken_from_the_path_that_was_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    own = tmp_path / "bin" / "bwrap"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\ntouch {tmp_path}/taken\nexec {shutil.which("bwrap")} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    await (await BubblewrapSandboxes(tmp_path / "root").start(ALONE)).stop()
    assert (tmp_path / "taken").exists()


async def test_namespaces_that_cannot_be_made_are_one_sentence(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(SandboxError, match=f"bubblewrap cannot start sandbox {sandbox.id} .*No such file"):
        await sandbox.run("true", Limits(), {}, user="verifier")


def test_everybody_may_enter_the_parents_of_what_is_shown() -> None:
    assert "/etcetera" in _bound("--ro-bind", Path("/etcetera/shown"), "/etcetera/shown")
    assert "/etc/ssl" not in _bound("--ro-bind", Path("/etc/ssl/shown"), "/etc/ssl/shown")


ORPHAN = """
import asyncio, sys
from pathlib import Path
from sandboxes.base import Limits, Spec
from sandboxes.local.bubblewrap import BubblewrapSandboxes

async def main():
    sandbox = await BubblewrapSandboxes(Path(sys.argv[1])).start(Spec(network="none"))
    ran = await sandbox.run("sleep 600 >/dev/null & id -u; grep -c . /etc/passwd", Limits(), {})
    print(sandbox.id, ran.exit_code, ran.output.split()[0], flush=True)
    if sys.argv[2] == "hang":
        await asyncio.sleep(600)
    await sandbox.stop()

asyncio.run(main())
"""


def test_an_ordinary_user_has_them_too() -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    python = shutil.which("python3", path="/usr/bin:/bin")
    need("root, to become somebody else, and a Python that everybody may use", os.getuid() == 0 and bool(python))
    assert python is not None
    with TemporaryDirectory(dir="/tmp") as directory:
        shutil.copytree(ROOT / "sandboxes", f"{directory}/sandboxes")
        os.chown(directory, 12345, 12345)
        ran = subprocess.run(
            [python, "-c", ORPHAN, f"{directory}/root", "stop"],
            cwd=directory, user=12345, group=12345, extra_groups=[], capture_output=True, text=True,
        )  # fmt: skip
        assert ran.stdout.split()[1:] == ["0", "1000"], ran.stderr
        assert os.listdir(f"{directory}/root") == []


async def test_what_it_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    sandboxes = BubblewrapSandboxes(tmp_path)
    for spec in (Spec(image=Image(name="bb:1")), Spec(profile="harbor")):
        with pytest.raises(SandboxError, match="has no image, services or root of its own .*; use Docker"):
            await sandboxes.start(spec)
    assert not list(tmp_path.iterdir())
