"""Token ids of long texts, piece by piece: what was tokenised once is not tokenised again.

Exact by construction: a text is cut only in front of added tokens, which split the input of every tokenizer, and each
piece begins with its token, so that nothing in it depends on what stands before. Added tokens that swallow the white
space beside them, count as whole words only, or are looked for in normalised text cut nothing.
"""

from array import array

from proxy.prompt.template import ChatTemplate

LONG = 256
"""Characters from which on a piece is remembered; shorter ones are tokenised together with their neighbours."""


class Pieces:
    """The encoder of one attempt. Safe from any thread."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self.known: dict[str, array[int]] = {}
        """The long pieces so far."""

    def encode(self, text: str, after: int | None = None) -> "array[int]":
        """The ids of a text that begins at an added token, or the prompt, or right behind the token `after`."""
        before = "" if after is None else self._template.decode([after])
        ids: array[int] = array("i")
        for piece in self._cut(before + text):
            if len(piece) < LONG:
                ids += self._encode(piece)
            else:
                found = self.known.get(piece)
                if found is None:
                    found = self.known[piece] = self._encode(piece)
                ids += found
        return ids if after is None else ids[1:]

    def _encode(self, text: str) -> "array[int]":
        return array("i", self._template.encode(text))

    def _cut(self, text: str) -> list[str]:
        """Pieces that are long, or several short ones in a row."""
        starts = self._template.cuts(text) if len(text) >= LONG else []
        pieces, short = [], 0
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            if end - start >= LONG:
                pieces += [text[short:start], text[start:end]]
                short = end
        return [piece for piece in (*pieces, text[short:]) if piece]
