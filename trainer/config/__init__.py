"""The trainer's configuration: one TOML file, checked completely before anything starts.

Relative paths are relative to the file. `--set section.key=value` on the command line overrides a field; the value
is read as TOML. Which samples a rollout may hold is the proxy's matter, not this file's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from proxy.pool.settings_file import (
    Count,
    FilePath,
    NotNegative,
    Positive,
    Seconds,
    Share,
    Weight,
    demand,
    load_settings,
)
from trainer.config.batch import BatchConfig
from trainer.config.credit import Credit
from trainer.config.estimators import Estimator, Negatives, Norm
from trainer.config.imitation import Imitation
from trainer.config.monitor import MonitorConfig
from trainer.config.mtp import Mtp
from trainer.config.optimizer import Optimizer
from trainer.config.report import Report

# fmt: off
LossKind = Literal[
    "cispo", "cispo_unified", "cispo_completion", "glm5", "icepop", "tis", "gspo", "decoupled_ppo", "ppo", "ipa",
    "dppo_tv",
]
# fmt: on
KINDS = get_args(LossKind)
"""The losses that trainer/loss/named_losses.py knows."""
BY_COMPLETION = ("cispo_completion", "gspo", "ipa")
"""Losses whose ratio is over a whole completion, unless `level` says otherwise."""
RECOMPUTED = ("decoupled_ppo", "ipa")
"""Losses that compare with recomputed logprobs."""
Correction = Literal["reject", "mask", "tis", "icepop"]


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [loss]: the policy loss and how advantages enter it."""

    kind: LossKind = "cispo"
    """decoupled_ppo and ipa compare with recomputed logprobs, with their own corrections; the others with the
    rollout's. gspo and cispo_completion take ratios of whole completions. See trainer/loss/named_losses.py."""
    cap: Positive | None = None
    """Upper bound of a token's ratio (the absolute value, not 1 + epsilon). CISPO: tokens above it still learn.
    decoupled_ppo: bound of policy / old, which is 1 in a batch's first update, so several are needed. ipa: bound of a
    completion's mean old / rollout. dppo_tv: bound of the change of a token's probability, so below 1 (prime-rl: 0.2).
    Default: 5."""
    floor: Weight | None = None
    """Lower bound of a token's ratio. Default: 0, which is no lower bound, as in MiniMax-M1."""
    mismatch: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    """decoupled_ppo: bound of old / rollout (AReaL's value)."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """decoupled_ppo, ipa: whose ratios policy / old and old / rollout are. token: each token's. sequence: the product
    over its completion. geometric: the geometric mean over it. Default: token for decoupled_ppo, geometric for ipa."""
    correction: Correction | None = None
    """decoupled_ppo, ipa: what a token weighs by old / rollout, up to the bound. reject: the ratio, above it 0. mask:
    1, above it 0. tis: the ratio, at most the bound. icepop: the ratio, 0 above the bound and below 1 / bound.
    Default: reject for decoupled_ppo, mask for ipa."""
    minibatches: Count = 1
    """Optimizer updates that divide a batch among them, by whole groups: at most as many as have something to train.
    Old logprobs are those before the first one; learning rate, version and push are one per step."""
    epochs: Count = 1
    """How often a step passes over its minibatches."""
    norm: Norm = "token"
    """token: mean over all trained tokens. rollout: mean over rollouts of their means. constant: divided by rollouts
    times `norm_constant` tokens (Dr.GRPO). mixed: `norm_constant` times the first plus the rest of the second."""
    norm_constant: Weight = 0.0
    """Tokens per rollout for norm = constant; share of the token mean for norm = mixed. Unused otherwise."""
    advantage: Estimator = "grpo"
    """grpo: (R - mean) / std. dr_grpo: R - mean. rloo: R - mean of the others. Used with credit.returns = outcome."""
    routing: Literal["own", "replay"] = "own"
    """Expert choice in a mixture of experts. own: the trainer's routers choose. replay: use the experts that the engine
    chose, which the proxy records with engine.routed_experts; routers still learn through the weights of the chosen."""
    kl: Weight = 0.0
    """Coefficient of KL(policy || reference), by the k3 estimate. Keeps a second model in memory."""
    kl_model: FilePath = ""
    """Hugging Face directory of the reference, of the model's shape and tokenizer. Empty: the initial model."""
    kl_steps_ago: NotNegative = 0
    """Take the policy of so many steps ago as the reference, at first the initial model. 0: the reference is fixed.
    `keep_checkpoints` must be greater than this, and greater than this plus `steps` of every monitor rule with
    `action = rollback`."""
    balance: Weight = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, per layer and sequence (DeepSeek-V3), averaged
    over trained tokens. 0: no such loss; the router learns from the policy loss alone."""
    positive_only_until: NotNegative = 0
    """Number of first steps that learn from positive advantages only."""
    negative_weight: Share = 1.0
    """Factor on negative advantages after these steps."""
    negative_longest: Count | None = None
    """Mask failed rollouts with more trained tokens than this. Default: none is masked."""

    def __post_init__(self) -> None:
        demand(
            self.norm != "constant" or self.norm_constant > 0,
            f"loss.norm = constant divides by loss.norm_constant = {self.norm_constant}; set that above 0",
        )
        demand(
            self.norm != "mixed" or self.norm_constant <= 1,
            f"loss.norm_constant = {self.norm_constant} is not a share; keep it between 0 and 1 for norm = mixed",
        )
        demand(
            self.norm != "mixed" or self.norm_constant not in (0, 1),
            f"loss.norm_constant = {self.norm_constant} mixes nothing for loss.norm = mixed, where 0 is norm = rollout "
            "and 1 is norm = token; set it above 0 and below 1",
        )
        demand(
            self.bounds[0] <= self.bounds[1],
            f"loss.floor = {self.bounds[0]} and loss.cap = {self.bounds[1]} are not an interval; keep floor <= cap",
        )
        demand(
            self.kind != "dppo_tv" or self.bounds[1] < 1,
            f"loss.cap = {self.bounds[1]} masks nothing with loss.kind = dppo_tv, where it bounds a change of "
            "probability; set it below 1",
        )
        demand(
            not self.floor or self.kind not in ("tis", "ipa", "dppo_tv"),
            f"loss.floor = {self.floor} is not used by loss.kind = {self.kind}, which has no lower bound; remove it",
        )
        for name, bound in (("cap", self.cap), ("floor", self.floor)):
            demand(
                self.updates > 1 or self.kind != "decoupled_ppo" or bound is None,
                f"loss.{name} = {bound} bounds policy / old for loss.kind = decoupled_ppo, which is 1 in the only "
                "update of a batch; set loss.minibatches or loss.epochs above 1, or remove it",
            )
        for name, chosen in (("kl_model", self.kl_model), ("kl_steps_ago", self.kl_steps_ago)):
            demand(
                not chosen or self.kl > 0,
                f"loss.{name} = {chosen} is the reference of loss.kl, which is 0; set that above 0, or remove it",
            )
        demand(
            not self.kl_model or not self.kl_steps_ago,
            f"loss.kl_model = {self.kl_model} and loss.kl_steps_ago = {self.kl_steps_ago} are two references; drop one",
        )
        for name, value in (("level", self.level), ("correction", self.correction)):
            demand(
                value is None or self.kind in RECOMPUTED,
                f"loss.{name} = {value} is for ratios against recomputed logprobs ({', '.join(RECOMPUTED)}), and "
                f"loss.kind = {self.kind} compares with the rollout's, which corrects the mismatch already; remove it",
            )
        demand(
            self.mismatch == 5.0 or self.kind == "decoupled_ppo",
            f"loss.mismatch = {self.mismatch} is not used by loss.kind = {self.kind}; remove it",
        )
        demand(
            not self.norm_constant or self.norm in ("constant", "mixed"),
            f"loss.norm_constant = {self.norm_constant} is not used by loss.norm = {self.norm}; remove it",
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """`floor` and `cap`, or their defaults."""
        return (0.0 if self.floor is None else self.floor), (5.0 if self.cap is None else self.cap)

    @property
    def by_completion(self) -> bool:
        """Whether ratios are of whole completions."""
        return self.kind in BY_COMPLETION if self.level is None else self.level != "token"

    @property
    def updates(self) -> int:
        """The most optimizer updates of a step."""
        return self.minibatches * self.epochs

    def negatives(self) -> Negatives:
        """Return what negative advantages weigh."""
        return Negatives(
            positive_only_until=self.positive_only_until, weight=self.negative_weight, longest=self.negative_longest
        )


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [parallel]: how ranks divide the model and the batch, and what bounds their memory."""

    processes: Count = 1
    """Ranks on this machine; `--nproc` overrides it. In a job over several machines: all ranks (docs/cluster.md)."""
    tensor: Count = 1
    """Ranks that share one copy of the model. The others hold further copies (data parallel)."""
    context: Count = 1
    """Ranks that share one micro-batch by tokens, for contexts too long for one rank. Keys and values are gathered."""
    pipeline: Count = 1
    """Stages of consecutive layers, each on its own ranks; micro-batches pass through them one after the other."""
    expert: Count = 1
    """Ranks that divide the experts of a mixture; each sends the others the tokens for their experts."""
    head_float32: bool = False
    """Compute the head in fp32 whatever `precision` says, as MiniMax-M1 does: closer to the engine's logprobs, where
    the engine does so too: SGLang with --enable-fp32-lm-head (engine.extra_args). The trainer compares both when it
    starts and refuses a difference; with engines that are away then, it tells of one at the push."""
    recompute: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model. bfloat16 keeps fp32 main weights in the optimizer."""
    distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        demand(
            self.processes % self.copy == 0,
            f"parallel.processes = {self.processes} is no multiple of parallel.tensor = {self.tensor} times "
            f"parallel.context = {self.context} times parallel.pipeline = {self.pipeline}; change one",
        )
        demand(
            self.processes % (self.expert * self.pipeline) == 0,
            f"parallel.processes = {self.processes} is no multiple of parallel.expert = {self.expert} times "
            f"parallel.pipeline = {self.pipeline}; change one",
        )

    @property
    def copy(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.context * self.pipeline

    @property
    def sequence(self) -> bool:
        """Whether norms and residuals are divided over the tensor ranks by tokens: less memory, the same result."""
        return self.tensor > 1


class Push(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [push]: which engines get new weights after a step, and how."""

    BUCKET_BYTES = 1 << 29
    """Bytes of weights in one request or broadcast, which bounds memory on both sides. A larger tensor goes alone.
    512 MiB is large enough that the number of requests does not matter."""
    ANSWER_SECONDS = 30.0
    """Maximum time of every request that does not load weights: describe, pause, join a group, continue."""
    TRIES = 3
    """Attempts, one second apart, to query an unresponsive engine before pushing without it."""
    PATIENCE_SECONDS = 1800.0
    """How long a push waits for engines that are away, where too few have the weights. As long as the harness waits."""

    engines: tuple[str, ...] = ()
    """Base URLs of all SGLang servers that sample for this run. Empty: weights are written but not pushed."""
    way: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """disk: engines read the exported directory, which they see under the same path. tensor: weights travel in
    requests. distributed: broadcast over NCCL (gloo on the CPU). auto: disk for engines at a loopback address,
    colocated ones, and those with data-parallel or pipeline ranks, else distributed."""
    address: str = ""
    """This machine's address as engines reach it, for `distributed`. Empty: the address on the route to the engine."""
    quorum: Count = 1
    """Engines that must have the new weights. The trainer waits while too few have them because others are away. It
    stops if too few have them because an engine that can be reached refuses. Others serve no calls until they have
    them."""
    timeout_seconds: Seconds = 300.0
    """Maximum time for one engine to load the weights, or one bucket of them; before that, to finish what keeps it from
    emptying its caches, which with pipeline ranks are its calls; and to empty them."""
    colocated: bool = False
    """Engines share the trainer's devices: they give up their memory during a step, and rollouts wait."""

    def __post_init__(self) -> None:
        bare = [url.rstrip("/") for url in self.engines]
        for url in self.engines:
            demand(
                url.startswith("http"), f"push.engines names {url}, which is not an http URL; write http://HOST:PORT"
            )
            demand(bare.count(url.rstrip("/")) == 1, f"push.engines names {url} twice; name every engine once")
        limit = max(1, len(self.engines))
        demand(self.quorum <= limit, f"push.quorum = {self.quorum} is none of 1 to {limit} engines; correct it")
        demand(
            not self.colocated or self.way != "distributed",
            "push.way = distributed needs devices of the engines' own, and push.colocated denies them; drop one",
        )


