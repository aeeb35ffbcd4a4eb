"""Model families in small: chat templates of our own that do what each family's does, over one tokenizer that merges.

All families share one byte-level BPE with all special tokens, so that one engine samples for all of them. What
is theirs: the template, the format of calls, the tokens that end a turn. Left out: their vocabularies and wording.
"""

import ast
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from harness.agents.bundles.install import agents_directory
from proxy.prompt.template import ChatTemplate
from tests.proxy.written import WRITERS

HERE = Path(__file__).parent / "families"
SPECIAL = """
[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <arg_key> </arg_key> <arg_value> </arg_value>
]~!b[ ]~b] [e~[ <minimax:tool_call> </minimax:tool_call>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>
<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]
<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
<|header_start|> <|header_end|> <|eot|> <|eom|> <|python_start|> <|python_end|> <|separator|>
""".split()
VOCABULARY = 2048 + len(SPECIAL)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family does that decides whether a turn can stay as it was sampled."""

    file: str
    way: str
    """How calls are written: a key of tests/proxy/written.py."""
    ends: tuple[str, ...]
    """Tokens that end a turn, the usual one first."""
    call_end: str = ""
    """The one behind calls, where it is another."""
    thinks: str = "<think>"
    """What a sampled turn with reasoning begins with; empty where the prompt has opened it. `no`: never reasons."""
    forgets: str = "never"
    """Whose reasoning the history leaves out: never | old (before the last user message) | all."""
    moves: bool = False
    """The system prompt and the tools go to the last user message."""
    one_of: bool = False
    """A turn shows its calls or its text, never both, and one call at most."""
    calls: bool = True
    """Whether the template shows calls."""
    options: dict[str, Any] = field(default_factory=dict)
    real: tuple[str, str] | None = None
    """The Python file that carries the template, below one of PLACES, and words that tell it from others there."""

    @property
    def source(self) -> str | None:
        """The template's text; None where the package that carries it is not installed."""
        if self.real is None:
            return (HERE / f"{self.file}.jinja").read_text()
        file, words = self.real
        source = next((place / file for place in PLACES if (place / file).is_file()), None)
        texts = ast.walk(ast.parse(source.read_text())) if source else ()
        strings = (text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))
        return next((text for text in strings if "{%" in text and words in text), None)


PLACES = (Path(sysconfig.get_path("purelib")), *agents_directory().glob("*/packages"))


def _im(file: str, way: str, **more: Any) -> Family:
    return Family(file=file, way=way, ends=("<|im_end|>", "<|endoftext|>"), **more)


def _glm(**more: Any) -> Family:
    ends = ("<|user|>", "<|observation|>", "<|endoftext|>")
    return Family(file="glm-4.5", way="glm45", ends=ends, call_end="<|observation|>", forgets="old", **more)


def _deepseek(**more: Any) -> Family:
    return Family(file="deepseek-v3.1", way="deepseekv31", ends=("<｜end▁of▁sentence｜>",), **more)


CARRIER = "the package that carries this template"
FAMILIES: dict[str, Family] = {
    "Qwen2.5": _im("qwen2.5", "qwen"),
    "Qwen3": _im("qwen3", "qwen", forgets="old"),
    "Qwen3, thinking only": _im("qwen3-thinking", "qwen", thinks="", forgets="old"),
    "Qwen3, not thinking": _im("qwen3", "qwen", thinks="no", forgets="all", options={"enable_thinking": False}),
    "Qwen3-Coder": _im("qwen3-coder", "qwen3_coder", thinks="no"),
    "GLM-4.5": _glm(thinks="\n<think>"),
    "GLM-4.5, not thinking": _glm(thinks="no", options={"enable_thinking": False}),
    "MiniMax-M2": Family(file="minimax-m2", way="minimax-m2", ends=("[e~[",), thinks="", forgets="old"),
    "DeepSeek-V3.1": _deepseek(thinks="no"),
    "DeepSeek-V3.1, thinking": _deepseek(thinks="", forgets="all", options={"thinking": True}),
    "Llama-3.1": Family(
        file="llama-3.1", way="llama3, no tag", ends=("<|eot_id|>", "<|eom_id|>"), thinks="no", one_of=True
    ),
    "Mistral": Family(file="mistral", way="mistral", ends=("</s>",), thinks="no", moves=True, one_of=True),
    "Kimi-K2": Family(file="kimi-k2", way="kimi_k2", ends=("<|im_end|>",), thinks="no"),
    "Llama-4, real": Family(
        file="",
        way="llama3, no tag",
        ends=("<|eot|>", "<|eom|>"),
        thinks="no",
        real=("transformers/models/llama4/processing_llama4.py", "<|python_start|>"),
    ),
    "Grok, real": Family(
        file="",
        way="qwen",
        ends=("<|separator|>",),
        thinks="no",
        calls=False,
        real=("sglang/srt/tokenizer/tiktoken_tokenizer.py", "<|separator|>"),
    ),
    "Llama-3, real": Family(
        file="",
        way="llama3",
        ends=("<|eot_id|>",),
        thinks="<think>",
        calls=False,
        real=("litellm/constants.py", "<|eot_id|>"),
    ),
    "DeepSeek-R1, real": Family(
        file="",
        way="deepseekv3",
        ends=("<｜end▁of▁sentence｜>",),
        thinks="",
        forgets="all",
        calls=False,
        real=("litellm/constants.py", "<｜tool▁outputs▁begin｜>"),
    ),
}
"""Those named real are the models' own templates, read from installed packages."""


def make_zoo(tiny_model: Path, root: Path) -> dict[str, ChatTemplate]:
    """The families as model directories below `root`, without weights; all have one tokenizer."""
    tokenizer = zoo_tokenizer(tiny_model)
    templates = {}
    for name, family in FAMILIES.items():
        if (source := family.source) is None:
            continue
        directory = root / name
        directory.mkdir(parents=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(source)
        ends = [tokenizer.token_to_id(end) for end in family.ends]
        _write(directory / "tokenizer_config.json", {"eos_token": family.ends[0], "bos_token": "<s>"})
        _write(directory / "generation_config.json", {"eos_token_id": ends})
        _write(directory / "config.json", {"max_position_embeddings": 40960})
        templates[name] = ChatTemplate(directory, WRITERS[family.way][0] if family.real else "auto")
    return templates


def zoo_tokenizer(tiny_model: Path) -> Tokenizer:
    """The tiny model's tokenizer with every family's special tokens behind its own."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def make_zoo_model(tiny_model: Path, directory: Path) -> None:
    """The tiny model with random weights for the further tokens: what the engine loads."""
    import torch
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    zoo_tokenizer(tiny_model).save(str(directory / "tokenizer.json"))
    for file in ("tokenizer_config.json", "generation_config.json"):
        (directory / file).write_bytes((tiny_model / file).read_bytes())
    config = json.loads((tiny_model / "config.json").read_text())
    _write(directory / "config.json", config | {"vocab_size": VOCABULARY})
    weights = load_file(tiny_model / "model.safetensors")
    words = weights["model.embed_tokens.weight"]
    more = torch.randn((len(SPECIAL), words.shape[1]), generator=torch.Generator().manual_seed(1)) * words.std()
    weights["model.embed_tokens.weight"] = torch.cat([words, more])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value))
