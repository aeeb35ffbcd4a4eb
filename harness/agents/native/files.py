"""Reads and edits text files by ranges of lines. Relative paths begin where the shell session is."""

from collections.abc import Callable
from pathlib import Path

from .tool import Tool, ToolFailed, parameters

MOST_LINES = 200
"""Lines that one call reads."""


class Files:
    """`directory`: says where relative paths begin."""

    def __init__(self, directory: Callable[[], Path]):
        self._directory = directory

    def tools(self) -> list[Tool]:
        return [
            Tool(
                "read_file",
                "Read lines of a file, numbered from 1.",
                parameters(path="string", first="integer", last="integer", optional=("first", "last")),
                self.read,
            ),
            Tool(
                "edit_file",
                "Replace the lines first to last of a file. last = first - 1 inserts; a new file has lines 1 to 0.",
                parameters(path="string", first="integer", last="integer", new_text="string"),
                self.edit,
            ),
        ]

    def read(self, path: str, first: int = 1, last: int | None = None) -> str:
        """The lines with their numbers."""
        lines = self._lines(path)
        end = min(len(lines), first + MOST_LINES - 1, len(lines) if last is None else last)
        if first < 1 or first > max(1, len(lines)):
            raise ToolFailed(f"{path} has {len(lines)} lines, so it cannot be read from line {first}")
        shown = [f"{number}\t{lines[number - 1]}" for number in range(first, end + 1)]
        return "\n".join([*shown, f"[lines {first} to {end} of {len(lines)}]"])

    def edit(self, path: str, first: int, last: int, new_text: str) -> str:
        """Replace these lines of the file."""
        file = self._directory() / path
        lines = self._lines(path) if file.exists() else []
        if not 1 <= first <= len(lines) + 1 or not first - 1 <= last <= len(lines):
            raise ToolFailed(f"{path} has {len(lines)} lines, so lines {first} to {last} cannot be replaced")
        new = new_text.split("\n") if new_text else []
        if new and not new[-1]:
            new.pop()  # the text ends its last line itself
        changed = [*lines[: first - 1], *new, *lines[last:]]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{line}\n" for line in changed), encoding="utf-8", newline="")
        except OSError as error:
            raise ToolFailed(f"{path} cannot be written: {error.strerror}") from None
        return f"{path} has {len(changed)} lines now"

    def _lines(self, path: str) -> list[str]:
        try:
            text = (self._directory() / path).read_bytes().decode("utf-8")
        except OSError as error:
            raise ToolFailed(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ToolFailed(f"{path} is no text in UTF-8; look at it with the shell") from None
        lines = text.split("\n")
        return lines[:-1] if not lines[-1] else lines
