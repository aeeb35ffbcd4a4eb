"""The text of each token, by the tokenizer of the model that sampled it. Without that one, tokens are shown as ids.

Only what decoding needs of a tokenizer.json goes to the library: no code of a model is run, nor is a pattern of it
compiled by which text would be split.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from proxy.pool.browse.tokens.places import TokenOrigin, configured_models, models_beside
from proxy.pool.completions.text_stream import TextStream
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.input_files import open_input
from proxy.pool.tokenizer_fingerprint import fingerprint_of

RUN_UP = 16
"""Tokens before a page from which its text is decoded, so that characters of several tokens come out whole."""
LARGEST = 64 << 20
"""Bytes of the largest tokenizer.json that is read. Those of models of today have up to 34 MB."""


@dataclass(frozen=True)
class Vocabulary:
    """How tokens become text."""

    tokenizer: Tokenizer | None
    note: str = ""
    """Why there is none, and what would help."""
    directory: str | None = None
    """Where it was found; None: there is none."""

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return the text of each token. `before`: some tokens that stand before them."""
        return texts(self.tokenizer, [*before, *ids])[len(before) :]


class _ForDecoding(msgspec.Struct):
    """What decoding needs of a tokenizer.json."""

    model: msgspec.Raw
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. Where several tokens make up a character, the last one gets it."""
    if tokenizer is None:
        return [f"<{name}>" for name in ids]
    stream = TextStream(tokenizer)
    return [stream.step([name]) or "" if tokenizer.id_to_token(name) is not None else f"<{name}>" for name in ids]


def vocabulary(pool: Pool, origin: TokenOrigin, model: Path | None) -> Vocabulary:
    """Return the vocabulary of recorded tokens.

    It comes from `model`, a directory that somebody named, else from one that the pool or the run's files lead to. One
    whose ids differ from those of the proxy that recorded the tokens is not used.
    """
    links: list[Path] = []
    foreign = False
    for directory in _directories(pool, origin, model):
        file = _file(directory, follow=model is not None)
        if file is None:
            continue
        ids = _ids(file)
        if origin.fingerprint in (None, ids) and (tokenizer := _tokenizer(file)) is not None:
            return Vocabulary(tokenizer, directory=str(directory))
        foreign |= ids is not None
        links += [directory] if file.link else []
    if links:
        why = f"{links[0]}/tokenizer.json is a link, which is followed only in a directory that you name"
        return Vocabulary(None, f"{why}; if it is the tokenizer of this model, add: --model {links[0]}")
    if foreign:
        why = "the tokenizers that were found have other ids than the one that recorded these tokens"
        return Vocabulary(None, f"{why}; name the directory of its model with --model")
    place = str(model) if model else "the exported weights that the pool names, or in another place that it leads to"
    return Vocabulary(None, f"no tokenizer.json is in {place}; name the model's directory with --model")


def _directories(pool: Pool, origin: TokenOrigin, model: Path | None) -> Iterator[Path]:
    """Yield where a tokenizer is looked for, the surest place first."""
    if model is not None:
        yield model
        return
    yield from origin.exported
    if origin.fingerprint is not None:  # else nothing would tell whether one of these fits
        yield from configured_models(pool, origin.run)
        yield from models_beside(pool)


@dataclass(frozen=True)
class _File:
    """A tokenizer.json as it was at one time."""

    path: Path
    follow: bool
    changed: int
    size: int
    link: bool


def _file(directory: Path, follow: bool) -> _File | None:
    path = directory / "tokenizer.json"
    try:
        status = os.stat(path, follow_symlinks=follow)
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return None
    return _File(path, follow, status.st_mtime_ns, status.st_size, stat.S_ISLNK(status.st_mode))


def _content(file: _File) -> bytes:
    with open_input(file.path, follow=file.follow) as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"{file.path} has more than {LARGEST} bytes, which is the limit; name another with --model")
    return content


@lru_cache(maxsize=64)  # all threads share it; a file that has changed is another key
def _ids(file: _File) -> str | None:
    """Return the fingerprint of a tokenizer's ids; None where it has none, or cannot be read."""
    try:
        return fingerprint_of(_content(file))
    except Exception:  # JSON that anybody wrote may have any shape
        return None


@lru_cache(maxsize=2)  # all threads share it: decoding changes nothing in a tokenizer
def _tokenizer(file: _File) -> Tokenizer | None:
    try:
        needed = msgspec.json.decode(_content(file), type=_ForDecoding)
        return Tokenizer.from_buffer(msgspec.json.encode(needed))
    except Exception:  # the library raises its own bare Exception for a malformed file
        return None
