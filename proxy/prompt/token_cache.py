"""Tokenises long texts piece by piece, so that a piece that was tokenised before is not tokenised again.

Exact by construction: a text is cut only in front of added tokens, which split the input of every tokenizer, and each
piece begins with its token, so that nothing in it depends on what stands before. Added tokens that swallow the white
space beside them, match whole words only, or are matched in normalised text cut nothing.
"""

import sys
from array import array
from collections import OrderedDict
from threading import Lock

from proxy.prompt.template import ChatTemplate

LONG = 256
"""Characters from which on a piece is remembered; shorter ones are tokenised together with their neighbours."""
MOST_BYTES = 1 << 24
"""Memory of one attempt's remembered pieces: some prompts of a long context. Those used least recently go first."""


class TokenCache:
    """The encoder of one attempt, with the token ids of its long pieces. Any thread may use it.

    Two threads that meet the same new piece both tokenise it, and get equal ids.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self.pieces: OrderedDict[str, tuple[array[int], int]] = OrderedDict()
        """Text of a long piece -> its ids, and the bytes of both; in the order of use."""
        self.size = 0
        """Bytes of all pieces, `MOST_BYTES` at the most."""
        self._changing = Lock()  # held while a piece is put in its place, so that `size` stays the sum of `pieces`

    def encode(self, text: str, after: int | None = None, remember: bool = True) -> "array[int]":
        """The ids of a text that begins the prompt, begins at an added token, or follows the added token `after`.

        `remember=False` adds no pieces to those that are remembered.
        """
        before = "" if after is None else self._template.decode([after])
        ids: array[int] = array("i")
        for piece in self._cut(before + text):
            if len(piece) < LONG:
                ids += self._encode(piece)
                continue
            known = self.pieces.get(piece)
            own = self._encode(piece) if known is None else known[0]
            if remember:
                self._use(piece, own)
            ids += own
        return ids if after is None else ids[1:]

    def _use(self, piece: str, ids: "array[int]") -> None:
        """Put a piece behind all others, and drop the first ones until the rest fits."""
        with self._changing:
            if piece not in self.pieces:
                size = sys.getsizeof(piece) + ids.itemsize * len(ids)
                self.pieces[piece] = ids, size
                self.size += size
            self.pieces.move_to_end(piece)
            while self.size > MOST_BYTES:
                self.size -= self.pieces.popitem(last=False)[1][1]

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
