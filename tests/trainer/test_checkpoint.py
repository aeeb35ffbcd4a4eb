"""Checkpoints: bit-exact resumption, and nothing half-written under a checkpoint's name."""

import multiprocessing
import resource
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from proxy.pool.errors import UserError
from tests.trainer.make import make_config, make_rows, write_model
from trainer.config import Config, Optimizer
from trainer.loop import prune
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron import atomic_dir
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy, Update

LOSS = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))


def step(policy: Policy, seed: int) -> Update:
    return policy.update([make_rows(4, seed), make_rows(3, seed + 100)], 35, LOSS, 1e-2)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in policy.model.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "parallel",
    [{}, {"distributed_optimizer": True}, {"precision": "bfloat16"}],
    ids=["float32", "distributed", "bfloat16"],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_step_after_resuming_is_the_same_bit_for_bit(
    steps: int, parallel: dict[str, object], ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, parallel=parallel)
    first, second = Policy(model, config, ranks), Policy(model, config, ranks)
    for seed in range(steps):
        step(first, seed)
    first.checkpoints.save(tmp_path / "saved", steps)
    before = step(first, 2)
    assert second.checkpoints.load(tmp_path / "saved") == steps
    assert step(second, 2).loss == before.loss
    assert equal(weights(first), weights(second))


