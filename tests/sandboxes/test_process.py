"""Sandboxes without Docker, with real processes: their limits, their files, and that nothing survives them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxError, Spec
from sandboxes.local import bubblewrap, memory_group
from sandboxes.local.process import ProcessSandbox, ProcessSandboxes
from sandboxes.local.processes import Process, processes_of, start_of, table
from tests.conftest import need

PYTHON = os.path.realpath(sys.executable)


@pytest.fixture(params=["process", "bubblewrap"])
def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> ProcessSandboxes:
    if request.param == "process":
        return ProcessSandboxes(tmp_path / "sandboxes")
    need("bubblewrap (apt-get install bubblewrap)", not bubblewrap.why_not())
    return bubblewrap.BubblewrapSandboxes(tmp_path / "sandboxes")


def spec_for(sandboxes: ProcessSandboxes, memory_mb: int = 4096) -> Spec:
    """Without a proxy: what is only separated cannot be kept from the network, and says so."""
    return Spec(network="none" if sandboxes.kind == "bubblewrap" else "model", memory_mb=memory_mb)


@pytest.fixture
async def sandbox(sandboxes: ProcessSandboxes) -> AsyncIterator[ProcessSandbox]:
    started = await sandboxes.start(spec_for(sandboxes))
    yield started
    await started.stop()


async def daemon(sandbox: ProcessSandbox) -> str:
    """A command that leaves a process with its own session, a dead parent and another title."""
    await sandbox.write("daemon.sh", "setsid sh -c 'echo up > up; sleep 600' >/dev/null 2>&1 &\n")
    return "sh daemon.sh; while ! test -e up; do sleep 0.01; done"


async def test_a_command_has_an_exit_code_both_outputs_and_a_clean_environment(
    sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the owner's own")
    result = await sandbox.run("echo $HOME; echo $GIVEN >&2; env | grep -c OPENAI; exit 3", Limits(), {"GIVEN": "x"})
    assert (result.ended, result.exit_code) == ("exit", 3)
    assert result.output == f"{sandbox.home}\nx\n0\n"


async def test_a_timeout_ends_daemons_too(sandbox: ProcessSandbox) -> None:
    result = await sandbox.run((await daemon(sandbox)) + "; sleep 600", Limits(seconds=1), {})
    assert result.ended == "timeout" and result.seconds < 300
    assert processes_of(table(), sandbox.id) == []


async def until(reached: Callable[[], bool], seconds: float = 60) -> None:
    """A process is in the table without its mark for the moment of its exec, so a look may come too early."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_what_a_command_leaves_running_stays_until_it_is_ended(sandbox: ProcessSandbox) -> None:
    began = time.monotonic()
    result = await sandbox.run((await daemon(sandbox)), Limits(), {})
    assert result.ended == "exit" and time.monotonic() - began < 300
    own = 2 if sandbox.own_root else 0  # bubblewrap's, which do not count
    await until(lambda: len(processes_of(table(), sandbox.id)) == own + 2)
    assert await sandbox.end_processes() == 2
    assert processes_of(table(), sandbox.id) == []


async def test_a_process_without_the_mark_is_found_by_its_session(sandbox: ProcessSandbox) -> None:
    await sandbox.run("env -i sleep 600 >/dev/null 2>&1 &", Limits(), {})
    assert await sandbox.end_processes() == 1


async def test_the_memory_limit_counts_all_processes(sandboxes: ProcessSandboxes) -> None:
    sandbox = await sandboxes.start(spec_for(sandboxes, memory_mb=100))
    hog = f"{PYTHON} -I -S -c 'import time; x = bytearray(60 << 20); time.sleep(600)'"
    result = await sandbox.run(f"{hog} & {hog}", Limits(seconds=120), {})
    assert result.ended == "memory" and processes_of(table(), sandbox.id) == []
    await sandbox.stop()


async def test_memory_that_ran_out_between_two_commands_ends_neither(sandboxes: ProcessSandboxes) -> None:
    need("a control group for memory (cgroup version 1 or 2, as root)", not memory_group.why_not())
    sandbox = await sandboxes.start(spec_for(sandboxes, memory_mb=100))
    hog = f"{PYTHON} -I -S -c 'bytearray(200 << 20)'"
    waiting = f'setsid sh -c "until test -e go; do sleep 0.05; done; {hog}" >/dev/null 2>&1 &'
    assert (await sandbox.run(waiting, Limits(seconds=60), {})).ended == "exit"
    await sandbox.write("go", "")
    assert sandbox.group is not None
    while not sandbox.group.kills():
        await asyncio.sleep(0.05)
    assert (await sandbox.run("true", Limits(seconds=60), {})).ended == "exit"
    await sandbox.stop()


