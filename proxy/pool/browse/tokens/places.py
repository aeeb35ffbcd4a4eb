"""The directories in which a tokenizer of recorded tokens may lie, from what the pool and the run's files name.

Not here: whether a tokenizer fits, and reading it (texts.py).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from proxy.pool.address import parsed
from proxy.pool.browse.run_dirs import run_directories
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.input_files import TOML_BYTES, open_input, parse_toml
from proxy.pool.schema import policy_versions, proxies, runs
from proxy.pool.training.evaluations import what_it_evaluates

LOOKED_AT = 16
"""The newest versions of a run, and of the pool, in whose directories a tokenizer is looked for; and as many of the
newest directories beside the pool that have one."""
CONFIG = "proxy.toml"
"""The configuration of a run's own proxy, in the run's directory."""


@dataclass(frozen=True)
class TokenOrigin:
    """Where recorded tokens come from."""

    run: str | None
    """The run in whose directory its files are; of an evaluation that a training run asked for, the training run."""
    fingerprint: str | None
    """That of the ids of the proxy that recorded them; None: not known."""
    exported: list[Path]
    """The directories of exported weights that the pool names."""


def origin_of(connection: Connection, run_id: int | None, proxy_id: int | None) -> TokenOrigin:
    """Return where tokens come from that a run recorded through a proxy."""
    run = ids = None
    if run_id is not None:
        row = connection.execute(select(runs.c.name, runs.c.config).where(runs.c.id == run_id)).one()
        of = what_it_evaluates(row.config)
        run = row.name if of is None else of.run
    if proxy_id is not None:
        ids = connection.scalar(select(proxies.c.tokenizer).where(proxies.c.id == proxy_id))
    return TokenOrigin(run, ids, list(exported_weights(connection, run_id)))


def exported_weights(connection: Connection, run_id: int | None) -> Iterable[Path]:
    """Return the directories of the newest exported weights, those of the run first."""
    newest = select(policy_versions.c.hf_dir).order_by(policy_versions.c.id.desc()).limit(LOOKED_AT)
    of_run: list[str] = []
    if run_id is not None:
        mine = select(policy_versions.c.hf_dir).where(policy_versions.c.run_id == run_id)
        of_run = list(connection.scalars(mine.order_by(policy_versions.c.step.desc()).limit(LOOKED_AT)))
    return [Path(directory) for directory in dict.fromkeys([*of_run, *connection.scalars(newest)])]


def configured_models(pool: Pool, run: str | None) -> Iterator[Path]:
    """Yield the models that the proxy of a run's own was started with."""
    for directory in run_directories(pool, run) if run is not None else ():
        with suppress(OSError, ValueError, UserError):
            with open_input(directory / CONFIG, follow=False) as file:
                content = file.read(TOML_BYTES + 1)
            if len(content) <= TOML_BYTES:
                engine = parse_toml(content.decode(), CONFIG).get("engine")
                model = engine.get("model") if isinstance(engine, dict) else None
                if isinstance(model, str) and os.path.isabs(model) and "\0" not in model:
                    yield Path(model)


def models_beside(pool: Pool) -> list[Path]:
    """Return the newest directories beside a SQLite pool that have a tokenizer. Links count as no directories."""
    address = parsed(pool.url)
    if address.get_backend_name() != "sqlite" or not address.database:
        return []
    found: list[tuple[float, Path]] = []
    with suppress(OSError), os.scandir(Path(address.database).absolute().parent) as entries:
        for entry in entries:
            with suppress(OSError):
                file = Path(entry.path) / "tokenizer.json"
                if entry.is_dir(follow_symlinks=False):
                    found.append((file.lstat().st_mtime, file.parent))
    return [directory for _, directory in sorted(found, reverse=True)[:LOOKED_AT]]
