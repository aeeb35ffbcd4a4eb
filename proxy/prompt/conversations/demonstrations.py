"""Makes completions of the demonstrations of a trajectory: of its token ids where they are this model's, else rendered.

Rendered text is what the model would have read and had to write: the prompt by its chat template, and the answer as the
template shows it. The template's own choices hold, such as leaving out old reasoning.
"""

import json
import math
from array import array
from collections.abc import Iterator
from typing import Any

from proxy.dialects.base import parsed_arguments
from proxy.pool.completions.labels import LABELS
from proxy.pool.errors import UserError
from proxy.pool.traces.atif_format import AtifMetrics
from proxy.pool.traces.atif_reading import AtifTurn, ReadTrajectory
from proxy.pool.traces.demonstrations import Demonstration
from proxy.prompt.template import ChatTemplate, TemplateError

RENDERED, RECORDED = "rendered", "ids"


class DemonstrationMaker:
    """Makes demonstrations for one model. `tokenizer`: the fingerprint of its ids."""

    def __init__(self, template: ChatTemplate, tokenizer: str | None):
        self._template, self._tokenizer = template, tokenizer

    def made(self, trajectory: ReadTrajectory) -> Iterator[Demonstration]:
        """Yield the demonstrations in order. UserError where the template cannot show one."""
        for at, turn in enumerate(trajectory.turns):
            if turn.demonstration:
                recorded = self._recorded(trajectory, at)
                yield recorded or self._rendered(trajectory, at)

    def _recorded(self, trajectory: ReadTrajectory, at: int) -> Demonstration | None:
        """Return the step with its token ids; None where it has none, or where they are another tokenizer's."""
        turn, tokenizer = trajectory.turns[at], trajectory.tokenizer
        metrics = turn.metrics
        if metrics is None or not metrics.prompt_token_ids or not metrics.completion_token_ids:
            return None
        answer = metrics.completion_token_ids
        largest = self._template.tokenizer.get_vocab_size()
        if not all(0 <= id < largest for id in (*metrics.prompt_token_ids, *answer)):
            return None
        if tokenizer != self._tokenizer if tokenizer else not self._are_ours(metrics, trajectory, at):
            return None
        given = tuple(turn.own.given)
        logprobs = array("f", metrics.logprobs or [each for each in turn.own.logprobs if each is not None])
        whole = len(logprobs) == len(answer) - sum(end - start for start, end in given)
        possible = all(math.isfinite(each) and each <= 0 for each in logprobs)  # as float32, as they are stored
        return Demonstration(
            prompt=array("i", metrics.prompt_token_ids),
            answer=array("i", answer),
            logprobs=logprobs if whole and possible else array("f"),
            given=given,
            reply=turn.message,
            label=_label(turn, trajectory),
            finish_reason=_finish_reason(turn),
            made_of=RECORDED,
            started_at=turn.started_at,
            seconds=turn.own.seconds,
        )

    def _are_ours(self, metrics: AtifMetrics, trajectory: ReadTrajectory, at: int) -> bool:
        """Whether the ids of a step are this tokenizer's: they spell the answer, and the newest text before it."""
        before = [str(turn.message.get("content") or "").strip() for turn in trajectory.turns[:at]]
        newest = next((text for text in reversed(before) if text), None)
        words = [word.strip() for word in _words(trajectory.turns[at].message)]
        if newest is None or not any(words):
            return False
        prompt = self._template.decode(metrics.prompt_token_ids or ())
        answer = self._template.decode(metrics.completion_token_ids or ())
        return _shows(prompt, newest) and all(_shows(answer, word) for word in words)

    def _rendered(self, trajectory: ReadTrajectory, at: int) -> Demonstration:
        turn = trajectory.turns[at]
        before = [_for_template(each.message) for each in trajectory.turns[:at]]
        prompt = self._render(before, trajectory.tools, turn.place)
        answer = self._answer(prompt, before, turn, trajectory.tools)
        return Demonstration(
            prompt=array("i", self._template.encode(prompt)),
            answer=array("i", self._template.encode(answer)),
            logprobs=array("f"),
            reply=turn.message,
            label=_label(turn, trajectory),
            finish_reason=_finish_reason(turn),
            made_of=RENDERED,
            started_at=turn.started_at,
            seconds=turn.own.seconds,
        )

    def _answer(self, prompt: str, before: list[dict[str, Any]], turn: AtifTurn, tools: list[dict[str, Any]]) -> str:
        """Return the text that the model has to write behind the prompt, up to the end of the turn."""
        message = _for_template(turn.message)
        thought, content = message.get("reasoning_content") or "", message.get("content") or ""
        ways = [message]
        if thought and not self._template.takes_reasoning:
            begin, end = self._template.form.think
            rest = {key: value for key, value in message.items() if key != "reasoning_content"}
            ways = [rest | {"content": f"{begin}\n{thought}\n{end}\n\n{content}"}]
        for way in ways:
            whole = self._render([*before, way], tools, turn.place, add_generation_prompt=False)
            if not whole.startswith(prompt):
                continue
            ends = [found.end() for found in self._template.any_end.finditer(whole, len(prompt))]
            answer = whole[len(prompt) : ends[-1] if ends else len(whole)]
            names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
            if all(words.strip() in answer for words in (thought, content, *names)):
                return answer
        raise UserError(
            f"{turn.place}: the chat template of {self._template.directory} does not show this answer as one to its "
            "prompt; leave the document out, or import it for a model whose template does"
        )

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], place: str, **options: Any) -> str:
        try:
            return self._template.render(messages, tools, **options)
        except TemplateError as error:
            raise UserError(f"{place}: {error}; leave the document out") from error


def _finish_reason(turn: AtifTurn) -> str:
    """Return how the answer ended. Documents of others do not say it, and hold whole answers."""
    return turn.own.finish_reason or ("tool_calls" if turn.message.get("tool_calls") else "stop")


def _label(turn: AtifTurn, trajectory: ReadTrajectory) -> str | None:
    """Return the label of the call, or of its document: a branch may have calls of several."""
    return turn.own.label if turn.own.label in LABELS else trajectory.label


def _words(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of an answer: reasoning, content, and of each call the name and the arguments that are text."""
    yield message.get("reasoning_content") or ""
    yield message.get("content") or ""
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"]
        arguments = parsed_arguments(call["function"]["arguments"])
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        yield from (value for value in values if isinstance(value, str))


def _shows(text: str, word: str) -> bool:
    """Whether a text has a word, as it is or as JSON writes it."""
    return word in text or any(json.dumps(word, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False))


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: content is text, arguments are objects where they are JSON objects."""
    shown = message | {"content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return shown
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": parsed_arguments(function["arguments"])}})
    return shown | {"tool_calls": calls}
