"""A step's tokens in the terminal: green becomes likelier, red less likely, the stronger the brighter; prompts are dim.

Without colours (no terminal, NO_COLOR) trained tokens stand in brackets with their coefficient's sign. Long stretches
of prompt are shortened. Left out: numbers of single tokens, which the page has (trainer/report/html.py).
"""

from collections.abc import Iterator
from itertools import groupby, islice

from rich.console import Console
from rich.style import Style
from rich.text import Text

from trainer.report.view import Line, Token, View

AROUND = 160
"""Characters that are shown of a long prompt at its beginning and its end."""
LEVELS = 6
"""Steps of brightness."""


def show(view: View, console: Console, limit: int | None = None) -> None:
    """Print a step, at most `limit` rollouts of it."""
    console.print(Text(view.title, style="bold"))
    for note in view.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    plainly = console.color_system is None
    console.print(_legend(view.strongest, plainly))
    for block in islice(view.blocks, limit):
        console.print()
        console.print(Text(visible(block.title), style="bold"))
        for line in block.lines:
            console.print(Text(visible(line.title), style="italic"))
            console.print(_text(line, view.strongest, plainly))


def level(coefficient: float, strongest: float) -> int:
    """How bright: 0 for none, 1 to LEVELS by the square root, so that weak tokens are seen beside the strongest."""
    if not coefficient or not strongest:
        return 0
    return max(1, round(LEVELS * (abs(coefficient) / strongest) ** 0.5))


def _legend(strongest: float, plainly: bool) -> Text:
    if plainly:
        return Text(f"[+likelier] [-less likely] [0trained, but weight 0]; strongest {strongest:.4g}")
    text = Text("less likely ")
    for value in (*range(-LEVELS, 0), 0, *range(1, LEVELS + 1)):
        text.append("■", _style(value / LEVELS * abs(value) / LEVELS, 1.0))
    return (
        text.append(f" likelier; strongest {strongest:.4g}  ")
        .append("prompt", "dim")
        .append("  not trained", "dim strike")
    )


def _style(coefficient: float, strongest: float) -> Style:
    strength = level(coefficient, strongest)
    if not strength:
        return Style(color="yellow", underline=True)
    share = 100 + round(155 * strength / LEVELS)
    color = f"rgb({share},40,40)" if coefficient < 0 else f"rgb(40,{share},40)"
    return Style(color=color, bold=2 * strength > LEVELS)  # bold is what few colours have left of brightness


def _text(line: Line, strongest: float, plainly: bool) -> Text:
    text = Text()
    for trained, run in groupby(line.tokens, key=lambda token: token.coefficient is not None):
        if trained:
            for part, style in _pulled(list(run), strongest, plainly):
                text.append(part, style)
        else:
            said = visible("".join(token.text for token in run))
            text.append(said if line.reason is not None else _shortened(said), "dim strike" if line.reason else "dim")
    return text


def _pulled(run: list[Token], strongest: float, plainly: bool) -> Iterator[tuple[str, Style | str]]:
    if not plainly:
        yield from ((visible(token.text), _style(token.coefficient or 0.0, strongest)) for token in run)
        return
    for sign, part in groupby(run, key=lambda token: _sign(token.coefficient or 0.0)):
        yield f"[{sign}{visible(''.join(token.text for token in part))}]", ""


def _sign(coefficient: float) -> str:
    return "0" if not coefficient else "+" if coefficient > 0 else "-"


def _shortened(text: str) -> str:
    hidden = len(text) - 2 * AROUND
    return text if hidden <= AROUND else f"{text[:AROUND]} ... {hidden} characters ... {text[-AROUND:]}"


def visible(text: str) -> str:
    """The text without what would steer a terminal or turn the direction of writing."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\u{{{ord(char):x}}}" for char in text)
