"""What two ranks compute, as files: `torchrun --nproc-per-node 2 -m tests.trainer.two_ranks DIRECTORY OUT SPLIT ...`.

For each way of splitting: logprobs and gradients of a model in DIRECTORY on fixed rows, then one update, a checkpoint,
and two more updates; the model before and after, and the losses. Then the checkpoint that one rank made is loaded,
saved again, and gone on from.
"""

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tests.trainer import drafting
from tests.trainer.make import make_config, make_rows
from trainer.commands.logprobs import difference
from trainer.commands.sft import measure
from trainer.config import Parallel
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import pack, plan
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.optimizer import sum_gradients
from trainer.megatron.parallel import Ranks, job, split
from trainer.megatron.schedule import forward, forward_backward
from trainer.megatron.weights import named_weights
from trainer.policy import Policy
from trainer.report import tokens
from trainer.report.gradients import token_notes

ROWS = 10
BUDGET = 60
KL = 0.1
RULE = rule_of("cispo", 0.0, 5.0)
LOSS = partial(policy_loss, rule=replace(RULE, kl=KL))

SHARDED = {"distributed_optimizer": True}
SPLITS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor": 2, "recompute": True, **SHARDED},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "pipeline-tied": {"pipeline": 2, "recompute": True, **SHARDED},
    "experts": {"expert": 2},
    "experts-tensor": {"tensor": 2, "expert": 2, "recompute": True},
    "experts-copied": {"tensor": 2},
    "experts-context": {"context": 2, "expert": 2, **SHARDED},
    "experts-pipeline": {"pipeline": 2},
    "data-sharded": SHARDED,
    "half": {"precision": "bfloat16", **SHARDED},
    "pipeline-half": {"pipeline": 2, "precision": "bfloat16"},
}
SHORT = {"data", "experts-tensor"}
"""Data, and tensors with experts. `make test` tries these, `make test-all` all: each costs half a minute of CPU."""

FAMILIES = {"pipeline-tied": "qwen2"} | {name: "qwen3_moe" for name in SPLITS if name.startswith("experts")}
"""Kinds that are not here train a qwen3 model. The qwen2 model shares the weights of embedding and output layer."""


@dataclass(frozen=True)
class Kind:
    """What one rank must share with a split over two, to be compared: the model, and the kind of optimizer."""

    family: str
    precision: str
    distributed_optimizer: bool

    def parallel(self) -> dict[str, Any]:
        return {"precision": self.precision, "distributed_optimizer": self.distributed_optimizer}

    def place(self, directory: Path) -> Path:
        return directory / "-".join(map(str, astuple(self)))


def kind(name: str) -> Kind:
    split = SPLITS[name]
    sharded = split.get("distributed_optimizer", False)
    return Kind(FAMILIES.get(name, "qwen3"), split.get("precision", "float32"), sharded)


def losses(model: Path) -> dict[str, float]:
    """Settings of the loss: with the load-balancing loss where there are experts."""
    return {"kl": KL} | ({"balance": 0.1} if model.name == "qwen3_moe" else {})


def branching(seed: int) -> list[TrainingRow]:
    """Rows of two groups: members share a prompt, and some a turn."""
    rows = make_rows(ROWS, seed)
    prompts = [row.tokens[:7] for row in rows[:2]]
    return [replace(row, tokens=np.concatenate((prompts[i % 2], row.tokens[7:]))) for i, row in enumerate(rows)]


def single(seed: int) -> list[TrainingRow]:
    """A row with one input token: of two ranks, one has nothing to do."""
    [row] = make_rows(1, seed)
    push = np.ones(2, dtype=np.float32)
    return [TrainingRow(row.tokens[:2], np.array([False, True]), row.rollout_logp[:2], push, row.segment[:2])]


BATCHES = (branching(1), branching(2), single(3))


