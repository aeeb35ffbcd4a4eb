"""What an attempt's model is shown otherwise than its agent writes it: kinds and a seed, in the attempt's row.

A policy that meets each scaffold in one form only learns its words by heart. The harness draws the kinds for a group,
since members of a group are compared, and share their prompts. The proxy follows them (proxy/augment).
"""

import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

PromptKind = Literal[
    "tool_names",
    "argument_names",
    "argument_order",
    "descriptions",
    "system_prompt",
    "observations",
    "truncation",
    "tool_format",
]
PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)
NAMES: frozenset[PromptKind] = frozenset({"tool_names", "argument_names"})
"""Kinds that an agent cannot have whose own prompts speak of its tools by name."""
TOOLS_IN_USER = "tools_in_user_message"
"""The argument of Llama's chat templates that says how tools are offered: in the first message of the user, or in the
system prompt. Other templates offer them in one way."""
PROBABILITY = 0.5
"""Probability that a group gets a variation, for each kind."""


class PromptVariation(msgspec.Struct, frozen=True):
    """What varies in the prompts of an attempt."""

    kinds: tuple[PromptKind, ...]
    seed: int
    """The seed of all choices: which name, which order, which limit."""

    def lines(self) -> list[str]:
        """Return the lines that `attempts.augmentation` lists."""
        return [f"{kind}={self.seed}" for kind in self.kinds]


def drawn(kinds: Sequence[PromptKind], seed: int, task: str, group_id: int) -> PromptVariation | None:
    """The variation of a group, a pure function of the arguments; None where it has no kind."""
    draws = random.Random(f"prompt/{seed}/{task}/{group_id}")
    earlier: list[PromptKind] = [kind for kind in PROMPT_KINDS if kind != "tool_format"]
    chosen = [kind for kind in earlier if draws.random() < PROBABILITY and kind in kinds]
    own_seed = draws.randrange(1 << 31)
    # A newer kind is drawn behind the seed, so that a run from before it, which is resumed, keeps its draws.
    chosen += ["tool_format"] if draws.random() < PROBABILITY and "tool_format" in kinds else []
    return PromptVariation(tuple(chosen), own_seed) if chosen else None
