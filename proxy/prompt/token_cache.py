"""Tokenises long texts piece by piece, so that a piece that was tokenised before is not tokenised again.

Exact by construction: a text is cut only in front of added tokens, which split the input of every tokenizer, and each
piece begins with its token, so that nothing in it depends on what stands before. Added tokens that swallow the white
space beside them, match whole words only, or are matched in normalised text cut nothing.
"""

from array import array

from proxy.prompt.template import ChatTemplate

LONG = 256
"""Characters from which on a piece is remembered; shorter ones are tokenised together with their neighbours."""


class TokenCache:
    """The encoder of one attempt, with the token ids of its long pieces. Any thread may use it.

    Without a lock: two threads that meet the same new piece both tokenise it, and store equal ids.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self.pieces: dict[str, array[int]] = {}
        """Text of a long piece -> its ids."""

    def encode(self, text: str, after: int | None = None) -> "array[int]":
        """The ids of a text that begins the prompt, begins at an added token, or follows the added token `after`."""
        before = "" if after is None else self._template.decode([after])
        ids: array[int] = array("i")
        for piece in self._cut(before + text):
            if len(piece) < LONG:
                ids += self._encode(piece)
                continue
            if (cached := self.pieces.get(piece)) is None:
                cached = self.pieces[piece] = self._encode(piece)
            ids += cached
        return ids if after is None else ids[1:]

    def _encode(self, text: str) -> "array[int]":
        return array("i", self._template.encode(text))

    def _cut(self, text: str) -> list[str]:
        """Cut into pieces: each is one long piece, or several short ones in a row."""
        starts = self._template.cuts(text) if len(text) >= LONG else []
        pieces, short = [], 0
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            if end - start >= LONG:
                pieces += [text[short:start], text[start:end]]
                short = end
        return [piece for piece in (*pieces, text[short:]) if piece]
