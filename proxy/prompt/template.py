"""Renders messages to text and encodes text to token ids, as transformers does, without transformers.

Reads `tokenizer.json`, the chat template and the few numbers that serving needs from a model directory in Hugging Face
format. Templates run in Jinja's immutable sandbox. Left out: multimodal templates, and slow (Python) tokenizers.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from proxy.parsing.formats import choose
from proxy.pool.errors import UserError
from proxy.pool.rollouts.prompt_variations import TOOLS_IN_USER
from proxy.prompt.system_messages import KEPT, WAYS, SystemWay, arranged

PROBE = "blackforgeprobe"
"""A word that no template contains."""

THINKING, THINKING_TOO = "enable_thinking", "thinking"
"""The argument that says whether to think, in most templates and in DeepSeek's."""
BEHIND_NAME = 8
"""Characters behind a call's name that show where its last token ends."""
DICT_ATTRIBUTES = frozenset(dir(dict))


class TemplateError(Exception):
    """The chat template refuses these messages; the message contains the template's own words."""


class ChatTemplate:
    """One model's tokenizer, chat template and tool-call format. Any thread may use it: nothing in it changes."""

    def __init__(self, directory: Path, tool_format: str = "auto"):
        self.directory = directory
        tokenizer_file = directory / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise UserError(f"the model directory {directory} has no tokenizer.json; save a fast tokenizer there")
        try:
            self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises its own bare Exception for a malformed file
            raise UserError(f"{tokenizer_file} is no tokenizer ({error}); save a fast tokenizer there") from error
        settings = _json(directory / "tokenizer_config.json")
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in tokens.items()}
        self._variables = {name: text for name, text in texts.items() if isinstance(text, str)}
        self._sources = _sources(directory, settings)
        try:
            compiled = {name: _compiled(source) for name, source in self._sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of {directory} is no jinja2 ({error}, line {error.lineno})") from error
        self._templates = {name: template for name, (template, _) in compiled.items()}
        self._arguments = frozenset().union(*(arguments for _, arguments in compiled.values()))
        model = _json(directory / "config.json")
        self.context_length: int | None = model.get("max_position_embeddings")
        self.ends = self._end_ids(model)
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added)
        """Texts that are always one token, whatever stands around them."""
        raw = [token for token in added if not token.normalized or self.tokenizer.normalizer is None]
        self._raw_special = _any_of(token.content for token in raw)
        self._plain = {token.content for token in raw if not (token.lstrip or token.rstrip or token.single_word)}
        self.any_end = _any_of(self.decode([end]) for end in self.ends)
        """Finds the text of the next token that ends a turn."""
        self.form = choose(tool_format, *self._described())
        self.written = self.form if tool_format == "auto" else choose("auto", *self._described())
        """The format in which the template writes calls; the model samples them in `form`."""
        self._calls: tuple[str | None, bool] = "", False
        self._calls_of_text = True
        self._system = WAYS[0]
        self._calls = self._way_of_calls()
        self._calls_of_text = self._shows({"content": self._calls[0], "tool_calls": [_call("ls", f"no {PROBE}")]})
        """Whether the template shows a call whose arguments are no JSON, as other systems' histories have them."""
        self.takes_system = self._shows({"content": "said"}, system=PROBE)
        """Whether the template shows a system prompt."""
        self._system = self._way_of_system()
        self.keeps_later_system = self._system.later == KEPT
        """Whether the template itself shows system messages behind other messages."""
        self.takes_reasoning = self._shows({"content": "said", "reasoning_content": PROBE})
        """Whether the template reads a turn's `reasoning_content`; others see reasoning only as part of the content."""
        self.tool_formats = self._tool_formats()
        """In how many ways the template offers tools, of which a request's arguments choose one."""
        self.opening = self._opening_of_calls()
        """Text of a turn before its first call's name, from the marker on, and text behind the name."""

    def _described(self) -> tuple[str, tuple[str, ...]]:
        return "\n".join(self._sources.values()), self.special

    def _way_of_calls(self) -> tuple[str | None, bool]:
        """The content with which the template shows calls without text, and whether arguments must be JSON text.

        DeepSeek's templates take only text, and some of them show calls only where the content is None.
        """
        parsed = {"a": PROBE}
        for content, arguments in product(("", None), (parsed, _tojson(parsed))):
            self._calls = content, isinstance(arguments, str)
            if self._shows({"content": content, "tool_calls": [_call(PROBE, arguments)]}):
                return self._calls
        return "", False

    def _way_of_system(self) -> SystemWay:
        """The first way in which the template shows all system messages, in front and later; as sent if none does."""
        system = [{"role": "system", "content": f"{PROBE}{number}"} for number in range(4)]
        user, turn = {"role": "user", "content": "x"}, {"role": "assistant", "content": "said"}
        messages = [*system[:2], user, system[2], turn, system[3], user]
        for way in WAYS:
            self._system = way
            try:
                text = self.render(messages, ())
            except TemplateError:
                continue
            if all(message["content"] in text for message in system):
                return way
        return WAYS[0]

    def _shows(self, turn: dict[str, Any], system: str = "") -> bool:
        """Whether the template shows PROBE when this is the last turn, or the system prompt."""
        first = [{"role": "system", "content": system}] if system else []
        try:
            return PROBE in self.render([*first, {"role": "user", "content": "x"}, {"role": "assistant", **turn}], ())
        except TemplateError:
            return False

    def _tool_formats(self) -> int:
        """2 where TOOLS_IN_USER changes how the template offers tools, and both ways show them; else 1."""
        if not self.reads(TOOLS_IN_USER):
            return 1
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
        tools = [{"type": "function", "function": {"name": PROBE, "description": "d", "parameters": {}}}]
        try:
            shown = {self.render(messages, tools, **{TOOLS_IN_USER: in_user}) for in_user in (True, False)}
        except TemplateError:
            return 1
        return len(shown) if all(PROBE in prompt for prompt in shown) else 1

    def _opening_of_calls(self) -> tuple[str, str]:
        """How the template writes a turn's first call; as the format does where the template shows none in it."""
        content, as_text = self._calls
        arguments = {"a": "b"}
        function = {"name": PROBE, "arguments": _tojson(arguments) if as_text else arguments}
        call = {"id": "a1b2c3d4e", "type": "function", "function": function}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            before, name, behind = self.render([{"role": "user", "content": "x"}, turn], ()).partition(PROBE)
        except TemplateError:
            return self.form.opening
        marker = self.form.opening[0]
        starts = [before.rfind(mark) for mark in (*self.form.openers, *self.form.at_start) if marker.startswith(mark)]
        start = min((at for at in starts if at >= 0), default=-1)
        if not name or start < 0 or self.form is not self.written:
            return self.form.opening
        return before[start:], behind[:BEHIND_NAME]

    def _end_ids(self, model: dict[str, Any]) -> tuple[int, ...]:
        """The end-of-turn tokens, the tokenizer's own first."""
        own = self.tokenizer.token_to_id(str(self._variables.get("eos_token")))
        named = _json(self.directory / "generation_config.json").get("eos_token_id", model.get("eos_token_id"))
        named = named if isinstance(named, list) else [named]
        return tuple(dict.fromkeys(end for end in (own, *named) if end is not None))

    @property
    def end(self) -> int:
        """The token that ends a turn."""
        return self.ends[0]

    def reads(self, argument: str) -> bool:
        """Whether the template reads an argument of this name."""
        return argument in self._arguments or (argument == THINKING and THINKING_TOO in self._arguments)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], **options: Any) -> str:
        """Render the prompt up to where the assistant's turn begins; TemplateError when the template refuses it.

        Tool-call arguments are parsed objects, or text that is no JSON object. A call of the latter kind becomes part
        of its message's text where the template has no way to show it. System messages that the template would not show
        stand in other places (system_messages.py beside this).
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        values = {**self._variables, "add_generation_prompt": True, **options}
        if THINKING in options and THINKING not in self._arguments:
            values.setdefault(THINKING_TOO, options[THINKING])
        content, as_text = self._calls
        messages = arranged(messages, self._system)
        if not self._calls_of_text:
            messages = [_with_calls_in_words(message) for message in messages]
        if as_text:
            messages = [_with_text_arguments(message) for message in messages]
        if content is None:
            messages = [m if m.get("content") or not m.get("tool_calls") else {**m, "content": None} for m in messages]
        try:
            return self._templates[name].render(messages=messages, tools=list(tools) or None, documents=None, **values)
        except Exception as error:  # the template is foreign code over the agent's data: it may raise anything
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error

    def cuts(self, text: str) -> list[int]:
        """Where the tokenizer always splits the text: the beginnings of plain added tokens."""
        return [match.start() for match in self._raw_special.finditer(text) if match[0] in self._plain]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Markers in it become their special tokens; nothing is added around it."""
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)  # `encode` also makes offsets
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the first of these texts, the longest of several that begin there; nothing without texts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"the file {path} is not JSON ({error}); save the model directory again") from error


