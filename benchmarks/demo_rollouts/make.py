"""Make benchmarks/demo_rollouts/demo.tar.xz: rollouts, weights and losses of 20 steps of the demo on a CPU.

usage: python benchmarks/demo_rollouts/make.py    (minutes; from the root of a checkout, after `make install`)

It is the demo of examples/demo in real parts (proxy, SGLang, harness, trainer), with a smaller model and smaller
groups, and without its evaluations. The warm-started weights are rounded to bfloat16 before the engine gets them, so
that half of the bytes hold them exactly. Of the pool only what the trainer reads is kept.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from sqlalchemy import delete, select, update

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "examples" / "demo"), str(HERE.parents[1])]

from run import Demo, clear  # noqa: E402  # the demo's own modules, which are scripts
from settings import RUN, Settings, write_engine_config, write_sft_config, write_trainer_config  # noqa: E402
from tasks import write as write_tasks  # noqa: E402

from proxy.engine.tiny_model import TinySizes, make_tiny_model  # noqa: E402
from proxy.pool import schema  # noqa: E402
from proxy.pool.database import Pool, open_pool  # noqa: E402
from proxy.pool.rollouts.runs import find_run  # noqa: E402

DATA = Path("/tmp/blackforge-demo-rollouts")
SIZES = TinySizes(hidden=64, intermediate=128)
SETTINGS = Settings(steps=20, groups=4, group_size=4)
KEPT = ("loss", "grad_norm", "entropy", "kl_rollout", "reward_mean", "trained_tokens")
"""Metrics of each step that a replay is compared with."""
PARTS = ("pool.db", "trainer.toml", "warm/config.json", "warm/model.safetensors")


class Recording(Demo):
    """The demo up to the end of its train steps."""

    def record(self) -> None:
        (self.directory / "logs").mkdir()
        make_tiny_model(self.directory / "tiny", self.settings.seed, SIZES)
        write_tasks(self.directory / "tasks", self.settings.seed)
        self.record_teacher(write_engine_config(self.directory, "tiny"))
        self.say("warm start")
        command = ["trainer", "sft", str(write_sft_config(self.directory, self.settings))]
        subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
        round_weights(self.directory / "warm" / "model.safetensors")
        engine, gateway = self.serve()
        config = write_trainer_config(self.directory, self.settings, engine)
        os.environ["OMP_NUM_THREADS"] = "1"
        trainer = self.start("trainer", ["trainer", "launch", str(config)], ready=False)
        self.wait_pushed(trainer)
        self.reinforce(gateway, trainer)


def round_weights(file: Path) -> None:
    """Round all weights to bfloat16."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(rounded, file, metadata={"format": "pt"})


def strip(pool: Pool) -> None:
    """Delete all of the pool but what the trainer reads of the consumed groups, and the metrics to compare with."""
    run = find_run(pool, RUN).id
    consumed = select(schema.groups.c.id).where(schema.groups.c.run_id == run, schema.groups.c.state == "CONSUMED")
    final = select(schema.rollouts.c.attempt_id).where(schema.rollouts.c.group_id.in_(consumed))
    with pool.write() as connection:
        connection.execute(delete(schema.events))
        connection.execute(delete(schema.undelivered))
        connection.execute(delete(schema.completions).where(schema.completions.c.attempt_id.not_in(final)))
        connection.execute(delete(schema.attempts).where(schema.attempts.c.id.not_in(final)))
        connection.execute(delete(schema.rollouts).where(schema.rollouts.c.group_id.not_in(consumed)))
        connection.execute(delete(schema.groups).where(schema.groups.c.id.not_in(consumed)))
        connection.execute(delete(schema.tasks).where(schema.tasks.c.id.not_in(select(schema.groups.c.task_id))))
        connection.execute(delete(schema.runs).where(schema.runs.c.id != run))
        connection.execute(update(schema.runs).values(config={}, owner=None))
        connection.execute(update(schema.tasks).values(spec={"id": "demo", "domain": "agent"}))
        connection.execute(update(schema.attempts).values(key_hash=schema.attempts.c.id, timings=None))
        unread: dict[str, Any] = {"reply": {}, "fingerprint": None, "shape": None, "proxy_id": None}
        connection.execute(update(schema.completions).values(unread))
        connection.execute(delete(schema.proxies))
        for row in connection.execute(select(schema.train_steps)).all():
            kept = {name: row.metrics[name] for name in KEPT if name in row.metrics}
            connection.execute(update(schema.train_steps).where(schema.train_steps.c.id == row.id).values(metrics=kept))


def pack() -> None:
    """Write the archive from what was recorded."""
    pool = open_pool(str(DATA / "pool.db"))
    strip(pool)
    pool.close()
    with closing(sqlite3.connect(DATA / "pool.db")) as connection:
        connection.execute("pragma journal_mode = delete")
        connection.execute("vacuum")
    text = (DATA / "trainer.toml").read_text().replace(f"{DATA}/", "")
    (DATA / "trainer.toml").write_text("\n".join(line for line in text.splitlines() if "engines" not in line) + "\n")
    archive = HERE / "demo.tar.xz"
    options = ["--sort=name", "--owner=0", "--group=0", "--mtime=@0", "-cJf", str(archive)]
    subprocess.run(["tar", "-C", str(DATA), *options, *PARTS], check=True)
    print(f"{archive}: {archive.stat().st_size} bytes")


def main() -> int:
    clear(DATA)
    demo = Recording(DATA, SETTINGS, Console())
    try:
        demo.record()
    finally:
        demo.close()
    demo.pool.close()
    pack()
    shutil.rmtree(DATA)
    return 0


if __name__ == "__main__":
    sys.exit(main())