def work(model: Path, out: Path, parallel: dict[str, Any], ranks: Ranks) -> Policy:
    """The same on any number of ranks."""
    out.mkdir(exist_ok=True)
    config = make_config(out, parallel={"processes": ranks.world, **parallel}, loss=losses(model))
    policy = Policy(model, config, ranks)
    policy.write_hf(out / "before")
    parts = [pack(micro, policy.shard)[0] for micro in plan(BATCHES[0], 1, BUDGET)[0]]
    computed = [policy.logprobs, policy.best] + ([partial(leads, policy)] if ranks.world == 1 else [])
    evaluated = [torch.cat([compute(packed) for packed in parts]) for compute in computed]
    torch.save(evaluated, out / f"evaluated-{ranks.rank}.pt")
    measured = measure(policy, BATCHES[0], BUDGET) | difference(policy, BATCHES[0], BUDGET)
    (out / f"measured-{ranks.rank}.json").write_bytes(msgspec.json.encode(measured))
    torch.save(gradients(policy, BATCHES[0], merge=True), out / f"gradients-{ranks.rank}.pt")
    learn(policy, BATCHES[:1], out / "first")
    policy.checkpoints.save(out / "checkpoint", 1)
    learn(policy, BATCHES[1:], out / "after")
    return policy


def leads(policy: Policy, packed: MicroBatch) -> torch.Tensor:
    """The gap between the two largest logits, for every trained token."""
    [logits] = forward(policy.model, [packed], policy.model.logits)
    first, second = logits.view(-1, logits.shape[-1])[packed.branches].topk(2).values.T
    return first - second


def learn(policy: Policy, batches: Sequence[list[TrainingRow]], out: Path) -> None:
    """One update for each batch; writes the model and the results."""
    reached, noted = [], []
    for rows in batches:
        micros = plan(rows, policy.ranks.data_world, BUDGET)
        update = policy.update(micros[policy.ranks.data_rank], sum(len(row.places) for row in rows), LOSS, 1e-2)
        noted.append((rows, token_notes(update.loss_inputs, LOSS, micros, policy.ranks, policy.shard)))
        assert update.sums is not None
        reached.append([update.loss, update.grad_norm, *update.sums.sums.tolist(), update.sums.peak.item()])
    policy.write_hf(out)
    if policy.ranks.rank == 0:
        (out / "reached.json").write_bytes(msgspec.json.encode(reached))
        for number, (rows, notes) in enumerate(noted):
            tokens.write(tokens.path(out, number), rows, notes)


def go_on(policy: Policy, source: Path, out: Path) -> None:
    """Resume from a checkpoint of another split, and save it again at once."""
    assert policy.checkpoints.load(source) == 1
    policy.checkpoints.save(out / "saved-again", 1)
    learn(policy, BATCHES[1:], out / "resumed")


def gradients(policy: Policy, rows: list[TrainingRow], merge: bool) -> dict[str, torch.Tensor]:
    """This rank's gradients on all rows, by names in the whole model; with the loss on the last stage."""
    micros = plan(rows, policy.ranks.data_world, BUDGET)[policy.ranks.data_rank]
    parts = [pack(micro, policy.shard, merge) for micro in (micros if merge else [[row] for row in rows])]

    def loss(number: int, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, trained = parts[number]
        value = policy_loss(logp[packed.branches], trained, RULE)[0]
        return value, value.detach()

    policy.model.balance = policy.balance
    policy.ddp.zero_grad_buffer()
    losses = forward_backward(policy.ddp, [packed for packed, _ in parts], loss)
    sum_gradients(policy.ddp)
    gradients = {name: param.main_grad.clone() for name, param in named_weights(policy.model)}
    return gradients | ({"loss": torch.stack(losses).sum()} if losses else {})


def main(directory: Path, out: Path, names: Sequence[str]) -> None:
    with job() as device:
        for name in names:
            parallel = msgspec.convert({"processes": 2, **SPLITS[name]}, Parallel)
            with split(parallel, device) as ranks:
                policy = work(directory / kind(name).family, out / name, SPLITS[name], ranks)
                go_on(policy, kind(name).place(directory) / "checkpoint", out / name)
                if name in drafting.SPLITS:
                    drafting.work(directory / drafting.SPLITS[name], out / name, SPLITS[name], ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
