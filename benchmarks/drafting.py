"""Measure what training an MTP head with the policy gains: one JSON object as the last line, and in the file of --out.

A small policy and its head learn one language by imitation. Then RL (CISPO on the policy's own samples, with a reward
for every token that follows another language's rule) changes the policy, twice from the same weights and with the same
samples: with the head trained too, and with the head frozen. The policies stay equal bit for bit, so the only
difference is what the head drafts. Lengths and acceptances are those that the trainer reports for each step
(docs/drafts.md), as means over the last tenth of the steps. Left out: the engine, and so the seconds saved.
"""

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.result import be_single_process, provenance, write_result
from trainer.config import Config, Parallel
from trainer.config.mtp import Mtp
from trainer.config.optimizer import Optimizer
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import plan
from trainer.data.row import TrainingRow
from trainer.data.tree import TokenRun
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import imitation, policy_loss
from trainer.megatron.mtp.loss import DraftMetrics
from trainer.megatron.parallel import Ranks, process_groups
from trainer.policy import LossFunction, Policy

VOCABULARY, HIDDEN, LAYERS, HEADS, HEAD_DIM = 64, 64, 2, 4, 16
LENGTH, BATCH, DRAFTS = 24, 64, 2
FOLLOWED = 0.8
"""How often a token of a language follows its rule; all others are drawn uniformly."""
RULE = rule_of("cispo", 0.0, 5.0)


@dataclass(frozen=True)
class Language:
    """A rule for the next token, from the last token and the one before it modulo 4."""

    next: np.ndarray
    """[4, VOCABULARY] token ids."""

    @staticmethod
    def draw(seed: int) -> "Language":
        return Language(np.random.default_rng(seed).integers(0, VOCABULARY, (4, VOCABULARY)))

    def samples(self, rng: np.random.Generator) -> np.ndarray:
        """[BATCH, LENGTH] token ids of random sentences."""
        tokens = rng.integers(0, VOCABULARY, (BATCH, LENGTH))
        for position in range(2, LENGTH):
            followed = rng.random(BATCH) < FOLLOWED
            tokens[followed, position] = self.next[tokens[followed, position - 2] % 4, tokens[followed, position - 1]]
        return tokens

    def followed(self, tokens: np.ndarray) -> np.ndarray:
        """[rows, LENGTH] 1 where the token follows the rule, else 0."""
        follows = np.zeros(tokens.shape, dtype=np.float32)
        follows[:, 2:] = self.next[tokens[:, :-2] % 4, tokens[:, 1:-1]] == tokens[:, 2:]
        return follows


def write_model(directory: Path) -> Path:
    """Write a MiMo without a head, with random weights."""
    config = {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        for name in ("q", "k", "v"):
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN)}
            shapes |= {f"{layer}.self_attn.{name}_proj.bias": (HIDDEN,)}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {name: torch.ones(shape) for name, shape in shapes.items() if "norm" in name}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def policy_of(source: Path, ranks: Ranks, train: bool) -> Policy:
    """The policy of a directory, with its head trained or frozen."""
    mtp = Mtp(drafts=DRAFTS, lr=2e-3 if train else 0.0)
    optimizer = Optimizer(lr=2e-3)
    config = Config(pool="pool.db", run="benchmark", model=str(source), output="out", optimizer=optimizer, mtp=mtp)
    return Policy(source, config, ranks)


def update(policy: Policy, rows: list[TrainingRow], loss: LossFunction, rate: float = 2e-3) -> DraftMetrics:
    """Take one optimizer step on these rows and return the head's metrics."""
    (micros,) = plan(rows, 1, 32_768)
    result = policy.update(micros, sum(len(row.places) for row in rows), loss, rate)
    assert result.drafts is not None
    return result.drafts


def rows_of(tokens: np.ndarray, logp: np.ndarray, advantage: np.ndarray) -> list[TrainingRow]:
    """Rows whose tokens were sampled, except for the first two of each."""
    trained = np.arange(LENGTH) >= 2
    return [
        TrainingRow(tokens[row], trained, logp[row], advantage[row], np.zeros(LENGTH, dtype=np.int64))
        for row in range(len(tokens))
    ]


