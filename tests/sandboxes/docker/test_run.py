"""Commands in containers: how they end, what is kept of what they write, and that nothing survives a limit."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Image, Limits, Result, SandboxError
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.processes import COMMAND, OOM_KILLS, only_main
from sandboxes.docker.container.sandbox import LONGEST_COMMAND, DockerSandbox
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import KIND, PID
from tests.daemons import said
from tests.sandboxes.docker.conftest import SMALL, says

BOMB = "while True:\n  try: os.fork()\n  except Exception: pass"
DAEMONS = "(setsid sleep 300 >/dev/null 2>&1 &) ; sleep 300 >/dev/null 2>&1 & "
SLEEPERS = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null | grep -c '^sleep 300' || true"


@pytest.fixture(params=["deb:py", "bb:1"])
async def either(request: pytest.FixtureRequest, sandboxes: DockerSandboxes) -> AsyncIterator[DockerSandbox]:
    """A strict sandbox of Debian, and one of busybox alone."""
    sandbox = await sandboxes.start(replace(SMALL, image=Image(name=request.param)))
    yield sandbox
    await sandbox.stop()


async def let_go(sandbox: DockerSandbox) -> None:
    """Make the file `go`, and return four seconds after the end of all commands that wait for it.

    By a connection of its own: on a busy machine what the sandbox's one says of the file comes after the commands' end.
    """
    daemon = await DockerDaemon.open(sandbox.daemon.address)
    assert await daemon.execute(sandbox.container, sandbox.command(("touch", "go"), "agent", {}), print) == 0
    container = daemon.container(sandbox.container)
    while any("-e go" in args for _, args in (await container.top(ps_args="-eo pid,args"))["Processes"]):
        await asyncio.sleep(0.1)
    await asyncio.sleep(4)
    await daemon.close()


async def ends(sandbox: DockerSandbox, command: str, **limits: float) -> Result:
    return await sandbox.run(command, Limits(**{"seconds": 120} | limits), {})  # type: ignore[arg-type]


async def test_a_command_has_its_exit_code_environment_and_both_outputs_in_order(either: DockerSandbox) -> None:
    result = await either.run("echo $A; echo two >&2; echo three; exit 7", Limits(), {"A": "one"})
    assert (result.ended, result.exit_code, result.output) == ("exit", 7, "one\ntwo\nthree\n")
    assert (await ends(either, "kill -9 $$")).exit_code == 137
    assert (await ends(either, "no-such-command")).exit_code == 127


async def test_output_is_passed_on_as_it_comes_and_bounded(strict: DockerSandbox) -> None:
    pieces: list[bytes] = []
    flood = "echo first; head -c 50000000 /dev/zero; echo; echo last"
    result = await strict.run(flood, Limits(output_bytes=2000), {}, on_output=pieces.append)
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert sum(map(len, pieces)) == 50_000_012 and result.dropped == 50_000_012 - 2000

    seen = asyncio.Event()
    slow = strict.run("echo now; sleep 300", Limits(), {}, on_output=lambda piece: seen.set())
    running = asyncio.create_task(slow)
    await asyncio.wait_for(seen.wait(), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await says(strict, SLEEPERS) == "0"


FILL = """
import fcntl, os, sys, termios, time

def waiting():
    return int.from_bytes(fcntl.ioctl(1, termios.FIONREAD, bytes(4)), sys.byteorder)

size, since = 0, time.monotonic()
while time.monotonic() < since + 3:
    if waiting() < 8192:
        size, since = size + os.write(1, bytes(4096)), time.monotonic()
    else:
        time.sleep(0.01)
open(sys.argv[1], "w").write(str(size))
"""
"""Writes until nobody takes any of it for three seconds, whatever the buffers up to the client hold, and leaves room
for the mark."""


async def test_output_whose_end_the_daemon_loses_is_not_taken_for_whole(strict: DockerSandbox) -> None:
    """It keeps an output for two seconds after its command's end. A right case was once wrong by this."""
    await strict.write("fill.py", FILL)
    commands = ["python3 fill.py size", "head -c 100000 /dev/zero; echo 100000 >size"] * 2
    begun: set[int] = set()

    async def prints(number: int, command: str) -> Result:
        waiting = "echo; while [ ! -e go ]; do sleep 0.1; done"
        limits = Limits(output_bytes=1 << 24)
        return await strict.run(f"{waiting}; {command}{number}", limits, {}, on_output=lambda piece: begun.add(number))

    running = [asyncio.create_task(prints(number, command)) for number, command in enumerate(commands)]
    while len(begun) < len(commands):
        await asyncio.sleep(0.05)
    with ThreadPoolExecutor() as threads:  # while nobody reads
        threads.submit(asyncio.run, let_go(strict)).result()
    results = await asyncio.gather(*running)
    sizes = [int(await says(strict, f"cat size{number}")) for number in range(len(commands))]
    lost = [result.output.count("\0") < size for result, size in zip(results, sizes, strict=True)]
    assert lost == [result.cut for result in results]
    assert True in lost[::2] and True not in lost[1::2]
    for result in results:
        assert result.exit_code == 0 and result.output.endswith("[the end of this output was lost]\n") == result.cut


