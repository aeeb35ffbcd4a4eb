"""Prompts without messages: a text that begins with an earlier prompt and its completion continues that completion.

There is no template here, and reasoning is text like any other.
"""

from collections import deque
from hashlib import blake2b
from threading import Lock

from proxy.prompt.continuation.completion_tree import CompletionNode
from proxy.prompt.template import ChatTemplate


class TextIndex:
    """The texts of one attempt's completions as clients of text completions have seen them. Any thread may use it."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._by_digest: dict[bytes, tuple[CompletionNode, int]] = {}
        """Digest of prompt and completion -> the completion, and the length of the text in characters."""
        self._undecoded: deque[CompletionNode] = deque()
        """Completions whose text nobody has asked for yet: most attempts never send text completions."""
        self._decoding = Lock()  # else a thread could search while another has taken nodes and not yet filed them

    def add(self, node: CompletionNode, text: str | None = None) -> None:
        """Add a served completion; without its text, it is decoded when the first text completion asks."""
        if text is None:
            self._undecoded.append(node)
        else:
            self._by_digest[_digest(text)] = node, len(text)

    def longest_match(self, text: str) -> tuple[CompletionNode | None, int]:
        """The completion with the longest text that this text begins with, and its length; (None, 0) without one."""
        with self._decoding:
            while self._undecoded:
                node = self._undecoded.popleft()
                decoded = self._template.decode(node.buffer[: node.length])
                self._by_digest[_digest(decoded)] = node, len(decoded)
        lengths = sorted({length for _, length in list(self._by_digest.values()) if length <= len(text)})
        digest, at, longest = blake2b(digest_size=16), 0, None
        for length in lengths:  # one pass over the text: the digest of each prefix goes on from the one before
            digest.update(text[at:length].encode("utf-8", "surrogatepass"))
            at, longest = length, self._by_digest.get(digest.digest(), longest)
        return longest or (None, 0)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
