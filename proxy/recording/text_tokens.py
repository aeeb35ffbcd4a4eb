"""The tokens that an answer's text was sampled as, with their logprobs: for clients that ask for logprobs.

Tokens of reasoning, of tool calls, of what follows a stop string and of the turn's end are no text. A token is part of
the first text that shows a character of it.
"""

from collections import deque

from tokenizers import Tokenizer

from proxy.call import TokenLogprob
from proxy.engine.engine_call import Sampling
from proxy.parsing.turn_parser import Text

IMPOSSIBLE = -1e30
"""Logprobs below it are those of tokens that a grammar forbids; they are no alternatives."""
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(b for b in range(256) if b not in _PRINTED)
}
"""The character by which vocabularies of the kind ByteLevel write a byte -> the byte."""


class TextTokens:
    """The tokens of one turn that no text has taken yet, in order."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling):
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._byte_level = b'"ByteLevel"' in tokenizer.decoder.__getstate__() if tokenizer.decoder else False
        self._special = tokenizer.get_added_tokens_decoder()
        self._count = 0
        self._waiting: deque[tuple[int, int, int]] = deque()
        """Place among the sampled tokens, and start and end in the text of the turn; a part of a character that is not
        whole yet has no length."""

    def add(self, start: int, end: int, visible: bool) -> None:
        """Note the next sampled token, which is [start, end) of the turn's text."""
        if visible:
            self._waiting.append((self._count, start, end))
        self._count += 1

    def take(self, text: Text) -> tuple[TokenLogprob, ...]:
        """The tokens of a text, which is behind all that were taken before."""
        tokens, text_end = [], text.start + len(text.text)
        while self._waiting and self._waiting[0][1] < text_end:
            place, start, end = self._waiting.popleft()
            if end > text.start or start == text.start:
                tokens += self._with_logprob(place, start)
        return tuple(tokens)

    def _with_logprob(self, place: int, start: int) -> list[TokenLogprob]:
        sampling = self._sampling
        at = sampling.logprob_place(place)
        if at is None or at >= len(sampling.logprobs):
            return []
        id, top = sampling.ids[place], sampling.top[at] if at < len(sampling.top) else ()
        named = [TokenLogprob(id, self._bytes(id), logprob) for logprob, id in top if logprob > IMPOSSIBLE]
        return [TokenLogprob(id, self._bytes(id), sampling.logprobs[at], start, tuple(named))]

    def _bytes(self, id: int) -> bytes:
        """What a token stands for inside a text; `decode` would drop the leading space of some vocabularies."""
        if id in self._special:
            return self._special[id].content.encode()
        written = self._tokenizer.id_to_token(id) or ""
        if self._byte_level and all(character in BYTES for character in written):
            return bytes(BYTES[character] for character in written)
        if len(written) == 6 and written.startswith("<0x"):
            return bytes([int(written[3:5], 16)])
        return written.replace("▁", " ").encode()
