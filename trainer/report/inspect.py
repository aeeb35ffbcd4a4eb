"""`trainer inspect CONFIG STEP`: what a step trained on, in the terminal or as a page."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from proxy.pool.errors import UserError
from trainer.config import Config
from trainer.report.html import page
from trainer.report.terminal import show
from trainer.report.view import view


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to show, and how."""

    step: int
    rollout: int | None = None
    """Only this one."""
    limit: int | None = None
    """At most so many rollouts."""
    html: Path | None = None
    """Write a page instead."""


def inspect(config: Config, wish: Wish) -> None:
    """Print the step or write its page. UserError when there is nothing to show."""
    if wish.limit is not None and wish.limit < 1:
        raise UserError(f"--limit {wish.limit} shows nothing; name a number from 1")
    found = view(config, wish.step, wish.rollout)
    if wish.html is None:
        show(found, Console(file=sys.stdout, soft_wrap=True, highlight=False), wish.limit)
        return
    try:
        with wish.html.open("w", encoding="utf-8") as file:
            file.writelines(page(found, wish.limit))
    except OSError as error:
        raise UserError(f"{wish.html} cannot be written ({error.strerror}); name another file") from error
    print(wish.html)
