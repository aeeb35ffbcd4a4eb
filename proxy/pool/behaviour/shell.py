"""Shell scripts as simple commands: their words, and the files that they write. Nothing is run or expanded.

Left out: functions, loops' variables, and what a substitution inside double quotes does.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

LONGEST = 20_000
"""Characters of a script that are read."""
MOST_HEREDOCS = 50
"""Here-documents of a script that are separated from its commands. If it has more, none is."""
DEEPEST = 3
"""Levels of `bash -c`, and of `python -m`, that are opened."""
SUBCOMMANDS = {"git", "pip", "pip3", "npm", "yarn", "pnpm", "docker", "cargo", "go", "apt", "apt-get", "conda", "uv"}
"""Programs whose first word says what they do."""
WRAPPERS = {"sudo", "env", "time", "nohup", "command", "exec", "nice", "stdbuf", "xargs", "builtin", "timeout", "then",
            "do", "else", "if", "while", "until", "!", "{"}  # fmt: skip
"""Words before a command that do not change which it is."""
MARKS = {"for", "done", "fi", "case", "esac", "}"}
"""Words that are no commands."""
SHELLS = {"bash", "sh", "zsh", "dash"}
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w{1,40})(?!\w)\1([^\n]*)\n(.*?)\n[ \t]*\2(?=\s|;|\)|$)", re.DOTALL)
"""The word is bounded and taken whole: for each part of it, the rest of the script would be searched for its end."""
_PIECE = re.compile(
    r"""(?P<same>\d?>&\d|<&\d)|(?P<write>&>>?|\d?>>?\|?)|(?P<read><{1,3})|(?P<end>&&|\|\||[;|&\n()]|`)"""
    r"""|'(?P<plain>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<comment>(?<!\S)\#[^\n]*)|\\(?P<escaped>.)"""
    r"""|(?P<space>[^\S\n]+)"""
    r"""|(?P<bare>[^\s;|&()<>'"\\`]+)|(?P<other>.)""",
    re.DOTALL,
)
_PYTHON = re.compile(r"python[\d.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Command:
    """One simple command."""

    words: tuple[str, ...]
    writes: tuple[str, ...] = ()
    """The files that its output is redirected to."""
    text: str = ""
    """The text of a here-document that it reads."""
    after: str = ""
    """The operator before it: `;` (or a new line, or `&`), `&&`, `||`, `|`. Empty: it is the first one."""

    @property
    def program(self) -> str:
        """Its name without its directory."""
        return _program(self.words)

    @property
    def head(self) -> str:
        """Its name with the word that says what it does: `git log`; the module for `python -m`."""
        words = self.words
        for _ in range(DEEPEST):  # a module may be one that runs a module
            if not _PYTHON.fullmatch(_program(words)) or "-m" not in words[:-1]:
                break
            words = words[words.index("-m") + 1 :]
        program = _program(words)
        arguments = [word for word in words[1:] if not word.startswith("-")] if program in SUBCOMMANDS else []
        return f"{program} {arguments[0]}" if arguments else program

    @property
    def line(self) -> str:
        """Its words in one line."""
        return " ".join(self.words)


def _program(words: tuple[str, ...]) -> str:
    return words[0].rpartition("/")[2] if words else ""


def commands(script: str, depth: int = 0) -> list[Command]:
    """Return the simple commands of a script, in order; scripts in `bash -c` are opened."""
    bodies: list[str] = []

    def without_body(match: re.Match[str]) -> str:
        bodies.append(match[4])
        return f" <<{len(bodies) - 1} {match[3]}"

    script, found = script[:LONGEST], list[Command]()
    if script.count("<<") <= MOST_HEREDOCS:
        script = _HEREDOC.sub(without_body, script)
    for command in _simple(script, bodies):
        own = _unwrapped(command)
        inner = _inner(own)
        if inner is not None and depth < DEEPEST:
            opened = [*commands(inner, depth + 1), *([Command((), own.writes)] if own.writes else [])]
            found += [replace(each, after=each.after if place else own.after) for place, each in enumerate(opened)]
        elif (own.words or own.writes) and own.program not in MARKS:
            found.append(own)
    return found


def _simple(script: str, bodies: list[str]) -> Iterator[Command]:
    words: list[str] = []
    writes: list[str] = []
    word, target, text = None, "", ""  # the word that is being read, and what a redirection does with it
    after, first = "", True
    for match in [*_PIECE.finditer(script), None]:
        kind = "end" if match is None else match.lastgroup
        if match is not None and kind in ("plain", "double", "escaped", "bare", "other"):
            if kind == "escaped" and match[kind] == "\n":
                continue
            word = (word or "") + match[kind]
            continue
        if word is not None:
            if target == "write":
                writes.append(word)
            elif target == "read":
                text = bodies[int(word)] if _is_number(word) and int(word) < len(bodies) else text
            else:
                words.append(word)
            word, target = None, ""
        if kind in ("write", "read"):
            target = kind
        elif kind == "end":
            if words or writes:
                yield Command(tuple(words), tuple(writes), text, "" if first else after or ";")
                first, after = False, ""
            if match is not None and match["end"] not in ("(", ")", "`"):
                after = after or (";" if match["end"] in ("\n", "&") else match["end"])
            words, writes, target, text = [], [], "", ""


def _is_number(word: str) -> bool:
    """Whether a word may be the number of a here-document: `isdigit` alone holds for signs that `int` refuses, too."""
    return word.isascii() and word.isdigit() and len(word) <= len(str(MOST_HEREDOCS))


def _unwrapped(command: Command) -> Command:
    """The command without assignments and wrappers before it."""
    words = list(command.words)
    while words:
        if words[0] in WRAPPERS:
            wrapper = words.pop(0)
            while words and (words[0].startswith("-") or (wrapper == "timeout" and words[0][:1].isdigit())):
                words.pop(0)
        elif _ASSIGNMENT.match(words[0]):
            words.pop(0)
        else:
            break
    return replace(command, words=tuple(words))


def _inner(command: Command) -> str | None:
    """The script that a shell is given as an argument, or as a here-document; None: it is given none."""
    if command.program == "eval":
        return " ".join(command.words[1:])
    if command.program not in SHELLS:
        return None
    flags = [i for i, word in enumerate(command.words) if re.fullmatch(r"-[a-z]*c", word)]
    if flags and flags[0] + 1 < len(command.words):
        return command.words[flags[0] + 1]
    return command.text or None
