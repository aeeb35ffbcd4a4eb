"""`trainer inspect CONFIG STEP`: show what a step trained on, in the terminal or as an HTML page."""

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
class InspectOptions:
    """What to show, and where."""

    step: int
    rollout: int | None = None
    """Id of the only rollout to show. None: all."""
    limit: int | None = None
    """Maximum number of rollouts. None: all."""
    html: Path | None = None
    """File to write a page to, instead of the terminal."""


def inspect(config: Config, options: InspectOptions) -> None:
    """Print the step or write its page. Raises UserError when there is nothing to show or the file is not writable."""
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit} shows nothing; name a number from 1")
    step = view(config, options.step, options.rollout)
    if options.html is None:
        show(step, Console(file=sys.stdout, soft_wrap=True, highlight=False), options.limit)
        return
    try:
        with options.html.open("w", encoding="utf-8") as file:
            file.writelines(page(step, options.limit))
    except OSError as error:
        raise UserError(f"{options.html} cannot be written ({error.strerror}); name another file") from error
    print(options.html)
