"""The trainer's side of the pool: its run, its leases, its published versions."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.training import steps, windowed_fifo
from trainer.config import Config
from trainer.megatron.parallel import Ranks
from trainer.preflight import claim, demand_tokenizer
from trainer.push import PushResult, Weights, push, push_again, release

POLL_SECONDS = 0.1
ENGINE_SECONDS = 5.0
"""How often the engines are asked, while waiting, whether they still serve the newest version; while one stays out,
or does not even refuse to answer, less and less often, up to ENGINE_PATIENCE."""
ENGINE_PATIENCE = 300.0

Found = TypeVar("Found")


class Ledger:
    """What the run has reached, and the next step's work. Every rank calls it, rank 0 acts, all get the answer.

    Waiting is polling: the pool has no events.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.run: runs.Run = ranks.share(self._open)
        self._ask_engines_at, self._between = time.monotonic() + ENGINE_SECONDS, ENGINE_SECONDS
        self._said: set[str] = set()
        self.pause_seconds = 0.0
        """How long the last push paused the engines; known to rank 0."""

    def latest(self) -> steps.Version | None:
        return self.ranks.share(lambda: steps.latest(self.pool, self.run.id))

    def reopen_after(self, step: int) -> None:
        self.ranks.share(lambda: steps.reopen_after(self.pool, self.run.id, step))

    def wait_for_lease(self, step: int) -> windowed_fifo.Lease:
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
        if self.config.push.colocated and self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # the engines need what the step has left
        self.ranks.share(lambda: self._push(version))

    def release_engines(self) -> None:
        """Room for a step on the engines' own devices, until the next push. Does nothing unless they are colocated."""
        if self.config.push.colocated:
            self.ranks.share(lambda: release(self.config.push))

    def _open(self) -> runs.Run:
        self.pool = open_pool(self.config.pool)
        run = runs.open_run(self.pool, self.config.run, "train", None)
        claim(Path(self.config.output), run, steps.latest(self.pool, run.id) is not None)
        runs.set_queue_limit(self.pool, run.id, self.config.batch.queue_limit or 2 * self.config.batch.groups)
        return run

    def _push(self, version: steps.Version) -> None:
        done = push(Weights(version.name, Path(version.hf_dir)), self.config.push)
        steps.mark_pushed(self.pool, version.id)
        self.pause_seconds = done.seconds
        self._note(version, done)

    def _note(self, version: steps.Version, done: PushResult) -> None:
        text = f"{version.name} {done.text()}"
        runs.record_event(self.pool, self.run.id, "push", text)
        for note in (*done.notes, *([text] if done.failed else [])):
            if note not in self._said:
                print(note, flush=True)
        self._said.update(done.notes)  # these are the same every time

    def _lease(self, step: int, rule: windowed_fifo.LeaseRule) -> windowed_fifo.Lease | None:
        if time.monotonic() > self._ask_engines_at:
            began = time.monotonic()
            done = self._push_again()
            self._between = rest(self._between, done, time.monotonic() - began)
            self._ask_engines_at = time.monotonic() + self._between
        found = windowed_fifo.lease(self.pool, self.run.id, step, rule)
        if found is not None:
            members = [rollout for group in found.groups for rollout in group.rollouts]
            attempts = {item.attempt_id for member in members for item in member.completions}
            demand_tokenizer(self.pool, Path(self.config.model), attempts)
        return found

    def _push_again(self) -> PushResult | None:
        """Give engines that failed or were started anew the newest weights."""
        version = steps.latest(self.pool, self.run.id)
        done = version and push_again(Weights(version.name, Path(version.hf_dir)), self.config.push)
        if not version or not done:
            return None
        self._note(version, done)
        if done.ways:
            print(f"engines that served something else have {version.name} again: {' '.join(done.ways)}", flush=True)
        return done

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


def rest(before: float, done: PushResult | None, took: float) -> float:
    """Seconds until the engines are asked again, after they were asked and perhaps pushed to.

    `took`: seconds. An engine whose machine is gone is waited for until the request's end, and the work waits with it.
    """
    if done is None:
        return min(ENGINE_PATIENCE, max(ENGINE_SECONDS, 10 * took))
    return min(2 * before, ENGINE_PATIENCE) if done.failed else ENGINE_SECONDS
