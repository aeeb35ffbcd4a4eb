"""Makes git repositories that an agent leaves harmless: what they hold stays, what git would run or obey does not.

Of a configuration that the agent changed, only the variables of SAFE stay. Hooks, `info/attributes` and directories
that stand for another repository (`commondir`) are left out. Attributes in the working tree stay: without the
configuration of a filter or a driver they name nothing. A repository is recognised by what lies in it, so a directory
that only looks like one (a bare repository in the working directory) is treated alike.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from harness.environment.archive import Entry

SAFE = re.compile(
    r"core\.(?:repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|symlinks|autocrlf|eol)"
    r"|(?:user|author|committer)\.(?:name|email)|init\.defaultbranch|extensions\.objectformat"
    r"|remote\..*\.(?:url|fetch|pushurl)|branch\..*\.(?:remote|merge|rebase)|submodule\..*\.(?:url|active)"
    r"|pull\.(?:rebase|ff)|push\.default",
    re.DOTALL,
)
"""Variables that make git run nothing and read nothing outside of the repository."""
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\]')
_VARIABLE = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*(?:=\s*(.*?))?\s*")


def repositories(entries: Mapping[str, Entry]) -> list[str]:
    """The directories that git may take for a repository, or for the part of one that a `commondir` names.

    Of that part git asks only for `objects` and `refs`, and obeys its configuration.
    """
    heads, shared = (_beside(name, entries) for name in ("HEAD", "objects"))
    own = {at for at in heads if f"{at}commondir" in entries or at.endswith(".git/")}
    return sorted(own | {at for at in shared if f"{at}refs" in entries})


def _beside(name: str, entries: Iterable[str]) -> set[str]:
    """The directories, with a slash at the end, that hold something of this name."""
    return {path[: -len(name)] for path in entries if path == name or path.endswith(f"/{name}")}


def obeyed(repository: str, entries: Iterable[str]) -> Iterator[str]:
    """The paths in a repository that must not come from an agent."""
    worktree = PurePosixPath(repository).parent.name == "worktrees"
    single = {"info/attributes", "config.worktree", *(() if worktree else ("commondir",))}
    for path in entries:
        rest = path[len(repository) :] if path.startswith(repository) else ""
        if rest in single or rest == "hooks" or rest.startswith("hooks/"):
            yield path


def harmless(config: str) -> str:
    """A repository's configuration without all variables that are not safe."""
    lines: list[str] = []
    section = name = ""
    continued = False
    for line in config.splitlines():
        continues = line.endswith("\\")
        if heading := _SECTION.match(line):
            section = heading[1].lower()
            name = section if heading[2] is None else f"{section}.{heading[2]}"
            lines.append(f"[{section}]" if heading[2] is None else f'[{section} "{heading[2]}"]')
        elif not continued and not continues and (variable := _VARIABLE.fullmatch(line)):
            if SAFE.fullmatch(f"{name}.{variable[1].lower()}") and "\0" not in line:
                lines.append(f"\t{variable[1]} = {variable[2] or 'true'}")
        continued = continues
    return "\n".join(lines) + "\n"
