"""Makes recorded traffic publishable: every text becomes pseudo-words, everything that is structure stays.

    python -m tests.captures.scrub SOURCE_FOLDER TARGET_FOLDER

Kept: fields and their order, roles, names of tools and parameters, ids (session ids replaced by others), timing,
faults, truth labels; of texts: whether two are equal, whether one begins with the other, whether one contains a whole
reply, white space and punctuation around the words that remain, JSON with its spaces and escapes in tool arguments.
Lost on purpose: the words (each depends on all words before it and on a key that is thrown away) and most of their
number. The result is refused when four words in a row of any source text are left in it.
"""

import argparse
import gzip
import hashlib
import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.captures.recorded import rows

TEXTS = {"content", "text", "description", "output", "reasoning_content", "reasoning", "instructions", "message"}
"""Fields that hold text. Others are text where they hold white space."""
DROPPED_HEADERS = {"host", "connection", "content-length", "accept-encoding"}
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
ID = re.compile(rf"{UUID}|(?<=ses_)[0-9A-Za-z]{{8,}}|(?<=msg_)[0-9a-f]{{8,}}|\b[0-9a-f]{{20,}}\b")
WORD = re.compile(rf"{UUID}|[A-Za-z0-9]+|[\u3040-\ud7ff]+")
LITERAL = re.compile(r'("(?:[^"\\]|\\.)*"?)(\s*:)?', re.DOTALL)
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
FIRST_WORDS, ONE_OF = 8, 16
"""Of a text stay its first words, and one of so many others."""
EMBEDDED_WORDS = 3
"""Replies and arguments of at least so many words keep their wording inside of other texts."""
RUN = 4

Atom = tuple[str, str]
"""The gap before it, and a word, a uuid or an embedded text."""
Visit = Callable[[str], str]


class Scrubber:
    """Replaces the texts of one agent: call `see` for all of them, then `write`."""

    def __init__(self, key: bytes):
        self._key = key
        self._seen: set[str] = set()
        self._embedded: set[str] = set()
        self._pattern = WORD
        self._kept: dict[str, set[int]] = {}
        self.written: dict[str, str] = {}
        """Source text -> what stands for it, both without the white space around them."""

    def see(self, text: str) -> str:
        self._seen.add(text.strip())
        return text

    def see_reply(self, text: str) -> str:
        """A text that other texts may contain."""
        if len(WORD.findall(text)) >= EMBEDDED_WORDS:
            self._embedded.add(text.strip())
        return self.see(text)

    def settle(self) -> None:
        """Decide, now that all texts are known, which of their words stay."""
        parts = sorted(self._embedded, key=len, reverse=True)
        alone = (rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])" for part in parts)
        self._pattern = re.compile("|".join([*alone, WORD.pattern]))
        self._seen |= self._embedded
        atoms = {text: self._atoms(text)[0] for text in self._seen}
        self._kept = _forced(atoms)

    def write(self, text: str) -> str:
        """Return the replacement of a text that was seen."""
        core = text.strip()
        if core not in self.written:
            self.written[core] = self._write(core)
        start = text.index(core)
        return text[:start] + self.written[core] + text[start + len(core) :]

    def _write(self, text: str) -> str:
        atoms, tail = self._atoms(text)
        chain, parts = hashlib.blake2b(key=self._key, digest_size=8), []
        for i, (gap, word) in enumerate(atoms):
            chain.update(f"{gap}\0{word}\0".encode())
            number = int.from_bytes(chain.digest(), "big")
            if word in self._embedded:
                parts.append(_short(gap) + self.write(word))
            elif i < FIRST_WORDS or i in self._kept[text] or number % ONE_OF == 0:
                parts.append(_short(gap) + (self.id(word) if ID.fullmatch(word) else _pseudo_word(number)))
        return "".join(parts) + _short(tail)

    def id(self, text: str) -> str:
        """The text with its ids replaced by others of the same shape."""
        return ID.sub(lambda match: self._other_id(match[0]), text)

    def _other_id(self, id: str) -> str:
        digits = iter(hashlib.blake2b(id.encode(), key=self._key, digest_size=32).hexdigest() * 4)
        return "".join(next(digits) if letter != "-" else letter for letter in id)

    def _atoms(self, text: str) -> tuple[list[Atom], str]:
        """The words, each with the gap before it, and what follows the last one."""
        pattern = WORD if text in self._embedded else self._pattern
        atoms, end = [], 0
        for match in pattern.finditer(text):
            atoms.append((text[end : match.start()], match[0]))
            end = match.end()
        return atoms, text[end:]


def _forced(atoms: dict[str, list[Atom]]) -> dict[str, set[int]]:
    """For each text the atoms at which it, or a text that begins like it, ends or parts from others."""
    order = sorted(atoms, key=atoms.__getitem__)
    shared = [_common(atoms[a], atoms[b]) for a, b in zip(order, order[1:], strict=False)]
    kept = {text: {len(atoms[text]) - 1} for text in order}
    for i, text in enumerate(order):
        for others in (
            zip(order[i + 1 :], shared[i:], strict=False),
            zip(order[:i][::-1], shared[:i][::-1], strict=False),
        ):
            length = len(atoms[text])
            for other, common in others:
                length = min(length, common)
                if length == 0:
                    break
                kept[text] |= {length, length - 1} if length == len(atoms[other]) else {length}
    return kept


