"""What a command prints for an error: its sentence, and the page that explains its subject, if there is one."""

from types import TracebackType

PAGES: dict[str, str | None] = {
    "harness.agents": "agents.md",
    "harness.cluster": "cluster.md",
    "harness.commands": "runs.md",
    "harness.commands.agents": "agents.md",
    "harness.commands.behaviour": "behaviour.md",
    "harness.commands.judge_options": "tasks.md",
    "harness.commands.rescore": "rewards.md",
    "harness.commands.validate": "tasks.md",
    "harness.environment": "augmentation.md",
    "harness.integrity": "integrity.md",
    "harness.loop": "runs.md",
    "harness.monitor": "monitor.md",
    "harness.rewards": "rewards.md",
    "harness.rollout": "runs.md",
    "harness.run_dir": "runs.md",
    "harness.settings": "runs.md",
    "harness.setup": "sandboxes.md",
    "harness.setup.stack": "runs.md",
    "harness.tasks": "tasks.md",
    "harness.validation": "tasks.md",
    "harness.verdict": "tasks.md",
    "harness.verdict.judge": "rewards.md",
    "proxy.commands": "models.md",
    "proxy.commands.dashboard": "dashboard.md",
    "proxy.commands.doctor": "cluster.md",
    "proxy.commands.pool": "pool.md",
    "proxy.commands.replay": "architecture.md",
    "proxy.commands.serving": "cluster.md",
    "proxy.commands.traces": "traces.md",
    "proxy.config": "models.md",
    "proxy.dashboard": "dashboard.md",
    "proxy.doctor": "cluster.md",
    "proxy.engine": "models.md",
    "proxy.http": "security.md",
    "proxy.parsing": "models.md",
    "proxy.pool": "pool.md",
    "proxy.pool.behaviour": "behaviour.md",
    "proxy.pool.browse": "dashboard.md",
    "proxy.pool.functions": None,
    "proxy.pool.input_files": None,
    "proxy.pool.processes": "runs.md",
    "proxy.pool.rollouts": "runs.md",
    "proxy.pool.search": "dashboard.md",
    "proxy.pool.settings_file": None,
    "proxy.pool.traces": "traces.md",
    "proxy.pool.training": "schedule.md",
    "proxy.pool.training.evaluations": "runs.md",
    "proxy.pool.training.finished_rollouts": "runs.md",
    "proxy.pool.training.steps": "runs.md",
    "proxy.prompt": "models.md",
    "proxy.recording": "models.md",
    "proxy.replay": "architecture.md",
    "proxy.server": "models.md",
    "sandboxes": "sandboxes.md",
    "trainer.commands": "training.md",
    "trainer.commands.doctor": "cluster.md",
    "trainer.commands.end_pause": "monitor.md",
    "trainer.commands.logprobs": "models.md",
    "trainer.commands.output_lock": "runs.md",
    "trainer.commands.rollback": "monitor.md",
    "trainer.commands.without_file": "cluster.md",
    "trainer.commands.worker": "cluster.md",
    "trainer.config": "training.md",
    "trainer.config.batch": "schedule.md",
    "trainer.config.credit": "credit.md",
    "trainer.config.model_shape": "models.md",
    "trainer.config.monitor": "monitor.md",
    "trainer.credit": "credit.md",
    "trainer.data": "trees.md",
    "trainer.doctor": "cluster.md",
    "trainer.drafter": "drafts.md",
    "trainer.loop": "training.md",
    "trainer.megatron": "models.md",
    "trainer.megatron.checkpoint": "runs.md",
    "trainer.megatron.parallel": None,
    "trainer.monitor": "monitor.md",
    "trainer.policy": "training.md",
    "trainer.preflight": "architecture.md",
    "trainer.push": "weights.md",
    "trainer.report": "training.md",
    "trainer.run_state": "training.md",
}
"""Pages of docs/ by the module that finds the fault. The longest name that the module begins with counts.

None: the page of the caller, which knows what the file or the function is for. Ranks hand on the errors of rank 0.
"""


def error_line(error: BaseException) -> str:
    """Return the line for stderr."""
    return f"error: {with_page(error)}"


def with_page(error: BaseException) -> str:
    """Return the error's sentence, with the page that explains it."""
    page = _page(error.__traceback__)
    return str(error) if page is None else f"{error} (see docs/{page})"


def page_of(module: str) -> str | None:
    """Return the page for errors that a module raises; None: that of its caller, or none."""
    while module:
        if module in PAGES:
            return PAGES[module]
        module = module.rpartition(".")[0]
    return None


def _page(at: TracebackType | None) -> str | None:
    """The page of the innermost function of a traceback that has one."""
    modules = []
    while at is not None:
        modules.append(str(at.tb_frame.f_globals.get("__name__", "")))
        at = at.tb_next
    return next((page for module in reversed(modules) if (page := page_of(module))), None)
