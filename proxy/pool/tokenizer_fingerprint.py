"""A fingerprint of a model's vocabulary, so that proxy and trainer can tell whether an id means the same token to both.

Not covered: how text is split into tokens, and tokenizers without a `tokenizer.json`.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec


class _Model(msgspec.Struct):
    vocab: Any = msgspec.field(default_factory=dict)
    """Text -> id, or (Unigram) a list of pairs that begin with the text."""


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[_Added] = msgspec.field(default_factory=list)


def fingerprint(directory: Path) -> str | None:
    """Return 16 hexadecimal digits over all ids and their texts; None without a readable vocabulary."""
    try:
        return fingerprint_of((directory / "tokenizer.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def fingerprint_of(content: bytes) -> str | None:
    """Return the fingerprint of the content of a tokenizer.json. DecodeError when it is no JSON."""
    tokenizer = msgspec.json.decode(content, type=_Tokenizer)
    vocab = tokenizer.model.vocab
    texts = list(vocab.items()) if isinstance(vocab, dict) else [(entry[0], id) for id, entry in enumerate(vocab)]
    texts += [(token.content, token.id) for token in tokenizer.added_tokens]
    if not texts:
        return None
    ordered = sorted({(id, text) for text, id in texts})
    return hashlib.sha256(msgspec.json.encode(ordered)).hexdigest()[:16]
