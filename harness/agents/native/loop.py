"""The agent's loop. A request is always what the context holds, so each turn is trained on exactly what it saw.

Left out: how a context looks (context.py), when it is compacted without a call (policy.py), the tools.
"""

import json
from collections.abc import Sequence
from typing import Any

from .actions import Actions, Fold
from .context import Context, Dropped, Results, user, with_text
from .files import Files
from .model import Answer, ContextFull, Message, Model, RefusedCall
from .policy import ContextPolicy
from .settings import AgentSettings, SettingsError
from .shell import Shell
from .tool import Tool, Toolbox

ASK_NOTES = (
    "The context is nearly full. Do not call a tool now: write notes that hold all that you need to go on. "
    "All turns so far are dropped then, and you see the task and your notes."
)
MERGE = "Here are {} independent drafts of your next turn. Judge them, and take the turn yourself.\n\n{}"
MAIN = "main"
"""The name of the conversation that is no branch."""
LEAST_CHARACTERS = 100
"""Of a result, however short the context is. Of others it may fill a half, where a token has four characters."""
CUT_IN_A_ROW = 2
"""Turns in a row that end at a token limit without a call, before the work ends."""


class Worker:
    """Works on one task: the main conversation, and the branches that it folds."""

    def __init__(
        self,
        model: Model,
        settings: AgentSettings,
        policy: ContextPolicy,
        shell: Shell,
        servers: Sequence[Tool],
        results: Results,
    ):
        self._model, self._settings, self._policy, self._results = model, settings, policy, results
        self._hands = [shell.tool(), *Files(lambda: shell.directory).tools(), *servers]

    def work_on_task(self, task: str) -> str:
        """The model's last words. They are empty when it has no room or no calls left."""
        return self._converse(task, MAIN)

    def _converse(self, task: str, branch: str) -> str:
        """Take turns until the model ends the conversation."""
        context = Context(
            branch, self._settings.system, task, self._results, recallable="recall" in self._policy.actions
        )
        actions = Actions(context, self._results)
        tools = self._toolbox(actions, self._fold if branch == MAIN else None)
        cut = 0
        while context.returned is None and cut < CUT_IN_A_ROW:
            try:
                answer = self._turn(context, tools)
            except (ContextFull, RefusedCall) as error:
                say(branch, ended=str(error))
                return "" if branch == MAIN else f"Error: the branch ended without a message: {error}"
            say(branch, reply=answer.message)
            cut = cut + 1 if answer.cut and not answer.calls else 0
            if cut and self._policy.ruled and context.turns:
                context.full = True  # so that the next turn begins with a compaction
                continue
            context.add_reply(answer)
            if not answer.calls:
                return answer.text
            for call in answer.calls:
                result = tools.run(call)
                context.add_result(call.get("id", ""), result)
                say(branch, result=result)
            for dropped in actions.apply():
                say_dropped(branch, dropped)
        return context.returned or ""

    def _turn(self, context: Context, tools: Toolbox) -> Answer:
        """The model's next turn, in a context that the policy has seen to. ContextFull when nothing makes it fit."""
        if context.fresh and context.branch == MAIN and self._settings.drafts > 1:
            return self._merged(context, tools)
        if (dropped := self._policy.trim(context)) is not None and dropped.results:
            say_dropped(context.branch, dropped)
        while True:
            if self._policy.must_compact(context):
                self._compact(context, tools)
            try:
                return self._ask(context, context.messages(), tools)
            except ContextFull:
                if not self._policy.ruled or not context.turns:
                    raise
                context.full = True

    def _ask(self, context: Context, messages: list[Message], tools: Toolbox, **fields: Any) -> Answer:
        answer, *_ = self._answers(context, messages, tools, **fields)
        return answer

    def _answers(self, context: Context, messages: list[Message], tools: Toolbox, **fields: Any) -> list[Answer]:
        answers = self._model.ask(messages, tools.definitions, **fields)
        context.measure(messages, answers[0].prompt_tokens)
        return answers

    def _compact(self, context: Context, tools: Toolbox) -> None:
        """Have the model write notes, and go on with them. The request keeps its tools, so its beginning is cached."""
        while True:
            try:
                messages = [*context.messages(), user(ASK_NOTES)]
                notes = self._ask(context, messages, tools, tool_choice="none")
                break
            except ContextFull:
                if not context.turns:
                    raise
                say_dropped(context.branch, context.drop_last_turn())
        say(context.branch, notes=notes.message)
        say_dropped(context.branch, context.compact(notes.text))

    def _merged(self, context: Context, tools: Toolbox) -> Answer:
        """Deep think: several answers to one turn, and one more turn that has read them."""
        drafts = self._answers(context, context.messages(), tools, n=self._settings.drafts)
        shown = "\n\n".join(f"Draft {number}:\n{_as_text(draft)}" for number, draft in enumerate(drafts, 1))
        say(context.branch, drafts=[draft.message for draft in drafts])
        return self._ask(context, with_text(context.messages(), MERGE.format(len(drafts), shown)), tools)

    def _fold(self, description: str, prompt: str) -> str:
        return self._converse(prompt, description)

    def _toolbox(self, actions: Actions, fold: Fold | None) -> Toolbox:
        """The tools of a conversation: of those that its policy offers, those that the settings name."""
        own, wanted = actions.tools(fold), set(self._settings.tools)
        if unknown := wanted - {tool.name for tool in (*self._hands, *own)} - {"fold", "return"}:
            raise SettingsError(f"the setting tools names {min(unknown)!r}, which is no tool; correct it")
        offered = {"plan", "return", *self._policy.actions}
        tools = [*self._hands, *(tool for tool in own if tool.name in offered)]
        some = [tool for tool in tools if not wanted or tool.name in wanted or tool.name == "return"]
        return Toolbox(some, max(LEAST_CHARACTERS, 2 * self._policy.context_tokens))


def _as_text(answer: Answer) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in answer.calls]
    return "\n".join(filter(None, [answer.text, *calls]))


def say(branch: str, **what: Any) -> None:
    """Write a line of the log, as JSON."""
    print(json.dumps({"branch": branch, **what}), flush=True)


def say_dropped(branch: str, dropped: Dropped) -> None:
    say(branch, context=dropped.how, results=list(dropped.results), characters=dropped.characters)
