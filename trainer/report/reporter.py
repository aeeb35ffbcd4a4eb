"""The observer beside the training loop: it takes down what a step did and tells the pool, the terminal and exporters.

A step's metrics are published with the step, so a step whose metrics the pool refuses fails. The rest must not stop the
training: an exporter or a record of tokens that cannot be written is printed, recorded as an event and skipped from
then on; the pool has the metrics, and the next start writes the exporters again from them.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from proxy.pool.rollouts import runs
from proxy.pool.training import steps
from proxy.pool.training.fates import RolloutFate
from proxy.pool.training.unused_groups import abort_share, before_step, since_last_step
from proxy.pool.training.windowed_fifo import LeasedGroup
from trainer.config import Config
from trainer.data.assemble import TrainingBatch
from trainer.data.imitation import imitated_tokens
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.monitor.liveness import PhaseWatch
from trainer.policy import Policy, Update
from trainer.report import tokens
from trainer.report.describe import MetricsContext, StepFacts, describe, line
from trainer.report.exporters import Exporter, TensorBoard, WeightsAndBiases
from trainer.report.flops import peak
from trainer.report.gradients import gradient_shares, token_notes
from trainer.report.left_out import left_out
from trainer.report.prometheus import METRICS, Prometheus
from trainer.run_state import RunState


class Reporter:
    """Reports the steps of a run. Every rank makes one, because gathering is collective; only rank 0 writes.

    Raises UserError when a configured exporter cannot be opened.
    """

    def __init__(self, config: Config, run: RunState, policy: Policy):
        self.config, self.run, self.policy, self.ranks = config, run, policy, policy.ranks
        device_peak = peak(device_name(self.ranks), config.parallel.precision)
        self._metrics_context = partial(
            MetricsContext,
            shape=policy.shape,
            labels=config.batch.labels,
            peak=device_peak and device_peak * self.ranks.world,
        )
        self.exporters: list[Exporter] = []
        self.ranks.share(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for exporter in self.exporters:
            with suppress(OSError):  # it was reported already, or the trainer ends with another error
                exporter.close()

    @contextmanager
    def step(self, step: int) -> Iterator["StepReport"]:
        """Watch one step. A block that ends without an error announces what it did. Collective."""
        report = StepReport(self, step)
        try:
            yield report
        finally:
            report.watch.end()
        self.announce(report.version, report.published | {"seconds": report.seconds})

    def describe(self, facts: StepFacts) -> dict[str, Any]:
        """Record the step's tokens and return the metrics to publish with it. Collective."""
        return self.ranks.share(lambda: self._describe(facts))

    def _describe(self, facts: StepFacts) -> dict[str, Any]:
        self._attempt("the record of tokens", lambda: self._keep_tokens(facts))
        published = steps.versions(self.run.pool, self.run.pool_run.id)
        metrics = describe(
            facts,
            self._metrics_context(
                versions={version.name: version.step for version in published},
                first_commands=steps.first_metrics(self.run.pool, self.run.pool_run.id).get("command_counts", {}),
            ),
        )
        metrics["unused_groups"] = since_last_step(self.run.pool, self.run.pool_run.id)
        fates = [fate.to_pool() for fate in facts.batch.fates]
        metrics |= left_out(self.run.pool, self.run.pool_run.id, fates)
        aborted = abort_share(self.run.pool, self.run.pool_run.id)
        metrics |= {} if aborted is None else {"abort_share": aborted}
        return metrics | self.run.monitor.assess(metrics, facts.groups, facts.step)

    def _keep_tokens(self, facts: StepFacts) -> None:
        output = Path(self.config.output)
        tokens.write(tokens.path(output, facts.step), facts.batch.rows, facts.notes)
        tokens.prune(output, facts.step)

    def announce(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        """Write the metrics of a published step to the pool, the terminal and the exporters. Collective."""
        self.ranks.share(lambda: self._announce(version, metrics))

    def _announce(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        pool = self.run.pool
        waited, self.run.engine_wait_seconds = self.run.engine_wait_seconds, 0.0
        # counted again, as a group may be dropped between the first count and the step's publishing
        metrics["unused_groups"] = before_step(pool, version)
        metrics |= {"pause_seconds": self.run.pause_seconds, "engine_wait_seconds": round(waited, 3)}
        steps.add_metrics(pool, version.id, metrics)
        print(line(version, metrics), flush=True)
        self._tell(version, metrics)
        self._export(version, metrics)

    def tell(self, version: steps.Version) -> None:
        """Tell what the monitor says of the newest step, where the trainer before this one did not. Collective."""
        self.ranks.share(lambda: self._tell(version, steps.newest_metrics(self.run.pool, self.run.pool_run.id)))

    def _tell(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        """Print and note what the monitor says of a step, each sentence once."""
        for text in self.run.monitor.tell(metrics, version.step):
            if runs.record_event_once(self.run.pool, version.run_id, "alarm", text, version.created_at):
                print(text, file=sys.stderr, flush=True)

    def start_again(self) -> None:
        """Write the exporters again from the pool: a rollback has taken steps back. Collective."""
        self.ranks.share(self._start_again)

    def _start_again(self) -> None:
        for exporter in self.exporters:
            with suppress(OSError):
                exporter.close()
        self.exporters.clear()
        self._open()

    def _open(self) -> None:
        """Open the configured exporters and write what the pool already holds to them."""
        report, output = self.config.report, Path(self.config.output)
        pool, run = self.run.pool, self.run.pool_run
        self.exporters.append(TensorBoard(output / "tensorboard"))
        self.exporters.append(Prometheus(output / METRICS, run.name, report.metrics_port))
        if report.wandb:
            retired = steps.newest_retired(pool, run.id)
            attempt = f"-after-{retired}" if retired else ""
            self.exporters.append(WeightsAndBiases(output / "wandb", report, run.name, attempt))
        for version, metrics in steps.history(pool, run.id) if self.exporters else ():
            self._export(version, metrics)

    def _export(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        for exporter in list(self.exporters):
            self._attempt(exporter.name, partial(exporter.write, version.step, version.created_at, metrics), exporter)

    def _attempt(self, name: str, write: Callable[[], None], exporter: Exporter | None = None) -> None:
        """Write something that training can do without. An exporter that fails is skipped until the next start."""
        try:
            write()
        except OSError as error:
            if exporter is not None:
                self.exporters.remove(exporter)
            text = f"{name} could not be written ({error}); training continues, and the pool has the metrics"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            runs.record_event(self.run.pool, self.run.pool_run.id, "report", text)


class StepReport:
    """What one step did, taken down as the loop goes: each method notes an event and the seconds since the last one.

    Every rank calls the methods in the loop's order: `packed` and `metrics` are collective.
    """

    version: steps.Version
    published: dict[str, Any]
    """The metrics that were published with the step."""
    _groups: Sequence[LeasedGroup]
    _batch: TrainingBatch
    _micros: Sequence[Sequence[Sequence[TrainingRow]]]
    _gradient_shares: dict[str, float]
    _update: Update
    imitated: dict[int, int]
    """How many tokens of each completion the step imitates."""

    def __init__(self, reporter: Reporter, step: int):
        self._reporter, self.step = reporter, step
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        first = reporter.ranks.rank == 0
        self.watch = reporter.run.monitor.watch_phases(step) if first else PhaseWatch((), lambda _: None)
        self.watch.enter(steps.PHASES[0])

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = round(now - self._last, 4)
        self._last = now
        self.watch.end()
        if part != steps.PHASES[-1]:
            self.watch.enter(steps.PHASES[steps.PHASES.index(part) + 1])

    def set_aside(self) -> None:
        """Note that a batch came to nothing: the step waits for another one. The batch's time is in no phase."""
        self._last = time.perf_counter()
        self.watch.enter(steps.PHASES[0])

    def leased(self, groups: Sequence[LeasedGroup]) -> None:
        self._groups = groups
        self._lap("wait")

    def packed(
        self,
        batch: TrainingBatch,
        sources: Sequence[Sequence[TrainingRow]],
        micros: Sequence[Sequence[Sequence[TrainingRow]]],
    ) -> None:
        """Note what the step trains on (`micros`: [data rank][micro-batch] -> rows). `sources`: what it imitates.

        Measures the gradients of both signs in the steps that `report.negative_gradient_every` asks for, here because
        that needs the weights before the update.
        """
        self._batch, self._micros = batch, micros
        self.imitated = imitated_tokens(row for rows in sources for row in rows)
        config, policy = self._reporter.config, self._reporter.policy
        every = config.report.negative_gradient_every
        mine = micros[policy.ranks.data_rank]
        asked = bool(every) and self.step % every == 0
        self._gradient_shares = gradient_shares(policy, mine, batch.tokens, configured(config.loss)) if asked else {}
        self._lap("prepare")

    @property
    def fates(self) -> Sequence[RolloutFate]:
        """What the step did with each rollout of its groups."""
        return [fate.to_pool() for fate in self._batch.fates]

    @property
    def scales(self) -> dict[str, Any] | None:
        """The running deviations after the step."""
        return self._batch.scales

    def updated(self, update: Update) -> None:
        self._update = update
        self._lap("train")

    def metrics(self) -> dict[str, Any]:
        """Return the metrics to publish with the step, once it is saved."""
        self._lap("checkpoint")
        config, policy = self._reporter.config, self._reporter.policy
        loss = partial(policy_loss, rule=configured(config.loss))
        notes = token_notes(self._update.loss_inputs, loss, self._micros, policy.ranks, policy.shard)
        facts = StepFacts(
            self.step, self._groups, self._batch, self._micros, self._update, notes, self._gradient_shares, self.seconds
        )
        self.published = self._reporter.describe(facts)
        self._lap("report")
        return self.published

    def pushed(self, version: steps.Version) -> None:
        self.version = version
        self._lap("push")


def device_name(ranks: Ranks) -> str:
    """Return the device's own name for itself."""
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