async def test_the_memory_limit_counts_memory_that_belongs_to_no_process(sandboxes: ProcessSandboxes) -> None:
    need("a control group for memory (cgroup version 1 or 2, as root)", not memory_group.why_not())
    sandbox = await sandboxes.start(spec_for(sandboxes, memory_mb=100))
    hog = (
        'import os, time; f = os.memfd_create("x"); [os.write(f, bytes(1 << 20)) for _ in range(200)]; time.sleep(600)'
    )
    result = await sandbox.run(f"{PYTHON} -I -S -c '{hog}'", Limits(seconds=120), {})
    assert result.ended == "memory" and processes_of(table(), sandbox.id) == []
    result = await sandbox.run(
        "head -c 300000000 /dev/zero >file; rm file; echo files on disk do not count", Limits(), {}
    )
    assert (result.ended, result.exit_code) == ("exit", 0)
    assert sandbox.group is not None and sandbox.group.directory.exists()
    await sandbox.stop()
    assert not sandbox.group.directory.exists()


async def test_the_cpu_limit_ends_a_busy_loop(sandbox: ProcessSandbox) -> None:
    spin = "import time\nwhile time.process_time() < 1: pass"
    assert (await sandbox.run(f"{PYTHON} -I -S -c '{spin}'", Limits(seconds=120), {})).exit_code == 0
    long = Limits(seconds=120, cpu_seconds=0.5)
    assert (await sandbox.run("sleep 0.6; echo what ran before does not count", long, {})).ended == "exit"
    assert (await sandbox.run("while :; do :; done", long, {})).ended == "cpu"


async def test_output_is_bounded_and_says_what_is_missing(sandbox: ProcessSandbox) -> None:
    command = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"
    result = await sandbox.run(command, Limits(output_bytes=1000), {})
    assert result.output.startswith("first\nxxx") and result.output.endswith("x\nlast\n")
    assert result.dropped == 3000000 + 12 - 1000 and f"[{result.dropped} bytes dropped]" in result.output


async def test_a_cancelled_command_leaves_nothing(sandbox: ProcessSandbox) -> None:
    running = asyncio.create_task(sandbox.run((await daemon(sandbox)) + "; sleep 600", Limits(), {}))
    while await sandbox.read("up") is None:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert processes_of(table(), sandbox.id) == []


async def test_stop_removes_everything_and_may_be_repeated(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    await sandbox.run("mkdir locked; touch locked/file; chmod 000 locked", Limits(), {})
    await sandbox.stop()
    await sandbox.stop()
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_files_go_in_and_out(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    await sandbox.write("a/b.txt", "text")
    await sandbox.write("~/.config/c", b"\0")
    assert (await sandbox.read("a/b.txt"), await sandbox.read("~/.config/c"), await sandbox.read("missing")) == (
        b"text",
        b"\0",
        None,
    )
    await sandbox.get("a", tmp_path / "out")
    await sandbox.put(tmp_path / "out", "back/again")
    assert await sandbox.read("back/again/b.txt", limit=2) == b"te"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "~/../x", "", "~/", "a\0b", "/work/../x", "/tmp/../etc/x"]
)
async def test_no_path_leads_outside(sandbox: ProcessSandbox, path: str) -> None:
    with pytest.raises(SandboxError, match="a path must (lead into the sandbox|be below one of)"):
        await sandbox.write(path, "x")


