"""The text of each token, by the tokenizer of the model that sampled it. Without that one, tokens are shown as ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlalchemy import Connection, select
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from proxy.pool.schema import policy_versions, proxies
from proxy.pool.tokenizer_fingerprint import fingerprint

LOOKED_AT = 16
"""The newest versions of a run, and of the pool, in whose directories a tokenizer is looked for."""
RUN_UP = 16
"""Tokens before a page from which its text is decoded, so that characters of several tokens come out whole."""


@dataclass(frozen=True)
class Vocabulary:
    """How tokens become text."""

    tokenizer: Tokenizer | None
    note: str = ""
    """Why there is none, and what would help."""

    def texts(self, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Return the text of each token. `before`: some tokens that stand before them."""
        return texts(self.tokenizer, [*before, *ids])[len(before) :]


def texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. Where several tokens make up a character, the last one gets it."""
    if tokenizer is None:
        return [f"<{name}>" for name in ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [
        stream.step(tokenizer, name) or "" if tokenizer.id_to_token(name) is not None else f"<{name}>" for name in ids
    ]


def vocabulary(connection: Connection, run_id: int | None, proxy_id: int | None, model: Path | None) -> Vocabulary:
    """Return the vocabulary of tokens that a run recorded through a proxy.

    It comes from `model`, a directory that somebody named, else from the newest exported weights of the run or of the
    pool. One whose ids differ from those of the proxy's tokenizer is not used.
    """
    wanted = None
    if proxy_id is not None:
        wanted = connection.scalar(select(proxies.c.tokenizer).where(proxies.c.id == proxy_id))
    foreign = 0
    for directory in [model] if model else exported_weights(connection, run_id):
        tokenizer, own = _loaded(directory)
        if tokenizer is not None and wanted in (None, own):
            return Vocabulary(tokenizer)
        foreign += tokenizer is not None
    if foreign:
        return Vocabulary(None, "the tokenizers that were found have other ids than the one that recorded these tokens")
    place = str(model) if model else "the exported weights that the pool names"
    return Vocabulary(None, f"no tokenizer.json is in {place}; name the model's directory with --model")


def exported_weights(connection: Connection, run_id: int | None) -> Iterable[Path]:
    """Return the directories of the newest exported weights, those of the run first."""
    newest = select(policy_versions.c.hf_dir).order_by(policy_versions.c.id.desc()).limit(LOOKED_AT)
    of_run: list[str] = []
    if run_id is not None:
        mine = select(policy_versions.c.hf_dir).where(policy_versions.c.run_id == run_id)
        of_run = list(connection.scalars(mine.order_by(policy_versions.c.step.desc()).limit(LOOKED_AT)))
    return [Path(directory) for directory in dict.fromkeys([*of_run, *connection.scalars(newest)])]


def _loaded(directory: Path) -> tuple[Tokenizer | None, str | None]:
    file = directory / "tokenizer.json"
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return None, None
    return _load(file, changed)


@lru_cache(maxsize=2)  # all threads share it: decoding changes nothing in a tokenizer
def _load(file: Path, _changed: int) -> tuple[Tokenizer | None, str | None]:
    try:
        return Tokenizer.from_file(str(file)), fingerprint(file.parent)
    except Exception:  # the library raises its own bare Exception for a malformed file
        return None, None