class Sft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [sft]: the warm start by imitation (`trainer sft`)."""

    WARMUP_STEPS = 20
    """Steps of linear warm-up of the learning rate: a few, as a warm start takes some hundred steps."""
    MEASURE_EVERY = 25
    """Steps between two measurements of the held-out loss. A measurement costs about one step."""
    HELD_OUT = 0.1
    """Share of the groups that is not trained on, but used to measure when to stop: of a few hundred demonstrations it
    leaves enough to measure."""
    SEED = 0
    """Seed of the shuffling and of the held-out choice. Repeating a warm start must give the same model."""

    runs: tuple[str, ...] = ()
    """Names of the runs whose recorded rollouts are imitated."""
    min_reward: float | None = None
    """Imitate only rollouts of at least this reward. Default: all."""
    output: FilePath = ""
    """Directory of the resulting model. Required by `trainer sft`, which replaces a model there and nothing else."""
    lr: Positive = 3e-3
    """Learning rate, not below optimizer.min_lr. `warmup_steps` is 20 here; the other optimizer settings are those of
    [optimizer]."""
    batch: Count = 32
    """Sequences of one step."""
    max_steps: Count = 400
    """Maximum number of steps."""
    stop_loss: float | None = None
    """Stop when the held-out loss per token falls to this. Default: train all steps."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    pool: FilePath
    """The data pool: a SQLite file or a database URL, the same that proxy and harness use."""
    run: str
    """Name of the run whose rollouts are trained on; the harness opens it."""
    model: FilePath
    """Hugging Face directory of the initial weights, with config and tokenizer."""
    output: FilePath
    """Directory for checkpoints and exported models."""
    steps: NotNegative = 100
    """The run ends when this many steps are published; `--steps` overrides it."""
    keep_checkpoints: Count = 2
    """Checkpoints and exported models to keep, newest first; older ones are deleted."""
    batch: BatchConfig = BatchConfig()
    loss: Loss = Loss()
    credit: Credit = Credit()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    mtp: Mtp = Mtp()
    push: Push = Push()
    report: Report = Report()
    monitor: MonitorConfig = MonitorConfig()
    sft: Sft = Sft()
    imitation: tuple[Imitation, ...] = ()

    def __post_init__(self) -> None:
        demand(
            self.parallel.context == 1 or not self.loss.by_completion,
            f"loss.kind = {self.loss.kind} takes ratios over whole completions, which parallel.context = "
            f"{self.parallel.context} would cut; choose another kind or level, or context = 1",
        )
        demand(
            self.keep_checkpoints > self.loss.kl_steps_ago,
            f"keep_checkpoints = {self.keep_checkpoints} deletes the policy of loss.kl_steps_ago = "
            f"{self.loss.kl_steps_ago} before it is used; set it to {self.loss.kl_steps_ago + 1} or more",
        )
        for rule in self.monitor.rule:
            reach = rule.steps + self.loss.kl_steps_ago
            also = f", and the reference of the step after it (loss.kl_steps_ago = {self.loss.kl_steps_ago})"
            demand(
                rule.action != "rollback" or self.keep_checkpoints > reach,
                f"keep_checkpoints = {self.keep_checkpoints} has deleted the step before the rule {rule.name!r} of "
                f"[monitor] began{also if self.loss.kl_steps_ago else ''}, when {rule.steps} steps in a row have "
                f"broken it; set it to {reach + 1} or more",
            )
        demand(
            not self.loss.kl_model or not Path(self.loss.kl_model).is_relative_to(Path(self.output) / "models"),
            f"loss.kl_model = {self.loss.kl_model} is a model that keep_checkpoints deletes; copy it elsewhere",
        )
        demand(
            self.loss.advantage == "grpo" or not self.credit.by_turn,
            f"loss.advantage = {self.loss.advantage} is not used by credit.returns = turns, which compares by "
            "credit.baseline; drop one",
        )
        demand(
            not self.batch.refill or self.credit.baseline != "none",
            "batch.refill skips groups whose rewards are equal, and credit.baseline = none learns from those too; drop "
            "one",
        )
        for source in self.imitation:
            demand(
                source.run != self.run,
                f"imitation.run = {source.run} is the run that is trained, whose rollouts are reinforced; name another",
            )
        demand(
            not self.mtp.drafts or self.parallel.context == self.parallel.pipeline == 1,
            f"mtp.drafts = {self.mtp.drafts} needs all layers and tokens on one rank, which parallel.context = "
            f"{self.parallel.context} and parallel.pipeline = {self.parallel.pipeline} divide; set them to 1",
        )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration file. Overrides are `section.key=value`, applied in order."""
    return load_settings(path, Config, overrides)
