"""The options that name a judge: a model that reviews tests or grades answers."""

import argparse
from pathlib import Path

from harness.verdict.judge import PAUSE_SECONDS, Judge
from proxy.pool.errors import UserError


def add_judge(verb: argparse.ArgumentParser, purpose: str) -> None:
    """Let a verb have a judge."""
    verb.add_argument("--judge", metavar="URL", help=f"OpenAI-compatible endpoint, ending in /v1, {purpose}")
    verb.add_argument("--judge-model", metavar="NAME", help="the model there")
    verb.add_argument("--judge-key-file", metavar="FILE", help="its API key, if it wants one")


def judge_at(url: str | None, model: str | None, key_file: str | None, pause: float = PAUSE_SECONDS) -> Judge | None:
    """The judge that the options name, if any."""
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
