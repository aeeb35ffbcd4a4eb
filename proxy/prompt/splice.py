"""From a request to exact tokens: where it repeats turns sampled in the same attempt, their recorded ids stand in.

`TurnMatcher` finds those turns; only the text behind the last of them is tokenised. The first turn that does not fit
(the agent changed something before it, or the template drops its reasoning) and all that follow are rendered as the
agent sent them and begin a new branch. Reasoning that the agent did not send back is put back where the template has a
place for it.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from proxy.call import Call
from proxy.parsing.formats import RecordedSchemas
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion, HistoryDigest, NewCompletion, RequestShape
from proxy.prompt.continuation.call_ids import lacks_ids, with_ids
from proxy.prompt.continuation.completion_tree import CompletionNode, CompletionTree
from proxy.prompt.continuation.history import HistoryReader, RequestHistory
from proxy.prompt.continuation.matching import TurnMatcher
from proxy.prompt.continuation.meaning import meaning
from proxy.prompt.continuation.placeholders import parsed_meaning
from proxy.prompt.continuation.text_index import TextIndex
from proxy.prompt.json_ids import IdListCache
from proxy.prompt.shown_form import with_form
from proxy.prompt.template import ChatTemplate, TemplateError
from proxy.prompt.token_cache import TokenCache

RESTORED = "reasoning_restored"
"""Counts calls whose prompt holds reasoning that the agent did not send back."""
ENDED = "ended_otherwise"
"""Counts calls that continue a turn whose last token, or stop string, is not the end that the template gives it."""
BRANCHED = "branched"
"""Counts calls that continue a recorded turn but not its path: agent or template changed what comes before its end."""

BYTES_PER_ID = array("i").itemsize


@dataclass
class Prompt:
    """A request as tokens, and its place in the attempt's tree."""

    ids: "array[int]"
    text: str
    """The text behind the path of `base` (without its end of turn); the whole prompt where there is no base."""
    follows: int | None
    """The completion that the request continues in conversation."""
    prefix_of: int | None
    """The completion whose path shares the most leading tokens."""
    prefix_length: int
    """How many tokens those are."""
    base: CompletionNode | None = None
    """The completion whose recorded ids the prompt begins with."""
    counted: tuple[str, ...] = ()
    """The counters of `continued_calls_total` that this call adds to."""
    written: bytes = b""
    """The ids as a JSON list."""
    plain: bool = False
    """Whether it belongs to a text completion."""
    history: HistoryDigest | None = None
    """What the answer will follow; None without messages."""
    shape: RequestShape | None = None
    """What the completion's label is made from; set once the request has its place."""
    experts_end: int = 0
    """How many of the first tokens have recorded experts; they stand in the rows of `prefix_of`."""
    partly: bool = False
    """Whether the request repeats a part of `follows` only, so that nothing says that all of it arrived."""


