"""The formats in which models write tool calls and reasoning, and the choice of one for a model. No streaming here.

Names are those of SGLang's `--tool-call-parser`. `auto` looks for markers in the model's chat templates, then among its
special tokens; a model without any gets Qwen's format.
"""

from collections.abc import Sequence

from proxy.parsing.formats.bare import Llama3, Mistral
from proxy.parsing.formats.base import THINK, Format, ParsedCall
from proxy.parsing.formats.qwen import Qwen
from proxy.parsing.formats.schemas import RecordedSchemas, ToolSchemas
from proxy.parsing.formats.sections import DeepSeekV3, DeepSeekV31, KimiK2
from proxy.parsing.formats.tagged import DeepSeekV32, Glm, MiniMaxM2, Qwen3Coder
from proxy.pool.errors import UserError

__all__ = ["FORMATS", "Format", "ParsedCall", "RecordedSchemas", "ToolSchemas", "choose"]

FORMATS: dict[str, type[Format]] = {
    "qwen": Qwen,
    "hermes": Qwen,
    "qwen3_coder": Qwen3Coder,
    "glm45": Glm,
    "glm47": Glm,
    "minimax-m2": MiniMaxM2,
    "deepseekv3": DeepSeekV3,
    "deepseekv31": DeepSeekV31,
    "deepseekv32": DeepSeekV32,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "mistral": Mistral,
}

_MARKERS = (
    ("deepseekv32", ("｜DSML｜",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("qwen", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>",)),
)
"""A format is recognised by all of its texts; more specific formats come first."""

_THINKS = (("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


def choose(name: str, templates: str, special: Sequence[str]) -> Format:
    """The format of this name, or for `auto` the one whose markers the model has; UserError for unknown names."""
    if name != "auto" and name not in FORMATS:
        raise UserError(f"the tool format {name!r} is unknown; use auto or one of {', '.join(FORMATS)}")
    tokens = "\n".join(special)
    if name == "auto":
        name = _detected(templates) or _detected(tokens) or "qwen"
    think = next((marks for marks in _THINKS if marks[0] in templates or marks[0] in special), THINK)
    return FORMATS[name](think)


def _detected(text: str) -> str | None:
    return next((name for name, markers in _MARKERS if all(marker in text for marker in markers)), None)