def _call(name: str, arguments: Any) -> dict[str, Any]:
    """A call with an id that every template accepts."""
    return {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": arguments}}


def _with_calls_in_words(message: dict[str, Any]) -> dict[str, Any]:
    """The message with those calls whose arguments are no JSON object as lines of its text."""
    calls = message.get("tool_calls") or ()
    unreadable = [call["function"] for call in calls if isinstance(call["function"]["arguments"], str)]
    if not unreadable:
        return message
    lines = [_tojson({"name": function["name"], "arguments": function["arguments"]}) for function in unreadable]
    kept = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    content = "\n".join([message["content"], *lines] if message.get("content") else lines)
    return {**rest, "content": content, **({"tool_calls": kept} if kept else {})}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [a if isinstance(a, str) else _tojson(a) for a in (function["arguments"] for function in functions)]
    calls = zip(message["tool_calls"], functions, texts, strict=True)
    return {**message, "tool_calls": [{**c, "function": {**f, "arguments": text}} for c, f, text in calls]}


def _sources(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Template name -> source; `chat_template.jinja` takes precedence over the tokenizer's configuration."""
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if not source:
        raise UserError(
            f"the model directory {directory} has no chat template; add chat_template.jinja, "
            "or chat_template in tokenizer_config.json"
        )
    return source if isinstance(source, dict) else {"default": source}


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training frameworks; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, quicker at `message.role`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What Jinja gives, without the exception that it raises and catches where a dict has no such attribute."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(16)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """A template, and the variables that it reads. Compiling takes longer than all else that a model's directory asks
    for, and replays, traces and tests open the same one again and again. All threads share it: two that ask for a new
    one at once both compile it, and rendering changes nothing in a template."""
    environment = _environment()
    return environment.from_string(source), frozenset(meta.find_undeclared_variables(environment.parse(source)))


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


def _tojson(value: Any, **options: Any) -> str:
    """Serialise as transformers does; jinja's own filter escapes HTML characters."""
    return json.dumps(value, **{"ensure_ascii": False, **options}) if options else _plain_json(value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
