"""The context actions as tools, which the model calls and is trained on like on any other tool.

What they do to the context happens when all calls of the turn have their results.
"""

from collections.abc import Callable

from .context import Context, Dropped, Results
from .tool import Tool, ToolFailed, parameters

Fold = Callable[[str, str], str]
"""Works on a branch: description, prompt -> the message that the branch returns."""


class Actions:
    """The actions on one context. `due`: what happens to it at the end of the turn."""

    def __init__(self, context: Context, results: Results):
        self._context, self._results = context, results
        self._due: list[Callable[[], Dropped]] = []

    def apply(self) -> list[Dropped]:
        """Do what the turn's calls asked for. The last compaction wins over all others."""
        due, self._due = self._due, []
        return [action() for action in due]

    def plan(self, text: str) -> str:
        self._context.plan = text
        return "noted"

    def compact(self, notes: str) -> str:
        self._due.append(lambda: self._context.compact(notes))
        return "the next turn shows your notes in the place of all turns so far"

    def discard(self, keep_last: int) -> str:
        if keep_last < 0:
            raise ToolFailed("keep_last must be 0 or more")
        self._due.append(lambda: self._context.discard(keep_last))
        return "done"

    def recall(self, id: str) -> str:
        text = self._results.get(id)
        if text is None:
            raise ToolFailed(f"there is no result {id}")
        return text

    def finish(self, message: str) -> str:
        self._context.returned = message
        return "done"

    def tools(self, fold: Fold | None) -> list[Tool]:
        """All actions. Without `fold` the conversation is a branch, which returns and does not fold."""
        folds = Tool(
            "fold",
            "Let a branch with a context of its own work on a part of the task. You get the message that it returns.",
            parameters(description="string", prompt="string"),
            lambda description, prompt: fold(description, prompt) if fold else "",
        )
        returns = Tool(
            "return", "End this branch with what its caller must know.", parameters(message="string"), self.finish
        )
        return [
            Tool("plan", "Note your plan, which stays when turns are dropped.", parameters(text="string"), self.plan),
            Tool(
                "compact",
                "Go on with notes in the place of all turns so far. Write down all that you still need.",
                parameters(notes="string"),
                self.compact,
            ),
            Tool(
                "discard",
                "Drop the results of all turns but the last ones.",
                parameters(keep_last="integer"),
                self.discard,
            ),
            folds if fold else returns,
            Tool("recall", "Show a dropped result again.", parameters(id="string"), self.recall),
        ]
