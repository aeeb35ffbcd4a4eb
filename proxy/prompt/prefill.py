"""How a prescribed call is begun: the tokens that the proxy gives to the model, so that it can only go on with a call.

Where the turn may reason, reasoning is sampled first. Its opening is given where the prompt lacks it; where it ends,
the opening of a call is given, with the function's name if only one may be called. All that follows is sampled freely.
Given text ends where a token ends that the model would have sampled itself. Left out: what may be called, beyond the
name; calls that the model adds behind the first one.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.call import Call, Constraint
from proxy.pool.completions.common_prefix import common_length
from proxy.prompt.splice import Prompt
from proxy.prompt.template import THINKING, THINKING_TOO, ChatTemplate

BEHIND_REASONING = "\n\n"
"""What most templates write between the end of reasoning and a call."""


@dataclass(frozen=True)
class Stage:
    """One engine call of an answer."""

    given: tuple[int, ...] = ()
    """Tokens that stand before what it samples."""
    ends: tuple[str, ...] = ()
    """Texts at which it ends, besides the turn's own end. The next stage goes on behind them."""


FREE = (Stage(),)
"""The stages of an answer without a prescribed call."""


def stages(call: Call, prompt: Prompt, template: ChatTemplate) -> Sequence[Stage]:
    """The engine calls that make the answer to a request."""
    constraint = call.constraint
    if constraint is None or constraint.calls is None or constraint.enforced:
        return FREE
    form = template.form
    opened = form.opens_reasoning(prompt.text)
    if not opened and not _may_reason(call, prompt, template):
        return (Stage(_opening(constraint, "", template)),)
    thought = Stage(() if opened else tuple(template.encode(form.think[0])), form.think[1:])
    return (thought, Stage(_opening(constraint, BEHIND_REASONING, template)))


def _may_reason(call: Call, prompt: Prompt, template: ChatTemplate) -> bool:
    """Whether the model would begin the turn with reasoning: the template shows it, and it is not switched off."""
    off = any(call.options.get(name) is False for name in (THINKING, THINKING_TOO))
    off = off or prompt.text.rstrip().endswith(template.form.think[1])
    return template.takes_reasoning and not off


def _opening(constraint: Constraint, before: str, template: ChatTemplate) -> tuple[int, ...]:
    """The tokens that a call of one of the functions begins with, with the name where only one may be called."""
    names = constraint.calls or ()
    marker, behind = template.opening
    whole = [array("i", template.encode(f"{before}{marker}{name}{behind}")) for name in names]
    if len(names) == 1:
        named = array("i", template.encode(f"{before}{marker}{names[0]}"))
        if whole[0][: len(named)] == named:
            return tuple(named)
    opening = array("i", template.encode(f"{before}{marker}"))
    return tuple(opening[: min(common_length(opening, ids, len(opening)) for ids in whole)])
