"""What every command has: `--version`, and `--print-completion` for the shell.

The version stands in pyproject.toml alone; here it comes from what is installed. sandboxes/cli.py has its own, as that
package imports none of the others.
"""

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import shtab


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
