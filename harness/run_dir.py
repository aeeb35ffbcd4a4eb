"""A run's directory: its lock, the settings the run was started with, its logs and its results."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.settings import Settings, stored_settings
from proxy.pool.errors import UserError
from proxy.pool.files import InUse, lock_directory, write_whole
from proxy.pool.rollouts.groups import RolloutRow
from proxy.pool.settings_file import with_absolute_paths


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that holds the rows of a run, and their name there."""

    pool: str
    name: str
    expected: int | None
    """Number of rollouts in all; None when the run has no fixed end."""


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.logs = self.path / "logs"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process. UserError when another process has locked it."""
        try:
            self._make_private()
            self.logs.mkdir(mode=0o700, exist_ok=True)
            lock = lock_directory(self.path)
        except OSError as error:
            raise UserError(f"the run directory {self.path} cannot be used ({error.strerror}); name another") from error
        except InUse as error:
            raise UserError(
                f"the run directory {self.path} is in use by process {error.holder}; wait for it or name another"
            ) from None
        try:
            yield
        finally:
            os.close(lock)

    def _make_private(self) -> None:
        """Make the directory, for its owner alone; also one that is empty or has a run.

        One with other files stays as it is until a run begins there.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.stat()
        ours = status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX  # /tmp is everybody's
        if ours and status.st_mode & 0o077 and ((self.path / "run.json").exists() or not os.listdir(self.path)):
            self.path.chmod(status.st_mode & 0o700)

    def resumes(self, config: dict[str, Any]) -> bool:
        """Whether a run was started here before. UserError when it was started with another configuration."""
        file = self.path / "run.json"
        if not file.exists():
            return False
        stored = msgspec.json.decode(file.read_bytes())
        for key, value in config.items():
            if stored.get(key) != value:
                raise UserError(
                    f"the run directory {self.path} was started with {key} {stored.get(key)!r}, now it is {value!r}; "
                    "repeat the old setting to resume or name another directory with --run-dir"
                )
        return True

    def begin(self, config: dict[str, Any], verb: str, settings: Settings) -> None:
        """Store what the run was started with. Call it once the run can start, so that a failed start binds nobody."""
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(config)))
        # absolute paths, so that a run can be resumed from another working directory
        absolute = with_absolute_paths(msgspec.to_builtins(settings), Settings, Path())
        content = {"verb": verb, "settings": absolute}
        write_whole(self.path / "settings.json", msgspec.json.format(msgspec.json.encode(content)), private=True)
        self._make_private()

    def begun_with(self) -> tuple[str, Settings]:
        """Read the verb and the settings of the last start. UserError when there was none."""
        try:
            content = msgspec.json.decode((self.path / "settings.json").read_bytes())
            return content["verb"], stored_settings(content["settings"], str(self.path / "settings.json"))
        except OSError as error:
            raise UserError(
                f"no run was started in {self.path} ({error.strerror}: settings.json); start one with `harness run`"
            ) from error

    def sandbox(self) -> str:
        """Read the kind of sandboxes that the run uses."""
        return str(msgspec.json.decode((self.path / "run.json").read_bytes())["sandbox"])

    def write_whereabouts(self, where: Whereabouts) -> None:
        """Store where the run's rows are."""
        write_whole(self.path / "whereabouts.json", msgspec.json.encode(where), private=True)

    def whereabouts(self) -> Whereabouts:
        """Read where the run's rows are. UserError when no run was started here."""
        try:
            return msgspec.json.decode((self.path / "whereabouts.json").read_bytes(), type=Whereabouts)
        except OSError as error:
            raise UserError(
                f"no run was started in {self.path} ({error.strerror}: whereabouts.json); name the directory of a run"
            ) from error

    def write_results(self, rows: list[RolloutRow]) -> Path:
        """Write one line per rollout to results.jsonl and return its path."""
        file = self.path / "results.jsonl"
        write_whole(file, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return file
