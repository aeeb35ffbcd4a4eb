"""Measure what training by prefix trees saves: one JSON object as the last line of output, and in the file of --out.

Each case is a batch of completions, each with the whole context that it was sampled in. `flat` computes every
completion by itself, on the trainer's fastest path for that (causal kernel, several in a micro-batch, logits only where
there is loss); `tree` computes every distinct token once. Forward and backward passes of both alternate in this run.
The gain is against separate completions: a history that only grows is a single sequence, against which a tree gains
nothing. docs/trees.md explains each figure. Left out: optimizer, GPU.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.result import be_single_process, provenance, write_result
from trainer.config import Config, Parallel
from trainer.data.packing import ContextShard, pack, plan
from trainer.data.row import TrainingRow
from trainer.data.tree import build
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks, process_groups
from trainer.policy import Policy

RULE = rule_of("cispo", 0.0, 5.0)
FLAT_TOKENS = 4096
"""Tokens of a flat micro-batch: the fastest of 1k to 16k on the machine that measured docs/trees.md."""


@dataclass(frozen=True)
class ModelSizes:
    """A Qwen3 of these sizes with random weights."""

    hidden: int
    layers: int = 1
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 64
    vocab: int = 2048

    def with_derived(self) -> "ModelSizes":
        heads = self.hidden // self.head_dim
        return ModelSizes(
            self.hidden, self.layers, 3 * self.hidden, heads, max(1, heads // 2), self.head_dim, self.vocab
        )


WIDE, NARROW = ModelSizes(1024).with_derived(), ModelSizes(128).with_derived()


@dataclass(frozen=True)
class Case:
    """A batch and the model that trains on it."""

    name: str
    sizes: ModelSizes
    rows: Callable[[], list[TrainingRow]]
    repeats: int = 3


def completion(draw: random.Random, context: list[int], reply: int, vocabulary: int) -> TrainingRow:
    """A completion of `reply` sampled tokens at the end of this context."""
    size = len(context)
    trained = np.arange(size) >= size - reply
    logp = np.where(trained, -np.log(vocabulary), 0).astype(np.float32)
    advantage = np.full(size, draw.gauss(0, 1), dtype=np.float32)
    return TrainingRow(np.array(context), trained, logp, advantage, np.zeros(size, dtype=np.int64))


def history(
    draw: random.Random, turns: int, size: int, start: Sequence[int] = (), vocabulary: int = 2048
) -> list[TrainingRow]:
    """Turns of `size` tokens each, half observed and half sampled; one row per turn's completion."""
    context, rows = list(start), []
    for _ in range(turns):
        context += [draw.randrange(vocabulary) for _ in range(size)]
        rows.append(completion(draw, list(context), size // 2, vocabulary))
    return rows


def group(draw: random.Random, members: int, prompt: int, reply: int) -> list[TrainingRow]:
    """Completions of members that share their prompt."""
    shared = [draw.randrange(2048) for _ in range(prompt)]
    return [row for _ in range(members) for row in history(draw, 1, 2 * reply, shared)]


def compaction(draw: random.Random, phases: int, turns: int, size: int) -> list[TrainingRow]:
    """Histories that are summarised when they are long: the next one begins with system prompt and summary."""
    system = [draw.randrange(2048) for _ in range(2 * size)]
    rows, start = [], system
    for _ in range(phases):
        phase = history(draw, turns, size, start)
        rows += phase
        start = system + [draw.randrange(2048) for _ in range(size)]
    return rows


def cases(quick: bool) -> list[Case]:
    turns, small = (10, 16) if quick else (100, 256)
    once = 1 if quick else 3
    return [
        Case("12", WIDE, lambda: history(random.Random(0), 4 if quick else 12, small), once),
        Case("100_t16", WIDE, lambda: history(random.Random(1), turns, 16), 1),
        Case("100_t256", NARROW, lambda: history(random.Random(2), turns, small), 1),
        Case("group8", WIDE, lambda: group(random.Random(3), 8, 4 * small, small), once),
        Case("compaction", WIDE, lambda: compaction(random.Random(4), 3, 4 if quick else 8, small // 2), once),
    ]


def write_model(directory: Path, sizes: ModelSizes) -> Path:
    """Write random weights in Hugging Face's format."""
    directory.mkdir()
    draw = torch.Generator().manual_seed(0)
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
        "lm_head.weight": (sizes.vocab, sizes.hidden),
    }
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": (keys, sizes.hidden) for part in "kv"}
        shapes |= {f"{at}self_attn.q_proj.weight": (queries, sizes.hidden)}
        shapes |= {f"{at}self_attn.o_proj.weight": (sizes.hidden, queries)}
        shapes |= {f"{at}mlp.{part}_proj.weight": (sizes.ffn, sizes.hidden) for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (sizes.hidden, sizes.ffn)}
        shapes |= {f"{at}{part}_layernorm.weight": (sizes.hidden,) for part in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{part}_norm.weight": (sizes.head_dim,) for part in "qk"}
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "vocab_size": sizes.vocab,
        "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "attention_bias": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def forward_backward(policy: Policy, micros: Sequence[Sequence[TrainingRow]], merge: bool) -> tuple[float, Tensor]:
    """Seconds of forward and backward pass over the micro-batches, with packing, and the summed loss."""
    policy.ddp.zero_grad_buffer()
    began, total = time.perf_counter(), torch.zeros((), device=policy.ranks.device)
    for rows in micros:
        packed, tokens = pack(rows, policy.shard, merge)
        loss = policy_loss(policy.ddp(packed)[packed.branches], tokens, RULE)[0]
        loss.backward()
        total += loss.detach()
    return time.perf_counter() - began, total


def gradients(policy: Policy) -> dict[str, Tensor]:
    """A copy of each parameter's gradient, by name."""
    return {name: param.main_grad.clone() for name, param in policy.model.named_parameters()}


@dataclass(frozen=True)
class BatchWork:
    """What a batch requires to be computed."""

    tokens: int
    """Tokens computed."""
    pairs: int
    """Pairs of a query and a key in attention."""
    logits: int
    """Rows of logits."""

    def flops(self, sizes: ModelSizes) -> float:
        """FLOPs of a forward pass (multiply-adds times two). The backward pass costs a multiple of it."""
        width, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        layer = 2 * sizes.hidden * (2 * width + 2 * keys + 3 * sizes.ffn) * self.tokens + 4 * width * self.pairs
        return sizes.layers * layer + 2 * sizes.hidden * sizes.vocab * self.logits


def work(rows: Sequence[TrainingRow], merge: bool) -> BatchWork:
    """The work of these rows, merged into trees or each by itself."""
    tree = build(rows, merge)
    return BatchWork(len(tree.tokens), int((tree.positions + 1).sum()), len(tree.parents))


def fill_micro_batches(rows: Sequence[TrainingRow], budget: int) -> list[list[TrainingRow]]:
    """Micro-batches of rows in their order, each up to the budget of tokens."""
    micros: list[list[TrainingRow]] = [[]]
    for row in rows:
        if micros[-1] and sum(one.inputs for one in micros[-1]) + row.inputs > budget:
            micros.append([])
        micros[-1].append(row)
    return micros


def measure(case: Case, policy: Policy, budget: int) -> dict[str, Any]:
    """Times of flat and tree, alternating, and the bound that their FLOPs set."""
    rows = case.rows()
    flat_micros = fill_micro_batches(rows, FLAT_TOKENS)
    (tree_micros,) = plan(rows, 1, budget)
    forward_backward(policy, tree_micros, True)  # warm up
    seconds: dict[bool, list[float]] = {True: [], False: []}
    gradients_of: dict[bool, dict[str, Tensor]] = {}
    for _ in range(case.repeats):
        for merge, micros in ((False, flat_micros), (True, tree_micros)):
            runs = [forward_backward(policy, micros, merge)[0] for _ in range(3 if merge else 1)]
            seconds[merge].append(median(runs))
            gradients_of[merge] = gradients(policy)
    flat, tree = work(rows, False), work(rows, True)
    bound = flat.flops(case.sizes) / tree.flops(case.sizes)
    speedup = median(seconds[False]) / median(seconds[True])
    print(f"{case.name}: {speedup:.2f} of {bound:.2f}", file=sys.stderr, flush=True)
    return {
        "speedup": speedup,
        "bound": bound,
        "share_of_bound": speedup / bound,
        "seconds_flat": median(seconds[False]),
        "seconds_tree": median(seconds[True]),
        "flat": asdict(flat),
        "tree": asdict(tree),
        "sizes": asdict(case.sizes),
        "max_rel_grad_diff": max(
            float((tree_gradient - flat_gradient).norm() / flat_gradient.norm())
            for tree_gradient, flat_gradient in zip(
                gradients_of[True].values(), gradients_of[False].values(), strict=True
            )
        ),
    }


def saved_bytes(policy: Policy, rows: Sequence[TrainingRow], merge: bool) -> int:
    """Bytes that the forward pass saves for the backward pass, with all rows in one micro-batch."""
    sizes: dict[int, int] = {}
    owned = {param.untyped_storage().data_ptr() for param in policy.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    packed, tokens = pack(rows, policy.shard, merge)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy_loss(policy.ddp(packed)[packed.branches], tokens, RULE)[0]
    total = sum(sizes.values())
    loss.backward()
    return total


def packing_rate() -> float:
    """Distinct tokens per second of planning, building and packing 200k tokens: 16 groups of 8, five turns each."""
    draw, rows = random.Random(5), []
    for _ in range(16):
        system = [draw.randrange(150_000) for _ in range(2_000)]
        for _ in range(8):
            rows += history(draw, 5, 260, system, 150_000)
    size = work(rows, True).tokens
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        (micros,) = plan(rows, 1, 32_768)
        for micro in micros:
            pack(micro, ContextShard(torch.device("cpu")))
        rates.append(size / (time.perf_counter() - began))
    return median(rates)


def run(quick: bool, budget: int, ranks: Ranks, directory: Path) -> dict[str, Any]:
    policies = {
        sizes: Policy(write_model(directory / str(sizes.hidden), sizes), settings(directory), ranks)
        for sizes in (WIDE, NARROW)
    }
    figures = {case.name: measure(case, policies[case.sizes], budget) for case in cases(quick)}
    many = history(random.Random(6), 10 if quick else 100, 16)
    flat, tree = (saved_bytes(policies[NARROW], many, merge) for merge in (False, True))
    result: dict[str, Any] = {}
    for name, case in figures.items():
        result |= {f"speedup_{name}": case["speedup"], f"bound_{name}": case["bound"]}
    return result | {
        "memory_ratio_100": flat / tree,
        "token_ratio_100": work(many, False).tokens / work(many, True).tokens,
        "pack_tokens_per_s": packing_rate(),
        "max_rel_grad_diff": max(case["max_rel_grad_diff"] for case in figures.values()),
        "cases": figures,
    }


def settings(directory: Path) -> Config:
    return Config(pool=str(directory / "pool.db"), run="benchmark", model=str(directory), output=str(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="take seconds instead of minutes; the figures mean little")
    parser.add_argument("--threads", type=int, default=1, help="threads of the computation (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="tokens of a micro-batch of trees (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    be_single_process()
    torch.set_num_threads(arguments.threads)
    figures = provenance("tree.py") | {
        "flat_is": "each completion by itself; against one masked sequence of a history that only grows the gain is 1",
    }
    with tempfile.TemporaryDirectory() as directory, process_groups(Parallel()) as ranks:
        figures |= run(arguments.quick, arguments.max_tokens, ranks, Path(directory))
    write_result(figures, arguments.out)
    return 0
