"""Rollouts as files of other tools and as spans, and ATIF documents as demonstrations (docs/traces.md)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from proxy.pool.browse.tokens.places import exported_weights
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.read import RolloutFilter
from proxy.pool.rollouts.runs import find_run
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.traces.demonstrations import find_documents, store_documents
from proxy.pool.traces.files import TraceCounts, write_traces
from proxy.pool.traces.spans import send_spans
from proxy.prompt.conversations.demonstrations import RECORDED, RENDERED, DemonstrationMaker
from proxy.prompt.conversations.reading import TemplateReader
from proxy.prompt.template import ChatTemplate


def export_traces(pool: Pool, which: RolloutFilter, kind: str, target: Path | None, model: Path | None) -> str:
    """Write a run's rollouts in one of the formats; return what is said about it."""
    if target is None:
        raise UserError(f"--format {kind} needs --output, the file or directory to write")
    template = model_template(pool, which.run or "", model)
    own = fingerprint(template.directory)
    return f"{said(write_traces(pool, which, kind, target, TemplateReader(template), own))}: {target}"


def export_spans(pool: Pool, which: RolloutFilter, endpoint: str, model: Path | None) -> str:
    """Send a run's rollouts as spans; return what is said about it."""
    template = model_template(pool, which.run or "", model)
    counts = send_spans(pool, which, endpoint, TemplateReader(template), fingerprint(template.directory))
    return f"{said(counts)}: {endpoint}"


def import_demonstrations(
    opened: Callable[[], AbstractContextManager[Pool]], name: str, paths: Sequence[Path], model: Path
) -> str:
    """Store the demonstrations of ATIF documents as a new run; return what is said about it.

    Everything is read before the pool is opened, so documents that are refused leave neither a run nor a new pool.
    """
    own = fingerprint(model)
    make = DemonstrationMaker(ChatTemplate(model), own).made
    found = find_documents(paths, make)
    with opened() as pool:
        counts = store_documents(pool, name, found, make, own)
    recorded, rendered = (counts.by_origin.get(origin, 0) for origin in (RECORDED, RENDERED))
    return (
        f"{counts.documents} documents: {counts.groups} groups with {counts.rollouts} rollouts; {recorded} answers of "
        f"recorded token ids, {rendered} rendered by the chat template of {model}"
    )


def model_template(pool: Pool, run: str, model: Path | None) -> ChatTemplate:
    """Return the chat template of this model, or of the newest weights that the pool names and that are here."""
    if model is not None:
        return ChatTemplate(model)
    run_id = find_run(pool, run).id
    with pool.read() as connection:
        directories = list(exported_weights(connection, run_id))
    for directory in directories:
        if (directory / "tokenizer.json").is_file():
            return ChatTemplate(directory)
    raise UserError(
        "the pool keeps prompts as tokens, and none of the weights that it names is here; name the directory of the "
        "proxy's engine.model with --model"
    )


def said(counts: TraceCounts) -> str:
    """Return the counts in words."""
    parts = [f"{counts.branches} branches of {counts.rollouts} rollouts"]
    if counts.without_calls:
        parts.append(f"{counts.without_calls} rollouts have no calls")
    if counts.raw:
        parts.append(f"{counts.raw} branches have text that could not be read as messages (marked raw)")
    if counts.unknown_tools:
        parts.append(f"the tools of {counts.unknown_tools} branches are not known")
    return "; ".join(parts)
