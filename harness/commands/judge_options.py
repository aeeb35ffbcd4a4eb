"""The flags that name a judge: a model that reviews tests or grades answers."""

import argparse
from pathlib import Path

from harness.verdict.judge import PAUSE_SECONDS, Judge
from proxy.pool.errors import UserError


def add_judge(verb: argparse.ArgumentParser, purpose: str) -> None:
    """Add the judge's flags to a verb. `purpose` ends the help of --judge: what the endpoint does for this verb."""
    verb.add_argument("--judge", metavar="URL", help=f"OpenAI-compatible endpoint, ending in /v1, {purpose}")
    verb.add_argument("--judge-model", metavar="NAME", help="name of the judge's model")
    verb.add_argument("--judge-key-file", metavar="FILE", help="file with the judge's API key, if it needs one")


def judge_at(
    url: str | None, model: str | None, key_file: str | None, pause_seconds: float = PAUSE_SECONDS
) -> Judge | None:
    """Make the judge that the flags name; None when they name none.

    `pause_seconds`: before the judge is asked a second time. UserError when the flags do not fit together, or the key
    cannot be read.
    """
    if url is None:
        if model or key_file:
            raise UserError("--judge-model and --judge-key-file go with --judge URL; name the endpoint")
        return None
    if not model:
        raise UserError(f"--judge {url} needs the name of a model; give it with --judge-model")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--judge must be a URL that begins with http:// or https://: {url}")
    return Judge(url, model, _key_in(key_file) if key_file else "", pause_seconds)


def _key_in(file: str) -> str:
    """Read the key. UserError when there is none that a header of HTTP can carry: one word in ASCII."""
    try:
        text = Path(file).read_text(encoding="ascii")
    except (OSError, ValueError) as error:  # ValueError: another character, or a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the judge's key cannot be read from {file} ({reason}); correct --judge-key-file") from error
    words = text.split()
    if len(words) != 1:
        raise UserError(
            f"the judge's key in {file} has {len(words)} words; write one there, or leave --judge-key-file out"
        )
    return words[0]
