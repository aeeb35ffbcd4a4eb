"""A step's tokens as one self-contained HTML file: the terminal's view, with each token's numbers in a tooltip."""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby, islice
from math import exp

from trainer.report.terminal import LEVELS, level, visible
from trainer.report.view import SequenceView, StepView, TokenView

LONG = 400
"""A longer prompt, in characters, is folded."""
STYLE = """
body { background: #111; color: #ccc; font: 14px/1.5 ui-monospace, monospace; margin: 2em; }
h1 { font-size: 1.1em; } h2 { font-size: 1em; border-top: 1px solid #444; padding-top: 1em; }
h3 { font-size: 1em; font-weight: normal; font-style: italic; color: #999; }
.note { color: #dc3; } .text { white-space: pre-wrap; overflow-wrap: anywhere; }
.p, details { color: #777; } details { display: inline; } summary { cursor: pointer; display: inline; color: #69c; }
.x { color: #777; text-decoration: line-through; } .z { color: #dc3; text-decoration: underline; }
"""


def _colours() -> str:
    shades = []
    for strength in range(1, LEVELS + 1):
        share = 0.12 + 0.88 * strength / LEVELS
        shades.append(f".u{strength} {{ background: rgba(30,160,60,{share:.2f}); color: #eee; }}")
        shades.append(f".d{strength} {{ background: rgba(200,40,40,{share:.2f}); color: #eee; }}")
    return "\n".join(shades)


def page(view: StepView, limit: int | None = None) -> Iterator[str]:
    """Yield the file in parts, with at most `limit` rollouts."""
    title = escape(view.title)
    yield f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
    yield f"<style>{STYLE}{_colours()}</style>\n<h1>{title}</h1>\n"
    yield from (f'<p class="note">{escape(note)}</p>\n' for note in view.notes)
    yield f'<p class="text">{_legend(view.strongest)}</p>\n'
    for rollout in islice(view.rollouts, limit):
        yield f"<h2>{escape(rollout.title)}</h2>\n"
        for sequence in rollout.sequences:
            spans = "".join(_spans(sequence, view.strongest))
            yield f'<h3>{escape(sequence.title)}</h3>\n<div class="text">{spans}</div>\n'
    yield "</html>\n"


def _legend(strongest: float) -> str:
    steps = [f'<span class="d{n}"> </span>' for n in range(LEVELS, 0, -1)]
    steps += [f'<span class="u{n}"> </span>' for n in range(1, LEVELS + 1)]
    return (
        f"less likely {''.join(steps)} more likely; strongest coefficient {strongest:.4g}  "
        "<span class='z'>weight 0</span>  <span class='p'>prompt</span>  <span class='x'>not trained</span>; "
        "point at a token for its numbers"
    )


def _spans(sequence: SequenceView, strongest: float) -> Iterator[str]:
    for trained, run in groupby(sequence.tokens, key=lambda token: token.coefficient is not None):
        if trained:
            yield from (_span(token, strongest) for token in run)
        else:
            yield _untrained(run, sequence.reason)


def _untrained(run: Iterable[TokenView], reason: str | None) -> str:
    text = escape(visible("".join(token.text for token in run)))
    if reason is not None:
        return f'<span class="x" title="not trained: {escape(reason)}">{text}</span>'
    if len(text) <= LONG:
        return f'<span class="p">{text}</span>'
    return f"<details><summary>[prompt of {len(text)} characters]</summary>{text}</details>"


def _span(token: TokenView, strongest: float) -> str:
    coefficient = token.coefficient or 0.0
    strength = level(coefficient, strongest)
    kind = f"{'d' if coefficient < 0 else 'u'}{strength}" if strength else "z"
    return f'<span class="{kind}" title="{escape(numbers(token))}">{escape(visible(token.text))}</span>'


def numbers(token: TokenView) -> str:
    """Return everything that is known of a trained token."""
    parts = [f"id {token.id}", f"version {token.version}", f"advantage {token.advantage:+.4g}"]
    if token.logp is not None:
        parts += [f"coefficient {token.coefficient:+.4g}", f"logp {token.logp:.4f}"]
    if token.rollout_logp is not None:
        parts.append(f"rollout logp {token.rollout_logp:.4f}")
        if token.logp is not None:
            parts.append(f"ratio {exp(min(20.0, token.logp - token.rollout_logp)):.4f}")
    return ", ".join(parts)
