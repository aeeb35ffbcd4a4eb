"""The text of token ids as they come, piece by piece."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Turns ids into text as the library's DecodeStream does, and goes on where that one gives up.

    Decoders with ByteFallback (Llama 2, Gemma) write � for every byte of a run in which one byte is wrong, also for
    those that were text before it came. DecodeStream (tokenizers 0.23) raises an error then. Here the text that was
    returned stays, and what comes behind it is decoded for itself.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []
        """The last ids, which have not become text yet."""

    def step(self, ids: Sequence[int]) -> str | None:
        """Return the text that these ids add; None while the last character is not whole."""
        self._waiting += ids
        try:
            text = self._stream.step(self._tokenizer, list(ids))
        except Exception as error:  # the library has no class for it
            if not str(error).startswith("Invalid prefix"):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            text = self._stream.step(self._tokenizer, self._waiting)
        if text is not None:
            self._waiting.clear()
        return text
