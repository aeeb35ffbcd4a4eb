"""The trainer's side of the pool: its run, its leases, its published versions."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from proxy.pool import runs, schedule, steps
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from trainer.config import Config
from trainer.megatron.parallel import Ranks
from trainer.push import Weights, lost, push

POLL_SECONDS = 0.1
ENGINE_SECONDS = 5.0
"""How often the engines are asked, while waiting, whether they still serve the newest version."""

Found = TypeVar("Found")


class Ledger:
    """What the run has reached, and the next step's work. Every rank calls it, rank 0 acts, all get the answer.

    Waiting is polling: the pool has no events.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.run: runs.Run = ranks.share(self._open)
        self._engines_asked = time.monotonic()
        self.pause_seconds = 0.0
        """How long the last push paused the engines; known to rank 0."""

    def latest(self) -> steps.Version | None:
        return self.ranks.share(lambda: steps.latest(self.pool, self.run.id))

    def reopen_after(self, step: int) -> None:
        self.ranks.share(lambda: steps.reopen_after(self.pool, self.run.id, step))

    def wait_for_lease(self, step: int) -> schedule.Lease:
        """The groups of this step, as soon as enough are finished."""
        rule = self.config.batch.rule()
        what = f"{rule.groups} finished groups for step {step}"
        return self.ranks.share(lambda: self._wait(lambda: self._lease(step, rule), what))

    def publish(self, step: int, directories: tuple[Path, Path], metrics: dict[str, Any]) -> steps.Version:
        """Make a step's weights the run's newest version and its groups CONSUMED, in one transaction."""
        checkpoint, hf_dir = (str(path.resolve()) for path in directories)
        done = steps.Published(step=step, checkpoint=checkpoint, hf_dir=hf_dir, metrics=metrics)
        return self.ranks.share(lambda: steps.publish(self.pool, self.run.id, done))

    def push(self, version: steps.Version) -> None:
        """Bring the engines to a published version. May be repeated."""
        self.ranks.share(lambda: self._push(version))

    def _open(self) -> runs.Run:
        self.pool = open_pool(self.config.pool)
        run = runs.open_run(self.pool, self.config.run, "train", None)
        runs.set_queue_limit(self.pool, run.id, self.config.batch.queue_limit or 2 * self.config.batch.groups)
        return run

    def _push(self, version: steps.Version) -> None:
        paused = push(Weights(version.name, Path(version.hf_dir)), self.config.push)
        steps.mark_pushed(self.pool, version.id)
        self.pause_seconds = paused
        engines = len(self.config.push.engines)
        runs.record_event(self.pool, self.run.id, "push", f"{version.name} to {engines} engines, paused {paused:.3f} s")

    def _lease(self, step: int, rule: schedule.LeaseRule) -> schedule.Lease | None:
        if time.monotonic() > self._engines_asked + ENGINE_SECONDS:
            self._engines_asked = time.monotonic()
            self._push_again()
        return schedule.lease(self.pool, self.run.id, step, rule)

    def _push_again(self) -> None:
        """Give an engine that was started anew the newest weights: what it samples otherwise counts for nothing."""
        version = steps.latest(self.pool, self.run.id)
        if version is None:
            return
        for url in lost(Weights(version.name, Path(version.hf_dir)), self.config.push):
            print(f"engine {url} was started anew; pushing {version.name} again", flush=True)
            self._push(version)

    def _wait(self, look: Callable[[], Found | None], what: str) -> Found:
        patience = self.config.batch.patience_seconds
        deadline = time.monotonic() + patience
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"waited batch.patience_seconds = {patience:g} for {what}; see that the harness runs, or raise it"
                )
            time.sleep(POLL_SECONDS)
        return found
