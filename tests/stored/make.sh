#!/usr/bin/env bash
# Makes tests/stored/before.tar.xz: a pool, a run directory and a checkpoint as blackforge wrote them at $COMMIT.
# usage: tests/stored/make.sh [PYTHON]    from the root of a checkout, with a Python that has the trainer's packages
set -euo pipefail
COMMIT=52dbdac
OLD=/tmp/blackforge-before DATA=/tmp/blackforge-stored  # the test replaces both where they stand in what was stored
PYTHON=${1:-python}
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$DATA"
git worktree add -q "$OLD" "$COMMIT"
trap 'git worktree remove --force "$OLD"' EXIT
mkdir "$DATA"
cd "$OLD"
PYTHONPATH=$OLD "$PYTHON" - "$DATA" <<'PY'
"""In the old tree: an evaluation that is killed half-way, and a training run of two steps, whose third is noted."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import select, update

from proxy.pool import runs, steps
from proxy.pool.database import open_pool
from proxy.pool.schema import completions, groups, rollouts
from tests.trainer import make
from trainer.config import Parallel
from trainer.loop import train
from trainer.megatron.parallel import process_groups

data = Path(sys.argv[1])
tasks = [{"id": name, "instruction": "Write hello.txt", "timeout": 60,
          "verifier": {"command": 'test "$(cat hello.txt)" = hello', "timeout": 30}} for name in "abc"]
(data / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
agent = f"python3 -I -S {Path.cwd()}/examples/agents/shell_agent.py; sleep 1"
command = [sys.executable, "-m", "harness", "run", str(data / "tasks.jsonl"), "--agent", "command", "--command", agent,
           "--sandbox", "process", "--run-dir", str(data / "run"), "--name", "evaluation", "--pool", str(data / "pool.db"),
           "--scripted", "tests/harness/scripts.py:hello", "--concurrency", "1", "-n", "1"]
harness = subprocess.Popen(command)


def finished():
    if not (data / "pool.db").exists():
        return 0
    with open_pool(str(data / "pool.db")).read() as connection:
        return len(connection.execute(select(rollouts.c.id).where(rollouts.c.finished_at.is_not(None))).all())


while finished() < 1:
    time.sleep(0.2)
time.sleep(0.5)
harness.kill()
harness.wait()
time.sleep(2)
shutil.rmtree(data / "run" / "model")
shutil.rmtree(data / "run" / "logs")

make.HIDDEN, make.FFN, make.VOCABULARY, make.LAYERS, make.HEADS, make.KV_HEADS, make.HEAD_DIM = 8, 8, 24, 1, 2, 1, 4
make.write_model(data / "model")
pool = open_pool(str(data / "pool.db"))
run_id = runs.open_run(pool, "demo", "train", None).id
make.fill(pool, run_id, 7)
with pool.write() as connection:  # one of each kind that is not trained
    mine = list(connection.scalars(select(groups.c.id).where(groups.c.run_id == run_id).order_by(groups.c.id)))
    ids = list(connection.scalars(select(rollouts.c.attempt_id).where(rollouts.c.group_id == mine[0])))
    ids += list(connection.scalars(select(rollouts.c.attempt_id).where(rollouts.c.group_id == mine[1])))
    rows = [completions.c.attempt_id == each for each in ids]
    connection.execute(update(completions).where(rows[4]).values(label="side"))
    connection.execute(update(completions).where(rows[1]).values(untrainable="abandoned in transport"))
    connection.execute(update(completions).where(rows[2]).values(
        untrainable="sampled with {'temperature': 0.2}, not from the training distribution"))
    lost = {"state": "TOMBSTONE", "failure": "hung", "reason": "filtered: hung"}
    values = connection.execute(select(groups).where(groups.c.id == mine[0])).one()._mapping
    connection.execute(groups.insert().values(dict(values) | lost | {"id": 99, "queue_index": 99}))
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
with process_groups(Parallel()) as ranks:
    config = make.make_config(data, steps=2, report={"tensorboard": False}, checkpoint={"keep": 1})
    train(config, ranks)
    later = data.with_name("blackforge-later")
    shutil.rmtree(later, ignore_errors=True)
    pool.close()
    shutil.copytree(data, later)
    train(make.make_config(later, steps=3, output=str(data / "trainer"), report={"tensorboard": False},
                           checkpoint={"keep": 9}), ranks)
third = steps.metrics(open_pool(str(later / "pool.db")), run_id)[3]
names = ("loss", "grad_norm", "reward_mean", "trained_tokens", "staleness_mean")
(data / "third_step.json").write_text(json.dumps({name: third[name] for name in names}, indent=1))
shutil.rmtree(later)
for kind in ("checkpoints", "models"):
    shutil.rmtree(data / "trainer" / kind / "step-000003")
(data / "trainer" / "tokens" / "000003.npz").unlink()
PY
rm -f "$DATA"/run/lock "$DATA"/run/*.ready
tar -C "$DATA" --sort=name --owner=0 --group=0 -cJf "$here/before.tar.xz" .
ls -l "$here/before.tar.xz"
