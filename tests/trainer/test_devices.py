"""A micro-batch on a device whose numbers nobody can read: where a GPU would wait for the CPU, and mixed devices.

The device is torch's `meta`, which computes shapes only. Reading a number of it raises an error, as does any operation
whose result has a shape that depends on numbers. Not covered: attention's kernel (replaced here by one that computes
the same shapes); several ranks, of which those that divide experts count tokens on the CPU; Megatron's optimizer around
Adam (main weights, clipping, which reads the norm once per update); statistics of a step, checkpoints and exports,
which read numbers by design.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxy.pool.errors import UserError
from tests.trainer.make import make_config, make_rows, write_model
from trainer import drafter as drafter_module
from trainer.commands.ranks import _environment
from trainer.config import Loss, LossKind, Parallel
from trainer.config.model_shape import read_shape
from trainer.data.packing import ContextShard, pack
from trainer.drafter import Drafter
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss
from trainer.megatron import cpu
from trainer.megatron.adam import Adam, norm_of_all, scale_all
from trainer.megatron.attention import flex
from trainer.megatron.device import demand_gpu
from trainer.megatron.model.experts import MoEAuxLossAutoScaler
from trainer.megatron.model.model import PolicyModel, build_model, transformer_config
from trainer.megatron.parallel import Ranks

META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Notes copies for which a GPU would wait, and operations that mix devices, but for single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        kinds = {tensor.device.type for tensor in given if tensor.dim() or tensor.device == META}
        if func is torch.ops.aten._to_copy.default and given[0].device != outputs[0].device:
            if not (kwargs or {}).get("non_blocking"):
                self.noted.append(f"a copy of {tuple(given[0].shape)} that waits")
        elif len(kinds) > 1:
            self.noted.append(f"{func} on {kinds}")
        return results


@pytest.fixture
def model(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[PolicyModel]:
    """A model on the device, with all that bounds memory. Its attention computes as many scores as pairs of tokens."""
    family = getattr(request, "param", "mimo")
    monkeypatch.setattr(cpu._stub, "current_device", lambda: META, raising=False)
    monkeypatch.setattr(flex, "compiled", lambda: quadratic)
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1, device=META))
    parallel = make_config(tmp_path, parallel={"recompute": True, "precision": "bfloat16"}).parallel
    shape = read_shape(write_model(tmp_path / "model", family))
    model = build_model(shape, transformer_config(shape, torch.bfloat16, parallel), parallel).to(META)
    model.logits_tokens = 10
    yield model


def quadratic(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float, **_: Any) -> Tensor:
    """FlexAttention's arguments and shapes. The mask's function is called as the kernel calls it."""
    assert block_mask.kv_num_blocks.device == block_mask.kv_indices.device == query.device
    numbers = (torch.arange(size, device=query.device) for size in (query.shape[2], key.shape[2]))
    rows, columns = torch.meshgrid(*numbers, indexing="ij")
    allowed = block_mask.mask_mod(rows, rows, rows, columns)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("kind", "model"),
    [("cispo", "mimo"), ("icepop", "mimo"), ("gspo", "mimo"), ("ipa", "mimo"), ("cispo", "qwen3_moe")],
    indirect=["model"],
)
def test_no_micro_batch_waits_for_the_device(kind: LossKind, model: PolicyModel) -> None:
    rule = configured(Loss(kind=kind, cap=2.0))
    model.balance = 0.1
    with Waits() as waits:
        packed, tokens = pack(make_rows(3), ContextShard(META, paths=True))
        loss_of = partial(policy_loss, rule=rule)
        logp = model(packed)[packed.branches]
        fields = vars(tokens) | {"old_logp": logp.detach()}
        loss, sums = loss_of(logp, type(tokens)(**fields))
        loss.backward()
    assert waits.noted == []
    grads = [param.grad for param in model.parameters()]
    assert {grad.device for grad in [*grads, sums.sums] if grad is not None} == {META} and None not in grads


def test_a_draft_head_does_not_wait_for_the_device_either(
    model: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, Megatron keeps gradients there, whatever device the model is on")
    monkeypatch.setattr(drafter_module, "build_optimizer", lambda *_: None)  # Megatron's takes no such tensors
    source = tmp_path / "model"
    config = make_config(tmp_path, parallel={"precision": "bfloat16"}, mtp={"drafts": 2})
    drafter = Drafter(model, read_shape(source), source, config)
    rows = make_rows(3)
    drafter.counts, drafter.sums = torch.ones(2, device=META), torch.zeros(2, 2, device=META)  # `begin` is collective
    with Waits() as waits:
        packed, _ = pack(rows, ContextShard(META))
        model(packed)
        drafter.learn(rows, packed)
    assert waits.noted == []


def test_adam_and_the_norm_of_the_gradients_do_not_wait_for_the_device() -> None:
    params = [torch.nn.Parameter(torch.zeros(size, 2, device=META)) for size in (3, 5)]
    optimizer = Adam(params, weight_decay=0.1)
    with Waits() as waits:
        for _ in range(2):
            for param in params:
                param.grad = torch.zeros_like(param)
            gradients = [param.grad for param in params if param.grad is not None]
            norm, _ = norm_of_all(0, None, [gradients])
            scale_all(0, None, [gradients], 0.5)
            optimizer.step()
    assert waits.noted == [] and norm.shape == (1,)
    assert {moment.device for state in optimizer.state.values() for moment in state.values()} == {META}


def test_a_rank_has_the_gpus_settings_that_torch_and_nccl_read_at_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    environment = _environment(Parallel())
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["NCCL_CUMEM_ENABLE"] == "0"  # as SGLang sets it for its own processes
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"  # what the user has set counts
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert _environment(Parallel())["NCCL_CUMEM_ENABLE"] == "1"


def test_a_rank_without_a_gpu_of_its_own_is_refused() -> None:
    demand_gpu(local_rank=1, gpus=2)
    with pytest.raises(UserError, match="rank 2 of this machine has no GPU, .* there are 2; set --nproc"):
        demand_gpu(local_rank=2, gpus=2)


def test_what_neither_the_stub_nor_torch_cuda_has_is_a_missing_attribute() -> None:
    assert cpu._stub.MemPool is torch.cuda.MemPool
    with pytest.raises(AttributeError, match="torch.cuda has no such_name"):
        cpu._stub.such_name  # noqa: B018 (reading it is the test)
