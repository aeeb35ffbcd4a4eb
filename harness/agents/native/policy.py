"""Who manages the context: the model by its calls, this module by rules, both, or nobody.

free: the model, with `compact`, `discard`, `fold` and `recall`. threshold: at a share of the context the model is
asked for notes and goes on with them. hybrid: the results of old turns are dropped all the time, and at the share the
model is asked for notes (GLM-5). none: nothing is ever dropped, so the work ends where the context does.
"""

import random

from .context import Context, Dropped
from .settings import AgentSettings, SettingsError

POLICIES = {
    "free": ("compact", "discard", "fold", "recall"),
    "threshold": ("recall",),
    "hybrid": ("recall",),
    "none": (),
}
"""Policy -> the context actions that the model is offered."""
RULED = ("threshold", "hybrid")


class ContextPolicy:
    """The policy of one rollout."""

    def __init__(self, name: str, settings: AgentSettings, task: str, context_tokens: int):
        """`context_tokens`: the context length of the model. SettingsError for a policy that does not exist."""
        if name not in POLICIES:
            raise SettingsError(f"the setting policy is {name!r}; it must be one of: {', '.join(POLICIES)}")
        self.name, self._keep_last = name, settings.keep_last
        self.actions: tuple[str, ...] = POLICIES[name]
        self.context_tokens = context_tokens
        self.share = random.Random(task).uniform(*settings.threshold)
        """The share of the context at which it compacts. It depends on the task alone, so a group shares it."""

    @property
    def ruled(self) -> bool:
        """Whether this module compacts."""
        return self.name in RULED

    def trim(self, context: Context) -> Dropped | None:
        """Drop what is dropped without the model's doing before its next turn."""
        return context.discard(self._keep_last) if self.name == "hybrid" else None

    def must_compact(self, context: Context) -> bool:
        """Whether the next request would be too long."""
        crowded = context.full or context.tokens() >= self.share * self.context_tokens
        return self.ruled and context.turns > 0 and crowded