class PromptBuilder:
    """Turns the requests of one attempt into prompts. Any thread may add and build."""

    def __init__(self, template: ChatTemplate, clock: float | None = None):
        """`clock`: unix time of the attempt's beginning, at which the template's date stamps stand still."""
        self._template = template
        self._clock = None if clock is None else datetime.fromtimestamp(clock)
        self.tree = CompletionTree()
        self._tokens = TokenCache(template)
        self._id_lists = IdListCache()
        self._histories = HistoryReader()
        self._matcher = TurnMatcher(self.tree, template, self._render)
        self._texts = TextIndex(template)

    def add(self, id: int, item: NewCompletion | Completion, path: "array[int]", prompt: Prompt | None = None) -> None:
        """Add a committed completion. Without its prompt, as after a restart, the text is decoded from the path."""
        ids = path[: item.prompt_length]
        base = self.tree.base_of(item.follows, ids) if prompt is None else prompt.base
        glue = prompt.text if prompt is not None else self._template.decode(ids[base.length if base else 0 :])
        form, reply = self._template.form, meaning(item.reply)
        calls, opened = item.reply.get("tool_calls"), form.opens_reasoning(glue)
        sampled = item.sampled
        ended = bool(sampled) and sampled[-1] in self._template.ends
        raw = self._template.decode(sampled[:-1] if ended else sampled)
        schemas = RecordedSchemas(calls) if calls else None
        shown = raw
        if calls and not ended:  # the last token may have begun the separator of a next call, such as a comma
            shown = raw.rstrip().rstrip("".join(mark for mark in form.inside if len(mark) == 1))
        open_section = bool(calls) and not ended and not shown.endswith(form.section_end)
        node = CompletionNode(
            id=id,
            buffer=path,
            size=len(path),
            length=len(path) - ended,
            follows=item.follows,
            base=base,
            glue=glue,
            meaning=reply,
            text=item.reply.get("content") or "",
            history=item.shape.history if item.shape else None,
            call_ids=tuple(call["id"] for call in calls or ()),
            spliceable=any(parsed_meaning(form, text, schemas, opened) == reply for text in {raw, shown}),
            opened=opened,
            unclosed=form.section_end if open_section else "",
        )
        if not self.tree.add(node, item) or item.finish_reason not in SERVED_FINISH_REASONS:
            return
        if prompt is not None:
            self._id_lists.add(id, path, prompt.written, len(prompt.ids))
        self._matcher.add(node)
        self._texts.add(node, glue + raw if prompt is not None and prompt.plain else None)

    @property
    def size(self) -> int:
        """Bytes of the token ids of its tree, of its remembered texts and of the messages that it keeps."""
        return BYTES_PER_ID * self.tree.token_count + self._tokens.size + self._histories.size

    def with_ids(self, call: Call, catch_up: Callable[[], None] = lambda: None, remember: bool = True) -> Call:
        """The request with ids for those calls and results of its history that came without. `remember` as in
        `build`."""
        if not lacks_ids(call.messages):
            return call
        request = self._read(call.messages, catch_up, remember)
        recorded = self._matcher.call_ids(request.messages, request.turns)
        return replace(call, messages=with_ids(request.messages, recorded, self._template.form))

    def build(
        self, call: Call, splice: bool, catch_up: Callable[[], None] = lambda: None, remember: bool = True
    ) -> Prompt:
        """Render and tokenise a request; if `splice`, with recorded ids where they stand for the same text.

        `catch_up` adds what other proxies have recorded; it is called where the request repeats a turn unknown here.
        `remember=False` keeps no messages, and no texts with their ids, for later prompts. Raises TemplateError when
        the template refuses the messages.
        """
        if call.prompt is not None:
            return self._build_text_completion(call.prompt, splice)
        request = self._read(call.messages, catch_up, remember)
        call = replace(call, messages=request.messages)
        match = self._matcher.match(call, request.turns, splice)
        text = self._render(call, call.messages) if match.text is None else match.text
        base = match.steps[-1].node if match.steps else None
        ids, counted = self._tokenise(base, text, remember)
        if any(s.node.meaning[1] and not call.messages[s.index].get("reasoning_content") for s in match.steps):
            counted.append(RESTORED)
        follows = match.follows
        if splice and follows is not None and base is not follows:
            counted.append(BRANCHED if follows.spliceable else ENDED)
        prefix_of, length = self.tree.longest_prefix(ids, base)
        return Prompt(
            ids,
            text,
            follows.id if follows else None,
            prefix_of,
            length,
            base=base,
            counted=tuple(counted),
            written=self._id_lists.write(ids, prefix_of, length),
            history=request.history,
            experts_end=self.tree.experts_end(prefix_of, length),
            partly=match.partly,
        )

    def _read(self, messages: Sequence[dict[str, Any]], catch_up: Callable[[], None], remember: bool) -> RequestHistory:
        request = self._histories.read(messages, remember)
        if not all(self._matcher.knows(turn) for turn in request.turns):
            catch_up()
        return request

    def _render(self, call: Call, messages: Sequence[dict[str, Any]]) -> str:
        fixed = {} if self._clock is None else {"strftime_now": self._clock.strftime}
        messages = with_form(messages, call, self._template.takes_system)
        return self._template.render(messages, call.tools, **(call.options | fixed))

    def _tokenise(self, base: CompletionNode | None, text: str, remember: bool) -> tuple["array[int]", list[str]]:
        """Return the ids of the path of `base` and of the text behind it, and what is counted of it.

        If the text begins with the path's end-of-turn token, that is not added twice. If it begins otherwise, the
        path's end-of-turn token is left out, which ENDED counts.
        """
        if base is None:
            return self._tokens.encode(text, None, remember), []
        if base.length == base.size:
            return base.path + self._tokens.encode(text, None, remember), []
        end = self._template.decode(base.path[-1:])
        if text.startswith(end):
            return base.path + self._tokens.encode(text[len(end) :], base.path[-1], remember), []
        return base.buffer[: base.length] + self._tokens.encode(text, None, remember), [ENDED]

    def _build_text_completion(self, prompt: str | tuple[int, ...], splice: bool) -> Prompt:
        """A prompt without a template, with recorded ids where it begins with a recorded prompt and its completion."""
        if isinstance(prompt, str):
            node, start = self._texts.longest_match(prompt) if splice else (None, 0)
            ids = array("i", self._template.encode(prompt[start:]))
            tokens, text = ids if node is None else node.buffer[: node.length] + ids, prompt
        else:
            size = self._template.tokenizer.get_vocab_size()
            if not all(0 <= id < size for id in prompt):
                raise TemplateError(f"prompt holds ids outside of 0 to {size - 1}; send this model's tokens")
            tokens, text = array("i", prompt), self._template.decode(prompt)
        prefix_of, length = self.tree.longest_prefix(tokens)
        nearest = self.tree.get(prefix_of)
        return Prompt(
            tokens,
            text,
            prefix_of if nearest is not None and length >= nearest.length else None,
            prefix_of,
            length,
            written=self._id_lists.write(tokens, prefix_of, length),
            plain=True,
            experts_end=self.tree.experts_end(prefix_of, length),
        )
