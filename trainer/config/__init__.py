"""The trainer's configuration: one TOML file, checked completely before anything starts.

Relative paths are relative to the file. `--set section.key=value` on the command line overrides a field; the value
is read as TOML. Which samples a rollout may hold is the proxy's matter, not this file's.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from proxy.pool.completions.labels import LABELS
from proxy.pool.errors import UserError
from proxy.pool.training.windowed_fifo import LeaseRule
from trainer.config.credit import Credit
from trainer.config.estimators import Estimator, Negatives, Norm
from trainer.config.mtp import Mtp
from trainer.config.optimizer import Optimizer
from trainer.config.report import Alarms, Report
from trainer.config.require import demand as _demand

KINDS = ("cispo", "cispo_unified", "glm5", "icepop", "tis", "gspo", "decoupled_ppo", "ppo", "ipa", "dppo_tv")
"""The losses that trainer/loss/named_losses.py knows."""
BY_COMPLETION = ("gspo", "ipa")
"""Those whose ratio is that of a whole completion."""
TRAINED = ("main", "subagent", "compaction")
"""The labels of what an agent works with: side calls (titles, commit messages) are not its task."""


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    groups: int = 8
    """Groups of rollouts that one train step takes."""
    window: int = 0
    """How many groups behind the oldest unfinished one the step may look for finished ones. 0 means `groups`."""
    queue_limit: int = 0
    """Groups that the harness may have open or waiting at a time: what bounds staleness. 0 means twice `groups`."""
    max_staleness: int = 4
    """Published steps that a rollout's oldest token may lag behind before it is dropped. 0: strictly on-policy."""
    stale: Literal["member", "group"] = "member"
    """What a stale rollout takes along. member: itself; its reward stays in the baseline, and a group goes when all of
    its rollouts are stale. group: the whole group."""
    labels: tuple[str, ...] = TRAINED
    """Completions that are learned from, by what they were for (main, subagent, compaction, side); the others are
    counted. Those without a label, of before there were any, are learned from. Holds for imitation too."""
    max_tokens: int = 32_768
    """Tokens of one micro-batch: what bounds memory. No single path may be longer."""
    patience_seconds: float = 3600.0
    """How long the trainer waits for its run to open, or for a full batch, before it gives up."""

    def __post_init__(self) -> None:
        _demand(self.groups >= 1, f"batch.groups = {self.groups} leaves a step empty; set it to 1 or more")
        for label in self.labels:
            _demand(label in LABELS, f"batch.labels has {label!r}, which is no label; choose from {', '.join(LABELS)}")
        _demand(self.max_tokens >= 2, f"batch.max_tokens = {self.max_tokens} fits no sequence; set it to 2 or more")
        limit = self.queue_limit or self.groups
        _demand(
            limit >= self.groups,
            f"batch.queue_limit = {self.queue_limit} is below batch.groups = {self.groups}, so that no step could "
            "fill; raise it",
        )
        self.rule()

    def rule(self) -> LeaseRule:
        """What the pool's scheduler is asked for."""
        return LeaseRule(
            groups=self.groups,
            window=self.window or self.groups,
            max_staleness=self.max_staleness,
            stale=self.stale,
        )


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = "cispo"
    """cispo, cispo_unified, glm5, icepop, tis, gspo, ppo, dppo_tv against the rollout's logprobs; decoupled_ppo and
    ipa against recomputed ones, with their own corrections. trainer/loss/named_losses.py says what each is."""
    cap: float = 5.0
    """Upper bound of a token's ratio (its absolute value, not 1 + epsilon). CISPO: above it the token still learns.
    decoupled_ppo: of policy / old, which is 1 as a batch has one update. ipa: of a completion's mean old / rollout.
    dppo_tv: of how far a token's probability moved, so below 1 (prime-rl: 0.2)."""
    floor: float = 0.0
    """Lower bound of a token's ratio. 0 is MiniMax-M1's choice: no floor."""
    norm: Norm = "token"
    """token: mean over all trained tokens. rollout: mean over rollouts of their means. constant: divided by rollouts
    times `norm_constant` tokens (Dr.GRPO). mixed: `norm_constant` times the first plus the rest of the second."""
    norm_constant: float = 0.0
    advantage: Estimator = "grpo"
    """grpo: (R - mean) / std. dr_grpo: R - mean. rloo: R - mean of the others. Of use with credit.returns = outcome."""
    routing: Literal["own", "replay"] = "own"
    """Of a mixture of experts. own: the trainer's routers choose. replay: the experts that the engine chose, which the
    proxy records with engine.routed_experts; routers still learn, by the weights of the chosen ones."""
    kl: float = 0.0
    """Coefficient of KL(policy || the initial model), by the k3 estimate. Holds a second model in memory."""
    balance: float = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, of each layer and sequence by itself
    (DeepSeek-V3), averaged over trained tokens. 0: none; the router learns from the policy loss alone."""
    positive_only_until: int = 0
    """Steps that learn from positive advantages only."""
    negative_ramp: int = 0
    """Steps over which negative advantages then come in."""
    negative_weight: float = 1.0
    """What negative advantages weigh in the end."""
    negative_longest: int | None = None
    """Failed rollouts with more trained tokens are masked. Absent: none is."""

    def __post_init__(self) -> None:
        _demand(self.kind in KINDS, f"loss.kind = {self.kind} is unknown; choose from {', '.join(KINDS)}")
        _demand(
            self.norm != "constant" or self.norm_constant > 0,
            f"loss.norm = constant divides by loss.norm_constant = {self.norm_constant}; set that above 0",
        )
        _demand(
            self.norm != "mixed" or 0 <= self.norm_constant <= 1,
            f"loss.norm_constant = {self.norm_constant} is no share; keep it between 0 and 1 for norm = mixed",
        )
        _demand(self.kl >= 0, f"loss.kl = {self.kl} would push away from the initial model; set it to 0 or more")
        _demand(self.balance >= 0, f"loss.balance = {self.balance} would reward unequal use; set it to 0 or more")
        _demand(
            0 <= self.negative_weight <= 1 and self.positive_only_until >= 0 and self.negative_ramp >= 0,
            f"loss.negative_weight = {self.negative_weight}, loss.positive_only_until = {self.positive_only_until} and "
            f"loss.negative_ramp = {self.negative_ramp}: the weight lies in [0, 1], steps are not negative",
        )
        _demand(
            0 <= self.floor <= self.cap and self.cap > 0,
            f"loss.floor = {self.floor} and loss.cap = {self.cap} are no interval of weights; keep 0 <= floor <= cap",
        )
        _demand(
            self.kind != "dppo_tv" or self.cap < 1,
            f"loss.cap = {self.cap} masks nothing with loss.kind = dppo_tv, where it bounds a change of probability; "
            "set it below 1",
        )
        _demand(
            not self.floor or self.kind not in ("tis", "ipa", "dppo_tv"),
            f"loss.floor = {self.floor} is not used by loss.kind = {self.kind}, which has no lower bound; drop it",
        )
        _demand(
            not self.norm_constant or self.norm in ("constant", "mixed"),
            f"loss.norm_constant = {self.norm_constant} is not used by loss.norm = {self.norm}; drop it",
        )

    def negatives(self) -> Negatives:
        """What negative advantages weigh."""
        return Negatives(
            positive_only_until=self.positive_only_until,
            ramp_steps=self.negative_ramp,
            weight=self.negative_weight,
            longest=self.negative_longest,
        )


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    processes: int = 1
    """Ranks on this machine; `--nproc` overrides it. Of a job over several machines: all ranks (docs/cluster.md)."""
    tensor: int = 1
    """Ranks that share one copy of the model. The others hold further copies (data parallel)."""
    sequence: bool = False
    """Divide norms and residuals over the tensor ranks by tokens: less memory, the same result."""
    context: int = 1
    """Ranks that share one micro-batch by tokens, for contexts that one cannot hold. Keys and values are gathered."""
    pipeline: int = 1
    """Stages of consecutive layers, each on ranks of its own; micro-batches pass through them one behind the other."""
    expert: int = 1
    """Ranks that divide the experts of a mixture among them; each sends the others the tokens for their experts."""
    logits_tokens: int = 4096
    """Rows of logits that exist at a time; of more trained tokens, the head is computed again in the backward pass."""
    head_float32: bool = False
    """Compute the head in fp32 whatever `precision` says, as MiniMax-M1 does: nearer to the engine's logprobs."""
    recompute: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass."""
    threads: int = 0
    """Threads of one rank. 0 means all cores divided by the ranks."""
    precision: str = "float32"
    """float32 or bfloat16 (then with fp32 main weights in the optimizer)."""
    distributed_optimizer: bool = False
    """Shard the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        for name in ("processes", "tensor", "context", "pipeline", "expert", "logits_tokens"):
            value = msgspec.structs.asdict(self)[name]
            _demand(value >= 1, f"parallel.{name} = {value} starts nothing; set it to 1 or more")
        _demand(
            self.tensor > 1 or not self.sequence,
            f"parallel.sequence needs tensor ranks to divide over, and parallel.tensor = {self.tensor}; drop one",
        )
        _demand(self.threads >= 0, f"parallel.threads = {self.threads} is negative; 0 divides the cores")
        _demand(
            self.precision in ("float32", "bfloat16"),
            f"parallel.precision = {self.precision} is unknown; choose float32 or bfloat16",
        )
        _demand(
            self.processes % self.copy == 0,
            f"parallel.processes = {self.processes} is no multiple of parallel.tensor = {self.tensor} times "
            f"parallel.context = {self.context} times parallel.pipeline = {self.pipeline}; change one",
        )
        _demand(
            self.processes % (self.expert * self.pipeline) == 0,
            f"parallel.processes = {self.processes} is no multiple of parallel.expert = {self.expert} times "
            f"parallel.pipeline = {self.pipeline}; change one",
        )

    @property
    def copy(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.context * self.pipeline


class Push(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engines: tuple[str, ...] = ()
    """Base URLs of every SGLang server that samples for this run. Empty: weights are written but pushed nowhere."""
    way: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    """disk: engines read the exported directory under the same path. tensor: in requests. distributed: broadcast over
    NCCL (gloo on the CPU). auto: disk to engines of this machine or with data-parallel ranks, else distributed."""
    bucket_bytes: int = 1 << 29
    """Of the weights that one request or broadcast brings; what bounds memory. A larger tensor goes by itself."""
    address: str = ""
    """This machine's address as engines reach it, for `distributed`. Empty: the one on the way to the engine."""
    quorum: int = 1
    """Engines that must have new weights; with fewer the trainer stops. Those without are left out until they have."""
    timeout_seconds: float = 300.0
    """How long one engine may take to load weights, or a bucket of them."""
    answer_seconds: float = 30.0
    """How long it may take for anything else: to say what it is, to pause, to join a group, to go on."""
    tries: int = 3
    """How often an engine that does not say what it is, is asked, a second apart, before the push goes on without."""
    colocated: bool = False
    """Engines share the trainer's devices: they give up their memory while a step is computed, and rollouts wait."""

    def __post_init__(self) -> None:
        for url in self.engines:
            _demand(url.startswith("http"), f"push.engines names {url}, which is no http URL; write http://HOST:PORT")
            _demand(self.engines.count(url) == 1, f"push.engines names {url} twice; name every engine once")
        for name in ("bucket_bytes", "timeout_seconds", "answer_seconds", "tries"):
            value = msgspec.structs.asdict(self)[name]
            _demand(value > 0, f"push.{name} = {value} lets no push succeed; set it above 0")
        limit = max(1, len(self.engines))
        _demand(1 <= self.quorum <= limit, f"push.quorum = {self.quorum} is none of 1 to {limit} engines; correct it")
        _demand(
            not self.colocated or self.way != "distributed",
            "push.way = distributed needs devices of the engines' own, and push.colocated denies them; drop one",
        )


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep: int = 2
    """Checkpoints and exported models that are kept, newest first; older ones are deleted."""

    def __post_init__(self) -> None:
        _demand(self.keep >= 1, f"checkpoint.keep = {self.keep} would delete the current one; set it to 1 or more")


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shuffle_rewards: bool = False
    """Deal the rewards of each group out at random before training: a control run that must not learn."""
    seed: int = 0
    """Seed of that shuffling."""


class Sft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runs: tuple[str, ...] = ()
    """Names of the runs whose recorded rollouts are imitated."""
    min_reward: float | None = None
    """Imitate rollouts of at least this reward. Absent: all of them, whatever their reward."""
    output: str = ""
    """Directory of the resulting model. Required by `trainer sft`."""
    lr: float = 3e-3
    """Learning rate of the warm start; the other optimizer settings are those of [optimizer]."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    batch: int = 32
    """Sequences of one step."""
    max_steps: int = 400
    """Steps at most."""
    held_out: float = 0.05
    """Share of the groups that is not trained on but measures when to stop."""
    measure_every: int = 25
    """Steps between two measurements."""
    stop_accuracy: float | None = None
    """Stop when this share of held-out tokens is the model's first choice. Absent: not a criterion."""
    stop_loss: float | None = None
    """Stop when the held-out loss per token falls to this. Absent: not a criterion."""
    seed: int = 0
    """Seed of the shuffling and of the held-out choice."""

    def __post_init__(self) -> None:
        for name in ("batch", "max_steps", "measure_every"):
            value = msgspec.structs.asdict(self)[name]
            _demand(value >= 1, f"sft.{name} = {value} does nothing; set it to 1 or more")
        _demand(0 < self.held_out < 1, f"sft.held_out = {self.held_out} is no share; choose one between 0 and 1")
        _demand(self.lr > 0, f"sft.lr = {self.lr} would not learn; set it above 0")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pool: str
    """The data pool: a SQLite file or a database URL, the same that proxy and harness use."""
    run: str
    """Name of the run whose rollouts are trained on; the harness opens it."""
    model: str
    """Hugging Face directory of the initial weights, with config and tokenizer."""
    output: str
    """Directory for checkpoints and exported models."""
    steps: int = 100
    """The run ends when this many steps are published; `--steps` overrides it."""
    batch: Batch = Batch()
    loss: Loss = Loss()
    credit: Credit = Credit()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    mtp: Mtp = Mtp()
    push: Push = Push()
    checkpoint: Checkpoint = Checkpoint()
    control: Control = Control()
    report: Report = Report()
    alarms: Alarms = Alarms()
    sft: Sft = Sft()

    def __post_init__(self) -> None:
        _demand(self.steps >= 0, f"steps = {self.steps} is negative; set it to 0 or more")
        _demand(
            self.parallel.context == 1 or self.loss.kind not in BY_COMPLETION,
            f"loss.kind = {self.loss.kind} takes ratios over whole completions, which parallel.context = "
            f"{self.parallel.context} would cut; choose another kind or context = 1",
        )
        _demand(
            not (self.control.shuffle_rewards and self.credit.shaped),
            "control.shuffle_rewards deals out the verifier's rewards, and what [credit] adds would still teach; drop "
            "one (credit.process_weight = 0, speed_weight = 0, no overlong_limit)",
        )
        _demand(
            self.loss.advantage == "grpo" or not self.credit.by_turn,
            f"loss.advantage = {self.loss.advantage} is not used by credit.returns = turns, which compares by "
            "credit.baseline; drop one",
        )
        _demand(
            not self.mtp.drafts or self.parallel.context == self.parallel.pipeline == 1,
            f"mtp.drafts = {self.mtp.drafts} needs all layers and tokens on one rank, which parallel.context = "
            f"{self.parallel.context} and parallel.pipeline = {self.parallel.pipeline} divide; set them to 1",
        )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration file. Overrides are `section.key=value`, applied in order."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a trainer configuration") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no valid TOML ({error}); correct it") from error
    for override in overrides:
        _apply(values, override)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        known = ", ".join(name for name in _fields(str(error)))
        raise UserError(f"{path}: {error}; correct or remove it (fields there: {known})") from error
    return _absolute(config, path.parent.absolute())


def _absolute(config: Config, base: Path) -> Config:
    pool = config.pool if "://" in config.pool else str(base / config.pool)
    sft = (
        config.sft
        if not config.sft.output
        else msgspec.structs.replace(config.sft, output=str(base / config.sft.output))
    )
    model, output = str(base / config.model), str(base / config.output)
    return msgspec.structs.replace(config, pool=pool, model=model, output=output, sft=sft)


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(f"--set {override} has no value; write --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, so that a shell needs no second pair of quotes
    *sections, key = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {override} goes through {section}, which is no section; name a table")
    values[key] = value


def _fields(message: str) -> list[str]:
    """The fields of the section that a validation message points into (`... - at `$.batch.groups``)."""
    _, _, place = message.partition("`$.")
    sections = {name: Config.__annotations__[name] for name in ("batch", "loss", "credit", "optimizer", "push")}
    sections |= {name: Config.__annotations__[name] for name in ("parallel", "checkpoint", "control", "sft")}
    sections |= {name: Config.__annotations__[name] for name in ("report", "alarms", "mtp")}
    struct = sections.get(place.split(".")[0].rstrip("`"), Config)
    return [field.name for field in msgspec.structs.fields(struct)]
