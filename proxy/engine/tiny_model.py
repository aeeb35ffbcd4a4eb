"""Makes a tiny Qwen3 model (weights, tokenizer, chat template), so that everything runs without a download.

The directory is in Hugging Face format and depends on the seed and the sizes only: the same bytes every time. The
tokenizer is a byte-level BPE trained here on our own words (`tiny_words.txt`) and on pieces of text that agents send
(`tiny_pieces.txt`). The weights are random. Left out: any training; it samples noise until it is trained.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).parent
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that stay in decoded text, as in Qwen3, because parsers look for them there."""

WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's split of text into words."""

PIECES_WEIGHT = 300
"""How often each piece is repeated in the corpus of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """The sizes of the model. With the defaults it learns the demo's tasks in minutes on one core."""

    vocabulary: int = 2048
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 40960
    rope_theta: float = 10000.0
    init_std: float = 0.05
    tied: bool = True


def make_tiny_model(directory: Path, seed: int = 0, sizes: TinySizes | None = None) -> None:
    """Write config, weights, tokenizer and template; existing files are overwritten."""
    sizes = sizes or TinySizes()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(sizes.vocabulary)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    end, pad = ids[TURN_END], ids[END_OF_TEXT]
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(sizes))
    _write_json(directory / "config.json", _model_config(sizes, end, pad))
    _write_json(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "eos_token_id": end, "pad_token_id": pad},
    )
    _write_weights(directory / "model.safetensors", sizes, seed)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _corpus() -> Iterator[str]:
    """Each word as often as its count says, mostly after a space, then the pieces."""
    for line in (HERE / "tiny_words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        word, count = line.split()
        yield f" {word}" * int(count)
        yield f"\n{word}" * (int(count) // 4)
    pieces = (HERE / "tiny_pieces.txt").read_text(encoding="utf-8")
    for mark in CONTROL + MARKERS:
        pieces = pieces.replace(mark, "\x00")
    yield from pieces.split("\x00") * PIECES_WEIGHT


def _train_tokenizer(vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocabulary}: choose fewer")
    return tokenizer


def _tokenizer_config(sizes: TinySizes) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes.context,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": (HERE / "tiny_template.jinja").read_text(encoding="utf-8"),
    }


def _model_config(sizes: TinySizes, end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.context,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": sizes.init_std,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": sizes.layers,
        "tie_word_embeddings": sizes.tied,
        "torch_dtype": "float32",
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
        "use_cache": True,
    }


def _shapes(sizes: TinySizes) -> dict[str, tuple[int, ...]]:
    """Qwen3's weight names and shapes; one-dimensional weights are norms."""
    hidden, query, key = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, hidden)}
    for layer in range(sizes.layers):
        block = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.q_norm": (sizes.head_dim,),
            "self_attn.k_norm": (sizes.head_dim,),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (sizes.intermediate, hidden),
            "mlp.up_proj": (sizes.intermediate, hidden),
            "mlp.down_proj": (hidden, sizes.intermediate),
        }
        shapes.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocabulary, hidden)
    return shapes


def _write_weights(path: Path, sizes: TinySizes, seed: int) -> None:
    import torch  # a second of import that only the maker of a model pays; the proxy itself runs without torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def weight(shape: tuple[int, ...]) -> "Tensor":
        return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * sizes.init_std

    weights = {name: weight(shape) for name, shape in _shapes(sizes).items()}
    save_file(weights, path, metadata={"format": "pt"})
