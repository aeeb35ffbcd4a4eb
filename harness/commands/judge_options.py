"""The flags that name a judge: a model that reviews tests or grades answers."""

import argparse
from pathlib import Path

from harness.verdict.judge import PAUSE_SECONDS, Judge
from proxy.pool.errors import UserError


def add_judge(verb: argparse.ArgumentParser, purpose: str) -> None:
    """Add the judge's flags to a verb."""
    verb.add_argument("--judge", metavar="URL", help=f"OpenAI-compatible endpoint, ending in /v1, {purpose}")
    verb.add_argument("--judge-model", metavar="NAME", help="name of the judge's model")
    verb.add_argument("--judge-key-file", metavar="FILE", help="file with the judge's API key, if it needs one")


def judge_at(url: str | None, model: str | None, key_file: str | None, pause: float = PAUSE_SECONDS) -> Judge | None:
    """Make the judge that the flags name; None when they name none. UserError when they do not fit together."""
    if url is None:
        if model or key_file:
            raise UserError("--judge-model and --judge-key-file go with --judge URL; name the endpoint")
        return None
    if not model:
        raise UserError(f"--judge {url} needs the name of a model; give it with --judge-model")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--judge must be a URL that begins with http:// or https://: {url}")
    try:
        key = Path(key_file).read_text(encoding="ascii").strip() if key_file else ""
    except (OSError, ValueError) as error:
        raise UserError(f"the judge's key cannot be read ({error}); correct --judge-key-file") from error
    return Judge(url, model, key, pause)
