"""A step's tokens in the terminal: the update makes green ones more likely, red ones less likely; prompts are dim.

Brighter means a larger coefficient. Without colours (no terminal, NO_COLOR) trained tokens stand in brackets with
their coefficient's sign. Long prompts are shortened. Not here: numbers of single tokens (trainer/report/html.py).
"""

from collections.abc import Iterator
from itertools import groupby, islice

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from trainer.report.view import SequenceView, StepView, TokenView

PROMPT_EDGE = 160
"""Characters of a long prompt that are shown at its beginning and its end."""
LEVELS = 6
"""Steps of brightness."""


def show(view: StepView, console: Console, limit: int | None = None) -> None:
    """Print a step, with at most `limit` rollouts."""
    console.print(Text(view.title, style="bold"))
    for note in view.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    plain = console.color_system is None
    console.print(_legend(view.strongest, plain))
    for rollout in islice(view.rollouts, limit):
        console.print()
        console.print(Text(visible(rollout.title), style="bold"))
        for sequence in rollout.sequences:
            console.print(Text(visible(sequence.title), style="italic"))
            console.print(_text(sequence, view.strongest, plain))


def level(coefficient: float, strongest: float) -> int:
    """Return how bright a token is: 0 for none, else 1 to LEVELS.

    It grows with the square root of the coefficient, so that weak tokens can be seen beside the strongest.
    """
    if not coefficient or not strongest:
        return 0
    return max(1, round(LEVELS * (abs(coefficient) / strongest) ** 0.5))


def _legend(strongest: float, plain: bool) -> Text:
    if plain:
        return Text(f"[+more likely] [-less likely] [0trained with weight 0]; strongest {strongest:.4g}")
    text = Text("less likely ")
    for value in (*range(-LEVELS, 0), 0, *range(1, LEVELS + 1)):
        text.append("■", _style(value / LEVELS * abs(value) / LEVELS, 1.0))
    return (
        text.append(f" more likely; strongest {strongest:.4g}  ")
        .append("prompt", "dim")
        .append("  not trained", "dim strike")
    )


def _style(coefficient: float, strongest: float) -> Style:
    strength = level(coefficient, strongest)
    if not strength:
        return Style(color="yellow", underline=True)
    share = 100 + round(155 * strength / LEVELS)
    color = f"rgb({share},40,40)" if coefficient < 0 else f"rgb(40,{share},40)"
    return Style(color=color, bold=2 * strength > LEVELS)  # terminals with few colours show strength by bold only


def _text(sequence: SequenceView, strongest: float, plain: bool) -> Text:
    text = Text()
    for trained, run in groupby(sequence.tokens, key=lambda token: token.coefficient is not None):
        if trained:
            for part, style in _styled(list(run), strongest, plain):
                text.append(part, style)
        else:
            untrained = visible("".join(token.text for token in run))
            if sequence.reason is None:
                text.append(_shortened(untrained), "dim")
            else:
                text.append(untrained, "dim strike")
    return text


def _styled(run: list[TokenView], strongest: float, plain: bool) -> Iterator[tuple[str, Style | str]]:
    if not plain:
        yield from ((visible(token.text), _style(token.coefficient or 0.0, strongest)) for token in run)
        return
    for sign, part in groupby(run, key=lambda token: np.sign(token.coefficient or 0.0)):
        yield f"[{'0+-'[int(sign)]}{visible(''.join(token.text for token in part))}]", ""


def _shortened(text: str) -> str:
    hidden = len(text) - 2 * PROMPT_EDGE
    return text if hidden <= PROMPT_EDGE else f"{text[:PROMPT_EDGE]} ... {hidden} characters ... {text[-PROMPT_EDGE:]}"


def visible(text: str) -> str:
    """Escape characters that would control a terminal or turn the direction of writing."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\u{{{ord(char):x}}}" for char in text)