@pytest.mark.parametrize("distributed", [False, True])
def test_a_resumed_run_has_the_optimizer_that_its_file_asks_for(
    distributed: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """Not that of the checkpoint: an eps far above every gradient leaves only the decay, in policy and draft head.

    Norms and biases do not decay.
    """
    model, parallel = write_model(tmp_path / "model", "mimo"), {"distributed_optimizer": distributed}
    config = make_config(tmp_path, parallel=parallel, mtp={"drafts": 1})
    Policy(model, config, ranks).checkpoints.save(tmp_path / "saved", 1)
    changed = msgspec.structs.replace(config, optimizer=Optimizer(lr=1e-2, eps=1e9, weight_decay=0.5))
    policy = Policy(model, changed, ranks)
    policy.checkpoints.load(tmp_path / "saved")
    assert policy.drafter is not None
    params = [param for part in (policy.model, policy.drafter.head) for param in part.parameters()]
    before = [param.detach().clone() for param in params]
    step(policy, 1)
    for param, old in zip(params, before, strict=True):
        kept = 1 - 1e-2 * 0.5 if param.dim() > 1 else 1
        assert torch.allclose(param, old * kept, rtol=1e-5, atol=0)


def test_saving_gathers_no_state_of_the_optimizer_on_all_ranks(
    ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has no room for the state that the data ranks divide. One rank gathers the same whole buffer as several."""
    policy = Policy(model, make_config(tmp_path, parallel={"distributed_optimizer": True}), ranks)
    gathered, all_gather = list[int](), dist.all_gather

    def counted(tensor_list: list[torch.Tensor], *rest: Any, **options: Any) -> Any:
        gathered.append(sum(part.numel() for part in tensor_list))
        return all_gather(tensor_list, *rest, **options)

    monkeypatch.setattr(dist, "all_gather", counted)
    policy.checkpoints.save(tmp_path / "saved", 1)
    assert max(gathered, default=0) < sum(param.numel() for param in policy.model.parameters())


def test_learning_changes_every_weight(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    policy = Policy(model, make_config(tmp_path), ranks)
    before = weights(policy)
    update = step(policy, 1)
    assert update.grad_norm > 0
    assert [name for name, param in weights(policy).items() if torch.equal(param, before[name])] == []


def test_an_empty_batch_changes_nothing(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    policy = Policy(model, make_config(tmp_path), ranks)
    before = weights(policy)
    assert policy.update([[]], 0, LOSS, 1e-2).sums is None
    assert equal(weights(policy), before)


def test_saving_starts_no_process(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    Policy(model, make_config(tmp_path), ranks).checkpoints.save(tmp_path / "saved", 1)
    assert multiprocessing.active_children() == before


def test_what_the_writing_thread_lacks_is_told(
    ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron is where psutil is missing."""
    monkeypatch.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async.HAVE_PSUTIL", False)
    policy = Policy(model, make_config(tmp_path), ranks)
    with pytest.raises(UserError, match=r"saved could not be written \(.*psutil is not installed.*\)"):
        policy.checkpoints.save(tmp_path / "saved", 1)
    assert not (tmp_path / "saved").exists()


def test_files_that_cannot_be_written_are_told_and_leave_the_old_checkpoint(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    policy, done = Policy(model, make_config(tmp_path), ranks), []
    policy.checkpoints.save(tmp_path / "saved", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # less than the tensors, more than the rest
    try:
        with pytest.raises(UserError, match=r"saved could not be written \(Worker failure.*\); make room on its disk"):
            policy.checkpoints.save(tmp_path / "saved", 2, meanwhile=lambda: done.append(True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done and policy.checkpoints.load(tmp_path / "saved") == 1


def test_a_write_that_broke_off_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_dir.replace_directory(target) as directory:
        (directory / "file").write_text("old")
    with pytest.raises(OSError), atomic_dir.replace_directory(target) as directory:
        (directory / "file").write_text("half")
        raise OSError("disk full")
    assert (target / "file").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "remains"), [("model", [".model.old"]), ("step-000012", [".step-000012.old", ".step-000003.old"])]
)
def test_a_write_deletes_the_remains_of_its_own_deletions_and_nothing_of_the_user(
    name: str, remains: list[str], tmp_path: Path
) -> None:
    users = [".venv.old", ".git.old", ".models.old", ".step-best.old", ".other-1.old"]
    for there in (name, *remains, *users):
        (tmp_path / there).mkdir()
        (tmp_path / there / "file").touch()
    (tmp_path / ".env.old").touch()
    (tmp_path / ".step-000001.old").symlink_to(".venv.old")
    with atomic_dir.replace_directory(tmp_path / name) as directory:
        (directory / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, ".env.old", ".step-000001.old", *users])
    assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]


def test_only_what_the_trainer_wrote_is_deleted(tmp_path: Path) -> None:
    config = make_config(tmp_path, keep_checkpoints=2)
    for name in ("step-000001", "step-000002", "step-000001.best"):
        (Path(config.output) / "checkpoints" / name).mkdir(parents=True)
    prune(config, 3)
    left = sorted(path.name for path in (Path(config.output) / "checkpoints").iterdir())
    assert left == ["step-000001.best", "step-000002"]


def test_an_incomplete_checkpoint_is_refused(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    config: Config = make_config(tmp_path)
    with pytest.raises(UserError, match="nowhere is not a complete checkpoint"):
        Policy(model, config, ranks).checkpoints.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("family", "parallel", "sentence"),
    [
        ("llama", {}, "saved with family = qwen3 and this run has llama; use the saved value, or start a new run"),
        ("qwen3", {"precision": "bfloat16"}, "parallel.precision = float32 and this run has bfloat16"),
        ("qwen3", {"distributed_optimizer": True}, "parallel.distributed_optimizer = False and this run has True"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    family: str, parallel: dict[str, object], sentence: str, ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    Policy(model, make_config(tmp_path), ranks).checkpoints.save(tmp_path / "saved", 1)
    other = Policy(write_model(tmp_path / "other", family), make_config(tmp_path, parallel=parallel), ranks)
    with pytest.raises(UserError, match=sentence):
        other.checkpoints.load(tmp_path / "saved")


@pytest.mark.long
@pytest.mark.parametrize("distributed", [False, True])
def test_steps_too_small_for_half_precision_add_up_across_checkpoints(
    distributed: bool, ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    """The optimizer's main weights are in single precision, and a checkpoint holds them."""
    parallel = {"precision": "bfloat16", "distributed_optimizer": distributed}
    config, rows, rate = make_config(tmp_path, parallel=parallel), [make_rows(4)], 1.9e-3

    def norms(policy: Policy) -> torch.Tensor:
        return torch.cat([value.flatten() for name, value in weights(policy).items() if "layernorm" in name])

    steady = Policy(model, config, ranks)
    before = norms(steady)
    assert before.dtype == torch.bfloat16 and before.min() > 0.5
    for count in range(3):
        resumed = Policy(model, config, ranks)
        steady.checkpoints.save(tmp_path / "saved", count)
        resumed.checkpoints.load(tmp_path / "saved")
        steps = [policy.update(rows, 20, LOSS, rate) for policy in (steady, resumed)]
        assert steps[0].loss == steps[1].loss and equal(weights(steady), weights(resumed))
        if count == 0:
            assert torch.equal(norms(steady), before)  # a step is less than half of a norm's last place
        steady = resumed
    assert (norms(steady) != before).float().mean() > 0.5


def test_what_is_written_is_shown_beside_the_size_of_the_checkpoint_before(tmp_path: Path) -> None:
    target = tmp_path / "step-000002"
    shown = atomic_dir.written(target)
    assert shown() == f"saving {target} (0 MB)"
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "part").write_bytes(bytes(3_000_000))
    shown = atomic_dir.written(target)
    with atomic_dir.replace_directory(target) as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "part").write_bytes(bytes(2_000_000))
        assert shown() == f"saving {target} (2 MB, the last one has 3 MB)"
    assert shown() == f"saving {target} (0 MB, the last one has 3 MB)"