def _common(a: list[Atom], b: list[Atom]) -> int:
    """Count the leading atoms that are equal."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[: i + 1] != b[: i + 1])


def _pseudo_word(number: int) -> str:
    word = ""
    for _ in range(3):
        number, at = divmod(number, len(SYLLABLES))
        word += SYLLABLES[at]
    return word


def _short(gap: str) -> str:
    return gap if len(gap) <= 12 else gap[:6] + gap[-6:]


# ---- walking a recording


def scrubbed(row: dict[str, Any], scrubber: Scrubber, text: Visit, hide: Visit) -> dict[str, Any]:
    """The row with `text` applied to its texts, `said` to those of replies, and its ids replaced."""
    answer, reply = row["resp"], row["resp"]["reply"]
    if reply is not None:
        calls = [{**call, "arguments": _arguments(call["arguments"], hide)} for call in reply["calls"]]
        reply = {**reply, "content": hide(reply["content"]), "reasoning": hide(reply["reasoning"]), "calls": calls}
    kept = {name: value for name, value in answer.items() if name not in ("events", "body", "reply")}
    problem = answer.get("body", {}).get("error")
    error = {"error": problem["code"] or problem["type"]} if problem else {}
    headers = [[name, scrubber.id(value)] for name, value in row["headers"] if name.lower() not in DROPPED_HEADERS]
    names = (
        "agent",
        "run",
        "seq",
        "t",
        "t_end",
        "conn",
        "inflight",
        "method",
        "path",
        "query",
        "body_bytes",
        "api",
        "kind",
    )
    return {
        **{name: row[name] for name in names},
        "headers": headers,
        "body": _walk(row["body"], "", scrubber, text),
        "resp": {**kept, **error, "reply": reply},
    }


def _walk(value: Any, field: str, scrubber: Scrubber, text: Visit) -> Any:
    if isinstance(value, dict):
        in_call = value.get("type") == "tool_use"
        return {
            name: _all(inner, text) if in_call and name == "input" else _walk(inner, name, scrubber, text)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_walk(inner, field, scrubber, text) for inner in value]
    if not isinstance(value, str):
        return value
    if field == "arguments":
        return _arguments(value, text)
    return text(value) if field in TEXTS or re.search(r"\s", value) else scrubber.id(value)


def _all(value: Any, text: Visit) -> Any:
    """Apply the function to all strings of a value."""
    if isinstance(value, dict):
        return {name: _all(inner, text) for name, inner in value.items()}
    if isinstance(value, list):
        return [_all(inner, text) for inner in value]
    return text(value) if isinstance(value, str) else value


def _arguments(raw: str, text: Visit) -> str:
    """Apply the function to the string values in JSON text, whole or cut; spaces and the way of escaping stay."""
    if not raw.lstrip().startswith("{"):
        return text(raw)

    def literal(match: re.Match[str]) -> str:
        written, colon = match[1], match[2]
        if colon:
            return match[0]
        closed = len(written) > 1 and written.endswith('"')
        value = json.dumps(text(json.loads(written if closed else written + '"')), ensure_ascii="\\u" in written)
        value = value.replace("/", "\\/") if "\\/" in written else value
        return value if closed else value[:-1]

    return LITERAL.sub(literal, raw)


# ---- checks


def check(scrubber: Scrubber, result: Iterable[dict[str, Any]]) -> None:
    """ValueError where a wording is left, or a relation between texts is lost."""
    written = scrubber.written
    if len(set(written.values())) != len(written):
        raise ValueError("two texts became one; run it again, for another key")
    order = sorted(written)
    for a, b in zip(order, order[1:], strict=False):
        begins = re.match(re.escape(a) + r"\b", b) is not None
        if begins and not written[b].startswith(re.sub(r"\W+\Z", "", written[a])):
            raise ValueError(f"{a[:40]!r} begins {b[:40]!r} no more")
    source = {run for text in written for run in _runs(text)}
    left = [run for text in _strings(list(result)) for run in _runs(text) if run in source]
    if left:
        raise ValueError(f"{len(left)} runs of {RUN} words are left, as {left[0]}")


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = [word.lower() for word in re.findall(r"[^\W_]+", text)]
    return zip(*(words[i:] for i in range(RUN)), strict=False)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def scrub(source: Path, target: Path, key: bytes) -> None:
    """Scrub the file of one agent."""
    scrubber = Scrubber(key)
    source_rows = list(rows(source))
    for row in source_rows:
        scrubbed(row, scrubber, scrubber.see, scrubber.see_reply)
    scrubber.settle()
    result = [scrubbed(row, scrubber, scrubber.write, scrubber.write) for row in source_rows]
    check(scrubber, result)
    with gzip.GzipFile(target, "wb", 9, mtime=0) as out:
        for row in result:
            out.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Replace the texts of recorded traffic by pseudo-words.")
    parser.add_argument("source", type=Path, help="folder of recordings, *.jsonl.gz")
    parser.add_argument("target", type=Path, help="folder for the scrubbed ones")
    options = parser.parse_args(arguments)
    key = secrets.token_bytes(32)
    options.target.mkdir(parents=True, exist_ok=True)
    for file in sorted(options.source.glob("*.jsonl.gz")):
        scrub(file, options.target / file.name, key)


if __name__ == "__main__":
    main()
