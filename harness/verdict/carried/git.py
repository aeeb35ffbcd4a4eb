"""Makes git repositories that an agent leaves harmless: what they hold stays, what git would run or obey does not.

Of a configuration that the agent changed, only the variables of SAFE stay. Hooks, `info/attributes` and directories
that stand for another repository (`commondir`) are left out. Attributes in the working tree stay: without the
configuration of a filter or a driver they name nothing. A repository is recognised by what lies in it, so a directory
that only looks like one (a bare repository in the working directory) is treated alike.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from harness.environment.archive import Entry

SAFE = re.compile(
    r"core\.(?:repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|symlinks|autocrlf|eol)"
    r"|(?:user|author|committer)\.(?:name|email)|init\.defaultbranch|extensions\.objectformat"
    r"|remote\.\*\.(?:url|fetch|pushurl)|branch\.\*\.(?:remote|merge|rebase)|submodule\.\*\.(?:url|active)"
    r"|pull\.(?:rebase|ff)|push\.default"
)
"""Variables that make git run nothing and read nothing outside of the repository; `*` stands for any subsection."""
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\]')
_VARIABLE = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*(?:=(.*))?")
_OBEYED = re.compile(r"(?:^|(?<=/))(?:hooks(?=/|\Z)|(?:info/attributes|config\.worktree|commondir)\Z)")


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


def obeyed(entries: Mapping[str, Entry]) -> Iterator[str]:
    """The paths in repositories that must not come from an agent."""
    found = set(repositories(entries))
    for path in entries:
        if any(_obeys(path[: match.start()], match[0], found) for match in _OBEYED.finditer(path)):
            yield path


def _obeys(directory: str, name: str, found: Collection[str]) -> bool:
    """Whether git obeys what has this name in a directory. A worktree needs its `commondir`."""
    return directory in found and not (name == "commondir" and PurePosixPath(directory).parent.name == "worktrees")


def harmless(config: str) -> str:
    """A repository's configuration without all variables that are not safe."""
    lines: list[str] = []
    kind = ""
    continued = False
    for line in config.splitlines():
        continues = line.endswith("\\")
        if heading := _SECTION.match(line):
            section = heading[1].lower()
            first, dot, _ = section.partition(".")
            kind = f"{first}.*" if dot or heading[2] is not None else first
            lines.append(f"[{section}]" if heading[2] is None else f'[{section} "{heading[2]}"]')
        elif not continued and not continues and (variable := _VARIABLE.fullmatch(line)):
            if SAFE.fullmatch(f"{kind}.{variable[1].lower()}") and "\0" not in line:
                lines.append(f"\t{variable[1]} = {(variable[2] or '').strip() or 'true'}")
        continued = continues
    return "\n".join(lines) + "\n"
