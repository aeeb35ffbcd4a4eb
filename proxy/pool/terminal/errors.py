"""What a command prints for an error: its sentence, and the page that explains what it is about, where there is one."""

from types import TracebackType

PAGES = {
    "harness.agents": "agents.md",
    "harness.cluster": "cluster.md",
    "harness.commands": "runs.md",
    "harness.commands.behaviour": "behaviour.md",
    "harness.commands.rescore": "rewards.md",
    "harness.commands.validate": "tasks.md",
    "harness.integrity": "integrity.md",
    "harness.monitor": "monitor.md",
    "harness.rewards": "rewards.md",
    "harness.run_dir": "runs.md",
    "harness.settings": "runs.md",
    "harness.setup": "sandboxes.md",
    "harness.tasks": "tasks.md",
    "harness.validation": "tasks.md",
    "harness.verdict": "tasks.md",
    "harness.verdict.judge": "rewards.md",
    "proxy.commands.dashboard": "dashboard.md",
    "proxy.commands.doctor": "cluster.md",
    "proxy.commands.pool": "pool.md",
    "proxy.commands.replay": "architecture.md",
    "proxy.dashboard": "dashboard.md",
    "proxy.engine": "models.md",
    "proxy.http": "security.md",
    "proxy.parsing": "models.md",
    "proxy.prompt": "models.md",
    "proxy.pool.behaviour": "behaviour.md",
    "proxy.pool.export": "pool.md",
    "proxy.pool.read": "pool.md",
    "proxy.pool.retention": "pool.md",
    "proxy.commands.traces": "traces.md",
    "proxy.pool.traces": "traces.md",
    "sandboxes": "sandboxes.md",
    "trainer.config.batch": "schedule.md",
    "trainer.config.credit": "credit.md",
    "trainer.config.model_shape": "models.md",
    "trainer.config.monitor": "monitor.md",
    "trainer.credit": "credit.md",
    "trainer.commands.doctor": "cluster.md",
    "trainer.commands.without_file": "cluster.md",
    "trainer.doctor": "cluster.md",
    "trainer.drafter": "drafts.md",
    "trainer.megatron": "models.md",
    "trainer.monitor": "monitor.md",
    "trainer.push": "weights.md",
    "trainer.report": "training.md",
}
"""Pages of docs/ by the module that finds the fault; a longer name goes before the shorter one that it begins with."""


def told(error: BaseException) -> str:
    """Return the line for stderr."""
    page = _page(error.__traceback__)
    return f"error: {error}" if page is None else f"error: {error} (see docs/{page})"


def _page(at: TracebackType | None) -> str | None:
    """The page of the innermost function on the way of the error that has one."""
    modules = []
    while at is not None:
        modules.append(str(at.tb_frame.f_globals.get("__name__", "")))
        at = at.tb_next
    for module in reversed(modules):
        name = module
        while name:
            if name in PAGES:
                return PAGES[name]
            name = name.rpartition(".")[0]
    return None