async def test_what_a_command_leaves_behind_may_print_on_and_nobody_sees_the_mark(either: DockerSandbox) -> None:
    result = await ends(either, "(sleep 0.5; echo late) & echo early")
    assert (result.output, result.cut) == ("early\nlate\n", False)
    result = await ends(either, "trap '' EXIT; kill -9 $PPID; sleep 1")
    assert (result.ended, result.exit_code, result.output, result.cut) == ("exit", 137, "", False)


async def test_the_shell_around_a_command_neither_shows_it_nor_speaks_nor_dies_with_it(either: DockerSandbox) -> None:
    """So a verdict by `pgrep -f SERVER` finds no server in the words of the verifier's own command."""
    shown = "echo sought; tr '\\0' ' ' </proc/$PPID/cmdline | grep -c sought || :"
    assert await says(either, shown) == "sought\n0"
    result = await ends(either, "kill -9 $$")
    assert (result.ended, result.exit_code, result.output) == ("exit", 137, "")
    result = await ends(either, f"echo ${COMMAND}; trap '' TERM; kill 0; exit 4")
    assert (result.ended, result.exit_code, result.output) == ("exit", 4, "\n")


FLOOD = """
import os

def full(piece, most):
    try:
        for _ in range(most):
            os.write(1, piece)
    except BlockingIOError:
        return True

os.set_blocking(1, False)
any(full(b"x" * 4096, 1 << 20) and full(b"x", 4096) for _ in range(100))
"""


async def test_the_end_of_what_fills_a_pipe_that_does_not_block_comes(strict: DockerSandbox) -> None:
    await strict.write("flood.py", FLOOD)
    for _ in range(10):
        result = await ends(strict, "python3 flood.py")
        assert (result.exit_code, result.cut) == (0, False)


@pytest.mark.parametrize("last", ["oom_kill 3", "oom_kill 3\noom_group_kill 0"])
def test_kills_for_lack_of_memory_are_counted_whatever_the_kernel_lists_last(tmp_path: Path, last: str) -> None:
    events = tmp_path / "memory.events"
    events.write_text(f"low 0\noom 3\n{last}\n")
    script = OOM_KILLS.replace("/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control", str(events))
    counted = subprocess.run(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert (counted.returncode, counted.stdout) == (0, "3\n")


async def test_a_time_limit_ends_the_whole_tree_with_daemons_that_have_fled(either: DockerSandbox) -> None:
    result = await ends(either, DAEMONS + "sleep 300", seconds=1)
    assert (result.ended, result.exit_code) == ("timeout", -9)
    assert await says(either, SLEEPERS) == "0"


async def test_daemons_live_until_they_are_ended_except_those_that_are_kept(either: DockerSandbox) -> None:
    await says(either, "(setsid sleep 300 >/dev/null 2>&1 &)")
    await either.keep_processes()
    await says(either, DAEMONS)
    assert await says(either, SLEEPERS) == "3"
    assert await either.end_processes() == 2
    assert await says(either, SLEEPERS) == "1"
    assert await either.end_processes() == 0


async def test_a_name_that_imitates_the_process_table_saves_nobody(strict: DockerSandbox) -> None:
    disguise = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'x) S 1 1 1\\n1 (') ; time.sleep(300)"
    await says(strict, f'(setsid python3 -c "{disguise}" >/dev/null 2>&1 &); sleep 1')
    assert await strict.end_processes() == 1


async def test_no_more_processes_are_had_than_the_limit_says(strict: DockerSandbox) -> None:
    forks = "import os, time\ntry:\n  while os.fork(): pass\n  time.sleep(300)\nexcept OSError: print('refused')"
    assert await says(strict, f'python3 -c "{forks}" 2>/dev/null') == "refused"
    assert 50 < await strict.end_processes() < 64