async def test_write_replaces_what_stands_in_the_way(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    await sandbox.run(f"ln -s {tmp_path}/outside tests; mkfifo pipe; mkdir -p dir/sub; touch file", Limits(), {})
    for path in ("tests/check.sh", "pipe", "dir", "file/below"):
        await sandbox.write(path, "ours")
        assert await sandbox.read(path) == b"ours"
    assert list((tmp_path / "outside").iterdir()) == []


async def test_a_deep_tree_stands_in_nobodys_way(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    nest = f'{PYTHON} -I -S -c \'import os\nfor i in range(1100): os.mkdir("d"); os.chdir("d")\''
    assert (await sandbox.run(f"mkdir tests; cd tests; {nest}", Limits(), {})).exit_code == 0
    with pytest.raises(SandboxError, match="cannot be copied out .*deeper than 256 directories"):
        await sandbox.get(".", tmp_path / "out")
    await sandbox.write("tests", "ours")
    assert await sandbox.read("tests") == b"ours"


async def test_reading_a_fifo_or_a_link_gives_nothing(sandbox: ProcessSandbox) -> None:
    await sandbox.run("mkfifo pipe; ln -s /etc/passwd link; mkdir dir", Limits(), {})
    assert [await sandbox.read(path) for path in ("pipe", "link", "dir")] == [None, None, None]


async def test_a_root_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="cannot be created"):
        await ProcessSandboxes(tmp_path / "file" / "x").start()


async def test_a_stop_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    sandbox = await ProcessSandboxes(tmp_path / "sandboxes").start()
    await sandbox.run("setsid sleep 638 & mkdir made", Limits(), {})
    stopping = asyncio.create_task(sandbox.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert not [process for process in table() if process.sandbox == sandbox.id]


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=(pytest.mark.long, pytest.mark.timeout(900)))])
async def test_a_process_that_is_just_exchanged_for_another_program_is_found(tmp_path: Path, times: int) -> None:
    """`setsid` leaves the session, then execve takes the environment away for a moment: 1 in 200 was missed there."""
    sandboxes = ProcessSandboxes(tmp_path)
    for _ in range(times):
        sandbox = await sandboxes.start()
        await sandbox.run("(setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 &)", Limits(), {})
        await sandbox.end_processes()
        await asyncio.sleep(0.02)  # what was missed has begun by now
        left = processes_of(table(), sandbox.id)
        await sandbox.stop()
        for process in left:
            os.kill(process.pid, signal.SIGKILL)
        assert left == []


async def test_a_child_that_is_forked_while_its_parent_is_killed_is_found_within_its_execve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was missed in 1 of 1000 sandboxes, under load."""
    sandbox = await ProcessSandboxes(tmp_path).start()
    await sandbox.run("true", Limits(), {})
    parent, child = (Process(pid, 1, pid, pid, 0.0, 0, sandbox.id) for pid in (101, 102))
    looks = iter([([parent], []), ([], [replace(child, sandbox="", starting=True)]), ([child], []), ([], [])])
    monkeypatch.setattr("sandboxes.local.process.kill", lambda *_: next(looks))
    assert await sandbox.end_processes() == 2 and list(looks) == []
    await sandbox.stop()


async def test_a_session_that_has_got_the_number_of_an_earlier_one_is_left_alone(tmp_path: Path) -> None:
    """Numbers of processes come again after 32,768 others: minutes, on a busy machine."""
    sandbox = await ProcessSandboxes(tmp_path).start()
    await sandbox.run("setsid sleep 600 >/dev/null 2>&1 &", Limits(), {})
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as another:
        started = start_of(another.pid)
        assert started is not None
        sandbox.sessions = {another.pid: started - 1}  # as if the sandbox's command had had this number before
        try:
            assert await sandbox.end_processes() == 1 and another.poll() is None
        finally:
            another.kill()
    assert processes_of(table(), sandbox.id) == []
    await sandbox.stop()


@pytest.mark.parametrize("looks", [150, 300])
async def test_a_killed_process_that_does_not_come_to_its_end_for_seconds_survives_only_after_many_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """On a machine with ten times as many processes at work as cores, the end of a killed one took seven seconds."""
    sandbox = await ProcessSandboxes(tmp_path).start()
    await sandbox.run("true", Limits(), {})
    dying = Process(101, 1, 101, 101, 0.0, 0, sandbox.id)
    seen: Iterator[tuple[list[Process], list[Process]]] = iter([*[([dying], [])] * looks, ([], [])])
    monkeypatch.setattr("sandboxes.local.process.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("sandboxes.local.process.kill", lambda *_: next(seen, ([], [])))
    if looks == 150:
        assert await sandbox.end_processes() == 1
    else:
        with pytest.raises(SandboxError, match="1 processes of sandbox .* survive SIGKILL, the first is 101"):
            await sandbox.end_processes()
    monkeypatch.undo()
    await sandbox.stop()


def test_processes_that_will_show_an_environment_are_told_from_those_without_any() -> None:
    empty = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        shown: list[Process] = []
        while not shown:
            shown = [process for process in table() if process.pid == empty.pid and not process.starting]
        assert shown[0].sandbox == ""
    finally:
        empty.kill()
        empty.wait()
    assert not [process for process in table() if process.starting and process.parent == 2]  # kernel threads
