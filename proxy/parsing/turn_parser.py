"""Splits a turn while it is sampled into reasoning, text and tool calls of the model's format.

A reasoning marker at the start of the turn opens reasoning. Text is emitted as soon as it cannot be part of a marker; a
tool call is emitted whole. A malformed call stays text, and calls behind it are still found. The joined pieces are the
same however the turn was cut into chunks. Left out: repair of broken calls, calls inside of reasoning.
"""

from dataclasses import dataclass, field, replace

from proxy.call import TokenLogprob
from proxy.parsing.formats import Format, ParsedCall, ToolSchemas

__all__ = ["ParsedCall", "Piece", "Reasoning", "Text", "TurnParser"]

SHORT = 256
"""Characters behind an opening marker that are parsed again with each chunk; longer calls only at a possible end."""
GROWTH = 1.125
"""How much a long call grows before it is parsed again, in formats where nothing marks its end."""


@dataclass(frozen=True)
class Text:
    text: str
    start: int = field(default=0, compare=False)
    """Where it begins in the text of the turn."""
    tokens: tuple[TokenLogprob, ...] = field(default=(), compare=False)
    """Its tokens, where the client asks for logprobs."""


@dataclass(frozen=True)
class Reasoning:
    text: str


Piece = Text | Reasoning | ParsedCall


class TurnParser:
    """The parser of one turn. `tools`: find calls of these tools. `reasoning`: the prompt ends inside reasoning."""

    def __init__(self, form: Format, *, tools: ToolSchemas | None, reasoning: bool = False):
        self._form = form
        self._tools = tools
        self._state = self._reasoning if reasoning else self._start
        self._buffer = ""  # text that is not certain yet
        self._fed = 0  # characters of the turn so far
        self._trim = reasoning  # drop newlines until the next character of this section
        self._expected = form.at_start  # markers that count only behind white space
        self._inside = False  # of a section of calls
        self._read = 0  # how much of the buffer was searched for a call's end
        self._final = False
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """The pieces that have become certain with this text."""
        self._buffer += text
        self._fed += len(text)
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, which was held back: the turn has ended, so no marker or call can be completed any more."""
        self._final = True
        return self.feed("")

    # Each state consumes what it can of the buffer. True: another state should go on with the rest.

    def _start(self) -> bool:
        seen, begin = self._buffer.lstrip(), self._form.think[0]
        if len(seen) < len(begin) and begin.startswith(seen) and not self._final:
            return False
        self._state = self._text
        if seen.startswith(begin):
            self._buffer = seen[len(begin) :]
            self._state, self._trim = self._reasoning, True
        return True

    def _reasoning(self) -> bool:
        marker = self._form.think[1]
        end = self._buffer.find(marker)
        if end < 0:
            self._emit_reasoning(self._certain((marker,)))
            return False
        self._emit_reasoning(len(self._buffer[:end].rstrip()))
        self._buffer = self._buffer[self._buffer.index(marker) + len(marker) :]
        self._state, self._trim = self._text, True
        return True

    def _text(self) -> bool:
        if self._tools is None:
            self._emit_text(len(self._buffer))
            return False
        seen = self._buffer.lstrip()
        if any(seen.startswith(marker) for marker in self._expected):
            return self._open(len(self._buffer) - len(seen))
        if not self._final and any(marker.startswith(seen) for marker in self._expected):
            return False
        markers = self._form.openers
        start = min((at for at in map(self._buffer.find, markers) if at >= 0), default=-1)
        if start < 0:
            self._emit_text(self._certain(markers))
            return False
        self._emit_text(len(self._buffer[:start].rstrip()))
        return self._open(len(self._buffer) - len(self._buffer.lstrip()))

    def _open(self, start: int) -> bool:
        """Continue at the marker that stands at `start`, behind white space only."""
        end = self._form.section_end
        if self._inside and end and self._buffer.startswith(end, start):
            self._buffer, self._trim = self._buffer[start + len(end) :], True
            self._inside, self._expected = False, ()
        else:
            self._state, self._read = self._call, 0
        return True

    def _call(self) -> bool:
        assert self._tools is not None, "calls are looked for with tools only"
        start = len(self._buffer) - len(self._buffer.lstrip())
        if not self._final and self._cannot_have_ended():
            return False
        reading = self._form.read(self._buffer[start:], self._tools)
        self._read = len(self._buffer)
        if reading is None and not self._final:
            return False
        self._state = self._text
        if reading is None or reading.call is None:
            self._reject(start)
            return True
        end = start + reading.end
        self._pieces.append(replace(reading.call, source=self._buffer[start:end]))
        self._inside = reading.goes_on or self._inside
        markers = (*self._form.inside, self._form.section_end) if self._inside else ()
        self._expected = tuple(filter(None, markers))
        self._buffer, self._trim = self._buffer[end:], True
        return True

    def _cannot_have_ended(self) -> bool:
        """Whether a long call cannot be complete yet, which saves parsing it again for each token."""
        if self._read <= SHORT:
            return False
        if not self._form.ends:
            return len(self._buffer) < self._read * GROWTH
        before, self._read = self._read, len(self._buffer)
        return not any(self._buffer.find(end, before - len(end) + 1) >= 0 for end in self._form.ends)

    def _reject(self, start: int) -> None:
        """Emit the marker as text, since no call follows it; what comes behind is parsed again."""
        markers = [m for m in (*self._expected, *self._form.openers) if self._buffer.startswith(m, start)]
        self._emit_text(start + max(map(len, markers)))

    def _certain(self, markers: tuple[str, ...]) -> int:
        """How much of the buffer cannot belong to a marker, or to the white space before one."""
        if self._final:
            return len(self._buffer)
        uncertain = max(_partial_marker(self._buffer, marker) for marker in markers)
        return len(self._buffer[: len(self._buffer) - uncertain].rstrip())

    def _emit_text(self, end: int) -> None:
        if text := self._cut(end):
            self._pieces.append(Text(text, self._fed - len(self._buffer) - len(text)))
            self._inside, self._expected = False, ()

    def _emit_reasoning(self, end: int) -> None:
        if text := self._cut(end):
            self._pieces.append(Reasoning(text))

    def _cut(self, end: int) -> str:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._trim and text:
            text = text.lstrip("\n")
            self._trim = not text
        return text


def _partial_marker(buffer: str, marker: str) -> int:
    """How many characters at the end of the buffer may begin the marker."""
    at = max(0, len(buffer) - len(marker) + 1)
    while (at := buffer.find(marker[0], at)) >= 0:
        if marker.startswith(buffer[at:]):
            return len(buffer) - at
        at += 1
    return 0
