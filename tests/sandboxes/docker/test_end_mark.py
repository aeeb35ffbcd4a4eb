"""The mark behind an output: wherever the pieces are divided, it is taken out, and nothing else is."""

import subprocess
from itertools import pairwise

import pytest

from sandboxes.docker.container.end_mark import EndMark
from sandboxes.docker.daemon import ContainerCommand


def marked(script: str, *arguments: str) -> tuple[EndMark, list[bytes], ContainerCommand]:
    pieces: list[bytes] = []
    mark = EndMark(pieces.append)
    return mark, pieces, mark.on(ContainerCommand(argv=("/bin/sh", "-c", script, "sh", *arguments), user=""))


def said_by(command: ContainerCommand) -> bytes:
    """What its shell says at its end."""
    return command.argv[4].encode() + b"\n"


@pytest.mark.parametrize("before", [b"", b"text", b"\x1e", b"\x1e\x1e0123", b"\x00" * 90])
@pytest.mark.parametrize("after", [b"", b"from the background"])
def test_the_mark_is_taken_out_wherever_the_pieces_are_divided(before: bytes, after: bytes) -> None:
    size = len(before) + 34 + len(after)
    for cuts in [*((at,) for at in range(1, size)), tuple(range(1, size)), *pairwise(range(1, size))]:
        mark, pieces, command = marked(":")
        output = before + said_by(command) + after
        for start, end in pairwise((0, *cuts, size)):
            mark.add(output[start:end])
        assert not mark.end(0) and b"".join(pieces) == before + after


def test_without_the_whole_mark_the_end_was_lost_unless_a_signal_ended_the_shell() -> None:
    """Commands that end by themselves have the codes beyond those of signals: Python has 255 for sys.exit(-1)."""
    for code, lost in ((0, True), (1, True), (128, True), (129, False), (137, False), (192, False), (255, True)):
        mark, pieces, command = marked(":")
        mark.add(b"text" + said_by(command)[:-1])
        assert mark.end(code) == lost and b"".join(pieces) == b"text" + said_by(command)[:-1]


def test_a_mark_that_comes_again_is_taken_out_again() -> None:
    """A shell whose pipe was full says it once more."""
    mark, pieces, command = marked(":")
    mark.add(b"text" + said_by(command) * 3)
    mark.add(said_by(command))
    assert not mark.end(0) and b"".join(pieces) == b"text"


@pytest.mark.parametrize("shell", ["/bin/sh", "bash", "busybox"])
def test_shells_print_it_however_they_end(shell: str) -> None:
    for script, code, said in (
        ('echo "$1 $#"; exit 3', 3, b"a b 1\n"),
        ("no-such-command 2>/dev/null", 127, b""),
        ('sh -c "kill -9 \\$\\$" 2>/dev/null', 137, b""),
        ("ulimit -u 0 2>/dev/null; exec 2>&-; . /nowhere/at/all", None, b""),
    ):
        mark, pieces, command = marked(script, "a b")
        words = [*(["busybox", "sh"] if shell == "busybox" else [shell]), *command.argv[1:]]
        ended = subprocess.run(words, stdout=subprocess.PIPE)
        mark.add(ended.stdout)
        assert code in (None, ended.returncode) and b"".join(pieces) == said and not mark.end(0)
