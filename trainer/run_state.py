"""What a training run has reached: its leases and published versions in the pool, and which of them engines have."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.functions.process import FunctionProcess
from proxy.pool.functions.weights import weigh
from proxy.pool.processes.owners import TRAINER, RunClaim, owned
from proxy.pool.rollouts import runs
from proxy.pool.training import steps, windowed_fifo
from proxy.pool.training.evaluations import find_teacher, held_engines
from proxy.pool.training.fates import RolloutFate
from proxy.pool.training.finished_rollouts import finished_rollouts
from proxy.pool.training.interventions import paused
from proxy.pool.training.unused_groups import since_last_step, waiting_rollouts
from proxy.pool.untrained import UntrainedReason
from trainer.config import Config, Push
from trainer.config.imitation import Imitation
from trainer.data.imitation import chosen, demonstrations
from trainer.data.row import TrainingRow
from trainer.megatron.parallel import Ranks
from trainer.monitor.monitor import Monitor
from trainer.preflight import claim, demand_heads, demand_tokenizer, other_heads
from trainer.push.held import unknown, without_held
from trainer.push.push import PushResult, push_again, push_patiently, release
from trainer.push.weights import Weights

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 2.0
"""Seconds between two looks at the pool. They become rarer while nothing comes: an idle run costs next to nothing."""
ENGINE_SECONDS = 5.0
"""Seconds between two checks, while waiting, that every engine still serves the newest version. The checks become rarer
while an engine stays out or does not even answer, up to ENGINE_PATIENCE."""
ENGINE_PATIENCE = 300.0
LINGER_SECONDS = 5.0
"""How long the trainer before this one may take to end after kill -9."""

Answer = TypeVar("Answer")


class RunState:
    """A training run between pool, engines and monitor.

    Every rank calls the same methods; rank 0 does the work inside `ranks.share`, and all get the answer. Rank 0 owns
    the run until the block ends: nothing is leased, published or pushed any more when another trainer has taken it
    over. Waiting is polling, because the pool sends no events.
    """

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        # these five are set on rank 0 alone, by _open
        self.pool: Pool
        self.monitor: Monitor
        self._claim: RunClaim
        self._demonstrations: list[list[TrainingRow]]
        self._ownership: ExitStack
        self.pool_run: runs.Run = ranks.share(self._open)
        self._check_engines_at, self._check_interval = time.monotonic() + ENGINE_SECONDS, ENGINE_SECONDS
        self._printed: set[str] = set()
        self._held: dict[str, str] = {}
        """URL -> version of the engines that the last push left out. Only rank 0 knows them."""
        self._refused_since: float | None = None
        """Since when pushes at the end of training have failed, by the monotonic clock; None: the last one did not."""
        self.pause_seconds = 0.0
        """How long the last push paused the engines. Only rank 0 knows it."""
        self.engine_wait_seconds = 0.0
        """How long pushes have waited for engines that were away. Only rank 0 knows it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.ranks.rank == 0:
            self._ownership.close()

    def _open(self) -> runs.Run:
        self.pool = open_pool(self.config.pool)
        run = runs.open_run(self.pool, self.config.run, "train", None)
        with ExitStack() as ownership:
            self._claim = ownership.enter_context(owned(self.pool, run, TRAINER, LINGER_SECONDS))
            ownership.enter_context(self._claim.kept())
            claim(Path(self.config.output), run, steps.latest(self.pool, run.id) is not None)
            demand_heads(self.config)
            self._demonstrations = [self._demonstrations_of(source) for source in self.config.imitation]
            if self.config.batch.function:
                with FunctionProcess(self.config.batch.function):
                    pass  # what cannot be imported is an error now, not at the first lease
            runs.set_queue_limit(self.pool, run.id, self.config.batch.open_groups)
            rule = self.config.batch.rule()
            runs.note_lease(self.pool, run.id, rule.groups, rule.window)
            self.monitor = Monitor(self.config, self.pool, run.id)
            print(self.config.batch.text(), flush=True)
            self._ownership = ownership.pop_all()
        return run

    def _demonstrations_of(self, source: Imitation) -> list[TrainingRow]:
        """Return the rows that a source offers. UserError where there are none, or one is too long for a step."""
        rollouts = finished_rollouts(self.pool, find_teacher(self.pool, source.run).id)
        attempts = {item.attempt_id for rollout in rollouts for item in rollout.completions}
        demand_tokenizer(self.pool, Path(self.config.model), attempts)
        groups = demonstrations(rollouts, source.min_reward, self.config.batch.labels)
        rows = [row for rows in groups.values() for row in rows if row.inputs]
        longest, limit = max((row.inputs for row in rows), default=0), self.config.batch.max_tokens
        if not 0 < longest <= limit:
            have = f"has a path of {longest} tokens to imitate" if rows else "has no rollout to imitate"
            way_out = f"raise batch.max_tokens = {limit}" if rows else "record some, or lower imitation.min_reward"
            raise UserError(f"the run {source.run}, which [[imitation]] names, {have}; {way_out}")
        return rows

    def to_imitate(self, step: int) -> list[list[TrainingRow]]:
        """Return what a step imitates beside its groups, by source."""
        sources = self.config.imitation
        if not sources:
            return []
        return self.ranks.share(
            lambda: [chosen(rows, one, step) for rows, one in zip(self._demonstrations, sources, strict=True)]
        )

    def latest(self) -> steps.Version | None:
        return self.ranks.share(lambda: steps.latest(self.pool, self.pool_run.id))

    def reopen_after(self, step: int) -> None:
        """Undo what was trained or leased after this step, so that the same groups are leased again."""
        self.ranks.share(lambda: steps.reopen_after(self.pool, self.pool_run.id, step, self._claim.token))

    def wait_for_lease(self, step: int) -> windowed_fifo.Lease:
        """Wait until this step's groups are finished and lease them.

        Meanwhile engines that restarted get the newest weights. Raises UserError after `batch.patience_seconds`, and
        when the rollouts were recorded with another tokenizer than the model's.
        """
        config = self.config
        rule = replace(config.batch.rule(), process=config.credit.process_rule(config.batch.labels))
        purpose = f"{rule.groups} finished groups for step {step}"
        return self.ranks.share(lambda: self._poll(lambda: self._lease(step, rule), purpose))

    def scales_before(self, step: int) -> dict[str, Any] | None:
        """The running deviations by domain that a step divides by; None: it does not, or there are none yet."""
        if not self.config.credit.by_domain:
            return None
        return self.ranks.share(lambda: steps.scales_before(self.pool, self.pool_run.id, step))

    def demand_owner(self) -> None:
        """Raise UserError when another trainer has taken the run over."""
        self.ranks.share(lambda: self._claim.demand())  # only rank 0 has a claim

    def publish(
        self,
        step: int,
        directories: tuple[Path, Path],
        metrics: dict[str, Any],
        *,
        parent: steps.Version | None = None,
        fates: Sequence[RolloutFate] = (),
        scales: dict[str, Any] | None = None,
        imitated: Mapping[int, int] | None = None,
    ) -> steps.Version:
        """Make a step's weights the run's newest version and its groups CONSUMED, in one transaction.

        `parent`: the version that the step grew from. `fates`: what it did with the rollouts of its groups.
        `scales`: the running deviations after it. `imitated`: by completion, the tokens that it imitated.
        """
        checkpoint, hf_dir = (str(path.resolve()) for path in directories)
        published = steps.Published(
            step=step,
            checkpoint=checkpoint,
            hf_dir=hf_dir,
            metrics=metrics,
            parent=parent.id if parent else None,
            fates=fates,
            scales=scales,
            imitated=imitated or {},
        )
        return self.ranks.share(lambda: steps.publish(self.pool, self.pool_run.id, published, self._claim.token))

    def heed(self, version: steps.Version) -> steps.Version:
        """Do what the monitor's rules ask for after this version; return the version to go on from.

        It is an earlier one after a rollback. Waits while the run is paused.
        """
        version = self.ranks.share(lambda: self.monitor.act(version, self._claim.token))
        waited = False
        # Shared every few seconds: a pause may outlast the time that ranks wait for one another in one `share`.
        while version.step < self.config.steps and self.ranks.share(partial(self._is_paused, told=waited)):
            waited = True
        if waited and self.ranks.rank == 0:
            print("the pause is over", flush=True)
        return version

    def _is_paused(self, told: bool) -> bool:
        """Whether the run is paused, after a while if so; engines that restart meanwhile get the newest weights."""
        why = paused(self.pool, self.pool_run.id)
        if why and not told:
            print(f"paused by {why}; `trainer continue` goes on", flush=True)
            runs.record_event(self.pool, self.pool_run.id, "pause", f"the trainer waits: paused by {why}")
        if why:
            self._claim.demand()
            self._check_engines()
            time.sleep(LONGEST_POLL_SECONDS)
        return bool(why)

    def drop_batch(self, step: int, norms: str) -> None:
        """Set aside the groups of an unpublished step, whose gradient is not finite, so that it leases others."""
        self.ranks.share(lambda: self._drop_batch(step, norms))

    def _drop_batch(self, step: int, norms: str) -> None:
        why = UntrainedReason.GRADIENT_NOT_FINITE
        ids = steps.drop_batch(self.pool, self.pool_run.id, step, why, self._claim.token)
        text = f"step {step}: {norms}; groups set aside: {', '.join(map(str, ids))}"
        runs.record_event(self.pool, self.pool_run.id, "gradient", text)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def push(self, version: steps.Version) -> None:
        """Bring the engines to a published version. Repeating it does no harm. Waits for engines that are away."""
        if self.config.push.colocated and self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # the engines on this device need the memory that the step has freed
            self.ranks.wait()  # for the others, whose devices the engines use too
        self.ranks.share(lambda: self._push(version))

    def release_engines(self) -> None:
        """Have colocated engines give up their device memory until the next push. Other engines are left alone."""
        if self.config.push.colocated:
            self.ranks.share(lambda: release(self.config.push, self._claim.demand))

    def _push(self, version: steps.Version) -> None:
        weights, say = Weights(version.name, Path(version.hf_dir)), partial(print, flush=True)
        pushed = push_patiently(weights, self._options_of_push(version), self._claim.demand, say)
        # Marked only now: a version whose push was cut short is pushed again by the next start.
        steps.mark_pushed(self.pool, version, self._claim.token)
        self.pause_seconds = pushed.seconds
        self.engine_wait_seconds += pushed.waited
        self._record_push(version, pushed)

    def _options_of_push(self, version: steps.Version) -> Push:
        """How to push a version: not to the engines that evaluations hold at other versions. Notes these in `_held`."""
        wanted = held_engines(self.pool, self.pool_run.id)
        for url in unknown(self.config.push, wanted):
            self._say_once(
                f"warning: an evaluation asks to hold engine {url}, and push.engines does not name it, so no engine is "
                "held; name the engines by the URLs at which the proxy has them"
            )
        options, self._held = without_held(self.config.push, wanted, version.name)
        for url, name in self._held.items():
            self._say_once(f"engine {url} stays at {name} until the evaluation of {name} has ended")
        return options

    def bring_back_engines(self) -> None:
        """Wait for evaluations that hold engines, and push the newest weights to these: for the end of training.

        A push that fails is repeated for ENGINE_PATIENCE seconds; engines that do not answer are left alone.
        """
        while self.ranks.share(self._waits_for_evaluation):
            pass

    def _waits_for_evaluation(self) -> bool:
        if not self._held and self._refused_since is None:
            return False
        self._claim.demand()
        time.sleep(LONGEST_POLL_SECONDS)
        pushed, now = self._repair_engines(), time.monotonic()
        if pushed is None or not pushed.failed:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > ENGINE_PATIENCE:
            return bool(self._held)
        return bool(self._held) or self._refused_since is not None

    def _say_once(self, text: str) -> None:
        if text not in self._printed:
            print(text, flush=True)
        self._printed.add(text)

    def _record_push(self, version: steps.Version, pushed: PushResult) -> None:
        text = f"{version.name} {pushed.text()}"
        runs.record_event(self.pool, self.pool_run.id, "push", text)
        notes, limit = list(pushed.notes), self.config.batch.max_tokens
        if pushed.longest_prompt > limit:
            notes.append(
                f"the engines accept prompts of {pushed.longest_prompt} tokens, and batch.max_tokens = {limit}: "
                "completions with longer paths are not trained (too_long); raise it or lower engine.context_length"
            )
        if difference := other_heads(self.config.parallel, pushed.heads):
            notes.append(difference)
        for note in notes:  # every push has the same ones
            self._say_once(note)
        if pushed.failed:
            print(text, flush=True)

    def _lease(self, step: int, rule: windowed_fifo.LeaseRule) -> windowed_fifo.Lease | None:
        self._check_engines()
        take = partial(windowed_fifo.lease, self.pool, self.pool_run.id, step, rule, self._claim.token)
        lease, function = take(), self.config.batch.function
        if lease is not None and function and weigh(self.pool, self.pool_run.id, lease, function, self._claim.token):
            lease = take()  # with what the function said
        if lease is not None and self.monitor.mask(lease.groups, step, self._claim.token):
            lease = take()
        if lease is not None:
            members = [rollout for group in lease.groups for rollout in group.rollouts]
            attempts = {item.attempt_id for member in members for item in member.completions}
            demand_tokenizer(self.pool, Path(self.config.model), attempts)
        return lease

    def _check_engines(self) -> None:
        """Repair engines, where another check is due."""
        if time.monotonic() > self._check_engines_at:
            started = time.monotonic()
            pushed = self._repair_engines()
            self._check_interval = check_interval(self._check_interval, pushed, time.monotonic() - started)
            self._check_engines_at = time.monotonic() + self._check_interval

    def _repair_engines(self) -> PushResult | None:
        """Push the newest weights to engines that failed or were restarted. None when nothing had to be pushed."""
        version = steps.latest(self.pool, self.pool_run.id)
        pushed = version and push_again(
            Weights(version.name, Path(version.hf_dir)), self._options_of_push(version), self._claim.demand
        )
        if not version or not pushed:
            return None
        self._record_push(version, pushed)
        if pushed.ways:
            engines = " ".join(pushed.ways)
            print(f"pushed {version.name} again to engines that served another version: {engines}", flush=True)
        return pushed

    def _poll(self, look: Callable[[], Answer | None], purpose: str) -> Answer:
        patience = self.config.batch.patience_seconds
        started = time.monotonic()
        deadline = started + patience
        while (answer := look()) is None:
            if time.monotonic() > deadline:
                raise UserError(f"waited batch.patience_seconds = {patience:g} for {purpose}{self._what_there_is()}")
            time.sleep(min(max(POLL_SECONDS, (time.monotonic() - started) / 50), LONGEST_POLL_SECONDS))
        return answer

    def _what_there_is(self) -> str:
        """Continue the sentence on a batch that did not fill: what the pool has of it, and the ways out."""
        ended, opened = waiting_rollouts(self.pool, self.pool_run.id)
        unused = since_last_step(self.pool, self.pool_run.id)
        left_out = ", ".join(f"{count} {reason}" for reason, count in unused.items())
        return (
            f", and {ended} of the {opened} rollouts in open groups have ended; check that the harness is running and "
            "that its concurrency is large enough, or raise batch.patience_seconds"
            + (f" (groups that no step takes since the last one: {left_out})" if left_out else "")
        )


def check_interval(previous: float, pushed: PushResult | None, took: float) -> float:
    """Seconds until the engines are checked again.

    `previous`: the interval before; `took`: seconds of the check, with its push. A check waits for an engine whose
    machine is gone until its request times out, and training waits with it, so slow checks become rare.
    """
    if pushed is None:
        return min(ENGINE_PATIENCE, max(ENGINE_SECONDS, 10 * took))
    return min(2 * previous, ENGINE_PATIENCE) if pushed.failed else ENGINE_SECONDS
