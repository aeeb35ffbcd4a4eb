"""Which tokens the ids of a model directory stand for, as a short fingerprint, so that two parts can tell whether they
mean the same by an id. Left out: how text is split into tokens, and tokenizers that are no `tokenizer.json`.
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
    """16 hexadecimal digits over all ids and their tokens' texts; None where the directory does not tell them."""
    try:
        found = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError):
        return None
    vocab = found.model.vocab
    texts = list(vocab.items()) if isinstance(vocab, dict) else [(entry[0], id) for id, entry in enumerate(vocab)]
    texts += [(token.content, token.id) for token in found.added_tokens]
    if not texts:
        return None
    ordered = sorted({(id, text) for text, id in texts})
    return hashlib.sha256(msgspec.json.encode(ordered)).hexdigest()[:16]