def imitate(policy: Policy, language: Language, steps: int) -> list[DraftMetrics]:
    """Learn a language from its samples; returns the head's metrics of each step."""
    rng, nothing = np.random.default_rng(1), np.zeros((BATCH, LENGTH), dtype=np.float32)
    return [update(policy, rows_of(language.samples(rng), nothing, nothing), imitation) for _ in range(steps)]


@torch.no_grad()
def sample(policy: Policy, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[BATCH, LENGTH] tokens and logprobs: two tokens drawn uniformly, then the policy's own."""
    tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (BATCH, 2)))
    logp = torch.zeros(BATCH, 2)
    for size in range(2, LENGTH):
        starts = [row * size for row in range(BATCH + 1)]
        last = torch.tensor(starts[1:]) - 1
        packed = MicroBatch(
            tokens=tokens.flatten(),
            positions=torch.arange(size).repeat(BATCH),
            runs=tuple(TokenRun(start, end, end, 0) for start, end in pairwise(starts)),
            rows=last,
            labels=last,
            branches=torch.arange(BATCH),
            nodes=last.numpy(),
            queries=(0, starts[-1]),
        )
        logprobs = policy.model.logits(packed).log_softmax(-1)
        token = (logprobs + torch.from_numpy(rng.gumbel(size=tuple(logprobs.shape)))).argmax(-1, keepdim=True)
        tokens, logp = torch.cat((tokens, token), 1), torch.cat((logp, logprobs.gather(1, token)), 1)
    return tokens.numpy(), logp.numpy()


def reinforce(policy: Policy, language: Language, steps: int) -> tuple[list[DraftMetrics], list[float]]:
    """CISPO on the policy's own samples; returns the head's metrics of each step and the share of rewarded tokens."""
    rng = np.random.default_rng(2)
    drafts, rewards = [], []
    for _ in range(steps):
        tokens, logp = sample(policy, rng)
        reward = language.followed(tokens)
        share = float(reward[:, 2:].mean())
        advantage = (reward - share) / float(reward[:, 2:].std() + 1e-6)
        drafts.append(update(policy, rows_of(tokens, logp, advantage), partial(policy_loss, rule=RULE)))
        rewards.append(share)
    return drafts, rewards


def run(quick: bool, ranks: Ranks, directory: Path) -> dict[str, Any]:
    first, second = Language.draw(3), Language.draw(4)
    start, warm, moving = directory / "start", 5 if quick else 300, 3 if quick else 100
    policy = policy_of(write_model(directory / "random"), ranks, train=True)
    imitated = imitate(policy, first, warm)
    policy.write_hf(start)
    figures: dict[str, Any] = {"imitation_steps": warm, "rl_steps": moving, "length_begin": imitated[0].length}
    moved = {}
    for name, train in (("trained", True), ("frozen", False)):
        policy = policy_of(start, ranks, train)
        drafts, rewards = reinforce(policy, second, moving)
        moved[name] = policy
        last = max(1, moving // 10)
        figures |= {
            "length_before": drafts[0].length,
            f"length_{name}": fmean(one.length for one in drafts[-last:]),
            f"acceptance_{name}": [fmean(one.accepted[depth] for one in drafts[-last:]) for depth in range(DRAFTS)],
            f"curve_{name}": [round(one.length, 4) for one in drafts[:: max(1, moving // 20)]],
            "reward_before": rewards[0],
            "reward_after": fmean(rewards[-last:]),
        }
    same = zip(*(policy.model.parameters() for policy in moved.values()), strict=True)
    return figures | {"policies_equal": all(torch.equal(one, other) for one, other in same)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="take seconds instead of minutes; the figures mean little")
    parser.add_argument("--threads", type=int, default=1, help="threads of the computation (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    be_single_process()
    torch.set_num_threads(arguments.threads)
    figures = provenance("mtp.py")
    with tempfile.TemporaryDirectory() as directory, process_groups(Parallel()) as ranks:
        figures |= run(arguments.quick, ranks, Path(directory))
    write_result(figures, arguments.out)
    return 0
