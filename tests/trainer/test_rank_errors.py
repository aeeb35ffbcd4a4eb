"""A rank that has an error of its own tells it at once, whatever the other ranks are waiting for."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from proxy.pool.errors import UserError
from tests.conftest import need
from trainer.megatron.parallel import Ranks, job


@pytest.mark.parametrize(("world", "after_an_error"), [(1, ["left"]), (2, [])])
def test_a_rank_among_several_leaves_the_job_only_without_an_error(
    world: int, after_an_error: list[str], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("left"))
    with pytest.raises(UserError, match="as told"), job():
        raise UserError("as told")
    assert left == after_an_error
    with job():
        pass
    assert left == [*after_an_error, "left"]


def test_an_error_of_one_rank_is_told_where_no_rank_can_leave_the_others(model: Path, tmp_path: Path) -> None:
    need("megatron-core", find_spec("megatron") is not None)
    config = tmp_path / "trainer.toml"
    config.write_text('pool = "pool.db"\nrun = "demo"\nmodel = "model"\noutput = "out"\nsteps = 1\n')
    command = [sys.executable, "-m", "tests.trainer.blocked_ranks", str(config), str(tmp_path)]
    # Its group is gloo's, and one GPU would have no room for two ranks.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert ended.stdout.splitlines()[-1:] == ["[1,2]"], ended.stderr  # rank 0 has lost the connection to rank 1
    error = msgspec.json.decode((tmp_path / "error-1.json").read_bytes())
    assert error["message"].startswith("the disk of rank 1 is full")
    assert "Traceback" in ended.stderr and not (tmp_path / "error-0.json").exists()
