"""A run's directory: who uses it, what it was started with, its logs and its results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.settings import Settings, stored_settings
from proxy.pool.errors import UserError
from proxy.pool.files import DirectoryInUse, lock_directory, write_whole
from proxy.pool.rollouts.groups import RolloutRow
from proxy.pool.settings_file import with_absolute_paths


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows of a run are."""

    pool: str
    name: str
    expected: int | None
    """Rollouts in all; None when it is open."""


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.logs = self.path / "logs"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory; UserError when a living process has it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = lock_directory(self.path)
        except OSError as error:
            raise UserError(f"the run directory {self.path} cannot be used ({error.strerror}); name another") from error
        except DirectoryInUse as error:
            raise UserError(
                f"the run directory {self.path} is in use by process {error.holder}; wait for it or name another"
            ) from None
        try:
            yield
        finally:
            os.close(lock)

    def resumes(self, config: dict[str, Any]) -> bool:
        """Whether a run was begun here; UserError when it was begun with another configuration."""
        file = self.path / "run.json"
        if not file.exists():
            return False
        kept = msgspec.json.decode(file.read_bytes())
        for key, value in config.items():
            if kept.get(key) != value:
                raise UserError(
                    f"the run directory {self.path} was started with {key} {kept.get(key)!r}, now it is {value!r}; "
                    "repeat the old setting to resume or name another directory with --run-dir"
                )
        return True

    def begin(self, config: dict[str, Any], verb: str, settings: Settings) -> None:
        """Keep what the run is started with, once it can start: a first try that came to nothing binds nobody."""
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(config)))
        told = {"verb": verb, "settings": _from_anywhere(settings)}
        write_whole(self.path / "settings.json", msgspec.json.format(msgspec.json.encode(told)), private=True)

    def begun_with(self) -> tuple[str, Settings]:
        """The verb and the settings of the last start; UserError when there was none."""
        try:
            told = msgspec.json.decode((self.path / "settings.json").read_bytes())
            return told["verb"], stored_settings(told["settings"], str(self.path / "settings.json"))
        except OSError as error:
            raise UserError(
                f"no run was begun in {self.path} ({error.strerror}: settings.json); start one with `harness run`"
            ) from error

    def sandbox(self) -> str:
        """The kind of sandboxes that the run has."""
        return str(msgspec.json.decode((self.path / "run.json").read_bytes())["sandbox"])

    def tell(self, where: Whereabouts) -> None:
        """Keep where the run's rows are."""
        write_whole(self.path / "whereabouts.json", msgspec.json.encode(where), private=True)

    def whereabouts(self) -> Whereabouts:
        """Where the run's rows are; UserError when no run was begun here."""
        try:
            return msgspec.json.decode((self.path / "whereabouts.json").read_bytes(), type=Whereabouts)
        except OSError as error:
            raise UserError(
                f"no run was begun in {self.path} ({error.strerror}: whereabouts.json); name the directory of a run"
            ) from error

    def write_results(self, rows: list[RolloutRow]) -> Path:
        """One line per rollout into results.jsonl."""
        file = self.path / "results.jsonl"
        write_whole(file, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return file


def _from_anywhere(settings: Settings) -> dict[str, Any]:
    """The settings with absolute paths, so that the working directory does not matter."""
    return with_absolute_paths(msgspec.to_builtins(settings), Settings, Path())