async def test_a_fork_bomb_is_ended(sandboxes: DockerSandboxes) -> None:
    sandbox = await sandboxes.start(replace(SMALL, pids=32))
    result = await ends(sandbox, f'python3 -c "import os\n{BOMB}"', seconds=2)
    assert result.ended == "timeout", result
    assert int(await says(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 10
    assert await sandbox.end_processes() == 0
    await sandbox.stop()


@pytest.mark.parametrize("printed", ["oom_kill x", "oom_kill"])
async def test_a_count_of_kills_that_the_agent_forges_is_no_error(harbor: DockerSandbox, printed: str) -> None:
    """An agent that is root replaces what reads the count: an error of ours would get it another try."""
    forged = await ends(harbor, f"printf '#!/bin/sh\necho {printed}\n' > /bin/cat; kill -9 $$")
    assert (forged.ended, forged.exit_code) == ("exit", 137)


async def test_a_memory_hog_is_told_from_somebody_elses_sigkill(strict: DockerSandbox) -> None:
    hog = "python3 -c 'x = bytearray(600 << 20)'"
    assert (await ends(strict, f"exec {hog}")).ended == "memory"
    assert (await ends(strict, "kill -9 $$")).ended == "exit"


async def test_a_cpu_limit_counts_the_whole_tree(strict: DockerSandbox) -> None:
    spin = "sh -c 'while :; do :; done' & "
    result = await ends(strict, f"{spin}{spin}wait", seconds=100, cpu_seconds=1)
    assert result.ended == "cpu"
    assert (await ends(strict, "true", cpu_seconds=60)).ended == "exit"


async def test_a_command_that_cannot_be_started_is_told(strict: DockerSandbox) -> None:
    longest = LONGEST_COMMAND - len(": ") - 1  # Linux counts the NUL at its end
    assert (await ends(strict, ": " + "x" * longest)).exit_code == 0
    with pytest.raises(SandboxError, match="put long text in files"):
        await ends(strict, ": " + "x" * (longest + 1))


async def test_a_root_who_ends_the_main_process_has_ended_its_sandbox(harbor: DockerSandbox) -> None:
    result = await ends(harbor, "kill -9 -1; sleep 300", seconds=60)
    assert (result.ended, result.exit_code) == ("exit", 137)
    with pytest.raises(SandboxError, match="is not running"):
        await ends(harbor, "true")


async def test_a_sandbox_that_is_gone_is_told_and_stopping_it_again_is_fine(sandboxes: DockerSandboxes) -> None:
    sandbox = await sandboxes.start(SMALL)
    await sandbox.stop()
    await sandbox.stop()
    with pytest.raises(SandboxError, match="No such container"):
        await ends(sandbox, "true")
    assert await sandbox.end_processes() == 0


async def test_a_start_that_is_given_up_twice_leaves_nothing(docker_daemon: str) -> None:
    mine = ["ps", "--all", "--quiet", f"--filter=label={PID}={os.getpid()}", f"--filter=label={KIND}=sandbox"]
    opened = await DockerSandboxes.open(Options(address=docker_daemon, run="test"))
    starting = asyncio.create_task(opened.start(replace(SMALL, image=Image(name="bb:1"))))
    async with asyncio.timeout(120):
        while not said(*mine):  # which holds the start up meanwhile
            await asyncio.sleep(0.01)
    for _ in range(2):
        starting.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await opened.close()
    assert said(*mine) == ""


async def test_a_look_from_outside_tells_whether_anything_runs_beside_the_main_process(strict: DockerSandbox) -> None:
    assert await strict.alone()
    await says(strict, "setsid sleep 637 >/dev/null 2>&1 &")
    assert not await strict.alone()
    assert await strict.end_processes() == 1 and await strict.alone()


@pytest.mark.parametrize(
    ("processes", "alone"),
    [
        ([(50, 9)], True),
        ([(50, 9), (51, 50), (52, 51), (53, 52)], True),
        ([(50, 9), (51, 50), (52, 51), (60, 50)], False),  # adopted by the first process
        ([(50, 9), (51, 50), (60, 9)], False),  # a command that still runs
        ([], False),
    ],
)
def test_only_the_main_process_and_what_it_started_counts_as_alone(
    processes: list[tuple[int, int]], alone: bool
) -> None:
    assert only_main(processes) is alone
