"""What is said of a step, and where: the pool, the terminal, the boards, the record of its tokens.

The pool's metrics are part of a step, and a step that cannot be published fails. The rest is not: a board or a record
that cannot be written is said, noted as an event and left out from then on, for the pool has the metrics and the next
start writes the boards anew. Rank 0's matter, except for gathering what each rank has seen.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from proxy.pool.rollouts import runs
from proxy.pool.training import steps
from trainer.config import Config
from trainer.data.row import Row
from trainer.loss.named_losses import configured
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.report import tokens
from trainer.report.alarms import raised
from trainer.report.describe import Facts, Setting, describe, line
from trainer.report.exporters import Board, TensorBoard, WeightsAndBiases
from trainer.report.flops import peak
from trainer.report.negatives import gradient_shares
from trainer.run_state import Ledger


class Reporter:
    """Says what the steps of a run were. Every rank makes one; rank 0's speaks."""

    def __init__(self, config: Config, ledger: Ledger, policy: Policy):
        self._config, self._ledger, self._ranks = config, ledger, policy.ranks
        each = peak(device_name(self._ranks), config.parallel.precision)
        self._setting = partial(
            Setting, shape=policy.shape, labels=config.batch.labels, peak=each and each * self._ranks.world
        )
        self.boards: list[Board] = []
        self._ranks.share(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for board in self.boards:
            with suppress(OSError):  # it was said already, or the trainer ends with another error
                board.close()

    def measure(self, step: int, policy: Policy, mine: Sequence[Sequence[Row]], denominator: int) -> dict[str, float]:
        """What costs passes of its own, in the steps that are to have it. Collective; before the update."""
        every = self._config.report.negative_gradient_every
        if not every or step % every:
            return {}
        return gradient_shares(policy, mine, denominator, configured(self._config.loss))

    def describe(self, facts: Facts) -> dict[str, Any]:
        """The metrics of a step before it is published, after its tokens are recorded."""
        return self._ranks.share(lambda: self._describe(facts))

    def tell(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        """Say what a step was that is published and pushed: to the pool, the terminal and the boards."""
        self._ranks.share(lambda: self._tell(version, metrics))

    def _describe(self, facts: Facts) -> dict[str, Any]:
        self._attempt("report.keep_tokens", lambda: self._keep(facts))
        versions = {version.name: version.step for version in self._published()}
        metrics = describe(facts, self._setting(versions=versions))
        found = raised(metrics, self._config.alarms, self._config.batch.max_staleness)
        return metrics | {"alarms": [alarm.name for alarm in found]}

    def _keep(self, facts: Facts) -> None:
        output, keep = Path(self._config.output), self._config.report.keep_tokens
        if keep:
            tokens.write(tokens.path(output, facts.step), facts.batch.rows, facts.notes)
        tokens.prune(output, facts.step, keep)

    def _tell(self, version: steps.Version, metrics: dict[str, Any]) -> None:
        pool, run = self._ledger.pool, self._ledger.run
        steps.add_metrics(pool, version.id, metrics)
        print(line(version, metrics), flush=True)
        for alarm in raised(metrics, self._config.alarms, self._config.batch.max_staleness):
            print(f"alarm in step {version.step}: {alarm.text()}", file=sys.stderr, flush=True)
            runs.record_event(pool, run.id, "alarm", f"step {version.step}: {alarm.text()}")
        for board in list(self.boards):
            self._attempt(board.name, partial(board.write, version.step, version.created_at, metrics), board)

    def _attempt(self, what: str, act: Callable[[], None], board: Board | None = None) -> None:
        """Do what training can do without. A board that fails is left out until the next start."""
        try:
            act()
        except OSError as error:
            if board is not None:
                self.boards.remove(board)
            text = f"{what} could not be written ({error}); training goes on, and the pool has the metrics"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            runs.record_event(self._ledger.pool, self._ledger.run.id, "report", text)

    def _open(self) -> None:
        """The boards that are configured, with what the pool holds already. UserError where one cannot be had."""
        report, output = self._config.report, Path(self._config.output)
        pool, run = self._ledger.pool, self._ledger.run
        if report.tensorboard:
            self.boards.append(TensorBoard(output / "tensorboard"))
        if report.wandb:
            retired = steps.newest_retired(pool, run.id)
            attempt = f"-after-{retired}" if retired else ""
            self.boards.append(WeightsAndBiases(output / "wandb", report, run.name, attempt))
        for version, metrics in steps.history(pool, run.id) if self.boards else ():
            for board in list(self.boards):
                self._attempt(board.name, partial(board.write, version.step, version.created_at, metrics), board)

    def _published(self) -> list[steps.Version]:
        return steps.versions(self._ledger.pool, self._ledger.run.id)


def device_name(ranks: Ranks) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
