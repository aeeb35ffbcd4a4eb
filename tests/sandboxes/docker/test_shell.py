"""A shell that stays open across commands."""

import asyncio

from sandboxes.base import Limits
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.shell import Shell, _Reply
from sandboxes.output import Kept
from tests.sandboxes.docker.conftest import says
from tests.sandboxes.docker.test_run import either

__all__ = ["either"]
LIMITS = Limits(seconds=120)


async def test_directory_variables_and_functions_go_on(either: DockerSandbox) -> None:
    shell = Shell(either, {"TOLD": "once"})
    assert (await shell.run("cd /tmp; A=1; f() { echo $A$B$TOLD; }", LIMITS)).output == ""
    assert (await shell.run("B=2; f; pwd", LIMITS)).output == "12once\n/tmp\n"
    result = await shell.run("printf 'no line end'; echo error >&2; cat; (exit 7)", LIMITS)
    assert (result.ended, result.exit_code, result.output) == ("exit", 7, "no line enderror\n")
    assert (await shell.run("if ( then", LIMITS)).exit_code != 0
    assert (await shell.run('echo "it\'s\nfine"; f', LIMITS)).output == "it's\nfine\n12once\n"
    await shell.close()
    assert await either.end_processes() == 0


async def test_exit_and_limits_end_the_shell_and_the_next_command_opens_another(either: DockerSandbox) -> None:
    shell = Shell(either, {})
    assert (await shell.run("A=1; exit 3", LIMITS)).exit_code == 3
    assert (await shell.run("echo [$A]; A=2", LIMITS)).output == "[]\n"
    late = await shell.run("echo begun; sleep 300", Limits(seconds=2))
    assert (late.ended, late.exit_code, late.output) == ("timeout", -9, "begun\n")
    assert (await shell.run("echo [$A]", LIMITS)).output == "[]\n"
    assert await says(either, "pwd") == "/work"
    await shell.close()


async def test_the_line_that_ends_a_reply_is_found_however_it_is_cut() -> None:
    for size in range(1, 60):
        kept = Kept(1000)
        reply = _Reply(kept)
        whole = f"out\n\nput\n{reply.mark[:9]}\n{reply.mark} 12\nlater".encode()
        for start in range(0, len(whole), size):
            reply.add(whole[start : start + size])
        assert kept.text() == f"out\n\nput\n{reply.mark[:9]}"
        assert await asyncio.wait_for(reply.code, 1) == 12
