"""The hosts that a command names, as far as its words show them: a line that names only this machine is no network.

Left out: hosts in variables and files, those joined to an option, aliases of ssh and git, and, beside a local host,
names without a dot.
"""

import re
from collections.abc import Iterator, Sequence

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://(?:[^\s/@'\"?#\\]*@)?(\[[^\]\s]*\]|[^\s:/'\"?#\\)\]},;]*)", re.IGNORECASE)
_LOCAL = re.compile(r"localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1\]", re.IGNORECASE)
_NAME = re.compile(rf"{_LOCAL.pattern}|[\w-]+(?:\.[\w-]+)+\.?", re.IGNORECASE)
_IN_CODE = re.compile(r"\(\s*['\"]([\w.-]+)['\"]\s*,\s*\d|Connection\(\s*['\"]([\w.-]+)")
"""How Python code names a host without a URL: `("HOST", PORT)`, `HTTPConnection("HOST")`."""
_FILES = {
    "curl": re.compile(
        r"-[A-Za-z]*[bcdeuwmoAFHKTX]|--(?:output|upload-file|header|data[\w-]*|request|user|form|cert|key)"
    ),
    "wget": re.compile(r"-[A-Za-z]*[OoaiP]|--(?:output-document|output-file|post-file)"),
    "ssh": re.compile(r"-[A-Za-z]*[iFElopmc]"),
}
"""Options whose values are files or texts and no hosts, by program."""
_BARE = {*_FILES, "http", "https", "aria2c", "lynx", "sftp", "nc", "ncat", "netcat", "telnet", "ftp", "ping",
         "nslookup", "dig", "host"}  # fmt: skip
"""Programs that take the bare name of a host; for the others it needs a colon: `HOST:PATH`."""


def only_local(line: str, words: Sequence[str]) -> bool:
    """Whether a line names a host, and none but this machine. `words`: those of its command; empty: it has none."""
    hosts = [*(match[1] for match in _URL.finditer(line)), *_named(words)]
    return bool(hosts) and all(_LOCAL.fullmatch(host) for host in hosts)


def _named(words: Sequence[str]) -> Iterator[str]:
    """The hosts that a command's words name without a URL."""
    program = words[0].rpartition("/")[2] if words else ""
    files, before = _FILES.get(program), ""
    for word in words[1:]:
        is_file, before = bool(files and files.fullmatch(before)), word
        if program.startswith("python"):
            yield from (match[1] or match[2] for match in _IN_CODE.finditer(word))
        elif "://" not in word and not is_file and not word.startswith("-"):
            place = re.split("[/?#]", word.replace("[::1]", "localhost"), maxsplit=1)[0].rpartition("@")[2]
            if program in _BARE or ":" in place:
                yield from (part for part in place.split(":") if _NAME.fullmatch(part))
