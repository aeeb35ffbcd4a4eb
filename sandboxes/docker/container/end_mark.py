"""Notices where the daemon lost the end of a command's output.

The daemon reads an output for two seconds after its command's end, and throws away what is left then, without a word to
its client (seen in 20.10; later code has the same limit). A busy machine or a client that stands still is all that
it takes. So a shell prints a mark when it ends, and where the mark arrived, all before it did, too. The mark is random,
so that no output has it by chance. Whoever reads the shell's arguments could print it early; that only hides a loss.
A program of the same user can take the mark out of the pipe. That looks like a loss, so a loss must bring nobody an
advantage. Left out: losses of a command with the exit code of a signal.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

from sandboxes.docker.daemon import ContainerCommand

_PRINT = "_blackforge_end=$1; shift; trap 'until echo \"$_blackforge_end\"; do sleep 0.1; done 2>&-' EXIT\n"
"""Begins a script. A trap, as shells run it also where they cannot fork; echo is a process of its own in none of them,
as printf is in mksh. It fails where the pipe is full and a command has left it non-blocking."""
SIGNAL_CODES = range(129, 193)
"""Exit codes of signals. A shell that one has ended prints nothing."""


class EndMark:
    """Passes the output of one command on to `sink`, without the mark. Pass every piece of it to `add`."""

    def __init__(self, sink: Callable[[bytes], None]):
        self._sink = sink
        self._mark = f"\x1e{secrets.token_hex(16)}\n".encode()
        self._held = b""
        """The end of the output so far, where it may be the beginning of the mark."""
        self._came = False

    def on(self, command: ContainerCommand) -> ContainerCommand:
        """Return a command like this one, which is `/bin/sh -c SCRIPT NAME ARGUMENTS`, that prints the mark."""
        shell, option, script, name, *arguments = command.argv
        return replace(
            command, argv=(shell, option, _PRINT + script, name, self._mark.decode().strip("\n"), *arguments)
        )

    def add(self, piece: bytes) -> None:
        """Pass a piece on, but for what may belong to the mark."""
        held = self._held + piece
        rest = held.replace(self._mark, b"")  # what a process in the background prints may come behind it
        self._came = self._came or len(rest) < len(held)
        begin = rest.rfind(self._mark[:1], max(0, len(rest) - len(self._mark) + 1))
        if begin < 0 or not self._mark.startswith(rest[begin:]):
            begin = len(rest)
        self._held = rest[begin:]
        if passed := rest[:begin]:
            self._sink(passed)

    def end(self, exit_code: int) -> bool:
        """Pass the rest on, once the command has ended. Return whether the end of its output was lost."""
        if self._held:
            self._sink(self._held)
            self._held = b""
        return not self._came and exit_code not in SIGNAL_CODES
