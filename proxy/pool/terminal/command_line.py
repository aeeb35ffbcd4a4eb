"""What every command has: `--version`, `--print-completion` for the shell, the examples of its verbs in its help.

The version stands in pyproject.toml alone; here it comes from what is installed. sandboxes/cli.py has its own of all
this, as that package imports none of the others.
"""

import argparse
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import shtab

from proxy.pool.terminal.errors import page_of

EXAMPLE = "example: "
"""A verb's epilog begins with it."""
MODULES = {"continue": "end_pause"}
"""Verbs whose module in `commands` has another name: `continue` is a word of Python's."""


class CommandParser(argparse.ArgumentParser):
    """A command; its verbs become parsers of the same class. Errors name the page that explains the verb."""

    def format_help(self) -> str:
        """Return the help, which ends with the examples of all verbs, or with the verb's own."""
        lines = [f"  {(verb.epilog or '').removeprefix(EXAMPLE)}" for _, verb in verbs(self, "") if verb is not self]
        return super().format_help() + "\n".join(["\nexamples:", *lines, ""] if lines else [])

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what the verb does not know here: argparse leaves that to the command, which shows its own usage."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error with its page, and exit with 2."""
        command, *words = self.prog.split()
        page = page_of(".".join([command, "commands", *(MODULES.get(word, word) for word in words)]))
        super().error(message if page is None else f"{message} (see docs/{page})")


def verbs(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return the words that lead to each verb, with its parser. A parser without verbs is its own only one."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield words, parser
    for action in inner:
        for name, sub in action.choices.items():
            yield from verbs(sub, f"{words} {name}")


def verbs_to_load(known: Collection[str], words: Sequence[str]) -> Collection[str]:
    """Return the verb that the words begin with, or all that are known: help, for one, names all of them.

    A command starts faster without what only its other verbs import.
    """
    return words[:1] if words and words[0] in known else known


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add `--version` and `--print-completion SHELL` to a command."""
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    shtab.add_argument_to(parser, help="print a script that completes this command's words in a shell")


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            found = version("blackforge")
        except PackageNotFoundError:
            parser.exit(2, "error: blackforge is not installed in this environment; install it with: make install\n")
        print(f"blackforge {found}")
        parser.exit(0)
